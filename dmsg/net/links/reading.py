"""Large reads for links, into one buffer of the process that is reused.

Twisted reads 64 KiB at a time into an object that is new for each read. On a busy link this takes a quarter of the time
for a record, because the kernel must provide and zero the memory. Records of 64 KiB also span two reads, and are
copied. Here a read takes up to ``READ_SIZE`` bytes, and records are opened in place.

Only plain TCP connections of Twisted's own reactors read in this way. All other transports (TLS, in memory, of other
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
HELD_SIZE = 64 * 1024
"""Maximum number of bytes of a read that must be copied and kept until the next turn."""
TLS_READ_SIZE = 64 * 1024
"""Maximum number of bytes that TCP below TLS reads at once, as Twisted does."""
SMALL_TLS_READ_SIZE = 2 * 1024
"""Maximum number of bytes that TCP below TLS reads at once while the records are small. TLS opens all records of a read
in one turn, and small ones cost more time than their bytes.
"""
LARGE_RECORD = 1024
"""Number of bytes of a record of TLS from which reads may be large again."""

_AGAIN = (EAGAIN, EWOULDBLOCK, EINTR)
_buffer: list[memoryview] = []


def read_kept(transport: object, received: Callable[[memoryview], None], limit: Callable[[], int]) -> bool:
    """Make ``transport`` read into the shared buffer of this process.

    :param received: called with the data, which are valid until it returns.
    :param limit: returns the maximum size of the next read in bytes, up to ``READ_SIZE``.
    :returns: whether the transport does so; otherwise it calls ``dataReceived`` as usual.
    """
    # Subclasses that read in another way, such as TLS, are not changed.
    if not isinstance(transport, Connection) or transport.TLS or type(transport).doRead is not Connection.doRead:
        return False
    transport.doRead = partial(_do_read, transport, received, limit)  # type: ignore[method-assign]
    return True


def _do_read(
    transport: Connection, received: Callable[[memoryview], None], limit: Callable[[], int]
) -> ConnectionDone | ConnectionLost | None:
    """Read once, in place of ``Connection.doRead``. A returned error ends the connection."""
    if transport.TLS:  # TLS was started after read_kept was called, so the data go to dataReceived.
        return Connection.doRead(transport)
    # A callback may run the reactor, and a second read would overwrite the data in use. So such a read gets another
    # buffer.
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
    """Limit the bytes that TCP below a transport of TLS reads at once; other transports are left alone."""
    tcp = getattr(transport, "transport", None)
    if ISSLTransport.providedBy(transport) and isinstance(tcp, Connection):
        tcp.bufferSize = size
