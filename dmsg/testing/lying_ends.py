"""Lying ends: streams whose other end breaks the protocol, although it has the right keys.

A server cannot forge an authentic frame, but the other end of a stream can send anything. Each lie needs a new stream.
The attacked end must notice the lie and end this stream, and only this one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from typing import Protocol, cast

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from dmsg.errors import CloseReason, DmsgError
from dmsg.net.streams.transports import stream_of
from dmsg.streams.carrier import ClientStream, TransportCarrier
from dmsg.streams.core.agreement import HASH_SIZE, Hello, Proposal, Resume
from dmsg.streams.core.resumption import INITIAL_WINDOW
from dmsg.streams.core.secure import SecureEnd
from dmsg.testing.lab import Lab
from dmsg.testing.promise import Fixed, PromiseBroken, Talker, Talkers
from dmsg.v2019.client import Client
from dmsg.v2019.core.state import ClientTransport
from dmsg.v2019.outgoing import REQUEST_TIMEOUT
from dmsg.v2019.session import ClientSession

PORT = 9
PIECE = 1000
"""Size in bytes of a piece of data that an end sends."""
FRAME = 60_000
"""Size in bytes of the data of a frame that a lying end sends."""
NOTICE_TIMEOUT = 5.0
"""Maximum seconds of the lab's time until the attacked end has noticed a lie."""


