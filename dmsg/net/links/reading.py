"""Reads of links into one buffer that is kept, as much at a time as there is.

Twisted reads 64 KiB at a time into an object that it makes for each read.  Where a link
is busy that is a quarter of a record's cost: the kernel has to give the memory and zero
it, records of 64 KiB lie in two reads and are put together by copying.  Here a read is up
to ``READ_SIZE`` bytes, and what is read is opened where it lies.

Only plain TCP of Twisted's own reactors reads so; every other transport (TLS, in memory, of
other reactors) goes on calling ``dataReceived``.
"""

from __future__ import annotations

from collections.abc import Callable
from errno import EAGAIN, EINTR, EWOULDBLOCK
from functools import partial

from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.main import CONNECTION_DONE, CONNECTION_LOST
from twisted.internet.tcp import Connection

READ_SIZE = 256 * 1024 + 64
"""Bytes that one read takes at most: four full records of a link."""
HELD_SIZE = 64 * 1024
"""Bytes that it takes when they cannot be looked at in this turn, and are held until the next one."""

_AGAIN = (EAGAIN, EWOULDBLOCK, EINTR)
_buffer: list[memoryview] = []


def read_kept(transport: object, received: Callable[[memoryview], None], most: Callable[[], int]) -> bool:
    """Let ``transport`` read into the buffer of this process.

    :param received: told what has come; it is there until this returns.
    :param most: how many bytes, up to ``READ_SIZE``, the next read may take.
    :returns: whether it does; else it calls ``dataReceived`` as always.
    """
    # not what derives from it and reads in another way, as TLS does
    if not isinstance(transport, Connection) or transport.TLS or type(transport).doRead is not Connection.doRead:
        return False
    transport.doRead = partial(_do_read, transport, received, most)  # type: ignore[method-assign]
    return True


def _do_read(
    transport: Connection, received: Callable[[memoryview], None], most: Callable[[], int]
) -> ConnectionDone | ConnectionLost | None:
    """As ``Connection.doRead``: what it returns ends the connection."""
    if transport.TLS:  # since it was looked at
        return Connection.doRead(transport)
    # a reactor that is run within a callback would read into what is still looked at
    view = _buffer.pop() if _buffer else memoryview(bytearray(READ_SIZE))
    try:
        try:
            size = transport.socket.recv_into(view, most())
        except OSError as error:
            return None if error.errno in _AGAIN else CONNECTION_LOST
        if not size:
            return CONNECTION_DONE
        received(view[:size])
        return None
    finally:
        _buffer.append(view)
