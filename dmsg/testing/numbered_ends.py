"""Ends of streams under test that begin with a number, so that the accepting end learns which stream was opened.

The promise is checked for the bytes of both directions: what arrives is the first part of what was sent, and what is
acknowledged has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence

from twisted.internet.error import ConnectionLost
from twisted.internet.interfaces import IAddress, IHalfCloseableProtocol
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.errors import DmsgError
from dmsg.net.streams.transports import stream_of
from dmsg.testing.promise import Pattern, PromiseBroken

NUMBER_SIZE = 8
"""Size in bytes of the number of a stream, which the opening end sends first."""


@implementer(IHalfCloseableProtocol)
class NumberedEnd(Protocol):
    """End of a stream under test. It sends one pattern, and checks that the received bytes are another pattern.

    :ivar sent: number of bytes of the pattern that this end has sent.
    :ivar acknowledged: number of bytes that the program at the other end has acknowledged; 0 if the stream does not use
        acknowledgements.
    :ivar received: number of bytes that arrived and were correct.
    :ivar has_finished: whether this end has half-closed the stream, after which it sends no more.
    """

    other: NumberedEnd

    def __init__(self, sends: int, expects: int) -> None:
        self._sends, self._expects = Pattern(sends), Pattern(expects)
        self.sent = self.acknowledged = self.received = 0
        self.lost: Failure | None = None
        self.has_finished = False

    def say(self, size: int) -> None:
        """Send ``size`` more bytes of the pattern, unless this end has finished.

        If the program is paused, the call runs only when the program resumes. This end may have finished before that.
        """
        if self.has_finished:
            return
        stream = stream_of(self)
        self.sent += size

        def arrived(_: object) -> None:
            if stream.confirms:
                self.acknowledged += size

        stream.send(self._sends.take(size)).addCallbacks(arrived, lambda failure: failure.trap(DmsgError))

    def finish(self) -> None:
        """Half-close the stream after the data that this end has sent so far."""
        self.has_finished = True
        stream_of(self).end_writing().addErrback(lambda failure: failure.trap(DmsgError, ConnectionLost))

    def readConnectionLost(self) -> None:
        if not self.other.has_finished or self.received != self.other.sent:
            raise PromiseBroken(f"the stream ended after {self.received} of {self.other.sent} bytes")

    def writeConnectionLost(self) -> None:
        """Do nothing. The call only reports that the other end has received the half-close of this end."""

    def dataReceived(self, data: bytes) -> None:
        if data != self._expects.take(len(data)):
            raise PromiseBroken(f"wrong bytes arrived after byte {self.received}")
        self.received += len(data)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.lost = reason

    def check(self) -> None:
        """Check the guarantee for the bytes that this end has sent.

        :raises PromiseBroken: more bytes are acknowledged than have arrived, or more bytes have arrived than were sent.
        """
        arrived = self.other.received
        if not self.acknowledged <= arrived <= self.sent:
            raise PromiseBroken(f"{self.sent} bytes were sent, {arrived} arrived and {self.acknowledged} acknowledged")

    @property
    def is_settled(self) -> bool:
        """Whether all bytes have arrived, or both ends know that the stream has ended."""
        if self.transport is None or self.other.transport is None:
            return self.transport is None or self.lost is not None
        return self.other.received == self.sent if self.lost is None else self.other.lost is not None


@implementer(IHalfCloseableProtocol)
class _Accepted(Protocol):
    """Protocol of an accepted stream. It reads the number of the stream, and passes all further data to the accepting
    end with this number."""

    def __init__(self, ends: Sequence[NumberedEnd]) -> None:
        self._ends = ends
        self._data = b""
        self._end: NumberedEnd | None = None

    def dataReceived(self, data: bytes) -> None:
        if self._end is None:
            self._data += data
            if len(self._data) < NUMBER_SIZE:
                return
            data, number = self._data[NUMBER_SIZE:], int.from_bytes(self._data[:NUMBER_SIZE], "big")
            if number >= len(self._ends):
                raise PromiseBroken("wrong bytes arrived at the beginning of a stream")
            self._end = self._ends[number]
            self._end.transport = self.transport
        if data:
            self._end.dataReceived(data)

    def readConnectionLost(self) -> None:
        if self._end is not None:
            self._end.readConnectionLost()

    def writeConnectionLost(self) -> None:
        """Do nothing. The call only reports that the other end has received the half-close of this end."""

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self._end is not None:
            self._end.connectionLost(reason)


class AcceptingFactory(Factory):
    """Factory of the protocols that accept streams and read their numbers.

    :param ends: accepting ends of all streams, by the numbers of the streams.
    """

    noisy = False

    def __init__(self, ends: Sequence[NumberedEnd]) -> None:
        self._ends = ends

    def buildProtocol(self, addr: IAddress | None) -> Protocol:
        return _Accepted(self._ends)


class OpeningFactory(Factory):
    """Factory for one stream: its protocol is the opening end ``end``."""

    noisy = False

    def __init__(self, end: NumberedEnd) -> None:
        self._end = end

    def buildProtocol(self, addr: IAddress | None) -> Protocol:
        return self._end
