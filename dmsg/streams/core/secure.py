"""Encryption and flow control of a secure stream: ciphers, sequences, rolling hashes, windows. No I/O, no clock.

The methods ``seal_*`` encrypt data into payloads of FWD, ACK and CLOSE, and the methods ``open_*`` decrypt these
payloads. A payload that is not authentic, repeated, missing or out of order raises
:exc:`~dmsg.streams.core.resumption.SecureError` and ends the transport, because an honest server neither loses nor
reorders frames. Nonces are counters that are not sent, so no two frames of a direction have the same nonce.

An ACK contains a part of the rolling hash of all data so far. With it, each end proves to the other that it has the
same bytes, and the positions of a resumed stream can be compared. The hashes are computed over the tags of the frames
instead of their data if both ends support that, which saves a pass over the data.

Two windows limit the sender: the receive window that the other end announces, and its own congestion window. A
:class:`SecureEnd` outlives the transports that carry it (:mod:`dmsg.streams.core.resumption`).
``docs/protocol/secure-transport.md`` is the specification.
"""

from __future__ import annotations

import struct

from cryptography.exceptions import InvalidTag

from dmsg.base.cipher_names import TAG_SIZE, Cipher
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
ACK_HASH_SIZE = 4
"""Number of bytes of the rolling hash that an ACK contains (seed document, TODO list)."""
SECURE_OVERHEAD = TAG_SIZE
MAX_SECURE_DATA = 65492
"""Maximum bytes of user data in one FWD of a secure transport. Together with sequence and tag, they fit into a frame of
2019."""
MAX_WINDOW = 32 * 1024 * 1024
"""Maximum bytes of one stream's receive window."""
GROW_WITHIN = 4.0
"""The window doubles if the application reads a window's worth of bytes within this many round trips."""
EARLY_WINDOW = 2 * 1024 * 1024
EARLY_GROW_WITHIN = 6.0
"""A window below ``EARLY_WINDOW`` quadruples if the application reads a window's worth of bytes within this many round
trips. While the window is so small, the TCP connections that carry the stream are in slow start too, and a small window
would keep them in it."""
MIN_LIMIT = 64 * 1024
"""Minimum bytes to which the congestion window is reduced when a server's queue was full."""
DIAGNOSE_SPAN = 64
"""Number of nonces before and after the expected one that are tried on a frame that is not authentic. This
distinguishes missing and repeated frames from altered ones."""
DIAGNOSE_SIZE = 4096
"""Maximum size in bytes of a frame that is not authentic, for which other nonces are tried."""

_sequence = struct.Struct(">H").pack
_ack = struct.Struct(f">H{ACK_HASH_SIZE}s")
_pack_sequence_into = struct.Struct(">H").pack_into
_long_ack = struct.Struct(f">H{ACK_HASH_SIZE}sI")
_FWD_DATA, _ACK_DATA, _CLOSE_DATA = bytes((FWD,)), bytes((ACK,)), bytes((CLOSE,))
END_OF_DATA = b"\1"
"""Payload of the FWD that half-closes a stream. This byte has a position in the stream, as FIN has a sequence number in
TCP. So ACKs, rolling hashes and RESUME treat the half-close like data."""
_END_SIZE = SEQUENCE_SIZE + len(END_OF_DATA) + TAG_SIZE


