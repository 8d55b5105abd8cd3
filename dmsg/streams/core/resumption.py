"""What of a secure stream outlives its transports, and how the stream goes from one transport to another.

What belongs to one transport (keys, nonces, sequences) is replaced by
:meth:`ResumableEnd.attach`; what belongs to the stream (bytes acknowledged and
received, the rolling hashes of both, what is not acknowledged) stays, so that
the two ends can compare where they are and go on.  An end that is asked to go on changes
nothing before the initiator has confirmed the new transport, and the initiator changes nothing before an
authentic frame shows that the other end has: whoever holds one of the two static keys could make the rest.  No I/O.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, NamedTuple, NoReturn, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from dmsg.base.buffers import NO_QUEUE, NO_TABLE
from dmsg.errors import CloseReason, DmsgError
from dmsg.noise.handshake import HandshakeResult
from dmsg.streams.core.agreement import HASH_SIZE, Hello, Resume
from dmsg.streams.core.budget import BUDGET, Budget

INITIAL_WINDOW = 256 * 1024
"""Bytes that a receiver lets a sender have unacknowledged at first."""
MAX_FRAMES = 16384
"""Frames in flight; below 2**15, so that the order of two sequences is never in doubt."""

FWD, ACK, CLOSE = 0xA, 0xB, 0x3
"""Kinds of sealed payloads, which are their associated data: the types of those frames of 2019.  A family with other
types names its frames by these."""
END_DATA = b"\x0e"
"""Associated data of the FWD that ends the data of its sender: no frame has this type, so no other FWD opens as one."""

pack_nonce = struct.Struct("<4xQ").pack
_position = struct.Struct(">Q").pack


class SecureError(DmsgError):
    """A frame that a correct peer over an honest server does not send.

    :ivar reason: why the transport ends.
    """

    def __init__(self, reason: CloseReason) -> None:
        super().__init__(reason.name)
        self.reason = reason


_NO_HASH = blake2b(digest_size=HASH_SIZE)
"""Stands for the rolling hash of a direction in which nothing has moved: each hash takes 448 bytes."""


def _no_keys(*_: object) -> NoReturn:
    raise AssertionError("a stream without a transport has no keys")


class Transport(Protocol):
    """Transport of any family, as the end of a stream that lies in it needs the transport.

    :ivar carrier: where the session finds the stream again; the core keeps it for the session and does not look at it.
    :ivar secure: the end that lies in the transport, or None.
    :ivar delivered: bytes out and in that the transport had delivered when its stream left it.
    """

    carrier: Any
    secure: Any
    delivered: tuple[int, int]


class Agreement(NamedTuple):
    """What the other end has of what was sent.

    :ivar frames: how many of the frames in flight it has.
    :ivar position: bytes of the stream up to there.
    :ivar rolling: the hash of them.
    """

    frames: int
    position: int
    rolling: blake2b


Unsent = tuple[list[object], list[tuple[bytes | memoryview, object]]]
"""Tickets of what the other end has, and (data, ticket) of what is to be sent again."""


class Answer(NamedTuple):
    """The answer to a RESUME that nobody has confirmed: the stream is as it was before.

    :ivar there: the initiator's hello.
    :ivar told: what this end said.
    :ivar received_hash: the rolling hash of what it had received then.
    :ivar remote_ended: the end of data was among that.
    """

    end: ResumableEnd
    result: HandshakeResult
    there: Hello
    told: Hello
    received_hash: blake2b
    remote_ended: bool

    @property
    def generation(self) -> int:
        """The one that the initiator asked for."""
        assert self.there.resume is not None
        return self.there.resume.generation

    @property
    def is_late(self) -> bool:
        """Whether the stream has gone on over a later transport."""
        return self.generation <= self.end.generation

    def is_confirmed_by(self, frame_type: int, payload: bytes | memoryview) -> bool:
        """Whether that is the initiator's first frame: without both keys nobody can make one."""
        return opens(ChaCha20Poly1305(self.result.receive_key).decrypt, 0, frame_type, payload)


def opens(decrypt: Callable[..., bytes], nonce: int, frame_type: int, payload: bytes | memoryview) -> bool:
    """Whether a FWD, ACK or CLOSE is authentic."""
    sealed = payload[1:] if frame_type == CLOSE else payload
    for associated in (bytes((frame_type,)), END_DATA) if frame_type == FWD else (bytes((frame_type,)),):
        try:
            decrypt(pack_nonce(nonce), sealed, associated)
        except InvalidTag:
            continue
        return True
    return False


