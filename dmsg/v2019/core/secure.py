"""One end of a secure stream: ciphers, sequences, rolling hashes, windows.

A :class:`SecureEnd` outlives the transports that carry it.  What belongs to one
transport (keys, nonces, sequences) is replaced by :meth:`SecureEnd.attach`;
what belongs to the stream (bytes acknowledged and received, the rolling
hashes of both, what is not acknowledged) stays, so that the two ends can
compare where they are and go on.  The hashes are over the tags of the frames, not over their data, where both
ends know that.  ``docs/protocol/secure-transport.md`` is
the specification.  No I/O, no clock.
"""

from __future__ import annotations

import struct
from collections import deque
from hashlib import blake2b
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from dmsg.errors import CloseReason, DmsgError
from dmsg.noise.handshake import HandshakeResult
from dmsg.v2019.core.agreement import HASH_SIZE, Hello, Resume
from dmsg.v2019.core.budget import BUDGET, Budget
from dmsg.v2019.core.wire import ACK, CLOSE, FWD, HEADER_SIZE, MAX_FRAME_PAYLOAD, SEQUENCE_SIZE, pack_fwd_into

TAG_SIZE = 16
ACK_HASH_SIZE = 4
"""Bytes of the rolling hash in an ACK (seed document, TODO list)."""
SECURE_OVERHEAD = TAG_SIZE
MAX_SECURE_DATA = MAX_FRAME_PAYLOAD - SEQUENCE_SIZE - TAG_SIZE
"""65492 bytes of user data in one FWD of a secure transport."""
INITIAL_WINDOW = 256 * 1024
"""Bytes that a receiver lets a sender have unacknowledged at first."""
MAX_WINDOW = 32 * 1024 * 1024
"""Bytes to which the window of one stream grows."""
GROW_WITHIN = 4.0
"""Round trips in which a window full has to be taken for the window to double."""
EARLY_WINDOW = 2 * 1024 * 1024
EARLY_GROW_WITHIN = 6.0
"""The same below ``EARLY_WINDOW``, where it is made four times as large: TCP on the
way begins slowly too, and goes on slowly while a window holds it back."""
MAX_FRAMES = 16384
"""Frames in flight; below 2**15, so that the order of two sequences is never in doubt."""
MIN_LIMIT = 64 * 1024
"""Bytes in flight that are always allowed to a sender whose server found its queue full."""
DIAGNOSE_SPAN = 64
"""Nonces before and after the expected one that are tried on a frame that is not
authentic, to tell frames that are missing or repeated from those that were changed."""
DIAGNOSE_SIZE = 4096
"""Bytes of the largest frame with which that is done."""

_nonce = struct.Struct("<4xQ").pack
_position = struct.Struct(">Q").pack
_sequence = struct.Struct(">H").pack
_ack = struct.Struct(f">H{ACK_HASH_SIZE}s")
_long_ack = struct.Struct(f">H{ACK_HASH_SIZE}sI")
_FWD_DATA, _ACK_DATA, _CLOSE_DATA = bytes((FWD,)), bytes((ACK,)), bytes((CLOSE,))
_END_DATA = b"\x0e"
"""Associated data of the FWD that ends the data of its sender: no frame has this type, so no other FWD opens as one."""
END_OF_DATA = b"\1"
"""What that FWD carries. It takes one byte of the stream's positions, as FIN takes a sequence number of TCP: so ACKs,
rolling hashes and RESUME cover it as they cover data."""
_END_SIZE = SEQUENCE_SIZE + len(END_OF_DATA) + TAG_SIZE


class SecureError(DmsgError):
    """A frame that a correct peer over an honest server does not send.

    :ivar reason: why the transport ends.
    """

    def __init__(self, reason: CloseReason) -> None:
        super().__init__(reason.name)
        self.reason = reason


