"""Check of the promise (guarantee) that streams make.

Every byte whose acknowledgement was reported to an application has arrived at the other end, exactly once and in order.
Nothing arrives that was not sent.
"""

from __future__ import annotations

from random import Random

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IAddress
from twisted.internet.protocol import Factory, Protocol
from twisted.python.failure import Failure

from dmsg.net.streams.transports import stream_of

BLOCK = 4096
"""Bytes of the pattern that are generated at a time."""


class PromiseBroken(AssertionError):
    """Error: the promise was not kept."""


class Pattern:
    """Pseudorandom bytes that both ends can generate, so that they need not be stored to be compared."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._made = b""
        self.offset = 0

    def take(self, size: int) -> bytes:
        """Return the next bytes."""
        parts = [self._made]
        have = len(self._made)
        while have < size:
            parts.append(self._random.randbytes(BLOCK))
            have += BLOCK
        data = b"".join(parts)
        self._made = data[size:]
        self.offset += size
        return data[:size]


class Talker(Protocol):
    """End of a stream under test, which sends one pattern and checks another.

    :ivar acknowledged: number of bytes that the transport reported as acknowledged.
    :ivar received: number of bytes that arrived and were correct.
    """

    def __init__(self, sends: int, expects: int) -> None:
        self._sends = Pattern(sends)
        self._expects = Pattern(expects)
        self.sent = 0
        self.acknowledged = 0
        self.received = 0
        self.lost: Failure | None = None
        self.other: Talker | None = None
        self.failures: list[Failure] = []

    def say(self, size: int) -> Deferred[None]:
        """Send ``size`` more bytes of the pattern; the Deferred fires when they are acknowledged."""
        self.sent += size

        def arrived(_: object) -> None:
            self.acknowledged += size

        return stream_of(self).send(self.next_bytes(size)).addCallbacks(arrived, self.failures.append)

    def next_bytes(self, size: int) -> bytes:
        """Return the next bytes of the pattern that this end sends."""
        return self._sends.take(size)

    def dataReceived(self, data: bytes) -> None:
        expected = self._expects.take(len(data))
        if data != expected:
            wrong = next(number for number, (a, b) in enumerate(zip(data, expected, strict=True)) if a != b)
            raise PromiseBroken(f"byte {self.received + wrong} is not the one that was sent")
        self.received += len(data)

    def connectionLost(self, reason: Failure = Failure(Exception("lost"))) -> None:
        self.lost = reason

    def check(self) -> None:
        """Check the promise for this stream.

        :raises PromiseBroken: more was acknowledged than arrived, or more arrived than was sent.
        """
        other = self.other
        assert other is not None
        end = getattr(other.transport, "end", None)
        # Unread data are counted as arrived, because a paused reader may not have read them.
        arrived = end.received if end is not None and other.lost is None else other.received
        if self.acknowledged > arrived:
            raise PromiseBroken(f"{self.acknowledged} bytes were acknowledged and {arrived} have arrived")
        if other.received > self.sent:
            raise PromiseBroken(f"{other.received} bytes arrived of {self.sent}")


class Fixed(Factory):
    """Factory that builds one given protocol, once."""

    noisy = False

    def __init__(self, protocol: Talker) -> None:
        self._protocol: Talker | None = protocol

    def buildProtocol(self, addr: IAddress | None) -> Talker | None:
        protocol, self._protocol = self._protocol, None
        return protocol


class Talkers(Factory):
    """Factory that builds the accepting ends, in the order in which :meth:`pair` was called."""

    noisy = False

    def __init__(self) -> None:
        self._expected: list[Talker] = []
        self.pairs: list[tuple[Talker, Talker]] = []

    def pair(self, seed: int) -> Talker:
        """Return the connecting end of a stream whose accepting end is built next."""
        one, two = Talker(seed * 2, seed * 2 + 1), Talker(seed * 2 + 1, seed * 2)
        one.other, two.other = two, one
        self._expected.append(two)
        self.pairs.append((one, two))
        return one

    def take(self) -> Talker:
        """Return the accepting end of the last :meth:`pair`, for callers that use another factory."""
        return self._expected.pop()

    def buildProtocol(self, addr: IAddress | None) -> Protocol | None:
        return self._expected.pop(0) if self._expected else None

    def check(self) -> None:
        """Check the promise for all streams.

        :raises PromiseBroken: it was not kept for some stream.
        """
        for pair in self.pairs:
            for talker in pair:
                talker.check()