class ResumableEnd:
    """One end of a stream.

    :param binding: 32 bytes, the handshake hash of the stream's first transport.
    :param window: bytes that this end lets the other have unacknowledged.
    :param token: 16 bytes if the stream can be resumed, else None.
    :param peer: the other end's key, which has its part of the budget.
    :param tags: the rolling hashes are over the tags of frames, as the two hellos agreed; else over the data.
    :param half_close: both ends understand the end of data, as the two hellos agreed.
    :ivar in_flight: (data, ticket of the caller, what the rolling hash takes of it) of each frame that is not
        acknowledged.
    :ivar acknowledged: bytes of the stream that the other end has.
    :ivar received: bytes of the stream that this end has.
    :ivar consumed: bytes of them that the application has taken.
    :ivar told_window: the window that the other end knows.
    :ivar remote_ended: the other end has said that no more data of it follows.
    """

    __slots__ = (
        "_acked_sequence",
        "_before",
        "_budget",
        "_decrypt",
        "_decrypt_into",
        "_encrypt",
        "_encrypt_into",
        "_end_given",
        "_given",
        "_measured_at",
        "_next_sequence",
        "_open_nonce",
        "_opening",
        "_peer",
        "_received_hash",
        "_received_sequence",
        "_seal_nonce",
        "_sent_hash",
        "_tags",
        "acknowledged",
        "answers",
        "binding",
        "consumed",
        "generation",
        "half_close",
        "idle_moves",
        "in_flight",
        "in_flight_bytes",
        "initiator",
        "limit",
        "measure_at",
        "moved_at",
        "peer_window",
        "received",
        "remote_ended",
        "round_trip",
        "token",
        "told_window",
        "transport",
        "unproven",
        "window",
    )

    def __init__(
        self,
        binding: bytes,
        *,
        initiator: bool,
        window: int = INITIAL_WINDOW,
        token: bytes | None = None,
        budget: Budget | None = None,
        peer: bytes = b"",
        tags: bool = False,
        half_close: bool = False,
    ) -> None:
        self.initiator = initiator
        self.binding = binding
        self._tags = tags
        self.half_close = half_close
        self.remote_ended = False
        self._peer = peer
        self.token = token
        self.generation = 0
        self.transport: Transport | None = None
        """The transport that carries it now; None while there is none."""
        self._sent_hash = self._received_hash = _NO_HASH
        self.acknowledged = 0
        self.idle_moves = 0
        self.moved_at: tuple[int, int] | None = None
        self.received = 0
        self.consumed = 0
        self.in_flight: deque[tuple[bytes | memoryview, object, bytes | memoryview]] = NO_QUEUE
        self.in_flight_bytes = 0
        self.window = window
        self.peer_window = 0
        self.limit = INITIAL_WINDOW
        """Bytes in flight that this end allows itself, whatever the other end names."""
        self._opening = True
        """No server's queue was full yet: the limit grows as the receiver's window may."""
        self.round_trip: float | None = None
        """Seconds, from the handshake."""
        self.measure_at = 1  # the first byte starts the clock
        self._measured_at: float | None = None
        self._budget = BUDGET if budget is None else budget
        self.told_window = 0
        self._encrypt: Callable[..., bytes] = _no_keys
        self._encrypt_into: Callable[..., object] = _no_keys
        self._decrypt: Callable[..., bytes] = _no_keys
        self._decrypt_into: Callable[..., int] = _no_keys
        self._before = (0, 0)
        self._given = 0
        """Bytes of the stream that were given out over a transport before; those below come again after a move."""
        self._end_given = False
        """The end of data was among them: nothing may follow it, whatever comes over the next transport."""
        self.unproven: Agreement | None = None
        """This end has moved, and the other has not shown yet that it has too."""
        self.answers: dict[Transport, Answer] = NO_TABLE
        """Transports over which the other end may go on, once it has confirmed one."""
        self._need_hashes()

    def _need_hashes(self) -> None:
        """Make the rolling hashes that are not there: those of directions in which nothing has moved."""
        # one hash for each direction, so that no direction's word can stand for the other's
        first, second = (b"\2", b"\3") if self._tags else (b"\0", b"\1")
        sent, received = (first, second) if self.initiator else (second, first)
        if self._sent_hash is _NO_HASH:
            self._sent_hash = blake2b(self.binding + sent, digest_size=HASH_SIZE)
        if self._received_hash is _NO_HASH:
            self._received_hash = blake2b(self.binding + received, digest_size=HASH_SIZE)

    # --- transports come and go ---

    def attach(self, transport: Transport, result: HandshakeResult, hello: Hello, told_window: int) -> None:
        """``transport`` carries the stream from now on.

        :param hello: the other end's.
        :param told_window: the window that this end named in its own.
        """
        self.detach()
        self._need_hashes()
        self.transport = transport
        if self.in_flight is NO_QUEUE:
            self.in_flight = deque()
        self._before = (self.acknowledged, self.received)
        transport.secure = self
        sealing, opening = ChaCha20Poly1305(result.send_key), ChaCha20Poly1305(result.receive_key)
        self._encrypt, self._encrypt_into = sealing.encrypt, sealing.encrypt_into
        self._decrypt, self._decrypt_into = opening.decrypt, opening.decrypt_into
        self._seal_nonce = self._open_nonce = 0
        self._next_sequence = 0
        self._acked_sequence = self._received_sequence = 0xFFFF  # of the frame before the first
        self.peer_window = hello.window
        self.told_window = told_window

    def detach(self) -> None:
        """There is no transport now."""
        if self.unproven is not None:
            self.unproven = None
            self.in_flight.pop()  # what asked for the proof
        if self.transport is not None:
            self.transport.delivered = self.delivered
            self.transport.secure = None
            self.transport = None
            # half of the memory of a stream that waits for another way, which has other keys
            self._encrypt = self._encrypt_into = self._decrypt = self._decrypt_into = _no_keys
            if not self.in_flight:
                self.in_flight = NO_QUEUE
            # the other half: what can be made again
            if not self.acknowledged:
                self._sent_hash = _NO_HASH
            if not self.received:
                self._received_hash = _NO_HASH

    @property
    def delivered(self) -> tuple[int, int]:
        """Bytes that the other end has acknowledged, and that this end has received, over this transport."""
        return self.acknowledged - self._before[0], self.received - self._before[1]

    def offer_window(self) -> int:
        """What to name in a hello: the window less what the application has not taken."""
        return max(0, self.consumed + self.window - self.received)

    def position(self) -> Resume:
        """Where this end stands, for a hello."""
        assert self.token is not None
        self._need_hashes()
        return Resume(self.token, self.generation, self.received, self._digest(self._received_hash, self.received))

    def _digest(self, rolling: blake2b, position: int) -> bytes:
        """A rolling hash at a position of the stream: 32 bytes."""
        if self._tags:
            rolling = rolling.copy()
            rolling.update(_position(position))
        return rolling.digest()

    def compare(self, there: Resume) -> Agreement:
        """Compare where the other end stands with what this end has sent; nothing changes.

        :raises SecureError: that cannot be: the streams have gone apart.
        """
        self._need_hashes()
        position, count, rolling = self.acknowledged, 0, self._sent_hash.copy()
        for data, _, counted in self.in_flight:
            if position >= there.received:
                break
            rolling.update(counted)
            position += len(data)
            count += 1
        if position != there.received or self._digest(rolling, position) != there.hash:
            raise SecureError(CloseReason.HASH_MISMATCH)
        return Agreement(count, position, rolling)

    def resume(self, there: Resume) -> Unsent:
        """Go on from where the other end stands.

        :raises SecureError: that cannot be: the streams have gone apart.
        """
        return self._agree(self.compare(there))

    def _agree(self, agreed: Agreement) -> Unsent:
        in_flight = self.in_flight
        tickets = [in_flight.popleft()[1] for _ in range(agreed.frames)]
        self.acknowledged, self._sent_hash = agreed.position, agreed.rolling
        while in_flight and not in_flight[0][0]:
            # frames without data are there to be acknowledged: this is the acknowledgement
            tickets.append(in_flight.popleft()[1])
        # what is sent again has other tags
        unsent = [(data, ticket) for data, ticket, _ in in_flight]
        if in_flight:
            in_flight.clear()
        self.in_flight_bytes = 0
        self._before = (self.acknowledged, self.received)
        return tickets, unsent

    def answer(self, result: HandshakeResult, there: Hello, told: Hello) -> Answer:
        """What is needed to go on over another transport, once the initiator has confirmed it."""
        self._need_hashes()
        return Answer(self, result, there, told, self._received_hash.copy(), self.remote_ended)

    def keep_answer(self, transport: Transport, answer: Answer) -> None:
        """Keep what was answered over ``transport`` until the initiator confirms it, or the transport ends."""
        if self.answers is NO_TABLE:
            self.answers = {}
        self.answers[transport] = answer

    def take_up(self, transport: Transport, answer: Answer) -> Unsent:
        """The initiator has confirmed ``answer``: ``transport`` carries the stream from where this end said it stood.

        What the transport before brought since then comes a second time, is counted, and not given out again.

        :raises SecureError: the streams have gone apart; ``transport`` carries this one all the same, to its end.
        """
        assert answer.there.resume is not None and answer.told.resume is not None
        self.detach()
        self._given = max(self._given, self.received)
        self._end_given = self._end_given or self.remote_ended
        self.received, self._received_hash = answer.told.resume.received, answer.received_hash
        self.remote_ended = answer.remote_ended
        self.generation = answer.generation
        self.attach(transport, answer.result, answer.there, answer.told.window)
        return self.resume(answer.there.resume)

    def is_authentic(self, frame_type: int, payload: bytes | memoryview) -> bool:
        """Whether that is the next frame of the other end; nothing changes."""
        return opens(self._decrypt, self._open_nonce, frame_type, payload)

    def prove(self) -> Unsent:
        """The responder goes on here, as an authentic frame shows."""
        assert self.unproven is not None
        agreed, self.unproven = self.unproven, None
        asked = self.in_flight.pop()
        found = self._agree(agreed)
        self.in_flight.append(asked)
        return found

    def release(self) -> None:
        """The stream is over: its share of the budget is free."""
        self._budget.give_back(self._peer, max(0, self.window - INITIAL_WINDOW))
        self.window = min(self.window, INITIAL_WINDOW)
        self.detach()
        self.in_flight = NO_QUEUE
