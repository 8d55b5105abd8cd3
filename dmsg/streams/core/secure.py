"""One end of a secure stream: ciphers, sequences, rolling hashes, windows.

A :class:`SecureEnd` outlives the transports that carry it (:mod:`dmsg.streams.core.resumption`).  The hashes are over
the tags of the frames, not over their data, where both ends know that.
``docs/protocol/secure-transport.md`` is the specification.  No I/O, no clock.
"""

from __future__ import annotations

import struct

from cryptography.exceptions import InvalidTag

from dmsg.errors import CloseReason, fit_close_reason
from dmsg.noise.handshake import HandshakeResult
from dmsg.streams.core.agreement import Hello
from dmsg.streams.core.resumption import (
    ACK,
    CLOSE,
    END_DATA,
    FWD,
    MAX_FRAMES,
    ResumableEnd,
    SecureError,
    Transport,
    pack_nonce,
)

SEQUENCE_SIZE = 2
TAG_SIZE = 16
ACK_HASH_SIZE = 4
"""Bytes of the rolling hash in an ACK (seed document, TODO list)."""
SECURE_OVERHEAD = TAG_SIZE
MAX_SECURE_DATA = 65492
"""Bytes of user data in one FWD of a secure transport: with its sequence and tag it fits into a frame of 2019."""
MAX_WINDOW = 32 * 1024 * 1024
"""Bytes to which the window of one stream grows."""
GROW_WITHIN = 4.0
"""Round trips in which a window full has to be taken for the window to double."""
EARLY_WINDOW = 2 * 1024 * 1024
EARLY_GROW_WITHIN = 6.0
"""The same below ``EARLY_WINDOW``, where it is made four times as large: TCP on the
way begins slowly too, and goes on slowly while a window holds it back."""
MIN_LIMIT = 64 * 1024
"""Bytes in flight that are always allowed to a sender whose server found its queue full."""
DIAGNOSE_SPAN = 64
"""Nonces before and after the expected one that are tried on a frame that is not
authentic, to tell frames that are missing or repeated from those that were changed."""
DIAGNOSE_SIZE = 4096
"""Bytes of the largest frame with which that is done."""

_sequence = struct.Struct(">H").pack
_ack = struct.Struct(f">H{ACK_HASH_SIZE}s")
_pack_sequence_into = struct.Struct(">H").pack_into
_long_ack = struct.Struct(f">H{ACK_HASH_SIZE}sI")
_FWD_DATA, _ACK_DATA, _CLOSE_DATA = bytes((FWD,)), bytes((ACK,)), bytes((CLOSE,))
END_OF_DATA = b"\1"
"""What that FWD carries. It takes one byte of the stream's positions, as FIN takes a sequence number of TCP: so ACKs,
rolling hashes and RESUME cover it as they cover data."""
_END_SIZE = SEQUENCE_SIZE + len(END_OF_DATA) + TAG_SIZE