class SecureEnd:
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
        self.transport: Any = None
        """The transport that carries it now; None while there is none."""
        # one hash for each direction, so that no direction's word can stand for the other's
        first = blake2b(binding + (b"\2" if tags else b"\0"), digest_size=HASH_SIZE)
        second = blake2b(binding + (b"\3" if tags else b"\1"), digest_size=HASH_SIZE)
        self._sent_hash, self._received_hash = (first, second) if initiator else (second, first)
        self.acknowledged = 0
        self.idle_moves = 0
        self.moved_at: tuple[int, int] | None = None
        self.received = 0
        self.consumed = 0
        self.in_flight: deque[tuple[bytes | memoryview, Any, bytes | memoryview]] = deque()
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
        self._before = (0, 0)

    # --- transports come and go ---

    def attach(self, transport: Any, result: HandshakeResult, hello: Hello, told_window: int) -> None:
        """``transport`` carries the stream from now on.

        :param hello: the other end's.
        :param told_window: the window that this end named in its own.
        """
        self.detach()
        self.transport = transport
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
        if self.transport is not None:
            self.transport.delivered = self.delivered
            self.transport.secure = None
            self.transport = None

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
        return Resume(self.token, self.generation, self.received, self._digest(self._received_hash, self.received))

    def _digest(self, rolling: blake2b, position: int) -> bytes:
        """A rolling hash at a position of the stream: 32 bytes."""
        if self._tags:
            rolling = rolling.copy()
            rolling.update(_position(position))
        return rolling.digest()

    def resume(self, there: Resume) -> tuple[list[Any], list[tuple[bytes | memoryview, Any]]]:
        """The other end says where it stands.

        This end has taken nothing since it said where it stands itself, so
        what either says is where the other goes on.

        :returns: tickets of what it has, and (data, ticket) of what is to be sent again.
        :raises SecureError: that cannot be: the streams have gone apart.
        """
        tickets: list[Any] = []
        in_flight = self.in_flight
        while self.acknowledged < there.received and in_flight:
            data, ticket, counted = in_flight.popleft()
            self._sent_hash.update(counted)
            self.acknowledged += len(data)
            tickets.append(ticket)
        if self.acknowledged != there.received or self._digest(self._sent_hash, there.received) != there.hash:
            raise SecureError(CloseReason.HASH_MISMATCH)
        while in_flight and not in_flight[0][0]:
            # frames without data are there to be acknowledged: this is the acknowledgement
            tickets.append(in_flight.popleft()[1])
        # what is sent again has other tags
        unsent = [(data, ticket) for data, ticket, _ in in_flight]
        in_flight.clear()
        self.in_flight_bytes = 0
        return tickets, unsent

    def release(self) -> None:
        """The stream is over: its share of the budget is free."""
        self._budget.give_back(self._peer, max(0, self.window - INITIAL_WINDOW))
        self.window = min(self.window, INITIAL_WINDOW)
        self.detach()
        self.in_flight.clear()

    # --- sending ---

    @property
    def may_send(self) -> bool:
        """Another frame may be sent now."""
        return (
            self.transport is not None
            and self.in_flight_bytes < self.peer_window
            and self.in_flight_bytes < self.limit
            and len(self.in_flight) < MAX_FRAMES
        )

    def seal_end(self, ticket: Any) -> bytes:
        """The payload of the FWD that says that no more data follows."""
        return self.seal_data(END_OF_DATA, ticket, _END_DATA)

    def seal_data(self, data: bytes | memoryview, ticket: Any, associated: bytes = _FWD_DATA) -> bytes:
        """The payload of a FWD.  :param data: at most 65492 bytes."""
        sequence = self._next_sequence
        self._next_sequence = (sequence + 1) & 0xFFFF
        nonce = self._seal_nonce
        self._seal_nonce = nonce + 1
        payload = self._encrypt(_nonce(nonce), b"".join((_sequence(sequence), data)), associated)
        # a frame without data has no place in the stream: nothing of it counts
        self.in_flight.append((data, ticket, payload[-TAG_SIZE:] if self._tags and data else data))
        self.in_flight_bytes += len(data)
        return payload

    def seal_frame(self, transport_id: int, data: bytes | memoryview, ticket: Any, frame: memoryview) -> int:
        """A whole FWD at the start of ``frame``, which has room for it; as :meth:`seal_data`, with a copy less.

        :returns: its length: 23 bytes more than that of ``data``.
        """
        size = len(data)
        sequence = self._next_sequence
        self._next_sequence = (sequence + 1) & 0xFFFF
        nonce = self._seal_nonce
        self._seal_nonce = nonce + 1
        plain_end = HEADER_SIZE + SEQUENCE_SIZE + size
        end = plain_end + TAG_SIZE
        pack_fwd_into(frame, 0, FWD, transport_id, SEQUENCE_SIZE + size + TAG_SIZE, sequence)
        frame[HEADER_SIZE + SEQUENCE_SIZE : plain_end] = data
        # where it lies
        self._encrypt_into(_nonce(nonce), frame[HEADER_SIZE:plain_end], _FWD_DATA, frame[HEADER_SIZE:end])
        self.in_flight.append((data, ticket, bytes(frame[plain_end:end]) if self._tags else data))
        self.in_flight_bytes += size
        return end

    def seal_ack(self) -> bytes:
        """The payload of an ACK of all that was received.

        It names the window only when it is another than the sender knows.
        """
        window = max(0, self.consumed + self.window - self.received)
        digest = self._digest(self._received_hash, self.received)[:ACK_HASH_SIZE]
        if window == self.told_window:
            plain = _ack.pack(self._received_sequence, digest)
        else:
            self.told_window = window
            plain = _long_ack.pack(self._received_sequence, digest, window)
        nonce = self._seal_nonce
        self._seal_nonce = nonce + 1
        return self._encrypt(_nonce(nonce), plain, _ACK_DATA)

    def seal_close(self, reason: int) -> bytes:
        """The payload of a CLOSE: the reason, and what proves that it is this end's."""
        byte = bytes((reason,))
        nonce = self._seal_nonce
        self._seal_nonce = nonce + 1
        return byte + self._encrypt(_nonce(nonce), byte, _CLOSE_DATA)

    def queue_was_full(self) -> None:
        """A server held more for the receiver than it may: send less ahead."""
        self.limit = max(MIN_LIMIT, self.in_flight_bytes // 2)
        self._opening = False

    # --- receiving ---

    def open_data(self, payload: bytes | memoryview) -> bytes | None:
        """The data of a FWD; None if it says that no more data follows.

        :param payload: a large one that may be written to is opened where it lies; its tag stays.
        :raises SecureError: see its reason.
        """
        plain: bytes | memoryview
        ends = False
        if len(payload) > DIAGNOSE_SIZE and isinstance(payload, memoryview) and not payload.readonly:
            plain = self._open_in_place(payload, _FWD_DATA)
        elif len(payload) == _END_SIZE and self.half_close:
            plain, ends = self._open_byte_or_end(payload)
        else:
            plain = self._open(payload, _FWD_DATA)
        sequence = (self._received_sequence + 1) & 0xFFFF
        if len(plain) < SEQUENCE_SIZE or plain[0] << 8 | plain[1] != sequence:
            raise SecureError(CloseReason.BAD_FRAME)
        self._received_sequence = sequence
        data = bytes(plain[SEQUENCE_SIZE:])
        size = len(data)
        self.received += size
        if size:
            if self.remote_ended:
                raise SecureError(CloseReason.BAD_FRAME)
            self._received_hash.update(payload[-TAG_SIZE:] if self._tags else data)
        if self.received - self.consumed > self.window + MAX_SECURE_DATA:
            raise SecureError(CloseReason.BUFFER_FULL)
        if ends:
            self.remote_ended = True
            self.consumed += size  # no application takes it
            return None
        return data

    def _open_byte_or_end(self, payload: bytes | memoryview) -> tuple[bytes, bool]:
        """The plaintext of a FWD with one byte, and whether it is the end of data."""
        try:
            plain = self._decrypt(_nonce(self._open_nonce), payload, _FWD_DATA)
        except InvalidTag:
            try:
                return self._open(payload, _END_DATA), True
            except SecureError as error:
                if error.reason is not CloseReason.NOT_AUTHENTIC:
                    raise
                raise SecureError(self._diagnose(bytes(payload), _FWD_DATA)) from None
        self._open_nonce += 1
        return plain, False

    def open_ack(self, payload: bytes | memoryview) -> tuple[int, list[Any]]:
        """How many frames an ACK acknowledges, and the tickets among them.

        :raises SecureError: see its reason.
        """
        plain = self._open(payload, _ACK_DATA)
        if len(plain) == _ack.size:
            sequence, digest = _ack.unpack(plain)
        elif len(plain) == _long_ack.size:
            sequence, digest, self.peer_window = _long_ack.unpack(plain)
        else:
            raise SecureError(CloseReason.BAD_FRAME)
        # serial number arithmetic: an older sequence is a count of 2**15 and more
        count = (sequence - self._acked_sequence) & 0xFFFF
        in_flight = self.in_flight
        if count > len(in_flight):
            raise SecureError(CloseReason.BAD_FRAME)
        self._acked_sequence = sequence
        tickets = []
        sent_hash = self._sent_hash
        size = 0
        for _ in range(count):
            data, ticket, counted = in_flight.popleft()
            sent_hash.update(counted)
            size += len(data)
            if ticket is not None:
                tickets.append(ticket)
        self.in_flight_bytes -= size
        self.acknowledged += size
        if self.limit < MAX_WINDOW:
            self.limit = min(MAX_WINDOW, self.limit + (3 * size if self._opening else max(1, size // 8)))
        if self._digest(sent_hash, self.acknowledged)[:ACK_HASH_SIZE] != digest:
            raise SecureError(CloseReason.HASH_MISMATCH)
        return count, tickets

    def open_close(self, payload: bytes) -> int | None:
        """The reason of a CLOSE that the other end made; None when a server made it."""
        if len(payload) != 2 + TAG_SIZE:
            return None
        try:
            plain = self._open(payload[1:], _CLOSE_DATA)
        except SecureError:
            return None
        return plain[0] if len(plain) == 1 else None

    def _open(self, payload: bytes | memoryview, associated: bytes) -> bytes:
        nonce = self._open_nonce
        try:
            plain = self._decrypt(_nonce(nonce), payload, associated)
        except InvalidTag:
            raise SecureError(self._diagnose(bytes(payload), associated)) from None
        self._open_nonce = nonce + 1
        return plain

    def _open_in_place(self, payload: memoryview, associated: bytes) -> memoryview:
        plain = payload[:-TAG_SIZE]
        try:
            self._decrypt_into(_nonce(self._open_nonce), payload, associated, plain)
        except InvalidTag:
            raise SecureError(CloseReason.NOT_AUTHENTIC) from None  # too large to be looked at more closely
        self._open_nonce += 1
        return plain

    def _diagnose(self, payload: bytes, associated: bytes) -> CloseReason:
        """Why a frame is not what was expected; the transport ends whatever it is."""
        expected = self._open_nonce
        if len(payload) > DIAGNOSE_SIZE:
            return CloseReason.NOT_AUTHENTIC  # a word more is not worth milliseconds to who sends rubbish
        for nonce in range(max(0, expected - DIAGNOSE_SPAN), expected + DIAGNOSE_SPAN):
            try:
                self._decrypt(_nonce(nonce), payload, associated)
            except InvalidTag:
                continue
            return CloseReason.FRAME_REPEATED if nonce < expected else CloseReason.FRAME_MISSING
        return CloseReason.NOT_AUTHENTIC

    # --- the window of this end ---

    def consume(self, size: int) -> bool:
        """The application has taken ``size`` bytes.

        :returns: the sender should hear of it now: a quarter of the window is free again.
        """
        self.consumed += size
        return self.consumed + self.window - self.received - self.told_window >= self.window // 4

    def measure(self, now: float) -> None:
        """A window full of bytes was taken since the last measure: let it grow if that was quick.

        While the window is what holds the sender back, a window full takes
        one round trip, or a few when TCP is still finding its own speed; when it
        takes more, something else does, and a larger window would only fill queues.

        :param now: seconds of a monotonic clock.
        """
        before, self._measured_at = self._measured_at, now
        early = self.window < EARLY_WINDOW
        within = EARLY_GROW_WITHIN if early else GROW_WITHIN
        if before is not None and self.round_trip is not None and now - before <= within * self.round_trip:
            more = min(self.window * (3 if early else 1), MAX_WINDOW - self.window)
            if more and self._budget.take(self._peer, more):
                self.window += more
        self.measure_at = self.consumed + self.window
