"""Options of TCP sockets, and sizes of their queues, which Twisted's interfaces do not offer.

The functions also accept other transports, such as TLS and connections in memory, and use Twisted's documented
interface for them. Such transports are slower, and the sizes of their queues are unknown.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
import termios

from twisted.internet.interfaces import ITransport
from twisted.internet.tcp import Connection, Port

KEEPALIVE_IDLE = 30
"""Seconds without received data after which the kernel begins to probe the peer."""
KEEPALIVE_INTERVAL = 10
"""Seconds between keepalive probes."""
KEEPALIVE_PROBES = 3
"""Number of unanswered keepalive probes after which the kernel drops the connection."""
USER_TIMEOUT_MS = 30_000
"""Milliseconds after which the kernel drops a connection if the peer does not acknowledge data or keeps its window
closed."""


SEND_SIZE = 256 * 1024 + 64
"""Maximum number of bytes passed to the socket in one call: four full records of a link."""
WORTH_SHEDDING = 256 * 1024
"""Number of sent bytes in Twisted's buffer above which the unsent bytes are copied to a new buffer, which frees the
memory of the sent bytes."""
BACKLOG = 1024
"""Maximum number of connections that wait to be accepted. The kernel may have a lower limit."""

_OPTIONS = (
    (socket.IPPROTO_TCP, "TCP_NODELAY", 1),
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", KEEPALIVE_IDLE),
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", KEEPALIVE_INTERVAL),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", KEEPALIVE_PROBES),
    (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", USER_TIMEOUT_MS),  # This option exists only on Linux.
)


def _set_options(handle: socket.socket) -> bool:
    try:
        for level, name, value in _OPTIONS:
            option = getattr(socket, name, None)
            if option is not None:
                handle.setsockopt(level, option, value)
    except OSError:
        return False  # This is a UNIX socket, or the peer has disconnected.
    return True


def _is_set(handle: socket.socket) -> bool:
    """Return whether the socket inherited the options from its listening socket. Only the last option of ``_OPTIONS``
    is compared, because nothing else sets this option to this value."""
    level, name, value = _OPTIONS[-1]
    option = getattr(socket, name, None)
    try:
        return option is not None and handle.getsockopt(level, option) == value
    except OSError:
        return False


def tune(transport: object) -> None:
    """Set the options of a TCP connection: small writes are sent without delay, and the kernel detects dead peers."""
    if isinstance(transport, Connection):
        send_more(transport)
        handle = transport.getHandle()
        if not _is_set(handle):
            _set_options(handle)


def send_more(transport: object) -> None:
    """Let Twisted pass up to ``SEND_SIZE`` bytes to the socket in one call, which is more than its default."""
    if isinstance(transport, Connection):
        transport.SEND_LIMIT = SEND_SIZE


def tune_listening(port: object) -> bool:
    """Set the options of all connections that a port will accept, and raise its backlog to ``BACKLOG``.

    Twisted's default backlog of 50 is too small: when another server stops, all its clients connect at once.

    :returns: whether accepted sockets inherit the options, as on Linux. If not, call :func:`tune` for each of them.
    """
    if not isinstance(port, Port):
        return False
    port.socket.listen(BACKLOG)
    return sys.platform == "linux" and _set_options(port.socket)


def queued_bytes(transport: object) -> int | None:
    """Return the number of unsent bytes in the transport's buffer, or None if that is unknown."""
    if isinstance(transport, Connection) and not transport.TLS:
        return len(transport.dataBuffer) - transport.offset + transport._tempDataLen
    return None


def held_bytes(transport: object) -> int:
    """Return the number of bytes that the transport's buffer occupies; 0 if that is unknown.

    This includes sent bytes that are in the same object as unsent bytes.
    """
    if isinstance(transport, Connection) and not transport.TLS:
        return len(transport.dataBuffer) + transport._tempDataLen
    return 0


def shed_sent_bytes(transport: object) -> None:
    """Free the memory of sent bytes in the transport's buffer, if these are many and more than the unsent bytes."""
    if isinstance(transport, Connection) and transport.offset > max(WORTH_SHEDDING, len(transport.dataBuffer) // 2):
        transport.dataBuffer = bytes(memoryview(transport.dataBuffer)[transport.offset :])
        transport.offset = 0


def unacknowledged_bytes(transport: object) -> int:
    """Return the number of sent or queued bytes that the peer's kernel has not acknowledged. The result is 0 if that is
    unknown, as on systems other than Linux."""
    if isinstance(transport, Connection) and transport.connected and sys.platform == "linux":
        try:
            return int.from_bytes(fcntl.ioctl(transport.getHandle(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        except OSError:
            return 0
    return 0


def outstanding_bytes(transport: object) -> int:
    """Return the number of bytes that were written to a transport and that the peer's kernel has not acknowledged, the
    queued ones included. The result is 0 if that is unknown. For TLS over TCP, encrypted bytes are counted.
    """
    while not isinstance(transport, Connection):
        transport = getattr(transport, "transport", None)
        if transport is None:
            return 0
    return (queued_bytes(transport) or 0) + unacknowledged_bytes(transport)


def can_half_close(transport: object) -> bool:
    """Whether the transport supports half-close: plain TCP does, TLS does not."""
    return isinstance(transport, Connection) and not transport.TLS


def set_reset_on_close(transport: object, enabled: bool) -> None:
    """Choose whether the kernel resets the connection when the socket is closed, by the program or because the program
    was killed.

    Without a reset, the kernel closes the connection of a killed process cleanly, and the peer mistakes that for an
    orderly end. Disable the reset before an orderly close, because a reset discards data that the peer has not
    acknowledged.
    """
    if isinstance(transport, Connection) and transport.connected:
        try:
            linger = struct.pack("ii", int(enabled), 0)
            transport.getHandle().setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        except OSError:
            pass  # The peer has already disconnected.


def forget_unsent(transport: object) -> None:
    """Free the unsent data of a lost connection. Otherwise Twisted keeps these data until the transport is
    garbage-collected."""
    if isinstance(transport, Connection):
        transport.dataBuffer, transport.offset = b"", 0
        transport._tempDataBuffer = []
        transport._tempDataLen = 0


def write_now(transport: ITransport | None, data: bytes | bytearray | memoryview) -> bool:
    """Write data directly to the socket if no earlier data are queued; otherwise queue the data. ``data`` may be reused
    after the call.

    A direct write saves the two ``epoll_ctl`` calls of ``transport.write``, which take a fifth of the CPU time if
    traffic is sparse. Call this function once per reactor turn, not once per frame.

    :returns: whether all data are sent, so that nothing is queued.
    """
    if (
        isinstance(transport, Connection)
        and not transport.TLS
        and transport.connected
        and not transport.disconnecting
        and not transport.dataBuffer
        and not transport._tempDataLen
        # Connections over UNIX sockets override ``writeSomeData`` to send descriptors as well, so their data are
        # queued.
        and type(transport).writeSomeData is Connection.writeSomeData
    ):
        limit = transport.SEND_LIMIT
        left = len(data)
        while left:
            try:
                sent = transport.socket.send(data if left <= limit else memoryview(data)[:limit])
            except OSError:
                # If the socket has an error, write() below gets the same error and reports it in Twisted's usual way.
                # If the socket's buffer is full, Twisted waits until it has room.
                break
            if sent == left:
                return True
            data = memoryview(data)[sent:]
            if sent < min(left, limit):
                break  # The socket's buffer is full.
            left -= sent
    assert transport is not None
    transport.write(bytes(data))
    return False