class SecureEnd(ResumableEnd):
    """One end of a stream, with a transport or without."""

    __slots__ = ()

    def go_over(self, transport: Transport, result: HandshakeResult, hello: Hello, told_window: int) -> bytes:
        """The responder has answered RESUME: ``transport`` carries the stream as soon as the responder goes on there.

        Until it shows that (``prove``) nothing else is sent, and what is not acknowledged stays as it is: if this
        transport is lost before, nobody can tell whether the responder has left its old one.

        :returns: the payload of a FWD without data, which the responder has to acknowledge.
        :raises SecureError: the streams have gone apart.
        """
        assert hello.resume is not None
        agreed = self.compare(hello.resume)
        self.attach(transport, result, hello, told_window)
        payload = self.seal_data(b"", None)
        self.unproven = agreed
        return payload

    # --- sending ---

    @property
    def may_send(self) -> bool:
        """Another frame may be sent now."""
        return (
            self.transport is not None
            and self.in_flight_bytes < self.peer_window
            and self.in_flight_bytes < self.limit
            and len(self.in_flight) < MAX_FRAMES
            and self.unproven is None
        )

    def seal_end(self, ticket: object) -> bytes:
        """The payload of the FWD that says that no more data follows."""
        return self.seal_data(END_OF_DATA, ticket, END_DATA)

    def seal_data(self, data: bytes | memoryview, ticket: object, associated: bytes = _FWD_DATA) -> bytes:
        """The payload of a FWD.  :param data: at most 65492 bytes."""
        sequence = self._next_sequence
        self._next_sequence = (sequence + 1) & 0xFFFF
        nonce = self._seal_nonce
        self._seal_nonce = nonce + 1
        payload = self._encrypt(pack_nonce(nonce), b"".join((_sequence(sequence), data)), associated)
        # a frame without data has no place in the stream: nothing of it counts
        self.in_flight.append((data, ticket, payload[-TAG_SIZE:] if self._tags and data else data))
        self.in_flight_bytes += len(data)
        return payload

    def seal_into(self, frame: memoryview, start: int, data: bytes | memoryview, ticket: object) -> int:
        """Write the payload of a FWD into ``frame`` from ``start`` on; as :meth:`seal_data`, with one copy less.

        :returns: where the payload ends: 18 bytes and the length of ``data`` after ``start``.
        """
        size = len(data)
        sequence = self._next_sequence
        self._next_sequence = (sequence + 1) & 0xFFFF
        nonce = self._seal_nonce
        self._seal_nonce = nonce + 1
        plain_end = start + SEQUENCE_SIZE + size
        end = plain_end + TAG_SIZE
        _pack_sequence_into(frame, start, sequence)
        frame[start + SEQUENCE_SIZE : plain_end] = data
        # where it lies
        self._encrypt_into(pack_nonce(nonce), frame[start:plain_end], _FWD_DATA, frame[start:end])
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
        return self._encrypt(pack_nonce(nonce), plain, _ACK_DATA)

    def seal_close(self, reason: int, size: int = 1) -> bytes:
        """Return the payload of a CLOSE: the reason in ``size`` bytes, and what proves that it is this end's."""
        plain = fit_close_reason(reason, size).to_bytes(size, "big")
        nonce = self._seal_nonce
        self._seal_nonce = nonce + 1
        return plain + self._encrypt(pack_nonce(nonce), plain, _CLOSE_DATA)

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
        before = self.received
        self.received = before + size
        if size:
            if self.remote_ended:
                raise SecureError(CloseReason.BAD_FRAME)
            self._received_hash.update(payload[-TAG_SIZE:] if self._tags else data)
            if before < self._given:
                data = data[self._given - before :]
            if data and self._end_given:
                raise SecureError(CloseReason.BAD_FRAME)
        if self.received - self.consumed > self.window + MAX_SECURE_DATA:
            raise SecureError(CloseReason.BUFFER_FULL)
        if ends:
            self.remote_ended = True
            if data:  # else the application was told over a transport before
                self.consumed += size  # no application takes it
                return None
        return data

    def _open_byte_or_end(self, payload: bytes | memoryview) -> tuple[bytes, bool]:
        """The plaintext of a FWD with one byte, and whether it is the end of data."""
        try:
            plain = self._decrypt(pack_nonce(self._open_nonce), payload, _FWD_DATA)
        except InvalidTag:
            try:
                return self._open(payload, END_DATA), True
            except SecureError as error:
                if error.reason is not CloseReason.NOT_AUTHENTIC:
                    raise
                raise SecureError(self._diagnose(bytes(payload), _FWD_DATA)) from None
        self._open_nonce += 1
        return plain, False

    def open_ack(self, payload: bytes | memoryview) -> tuple[int, list[object]]:
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

    def open_close(self, payload: bytes, size: int = 1) -> int | None:
        """Return the reason, of ``size`` bytes, of a CLOSE that the other end made; None when a server made it."""
        if len(payload) != 2 * size + TAG_SIZE:
            return None
        try:
            plain = self._open(payload[size:], _CLOSE_DATA)
        except SecureError:
            return None
        return int.from_bytes(plain, "big")

    def _open(self, payload: bytes | memoryview, associated: bytes) -> bytes:
        nonce = self._open_nonce
        try:
            plain = self._decrypt(pack_nonce(nonce), payload, associated)
        except InvalidTag:
            raise SecureError(self._diagnose(bytes(payload), associated)) from None
        self._open_nonce = nonce + 1
        return plain

    def _open_in_place(self, payload: memoryview, associated: bytes) -> memoryview:
        plain = payload[:-TAG_SIZE]
        try:
            self._decrypt_into(pack_nonce(self._open_nonce), payload, associated, plain)
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
                self._decrypt(pack_nonce(nonce), payload, associated)
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
