"""Sending of a connection's data at the end of the reactor turn in which the data were written.

Twisted waits until the next poll reports that the socket is writable. That costs two ``epoll_ctl`` calls and often a
poll of its own for each response, a tenth of the CPU time of a small HTTP request. At the end of a turn the socket
almost always accepts the data. If not, the rest is sent in Twisted's way.
"""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.interfaces import IReactorTime
from twisted.internet.tcp import Connection

from dmsg.net.socketopts import queued_bytes
from dmsg.net.turn_end import AtTurnEnd, at_turn_end


class _TurnWrites:
    """Replacement for the method ``startWriting`` of one of Twisted's TCP connections."""

    __slots__ = ("_at_end", "_is_due", "_start", "_transport")

    def __init__(self, transport: Connection, at_end: AtTurnEnd) -> None:
        self._transport = transport
        self._at_end = at_end
        self._start: Callable[[], None] = transport.startWriting
        self._is_due = False

    def start(self) -> None:
        """Schedule the sending of the queued data."""
        if self._is_due:
            return
        self._is_due = True
        self._at_end(self._send)

    def _send(self) -> None:
        self._is_due = False
        transport = self._transport
        if not transport.connected:
            return
        try:
            ended = transport.doWrite()
        except BaseException:
            # A producer failed. Twisted ends the connection in this case, too.
            transport.abortConnection()
            raise
        # The reactor calls ``doWrite`` again, meets the same error or end of the connection, and reports it.
        if transport.connected and (ended is not None or queued_bytes(transport)):
            self._start()


def send_at_turn_end(transport: object, reactor: IReactorTime) -> None:
    """Make a plain TCP connection send its data at the end of the turn in which they are written. Any other transport
    is not changed.
    """
    if isinstance(transport, Connection) and not transport.TLS:
        writes = _TurnWrites(transport, at_turn_end(reactor))
        transport.startWriting = writes.start  # type: ignore[method-assign]
