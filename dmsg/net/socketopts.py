"""Options and queues of TCP sockets that Twisted's interfaces do not offer.

For other transports (TLS, in-memory) the documented interface is used instead. Such transports work too, with less
speed and without exact numbers.
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
"""Seconds of silence before the kernel probes a peer."""
KEEPALIVE_INTERVAL = 10
"""Seconds between probes."""
KEEPALIVE_PROBES = 3
"""Unanswered probes after which the connection is dead."""
USER_TIMEOUT_MS = 30_000
"""Milliseconds after which the kernel drops a connection whose data are not acknowledged or whose window stays closed.
"""


SEND_SIZE = 256 * 1024 + 64
"""Maximum number of bytes passed to the socket in one call: four full records of a link."""
WORTH_SHEDDING = 256 * 1024
"""Minimum number of sent bytes in Twisted's buffer from which on the unsent rest is copied, to free their memory."""
BACKLOG = 1024
"""Number of connections that may wait to be accepted; the kernel may have a lower limit."""

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
        return False  # The option cannot be set: this is a UNIX socket, or the peer has already disconnected.
    return True


def _is_set(handle: socket.socket) -> bool:
    """Return whether the socket inherited our options: no other code sets the last option to this number."""
    level, name, value = _OPTIONS[-1]
    option = getattr(socket, name, None)
    try:
        return option is not None and handle.getsockopt(level, option) == value
    except OSError:
        return False


def tune(transport: object) -> None:
    """Set the options of a connection: small writes are sent without delay, and the kernel detects dead peers."""
    if isinstance(transport, Connection):
        send_more(transport)
        handle = transport.getHandle()
        if not _is_set(handle):
            _set_options(handle)


def send_more(transport: object) -> None:
    """Raise the number of bytes that Twisted passes to the socket in one call."""
    if isinstance(transport, Connection):
        transport.SEND_LIMIT = SEND_SIZE


def tune_listening(port: object) -> bool:
    """Set the options of all connections that a port will accept, and let ``BACKLOG`` of them wait.

    Twisted's default backlog of 50 is not enough: when another server goes down, its clients all come at once.

    :returns: whether accepted sockets inherit the options, as on Linux, and need not be tuned one by one.
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
    """Return the number of bytes that the transport's buffer occupies.

    This includes sent bytes if they are in one object with unsent ones.
    """
    if isinstance(transport, Connection) and not transport.TLS:
        return len(transport.dataBuffer) + transport._tempDataLen
    return 0


def shed_sent_bytes(transport: object) -> None:
    """Free the sent part of the transport's buffer, if it is larger than the unsent part."""
    if isinstance(transport, Connection) and transport.offset > max(WORTH_SHEDDING, len(transport.dataBuffer) // 2):
        transport.dataBuffer = bytes(memoryview(transport.dataBuffer)[transport.offset :])
        transport.offset = 0


def unacknowledged_bytes(transport: object) -> int:
    """Return the number of bytes that the peer's kernel has not acknowledged; 0 if that is unknown (not on Linux)."""
    if isinstance(transport, Connection) and transport.connected and sys.platform == "linux":
        try:
            return int.from_bytes(fcntl.ioctl(transport.getHandle(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        except OSError:
            return 0
    return 0


def can_half_close(transport: object) -> bool:
    """Whether one direction of the transport can be ended while the other stays open: on plain TCP, but not on TLS."""
    return isinstance(transport, Connection) and not transport.TLS


def set_reset_on_close(transport: object, enabled: bool) -> None:
    """Choose whether the kernel resets the connection when the socket is closed, also at the death of the process.

    Without the reset, the kernel of a killed process ends the connection cleanly, and the peer takes that for an
    orderly end.  Disable the reset before an orderly close, because a reset discards sent data that the peer has not
    acknowledged.
    """
    if isinstance(transport, Connection) and transport.connected:
        try:
            linger = struct.pack("ii", int(enabled), 0)
            transport.getHandle().setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        except OSError:
            pass  # The error is ignored: the peer has already disconnected.


def forget_unsent(transport: object) -> None:
    """Free the unsent data of a lost connection. Twisted keeps them until the transport is garbage-collected."""
    if isinstance(transport, Connection):
        transport.dataBuffer = b""
        transport._tempDataBuffer = []
        transport._tempDataLen = 0


def write_now(transport: ITransport | None, data: bytes | bytearray | memoryview) -> None:
    """Write data, directly to the socket if nothing is queued. ``data`` is not kept after the call.

    This saves the two calls of ``epoll_ctl`` of each ``transport.write``, a fifth of the CPU time of sparse traffic.
    Call this function once per reactor turn, and not for each frame.
    """
    if (
        isinstance(transport, Connection)
        and not transport.TLS
        and transport.connected
        and not transport.disconnecting
        and not transport.dataBuffer
        and not transport._tempDataLen
    ):
        while data:
            # The type is ignored here, because the socket accepts any kind of buffer.
            sent = transport.writeSomeData(data)
            # The error is ignored, because write() below gets it again, and reports it where Twisted expects it.
            if not isinstance(sent, int) or sent <= 0:
                break
            if sent == len(data):
                return
            tried = min(len(data), transport.SEND_LIMIT)
            data = memoryview(data)[sent:]
            if sent < tried:
                break  # Nothing was written, because the socket's buffer is full.
    assert transport is not None
    transport.write(bytes(data))
