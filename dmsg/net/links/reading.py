"""Large reads for links, into a shared buffer of the process.

Twisted reads 64 KiB at a time into a new object. On a busy link this read takes a quarter of the time in which a record
is processed, because the kernel must provide and zero the memory. Also, records of 64 KiB span two reads and are
copied. With this module, a read takes up to ``READ_SIZE`` bytes, and records are decrypted in place.

Only plain TCP connections of Twisted's own reactors use this module. All other transports (TLS, in memory, of other
reactors) call ``dataReceived`` as usual.
"""

from __future__ import annotations

from collections.abc import Callable
from errno import EAGAIN, EINTR, EWOULDBLOCK
from functools import partial

from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.interfaces import ISSLTransport
from twisted.internet.main import CONNECTION_DONE, CONNECTION_LOST
from twisted.internet.tcp import Connection

READ_SIZE = 256 * 1024 + 64
"""Maximum number of bytes of one read: four full records of a link."""
COPIED_READ_SIZE = 64 * 1024
"""Maximum number of bytes of one read while the owner's time in this turn is used up. The data are then copied from the
shared read buffer and kept until the next turn."""
TLS_READ_SIZE = 64 * 1024
"""Usual maximum number of bytes of a TCP read below TLS, which is Twisted's default."""
SMALL_TLS_READ_SIZE = 2 * 1024
"""Maximum number of bytes of a TCP read below TLS while the TLS records are small. TLS decrypts all records of a read
in one turn, and a small record takes more time than its size suggests."""
LARGE_RECORD = 1024
"""Minimum size in bytes of a large TLS record. A large record sets the maximum of TCP reads to ``TLS_READ_SIZE``
again."""

_AGAIN = (EAGAIN, EWOULDBLOCK, EINTR)
_buffer: list[memoryview] = []


def read_into_shared_buffer(
    transport: object, received: Callable[[memoryview], None], limit: Callable[[], int]
) -> bool:
    """Make ``transport`` read into the shared buffer of this process.

    :param received: called with the data, which are valid until the callback returns.
    :param limit: returns the maximum size of the next read in bytes, up to ``READ_SIZE``.
    :returns: False if the transport does not support this and calls ``dataReceived`` as usual.
    """
    # A TLS connection, or a subclass of Connection with its own ``doRead``, keeps its read method.
    if not isinstance(transport, Connection) or transport.TLS or type(transport).doRead is not Connection.doRead:
        return False
    transport.doRead = partial(_do_read, transport, received, limit)  # type: ignore[method-assign]
    return True


def _do_read(
    transport: Connection, received: Callable[[memoryview], None], limit: Callable[[], int]
) -> ConnectionDone | ConnectionLost | None:
    """Read once; replaces ``Connection.doRead``. A returned exception ends the connection."""
    if transport.TLS:  # TLS was started after read_into_shared_buffer was called, so dataReceived gets the data.
        return Connection.doRead(transport)
    # A callback may run the reactor, and a second read would overwrite the data in use. So each nested read uses
    # another buffer.
    view = _buffer.pop() if _buffer else memoryview(bytearray(READ_SIZE))
    try:
        try:
            size = transport.socket.recv_into(view, limit())
        except OSError as error:
            return None if error.errno in _AGAIN else CONNECTION_LOST
        if not size:
            return CONNECTION_DONE
        received(view[:size])
        return None
    finally:
        _buffer.append(view)


def limit_reads_below_tls(transport: object, size: int) -> None:
    """Limit the size of TCP reads below a TLS transport. Other transports are not changed."""
    tcp = getattr(transport, "transport", None)
    if ISSLTransport.providedBy(transport) and isinstance(tcp, Connection):
        tcp.bufferSize = size