class SecureEnd(ResumableEnd):
    """End of a secure stream, which encrypts and decrypts its frames and controls their flow."""

    __slots__ = ()

    def attach_resumed(
        self,
        transport: Transport,
        result: HandshakeResult,
        hello: Hello,
        told_window: int,
        cipher: Cipher = Cipher.CHACHA20_POLY1305,
    ) -> bytes:
        """Attach ``transport``, over which the responder has answered RESUME, and ask the responder for a proof that it
        has moved.

        Until the proof arrives (``prove``), nothing else is sent and unacknowledged data are kept. If this transport is
        lost before the proof, this end cannot know whether the responder has left its old transport.

        :returns: payload of a FWD without data, which the responder has to acknowledge.
        :raises SecureError: the two ends have different histories.
        """
        assert hello.resume is not None
        agreed = self.compare(hello.resume)
        self.attach(transport, result, hello, told_window, cipher)
        payload = self.seal_data(b"", None)
        self.unproven = agreed
        return payload

    # --- sending ---

    @property
    def may_send(self) -> bool:
        """Whether another frame may be sent now."""
        return (
            self.transport is not None
            and self.in_flight_bytes < self.peer_window
            and self.in_flight_bytes < self.limit
            and len(self.in_flight) < MAX_FRAMES
            and self.unproven is None
        )

    def seal_end(self, ticket: object) -> bytes:
        """Return the payload of the FWD that half-closes the stream."""
        return self.seal_data(END_OF_DATA, ticket, END_DATA)

    def seal_data(self, data: bytes | memoryview, ticket: object, associated: bytes = _FWD_DATA) -> bytes:
        """Return the payload of a FWD.

        :param data: user data, at most 65492 bytes.
        """
        sequence = self._next_sequence
        self._next_sequence = (sequence + 1) & 0xFFFF
        nonce = self._seal_nonce
        if nonce == self._seal_rekey:
            self._rekey_sealing()
        self._seal_nonce = nonce + 1
        payload = self._encrypt(pack_nonce(nonce), b"".join((_sequence(sequence), data)), associated)
        # A frame without data has no position in the stream, so it does not enter the rolling hash.
        self.in_flight.append((data, ticket, payload[-TAG_SIZE:] if self._tags and data else data))
        self.in_flight_bytes += len(data)
        return payload

    def seal_into(self, frame: memoryview, start: int, data: bytes | memoryview, ticket: object) -> int:
        """Write the payload of a FWD into ``frame``, beginning at ``start``. This saves one of the copies of
        :meth:`seal_data`.

        :returns: index of the payload's end, which is ``start`` + 18 + the length of ``data``.
        """
        size = len(data)
        sequence = self._next_sequence
        self._next_sequence = (sequence + 1) & 0xFFFF
        nonce = self._seal_nonce
        if nonce == self._seal_rekey:
            self._rekey_sealing()
        self._seal_nonce = nonce + 1
        plain_end = start + SEQUENCE_SIZE + size
        end = plain_end + TAG_SIZE
        _pack_sequence_into(frame, start, sequence)
        frame[start + SEQUENCE_SIZE : plain_end] = data
        # The cipher overwrites the plaintext in the buffer, which saves a copy.
        self._encrypt_into(pack_nonce(nonce), frame[start:plain_end], _FWD_DATA, frame[start:end])
        self.in_flight.append((data, ticket, bytes(frame[plain_end:end]) if self._tags else data))
        self.in_flight_bytes += size
        return end

    def seal_ack(self) -> bytes:
        """Return the payload of an ACK of all frames received so far.

        The payload contains the receive window only if the other end does not know it yet.
        """
        window = max(0, self.consumed + self.window - self.received)
        digest = self._digest(self._received_hash, self.received)[:ACK_HASH_SIZE]
        if window == self.told_window:
            plain = _ack.pack(self._received_sequence, digest)
        else:
            self.told_window = window
            plain = _long_ack.pack(self._received_sequence, digest, window)
        nonce = self._seal_nonce
        if nonce == self._seal_rekey:
            self._rekey_sealing()
        self._seal_nonce = nonce + 1
        return self._encrypt(pack_nonce(nonce), plain, _ACK_DATA)

    def seal_close(self, reason: int, size: int = 1) -> bytes:
        """Return the payload of a CLOSE: the reason in ``size`` bytes, followed by the encrypted reason, which is
        authenticated.

        Servers read the unencrypted reason. The other end uses only the encrypted one.
        """
        plain = fit_close_reason(reason, size).to_bytes(size, "big")
        nonce = self._seal_nonce
        if nonce == self._seal_rekey:
            self._rekey_sealing()
        self._seal_nonce = nonce + 1
        return plain + self._encrypt(pack_nonce(nonce), plain, _CLOSE_DATA)

    def queue_was_full(self) -> None:
        """Reduce the congestion window to half of the bytes in flight, because a server's queue for the receiver was
        full."""
        self.limit = max(MIN_LIMIT, self.in_flight_bytes // 2)
        self._in_slow_start = False

    # --- receiving ---

    def open_data(self, payload: bytes | memoryview) -> bytes | None:
        """Decrypt a FWD. Return its data, or None if the frame is a half-close.

        :param payload: payload of the frame. A large writable memoryview is decrypted in place, except for its tag.
        :raises SecureError: the frame is not authentic or violates the protocol; its ``reason`` says how.
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
        # One frame is allowed in addition to the window, because the last frame that the sender's window permits may
        # exceed it.
        if self.received - self.consumed > self.window + MAX_SECURE_DATA:
            raise SecureError(CloseReason.BUFFER_FULL)
        if ends:
            self.remote_ended = True
            # ``data`` is empty if this half-close was already delivered to the application over an earlier transport.
            if data:
                self.consumed += size  # The byte counts as read at once, because no application reads it.
                return None
        return data

    def _open_byte_or_end(self, payload: bytes | memoryview) -> tuple[bytes, bool]:
        """Decrypt a FWD with one byte. Return its plaintext, and whether the frame is a half-close."""
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
        if self._open_nonce == self._open_rekey:
            self._rekey_opening()
        return plain, False

    def open_ack(self, payload: bytes | memoryview) -> tuple[int, list[object]]:
        """Decrypt an ACK. Return the number of frames that it acknowledges, and the tickets of the frames that were
        sent with a ticket.

        :raises SecureError: the frame is not authentic or violates the protocol; its ``reason`` says how.
        """
        plain = self._open(payload, _ACK_DATA)
        if len(plain) == _ack.size:
            sequence, digest = _ack.unpack(plain)
        elif len(plain) == _long_ack.size:
            sequence, digest, self.peer_window = _long_ack.unpack(plain)
        else:
            raise SecureError(CloseReason.BAD_FRAME)
        # The difference is computed modulo 2**16. For an outdated sequence, the difference is at least 2**15, and the
        # next check rejects it.
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
        # At first, the congestion window grows by three times the acknowledged bytes, so that it quadruples in each
        # round trip. After a server's queue was full, it grows by an eighth of the acknowledged bytes, so that the
        # queue fills slowly.
        if self.limit < MAX_WINDOW:
            self.limit = min(MAX_WINDOW, self.limit + (3 * size if self._in_slow_start else max(1, size // 8)))
        # Different hashes mean that the two ends have different data, which does not happen with a correct peer and an
        # honest server.
        if self._digest(sent_hash, self.acknowledged)[:ACK_HASH_SIZE] != digest:
            raise SecureError(CloseReason.HASH_MISMATCH)
        return count, tickets

    def open_close(self, payload: bytes, size: int = 1) -> int | None:
        """Decrypt a CLOSE of the other end. Return its reason, which has ``size`` bytes, or None if the CLOSE is not
        authentic."""
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
        if nonce + 1 == self._open_rekey:
            self._rekey_opening()
        return plain

    def _open_in_place(self, payload: memoryview, associated: bytes) -> memoryview:
        plain = payload[:-TAG_SIZE]
        try:
            self._decrypt_into(pack_nonce(self._open_nonce), payload, associated, plain)
        except InvalidTag:
            # Other nonces are not tried, because that takes too long for frames larger than ``DIAGNOSE_SIZE``.
            raise SecureError(CloseReason.NOT_AUTHENTIC) from None
        self._open_nonce += 1
        if self._open_nonce == self._open_rekey:
            self._rekey_opening()
        return plain

    def _diagnose(self, payload: bytes, associated: bytes) -> CloseReason:
        """Return the most precise close reason for a frame that is not authentic. The transport ends, whatever the
        reason is."""
        expected = self._open_nonce
        if len(payload) > DIAGNOSE_SIZE:
            # Large frames are not diagnosed, because invalid frames must not cause milliseconds of work each.
            return CloseReason.NOT_AUTHENTIC
        for nonce in range(max(0, expected - DIAGNOSE_SPAN), expected + DIAGNOSE_SPAN):
            try:
                self._decrypt(pack_nonce(nonce), payload, associated)
            except InvalidTag:
                continue
            return CloseReason.FRAME_REPEATED if nonce < expected else CloseReason.FRAME_MISSING
        return CloseReason.NOT_AUTHENTIC

    # --- receive window ---

    def consume(self, size: int) -> bool:
        """Record that the application has read ``size`` bytes.

        :returns: whether an ACK should announce the receive window now, because it exceeds the one last announced by at
            least a quarter of the full window.
        """
        self.consumed += size
        return self.consumed + self.window - self.received - self.told_window >= self.window // 4

    def measure(self, now: float) -> None:
        """Grow the receive window if the application has read a window's worth of bytes quickly.

        While the receive window limits the sender, reading that much takes one round trip, or a few of them during
        TCP's slow start. If it takes longer, something else limits the sender, and a larger window would only fill
        queues.

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