class LyingEnds:
    """Client ``mallory``, who lies to another client over streams between them.

    :param server: name of the only server of ``mallory``.
    :param victim: client that is attacked.
    """

    def __init__(self, lab: Lab, server: str, victim: Client) -> None:
        self._lab = lab
        self._server = lab.key(server).public
        self._victim = victim
        self._mallory = lab.add_client("mallory", only=[self._server], min_servers=1)
        self._talkers = Talkers()
        victim.listen(self._talkers, PORT)

    def tell(self, kind: str, seed: int) -> bool:
        """Open a stream, tell a lie over it, and wait until the attacked end has noticed.

        :param kind: name of the lie, one of :data:`KINDS`.
        :param seed: seed of the data.
        :returns: whether the lie was told; False if no stream could be opened.
        :raises PromiseBroken: the attacked end has accepted the lie, or has ended the stream for a wrong reason.
        """
        lie, reason = _LIES[kind]
        talker = self._talkers.pair(seed)
        other = talker.other
        assert other is not None
        try:
            self._lab.result(self._mallory.connect(self._victim.public_key, Fixed(talker), PORT, via=self._server))
        except DmsgError:  # No stream was opened, because discovery lies or strangers have used up the rate limit.
            self._talkers.forget()
            return False
        self._until(lambda: other.transport is not None)
        for end in (talker, other):
            end.say(PIECE)
        self._until(lambda: talker.acknowledged == other.acknowledged == PIECE)
        asked = lie(self, talker, other)
        if reason is None:
            self._refused(kind, asked, talker, other)
        else:
            self._ended(kind, reason, other)
        self._talkers.check()
        stream_of(talker).abortConnection()
        stream_of(other).abortConnection()
        self._talkers.forget()
        return True

    def _ended(self, kind: str, reason: CloseReason, other: Talker) -> None:
        """Check that the attacked end has ended the stream, and that its close reason is ``reason``."""
        self._until(lambda: other.lost is not None)
        if other.lost is None:
            raise PromiseBroken(f"an end believed the lie of the other end: {kind}")
        found = getattr(other.lost.value, "close_reason", None)
        if found != reason:
            raise PromiseBroken(f"an end that was told the lie '{kind}' ended its stream because of {found}")

    def _refused(self, kind: str, asked: Deferred[object] | None, talker: Talker, other: Talker) -> None:
        """Check that the attacked end has refused a request, and that the stream continues."""
        assert asked is not None
        results: list[object] = []
        asked.addBoth(results.append)
        self._until(lambda: results)
        if not results or not isinstance(results[0], Failure):
            raise PromiseBroken(f"an end accepted a request that it must refuse: {kind}")
        before = other.received
        talker.say(PIECE)
        self._until(lambda: other.received == before + PIECE)
        if other.received != before + PIECE:
            raise PromiseBroken(f"a stream did not continue after a request that was refused: {kind}")

    def _until(self, condition: Callable[[], object]) -> None:
        """Advance the clock until a condition holds, at most ``NOTICE_TIMEOUT`` seconds."""
        # The clock is advanced by 0, which flushes the streams.
        self._lab.clock.advance(0)
        end = self._lab.clock.seconds() + NOTICE_TIMEOUT
        self._lab.network.run_until(lambda: condition() or self._lab.clock.seconds() >= end, 2 * NOTICE_TIMEOUT)

    # --- lies ---

    def _wrong_ack_hash(self, talker: Talker, other: Talker) -> None:
        _end_of(talker)._received_hash = blake2b(b"lie", digest_size=HASH_SIZE)  # noqa: SLF001
        other.say(PIECE)

    def _early_ack(self, talker: Talker, other: Talker) -> None:
        """Acknowledge frames that the attacked end has not sent."""
        carrier = _carrier_of(talker)
        end = carrier.stream.secure_end
        end._received_sequence = (end._received_sequence + 3) & 0xFFFF  # noqa: SLF001
        carrier.transport.ack_due = True
        carrier.session.core._due.append(carrier.transport)  # noqa: SLF001
        carrier.session.flush()

    def _skipped_sequence(self, talker: Talker, other: Talker) -> None:
        end = _end_of(talker)
        end._next_sequence = (end._next_sequence + 1) & 0xFFFF  # noqa: SLF001
        talker.say(PIECE)

    def _repeated_sequence(self, talker: Talker, other: Talker) -> None:
        end = _end_of(talker)
        end._next_sequence = (end._next_sequence - 1) & 0xFFFF  # noqa: SLF001
        talker.say(PIECE)

    def _beyond_the_window(self, talker: Talker, other: Talker) -> None:
        """Send more than the window allows, while the attacked application does not read."""
        stream_of(other).pauseProducing()
        carrier = _carrier_of(talker)
        carrier.stream.secure_end.peer_window = carrier.stream.secure_end.limit = 4 * INITIAL_WINDOW
        for _ in range(2 * INITIAL_WINDOW // FRAME):
            talker.sent += FRAME
            carrier.session.core.send(carrier.transport, talker.next_bytes(FRAME))
        carrier.session.flush()
        # The application of the attacked end must resume reading: its stream reports the error only after the
        # application has read the data that arrived before the error.
        self._until(lambda: stream_of(other).has_ended)
        stream_of(other).resumeProducing()

    def _data_after_the_end(self, talker: Talker, other: Talker) -> None:
        """Send data after a half-close."""
        carrier = _carrier_of(talker)
        carrier.session.core.send_end(carrier.transport)
        carrier.session.core.send(carrier.transport, b"lie")
        carrier.session.flush()

    # --- lies in a RESUME ---

    def _wrong_resume_hash(self, talker: Talker, other: Talker) -> None:
        self._move(talker, lambda position: replace(position, hash=bytes(HASH_SIZE)))

    def _wrong_resume_position(self, talker: Talker, other: Talker) -> None:
        self._move(talker, lambda position: replace(position, received=position.received - 1))

    def _resume_from_the_start(self, talker: Talker, other: Talker) -> None:
        self._move(talker, lambda position: replace(position, received=0))

    def _used_generation(self, talker: Talker, other: Talker) -> Deferred[object]:
        """Request a move of the stream to another transport with a generation that is already used: that of the present
        transport."""
        carrier = _carrier_of(talker)
        end = carrier.stream.secure_end
        return self._request(carrier, end.position(), end=None)[0]

    def _move(self, talker: Talker, change: Callable[[Resume], Resume]) -> None:
        """Resume a stream over another transport through the same server, with a wrong position."""
        carrier = _carrier_of(talker)
        stream, session = carrier.stream, carrier.session
        end = stream.secure_end
        self._mallory.streams.suspend(stream, CloseReason.MOVED)
        carrier.leave(CloseReason.MOVED)
        end.generation += 1
        answered, transport = self._request(carrier, change(end.position()), end)
        answered.addCallbacks(lambda _: session.carry(stream, transport), lambda _: None)

    def _request(
        self, carrier: _Carrier, position: Resume, end: SecureEnd | None
    ) -> tuple[Deferred[object], ClientTransport]:
        session = carrier.session
        hello = Hello(0, INITIAL_WINDOW, resume=position)
        proposal = Proposal(self._mallory.streams.key, self._victim.public_key, hello)
        waiting, transport = session._outgoing._request(  # noqa: SLF001
            self._victim.public_key, proposal, end, INITIAL_WINDOW, REQUEST_TIMEOUT
        )
        assert transport is not None
        TransportCarrier(session, transport, carrier.stream)
        session.flush()
        answered: Deferred[object] = waiting  # type: ignore[assignment]  # Deferred is invariant.
        return answered, transport


class _Carrier(Protocol):
    """Attributes of a carrier and its session that a lying end uses, some of which are private."""

    stream: ClientStream
    session: ClientSession
    transport: ClientTransport

    def leave(self, reason: int) -> None: ...


def _carrier_of(talker: Talker) -> _Carrier:
    return cast(_Carrier, stream_of(talker)._carrier)  # noqa: SLF001


def _end_of(talker: Talker) -> SecureEnd:
    return _carrier_of(talker).stream.secure_end


_Lie = Callable[[LyingEnds, Talker, Talker], Deferred[object] | None]
_LIES: dict[str, tuple[_Lie, CloseReason | None]] = {
    "wrong hash in an ACK": (LyingEnds._wrong_ack_hash, CloseReason.HASH_MISMATCH),  # noqa: SLF001
    "early ACK": (LyingEnds._early_ack, CloseReason.BAD_FRAME),  # noqa: SLF001
    "skipped sequence": (LyingEnds._skipped_sequence, CloseReason.BAD_FRAME),  # noqa: SLF001
    "repeated sequence": (LyingEnds._repeated_sequence, CloseReason.BAD_FRAME),  # noqa: SLF001
    "data beyond the window": (LyingEnds._beyond_the_window, CloseReason.BUFFER_FULL),  # noqa: SLF001
    "data after the end": (LyingEnds._data_after_the_end, CloseReason.BAD_FRAME),  # noqa: SLF001
    "wrong hash in a RESUME": (LyingEnds._wrong_resume_hash, CloseReason.HASH_MISMATCH),  # noqa: SLF001
    "wrong position in a RESUME": (LyingEnds._wrong_resume_position, CloseReason.HASH_MISMATCH),  # noqa: SLF001
    "RESUME from the start": (LyingEnds._resume_from_the_start, CloseReason.HASH_MISMATCH),  # noqa: SLF001
    "used generation": (LyingEnds._used_generation, None),  # noqa: SLF001
}
KINDS = tuple(_LIES)
"""Names of the lies."""
