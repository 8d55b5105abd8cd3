"""Resumption: the state of a secure stream that outlives its transports, and the move to another transport. No I/O.

:meth:`ResumableEnd.attach` replaces the state of one transport: keys, nonces and sequences. The state of the stream is
kept: numbers of bytes acknowledged and received, their rolling hashes, and unacknowledged data. With this state, the
two ends compare their positions and continue.

The responder does not change its state before the initiator has confirmed the new transport. The initiator does not
change its state before an authentic frame proves that the responder has moved. The handshake messages alone prove
nothing, because anybody who has one of the two static keys can make them.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, NamedTuple, NoReturn, Protocol

from cryptography.exceptions import InvalidTag

from dmsg.base.buffers import NO_QUEUE, NO_TABLE
from dmsg.base.cipher_names import Cipher
from dmsg.errors import CloseReason, DmsgError
from dmsg.noise.ciphers import NO_REKEY, begin_cipher, next_cipher, rekey_after
from dmsg.noise.handshake import HandshakeResult
from dmsg.streams.core.agreement import HASH_SIZE, Hello, Resume, agreed_cipher
from dmsg.streams.core.budget import BUDGET, Budget

INITIAL_WINDOW = 256 * 1024
"""Initial receive window in bytes."""
MAX_FRAMES = 16384
"""Maximum number of frames in flight. It is below 2**15, so that the order of two sequences is always unambiguous."""

FWD, ACK, CLOSE = 0xA, 0xB, 0x3
"""Kinds of encrypted payloads, which are used as their associated data. The values are the frame types of 2019. A
protocol family with other frame types uses these values as well."""
END_DATA = b"\x0e"
"""Associated data of the FWD that half-closes a stream. No frame has this type, so no other FWD can be mistaken for a
half-close."""

pack_nonce = struct.Struct("<4xQ").pack
_position = struct.Struct(">Q").pack


class SecureError(DmsgError):
    """Error: a frame arrived that a correct peer would not send through an honest server.

    :ivar reason: close reason for the transport.
    """

    def __init__(self, reason: CloseReason) -> None:
        super().__init__(reason.name)
        self.reason = reason


_NO_HASH = blake2b(digest_size=HASH_SIZE)
"""Placeholder for the rolling hash of a direction without data. It saves idle streams the 448 bytes of a hash."""


def _no_keys(*_: object) -> NoReturn:
    raise AssertionError("a stream without a transport has no keys")


class Transport(Protocol):
    """Interface of a transport, of any protocol family, as the end of a stream uses it.

    :ivar carrier: carrier that binds the transport to its stream. Set and used by the session, not by the core.
    :ivar secure: end of the stream that the transport carries, or None.
    :ivar delivered: numbers of sent and of received bytes that were delivered before the stream left the transport.
    """

    carrier: Any
    secure: Any
    delivered: tuple[int, int]


class Agreement(NamedTuple):
    """Result of comparing the positions of the two ends: how much of the data in flight the other end has received.

    :ivar frames: number of frames in flight that the other end has received.
    :ivar position: number of bytes of the stream up to the end of these frames.
    :ivar rolling: rolling hash of these bytes.
    """

    frames: int
    position: int
    rolling: blake2b


Unsent = tuple[list[object], list[tuple[bytes | memoryview, object]]]
"""Pair of lists: the tickets of the frames that the other end has received, and (data, ticket) of each frame to send
again."""


class Answer(NamedTuple):
    """Unconfirmed answer of this end to a RESUME. Until the answer is confirmed, the stream is not changed.

    :ivar hello: hello of the initiator.
    :ivar reply: hello with which this end answered.
    :ivar received_hash: rolling hash of the data that this end had received when it answered.
    :ivar remote_ended: whether the initiator had half-closed the stream when this end answered.
    """

    end: ResumableEnd
    result: HandshakeResult
    hello: Hello
    reply: Hello
    received_hash: blake2b
    remote_ended: bool

    @property
    def generation(self) -> int:
        """Generation in the initiator's hello."""
        assert self.hello.resume is not None
        return self.hello.resume.generation

    @property
    def is_late(self) -> bool:
        """Whether the stream has meanwhile moved to a transport whose generation is not lower than this answer's."""
        return self.generation <= self.end.generation

    def is_confirmed_by(self, frame_type: int, payload: bytes | memoryview) -> bool:
        """Return whether a frame is the initiator's first one and authentic, which proves that the initiator holds the
        keys."""
        cipher = begin_cipher(agreed_cipher(self.hello, self.reply), self.result.receive_key)
        return is_authentic(cipher.decrypt, 0, frame_type, payload)


