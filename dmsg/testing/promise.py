"""Check of the promise, which is the guarantee that streams give to applications.

The promise: a byte that is reported to the application as acknowledged has arrived at the other end, exactly once and
in order. No byte arrives that was not sent.
"""

from __future__ import annotations

from random import Random

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IAddress
from twisted.internet.protocol import Factory, Protocol
from twisted.python.failure import Failure

from dmsg.net.streams.transports import stream_of

BLOCK = 4096
"""Number of bytes of a pattern that are generated at a time."""


class PromiseBroken(AssertionError):
    """Error: a walk saw what dmsg promises never to happen, for example wrong bytes in a stream."""


class Pattern:
    """Pseudorandom bytes. Sender and receiver generate the same bytes from the same seed, so that sent bytes need not
    be stored for the comparison."""

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
    """End of a stream under test. It sends one pattern, and checks that the received bytes are another pattern.

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
        """Send ``size`` more bytes of the pattern.

        :returns: Deferred that fires when these bytes are acknowledged.
        """
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
        """Check the promise for the bytes that this end sent.

        :raises PromiseBroken: more bytes are acknowledged than have arrived, or more bytes have arrived than were sent.
        """
        other = self.other
        assert other is not None
        end = getattr(other.transport, "end", None)
        # Data that the application has not read yet counts as arrived, because the application may have paused reading.
        arrived = end.received if end is not None and other.lost is None else other.received
        if self.acknowledged > arrived:
            raise PromiseBroken(f"{self.acknowledged} bytes were acknowledged and {arrived} have arrived")
        if other.received > self.sent:
            raise PromiseBroken(f"{other.received} bytes arrived, but only {self.sent} were sent")


class Fixed(Factory):
    """Factory that returns one given protocol, once."""

    noisy = False

    def __init__(self, protocol: Talker) -> None:
        self._protocol: Talker | None = protocol

    def buildProtocol(self, addr: IAddress | None) -> Talker | None:
        protocol, self._protocol = self._protocol, None
        return protocol


class Talkers(Factory):
    """Factory of the protocols at the accepting ends of test streams. They are returned in the order
    in which :meth:`pair` created them."""

    noisy = False

    def __init__(self) -> None:
        self._expected: list[Talker] = []
        self.pairs: list[tuple[Talker, Talker]] = []

    def pair(self, seed: int) -> Talker:
        """Create both ends of a stream. Return the connecting end; the factory will return the accepting end.

        :param seed: seed of both patterns.
        """
        one, two = Talker(seed * 2, seed * 2 + 1), Talker(seed * 2 + 1, seed * 2)
        one.other, two.other = two, one
        self._expected.append(two)
        self.pairs.append((one, two))
        return one

    def take(self) -> Talker:
        """Remove the accepting end that :meth:`pair` created last from this factory, and return it, because the
        listener of the caller uses another factory."""
        return self._expected.pop()

    def forget(self) -> None:
        """Forget all streams so far, so that they are not checked any more."""
        self._expected.clear()
        self.pairs.clear()

    def buildProtocol(self, addr: IAddress | None) -> Protocol | None:
        return self._expected.pop(0) if self._expected else None

    def check(self) -> None:
        """Check the promise for all streams.

        :raises PromiseBroken: a stream has broken the promise.
        """
        for pair in self.pairs:
            for talker in pair:
                talker.check()
