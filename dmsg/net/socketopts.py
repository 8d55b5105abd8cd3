"""Two things a relay needs of a TCP socket that Twisted's interfaces do not offer.

Both fall back to the documented interface for transports that are not plain
TCP (TLS, in-memory), so nothing depends on them but speed and patience.
"""

from __future__ import annotations

import fcntl
import socket
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
"""Milliseconds that sent data, or a closed receive window, may stay as it is."""


SEND_SIZE = 256 * 1024 + 64
"""Bytes that one call gives to the socket at most: four full records of a link."""
WORTH_SHEDDING = 256 * 1024
"""Bytes."""
BACKLOG = 1024
"""Connections that wait to be accepted; the kernel may have a lower limit."""

_OPTIONS = (
    (socket.IPPROTO_TCP, "TCP_NODELAY", 1),
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", KEEPALIVE_IDLE),
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", KEEPALIVE_INTERVAL),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", KEEPALIVE_PROBES),
    (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", USER_TIMEOUT_MS),  # Linux only
)


def _set_options(handle: socket.socket) -> bool:
    try:
        for level, name, value in _OPTIONS:
            option = getattr(socket, name, None)
            if option is not None:
                handle.setsockopt(level, option, value)
    except OSError:
        return False  # a UNIX socket, or the peer is gone already
    return True


def _is_set(handle: socket.socket) -> bool:
    """Whether its listening socket was tuned: nobody else sets the last of the options to our number."""
    level, name, value = _OPTIONS[-1]
    option = getattr(socket, name, None)
    try:
        return option is not None and handle.getsockopt(level, option) == value
    except OSError:
        return False


def tune(transport: object) -> None:
    """No delay for small writes; dead peers are found by the kernel."""
    if isinstance(transport, Connection):
        send_more(transport)
        handle = transport.getHandle()
        if not _is_set(handle):
            _set_options(handle)


def send_more(transport: object) -> None:
    """Give the socket more at a time than Twisted does."""
    if isinstance(transport, Connection):
        transport.SEND_LIMIT = SEND_SIZE


def tune_listening(port: object) -> bool:
    """The same for all connections that will be accepted, and room for ``BACKLOG`` of them.

    Twisted's default backlog of 50 is overrun by the clients of another server
    that went down.

    :returns: whether accepted connections need not be tuned one by one: Linux
        lets them inherit options.
    """
    if not isinstance(port, Port):
        return False
    port.socket.listen(BACKLOG)
    return sys.platform == "linux" and _set_options(port.socket)


def queued(transport: object) -> int | None:
    """Bytes that the transport holds unsent, or None when it does not say."""
    if isinstance(transport, Connection) and not transport.TLS:
        return len(transport.dataBuffer) - transport.offset + transport._tempDataLen
    return None


def held(transport: object) -> int:
    """Bytes that the transport keeps: also those that are sent, as long as they are in one piece with others."""
    if isinstance(transport, Connection) and not transport.TLS:
        return len(transport.dataBuffer) + transport._tempDataLen
    return 0


def shed(transport: object) -> None:
    """Let go of what is sent, where it is more than what is left of its piece."""
    if isinstance(transport, Connection) and transport.offset > max(WORTH_SHEDDING, len(transport.dataBuffer) // 2):
        transport.dataBuffer = bytes(memoryview(transport.dataBuffer)[transport.offset :])
        transport.offset = 0


def unacknowledged(transport: object) -> int:
    """Bytes that the kernel has taken and the peer's has not, on Linux; else 0."""
    if isinstance(transport, Connection) and transport.connected and sys.platform == "linux":
        try:
            return int.from_bytes(fcntl.ioctl(transport.getHandle(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        except OSError:
            return 0
    return 0


def forget_unsent(transport: object) -> None:
    """Let go of what a lost connection did not send: Twisted keeps it until a collection finds the transport."""
    if isinstance(transport, Connection):
        transport.dataBuffer = b""
        transport._tempDataBuffer = []
        transport._tempDataLen = 0


def write_now(transport: ITransport | None, data: bytes | bytearray | memoryview) -> None:
    """``transport.write``, but try the socket first when nothing waits there.  Nothing of ``data`` is kept.

    Saves the pair of epoll_ctl calls that each ``write`` costs, a fifth of the
    CPU of sparse traffic.  Call it once per reactor turn, not per frame.
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
            sent = transport.writeSomeData(data)  # any buffer will do
            # an error is left for write() to meet again in the proper place
            if not isinstance(sent, int) or sent <= 0:
                break
            if sent == len(data):
                return
            tried = min(len(data), transport.SEND_LIMIT)
            data = memoryview(data)[sent:]
            if sent < tried:
                break  # the socket is full
    assert transport is not None
    transport.write(bytes(data))