def is_authentic(decrypt: Callable[..., bytes], nonce: int, frame_type: int, payload: bytes | memoryview) -> bool:
    """Return whether a FWD, ACK or CLOSE with this nonce is authentic."""
    # A CLOSE begins with its reason, which is not encrypted, so that servers can read it.
    sealed = payload[1:] if frame_type == CLOSE else payload
    for associated in (bytes((frame_type,)), END_DATA) if frame_type == FWD else (bytes((frame_type,)),):
        try:
            decrypt(pack_nonce(nonce), sealed, associated)
        except InvalidTag:
            continue
        return True
    return False


class ResumableEnd:
    """End of a secure stream, with the state that outlives a transport.

    :param binding: 32 bytes, the handshake hash of the stream's first transport.
    :param window: receive window of this end in bytes.
    :param token: 16 bytes that identify the stream; None if it cannot be resumed.
    :param budget: memory budget from which the window grows; by default that of the process.
    :param peer: key of the other end, to which growth of the window is charged in the budget.
    :param tags: whether the rolling hashes are computed over the tags of frames instead of their data, as agreed in the
        hellos.
    :param half_close: whether both ends support half-close, as agreed in the hellos.
    :ivar in_flight: (data, caller's ticket, bytes that enter the rolling hash) of each unacknowledged frame.
    :ivar acknowledged: number of bytes of the stream that the other end has acknowledged.
    :ivar received: number of bytes of the stream that this end has received.
    :ivar consumed: number of received bytes that the application has read.
    :ivar told_window: receive window in bytes that was last announced to the other end.
    :ivar remote_ended: whether the other end has half-closed.
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
        "_in_slow_start",
        "_measured_at",
        "_next_open_key",
        "_next_sequence",
        "_open_nonce",
        "_open_rekey",
        "_peer",
        "_received_hash",
        "_received_sequence",
        "_seal_nonce",
        "_seal_rekey",
        "_sent_hash",
        "_tags",
        "acknowledged",
        "answers",
        "binding",
        "cipher",
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
        """Transport that carries the stream now; None while the stream is suspended."""
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
        """Congestion window: maximum bytes in flight by this end's own estimate. The other end's receive window limits
        them, too."""
        self._in_slow_start = True
        """Whether the congestion window grows as in TCP's slow start. It does until a server reports a full queue."""
        self.round_trip: float | None = None
        """Round trip in seconds, measured by the handshake."""
        self.measure_at = 1  # The first measurement starts with the first byte that the application reads.
        self._measured_at: float | None = None
        self._budget = BUDGET if budget is None else budget
        self.told_window = 0
        self._encrypt: Callable[..., bytes] = _no_keys
        self._encrypt_into: Callable[..., object] = _no_keys
        self._decrypt: Callable[..., bytes] = _no_keys
        self._decrypt_into: Callable[..., int] = _no_keys
        self._next_open_key: Callable[..., bytes] = _no_keys
        """Method of the decrypting cipher that derives the next key."""
        self._seal_rekey = self._open_rekey = NO_REKEY
        """Nonces at which the keys of the sending and of the receiving direction are changed."""
        self.cipher = Cipher.CHACHA20_POLY1305
        """Cipher of the present transport, or of the last one."""
        self._before = (0, 0)
        self._given = 0
        """Number of bytes of the stream that the application received over earlier transports. After a move, some of
        these bytes arrive again, and are not delivered a second time."""
        self._end_given = False
        """Whether the application was told of the half-close over an earlier transport, so that no data may follow."""
        self.unproven: Agreement | None = None
        """Result of comparing the positions of the two ends. It is stored from the start of a move until the other end
        has proved that it has moved; None at other times.
        """
        self.answers: dict[Transport, Answer] = NO_TABLE
        """Unconfirmed answers to RESUMEs, by the transport over which the other end may confirm them."""
        self._need_hashes()

    def _need_hashes(self) -> None:
        """Replace placeholders of rolling hashes by real hashes."""
        # The prefixes of the two directions differ, so that a hash of one direction is not valid for the other.
        first, second = (b"\2", b"\3") if self._tags else (b"\0", b"\1")
        sent, received = (first, second) if self.initiator else (second, first)
        if self._sent_hash is _NO_HASH:
            self._sent_hash = blake2b(self.binding + sent, digest_size=HASH_SIZE)
        if self._received_hash is _NO_HASH:
            self._received_hash = blake2b(self.binding + received, digest_size=HASH_SIZE)

    # --- attaching and detaching transports ---

    def attach(
        self,
        transport: Transport,
        result: HandshakeResult,
        hello: Hello,
        told_window: int,
        cipher: Cipher = Cipher.CHACHA20_POLY1305,
    ) -> None:
        """Continue the stream over ``transport``, with the keys of the transport's handshake.

        :param hello: hello of the other end.
        :param told_window: receive window in bytes that this end stated in its own hello.
        :param cipher: cipher on which the two hellos agree.
        """
        self.detach()
        self._need_hashes()
        self.transport = transport
        if self.in_flight is NO_QUEUE:
            self.in_flight = deque()
        self._before = (self.acknowledged, self.received)
        transport.secure = self
        self.cipher = cipher
        sealing, opening = begin_cipher(cipher, result.send_key), begin_cipher(cipher, result.receive_key)
        self._encrypt, self._encrypt_into = sealing.encrypt, sealing.encrypt_into
        self._decrypt, self._decrypt_into = opening.decrypt, opening.decrypt_into
        self._next_open_key = opening.encrypt
        self._seal_rekey = self._open_rekey = rekey_after(cipher)
        self._seal_nonce = self._open_nonce = 0
        self._next_sequence = 0
        self._acked_sequence = self._received_sequence = 0xFFFF  # The first frame has sequence 0.
        self.peer_window = hello.window
        self.told_window = told_window

    def detach(self) -> None:
        """Detach the stream from its transport, if it has one."""
        if self.unproven is not None:
            self.unproven = None
            # The last frame in flight only requested a proof that the other end has moved the stream to this transport.
            # It contains no data, so it is not sent again.
            self.in_flight.pop()
        if self.transport is not None:
            self.transport.delivered = self.delivered
            self.transport.secure = None
            self.transport = None
            # The ciphers are freed, because they take half of the memory of a suspended stream and the next transport
            # has other keys.
            self._encrypt = self._encrypt_into = self._decrypt = self._decrypt_into = self._next_open_key = _no_keys
            if not self.in_flight:
                self.in_flight = NO_QUEUE
            # The rolling hashes of the two directions take the other half of a suspended stream's memory. The hash of a
            # direction without data is freed, too, because it can be created again.
            if not self.acknowledged:
                self._sent_hash = _NO_HASH
            if not self.received:
                self._received_hash = _NO_HASH

    def _rekey_sealing(self) -> None:
        """Change the key of the sending direction. Called before the message with nonce ``_seal_rekey`` is
        encrypted."""
        sealing = next_cipher(self._encrypt)
        self._encrypt, self._encrypt_into = sealing.encrypt, sealing.encrypt_into
        self._seal_rekey += rekey_after(self.cipher)

    def _rekey_opening(self) -> None:
        """Change the key of the receiving direction. Called when the last message before nonce ``_open_rekey`` has been
        decrypted."""
        opening = next_cipher(self._next_open_key)
        self._decrypt, self._decrypt_into = opening.decrypt, opening.decrypt_into
        self._next_open_key = opening.encrypt
        self._open_rekey += rekey_after(self.cipher)

    @property
    def delivered(self) -> tuple[int, int]:
        """Number of bytes that the other end has acknowledged, and number that this end has received, over the present
        transport."""
        return self.acknowledged - self._before[0], self.received - self._before[1]

    def offer_window(self) -> int:
        """Return the receive window to state in a hello: the window without the bytes that the application has not
        read."""
        return max(0, self.consumed + self.window - self.received)

    def position(self) -> Resume:
        """Return this end's position to state in a hello: the number of received bytes and their rolling hash."""
        assert self.token is not None
        self._need_hashes()
        return Resume(self.token, self.generation, self.received, self._digest(self._received_hash, self.received))

    def _digest(self, rolling: blake2b, position: int) -> bytes:
        """Return the 32 bytes of a rolling hash at a position of the stream."""
        if self._tags:
            rolling = rolling.copy()
            rolling.update(_position(position))
        return rolling.digest()

    def compare(self, remote: Resume) -> Agreement:
        """Compare the other end's position with the data that this end has sent. Do not change the state.

        :raises SecureError: the position contradicts the sent data, so the two ends have different histories.
        """
        self._need_hashes()
        position, count, rolling = self.acknowledged, 0, self._sent_hash.copy()
        # The other end may have received frames whose ACKs were lost. It receives whole frames only, so a position
        # inside a frame is an error.
        for data, _, counted in self.in_flight:
            if position >= remote.received:
                break
            rolling.update(counted)
            position += len(data)
            count += 1
        if position != remote.received or self._digest(rolling, position) != remote.hash:
            raise SecureError(CloseReason.HASH_MISMATCH)
        return Agreement(count, position, rolling)

    def resume(self, remote: Resume) -> Unsent:
        """Continue from the other end's position.

        :returns: tickets of the frames that the other end has received, and the data to send again.
        :raises SecureError: the position contradicts the sent data, so the two ends have different histories.
        """
        return self._agree(self.compare(remote))

    def _agree(self, agreement: Agreement) -> Unsent:
        in_flight = self.in_flight
        tickets = [in_flight.popleft()[1] for _ in range(agreement.frames)]
        self.acknowledged, self._sent_hash = agreement.position, agreement.rolling
        while in_flight and not in_flight[0][0]:
            # Frames without data are not sent again. They only ask for an acknowledgement, and the position
            # acknowledges them.
            tickets.append(in_flight.popleft()[1])
        # The tags are dropped, because data that are sent again are encrypted with another key and have other tags.
        unsent = [(data, ticket) for data, ticket, _ in in_flight]
        if in_flight:
            in_flight.clear()
        self.in_flight_bytes = 0
        self._before = (self.acknowledged, self.received)
        return tickets, unsent

    def answer(self, result: HandshakeResult, hello: Hello, reply: Hello) -> Answer:
        """Return the state with which the responder continues this stream over another transport, once the initiator
        has confirmed that transport."""
        self._need_hashes()
        return Answer(self, result, hello, reply, self._received_hash.copy(), self.remote_ended)

    def keep_answer(self, transport: Transport, answer: Answer) -> None:
        """Store the answer given over ``transport`` until the initiator confirms it or the transport ends."""
        if self.answers is NO_TABLE:
            self.answers = {}
        self.answers[transport] = answer

    def resume_over(self, transport: Transport, answer: Answer) -> Unsent:
        """Continue over ``transport`` from the position that ``answer`` states, because the initiator has confirmed
        ``answer``.

        Data that the former transport delivered after the answer arrive again. They are counted, and not delivered to
        the application a second time.

        :raises SecureError: the two ends have different histories. The end is attached to ``transport`` nevertheless,
            so that it can send an authenticated CLOSE.
        """
        assert answer.hello.resume is not None and answer.reply.resume is not None
        # ``received`` is reset to the position that the answer states, because the initiator sends from there on.
        self.detach()
        self._given = max(self._given, self.received)
        self._end_given = self._end_given or self.remote_ended
        self.received, self._received_hash = answer.reply.resume.received, answer.received_hash
        self.remote_ended = answer.remote_ended
        self.generation = answer.generation
        cipher = agreed_cipher(answer.hello, answer.reply)
        self.attach(transport, answer.result, answer.hello, answer.reply.window, cipher)
        return self.resume(answer.hello.resume)

    def is_authentic(self, frame_type: int, payload: bytes | memoryview) -> bool:
        """Return whether a frame is the next one of the other end, and authentic. Do not change the state."""
        return is_authentic(self._decrypt, self._open_nonce, frame_type, payload)

    def prove(self) -> Unsent:
        """Complete the initiator's move of the stream to the new transport, because an authentic frame has proved that
        the responder has moved the stream there."""
        assert self.unproven is not None
        agreed, self.unproven = self.unproven, None
        asked = self.in_flight.pop()
        found = self._agree(agreed)
        self.in_flight.append(asked)
        return found

    def release(self) -> None:
        """Detach a stream that is closed, and return its bytes to the budget."""
        self._budget.give_back(self._peer, max(0, self.window - INITIAL_WINDOW))
        self.window = min(self.window, INITIAL_WINDOW)
        self.detach()
        self.in_flight = NO_QUEUE
