"""Records of the 2019 protocol, which encrypt a connection after its handshake.

A record is ``length(2) || sequence(4) || ciphertext || tag(16)``, with big-endian numbers; ``length`` counts everything
after itself. The nonce of ChaCha20-Poly1305 is four zero bytes and then the sequence number as 8 bytes, little endian.
The associated data are empty. Each direction starts with the sequence number 1 and adds 1 for each record.

Two rules are stricter than those of the reference implementation. Sequence numbers must strictly grow, while the
reference implementation accepts replays. A connection ends before its 32-bit sequence number wraps, because nonces
would repeat.

With AES-256-GCM (:mod:`dmsg.noise.ciphers`), nonces and records have the same format. The key changes before each
record whose sequence number is a multiple of ``REKEY_AFTER``. A sender may skip other sequence numbers, but not these.
"""

from __future__ import annotations

import struct

from cryptography.exceptions import InvalidTag

from dmsg.base.cipher_names import TAG_SIZE, Cipher
from dmsg.errors import DropReason, LocalProtocolError, RemoteProtocolError
from dmsg.noise.ciphers import AEAD, begin_key, make_cipher, next_key, rekey_after

LENGTH_SIZE = 2
SEQUENCE_SIZE = 4
HEADER_SIZE = LENGTH_SIZE + SEQUENCE_SIZE
OVERHEAD = SEQUENCE_SIZE + TAG_SIZE
MAX_BODY = 65535
MAX_PLAINTEXT = MAX_BODY - OVERHEAD
MAX_RECORD = LENGTH_SIZE + MAX_BODY
MAX_SEQUENCE = 2**32 - 1

COPY_LIMIT = 2048
"""Maximum size in bytes of a record that is encrypted or decrypted into a new object and then copied to the target
buffer. Larger records are written through a view of the target buffer. For small records, making the view would cost
more than the copy."""

_header = struct.Struct(">HI")
_nonce = struct.Struct("<4xQ").pack


class _Direction:
    """Base class of one direction of a connection: its current key, and its cipher object, which is released while the
    connection is idle."""

    __slots__ = ("_cipher", "_key", "_kind", "_rekey_after", "_rekey_at")

    def __init__(self, key: bytes, cipher: Cipher) -> None:
        """:param key: 32 bytes, the key of this direction from the handshake."""
        self._kind = cipher
        self._key = begin_key(cipher, key)
        self._rekey_after = self._rekey_at = rekey_after(cipher)
        self._cipher: AEAD | None = None
        self._make_cipher()

    def _make_cipher(self) -> AEAD:
        """Make the cipher object with the current key."""
        self._cipher = made = make_cipher(self._kind, self._key)
        return made

    def _rekey(self) -> AEAD:
        """Change the key. Called before the record whose sequence number is ``_rekey_at``."""
        self._key = next_key((self._cipher or self._make_cipher()).encrypt)
        self._rekey_at += self._rekey_after
        return self._make_cipher()

    def release_cipher(self) -> None:
        """Release the cipher object, to save memory. The next record makes it again."""
        self._cipher = None


class RecordSealer(_Direction):
    """Sealer that encrypts the records of one direction."""

    __slots__ = ("sequence",)

    def __init__(self, key: bytes, sequence: int = 0, cipher: Cipher = Cipher.CHACHA20_POLY1305) -> None:
        """:param key: 32 bytes, the key of this direction from the handshake.
        :param sequence: sequence number of the last record sent, which is also the last nonce; 0 if none was sent.
        """
        super().__init__(key, cipher)
        self.sequence = sequence

    @property
    def exhausted(self) -> bool:
        """Whether the sequence numbers, and so the nonces, are used up. No further record can be sealed then."""
        return self.sequence >= MAX_SEQUENCE

    def seal(self, plaintext: bytes | bytearray | memoryview) -> bytes | bytearray:
        """Encrypt ``plaintext`` and return the record.

        :param plaintext: at most 65515 bytes.
        :raises LocalProtocolError: the plaintext is too long, or the nonces are used up.
        """
        size = len(plaintext)
        sequence = self.sequence + 1
        if size > MAX_PLAINTEXT or sequence > MAX_SEQUENCE:
            raise LocalProtocolError("record is too long or the connection's nonces are used up")
        # The sequence number counts as used even if the encryption fails. Otherwise two plaintexts could be encrypted
        # with the same nonce, which would reveal both.
        self.sequence = sequence
        if sequence == self._rekey_at:
            self._rekey()
        if size <= COPY_LIMIT:
            cipher = self._cipher or self._make_cipher()
            return _header.pack(size + OVERHEAD, sequence) + cipher.encrypt(_nonce(sequence), plaintext, None)
        record = bytearray(HEADER_SIZE + size + TAG_SIZE)
        self._seal_into(plaintext, size, sequence, memoryview(record))
        return record

    def seal_into(self, plaintext: bytes | bytearray | memoryview, buffer: memoryview) -> int:
        """Encrypt ``plaintext`` and write the record to the start of ``buffer``, which must be large enough.

        :returns: length of the record in bytes, 22 more than the length of ``plaintext``.
        :raises LocalProtocolError: the plaintext is too long, or the nonces are used up.
        """
        size = len(plaintext)
        sequence = self.sequence + 1
        if size > MAX_PLAINTEXT or sequence > MAX_SEQUENCE:
            raise LocalProtocolError("record is too long or the connection's nonces are used up")
        self.sequence = sequence
        if sequence == self._rekey_at:
            self._rekey()
        self._seal_into(plaintext, size, sequence, buffer)
        return HEADER_SIZE + size + TAG_SIZE

    def _seal_into(
        self, plaintext: bytes | bytearray | memoryview, size: int, sequence: int, buffer: memoryview
    ) -> None:
        _header.pack_into(buffer, 0, size + OVERHEAD, sequence)
        cipher = self._cipher or self._make_cipher()
        cipher.encrypt_into(_nonce(sequence), plaintext, None, buffer[HEADER_SIZE : HEADER_SIZE + size + TAG_SIZE])


class RecordOpener(_Direction):
    """Opener that decrypts the records of one direction from a byte stream, which arrives in pieces of any size.

    The opener buffers at most one incomplete record.

    :ivar broken: error after which no more records can be opened; None before. The error says that a record was too
        short or not authentic, or that its sequence number did not grow. The records before the faulty one are
        decrypted as usual.
    """

    __slots__ = ("_held", "_needed", "broken", "sequence")

    def __init__(self, key: bytes, sequence: int = 0, cipher: Cipher = Cipher.CHACHA20_POLY1305) -> None:
        """:param key: 32 bytes, the key of this direction from the handshake.
        :param sequence: sequence number of the last record received, which is also the last nonce; 0 if none was
            received.
        """
        super().__init__(key, cipher)
        self.sequence = sequence
        self._held: bytearray | None = None
        self._needed = 0
        self.broken: RemoteProtocolError | None = None

    @property
    def held(self) -> int:
        """Number of buffered bytes of an incomplete record."""
        return 0 if self._held is None else len(self._held)

    # This loop must be fast, so it calls no helper functions. For a small frame, such a call would take longer than all
    # other work.
    def open_into(self, data: bytes | bytearray | memoryview, buffer: bytearray, at: int) -> int:  # noqa: C901, PLR0912
        """Decrypt every record that ``data`` completes, and write the plaintexts one after another to ``buffer``.

        :param data: next bytes of the stream. The opener copies what it needs of them.
        :param buffer: target of the plaintext; must have room for ``len(data) + MAX_RECORD`` bytes after ``at``.
        :param at: position in ``buffer`` at which the plaintext starts.
        :returns: position in ``buffer`` after the plaintext. Check :attr:`broken` as well.
        """
        if not data or self.broken is not None:
            return at
        if self._held is not None:
            self._held += data
            # A peer may send a record byte by byte. Without this check, each byte would cause an attempt to parse the
            # record.
            if len(self._held) < self._needed:
                return at
            data = self._held
            self._held = None
        unpack = _header.unpack_from
        nonce = _nonce
        cipher = self._cipher or self._make_cipher()
        decrypt = cipher.decrypt
        sequence = self.sequence
        rekey_at = self._rekey_at
        # Small plaintexts are collected and copied together. A separate slice assignment for each would take a fifth of
        # the total time at 64 bytes.
        small: list[bytes] = []
        end = len(data)
        last = end - HEADER_SIZE
        position = 0
        try:
            while position <= last:
                length, number = unpack(data, position)
                following = position + LENGTH_SIZE + length
                if following > end:
                    break
                # The sequence number is not authentic before the decryption. It is only compared here, and stored after
                # the loop.
                if number <= sequence or length < OVERHEAD:
                    self.broken = (
                        _too_short(length)
                        if length < OVERHEAD
                        else RemoteProtocolError(
                            DropReason.REPLAYED_RECORD, f"record sequence {number} after {sequence}"
                        )
                    )
                    break
                if number >= rekey_at:
                    if number > rekey_at:
                        self.broken = _no_key_change(number, rekey_at)
                        break
                    cipher = self._rekey()
                    decrypt, rekey_at = cipher.decrypt, self._rekey_at
                if length <= COPY_LIMIT:
                    small.append(decrypt(nonce(number), data[position + HEADER_SIZE : following], None))
                else:
                    # Collected small plaintexts are copied first, because they come before this record.
                    if small:
                        at = _append(buffer, at, small)
                    size = length - OVERHEAD
                    cipher.decrypt_into(
                        nonce(number),
                        memoryview(data)[position + HEADER_SIZE : following],
                        None,
                        memoryview(buffer)[at : at + size],
                    )
                    at += size
                sequence = number
                position = following
        except InvalidTag:
            self.broken = RemoteProtocolError(DropReason.BAD_RECORD, "record is not authentic")
        if small:
            at = _append(buffer, at, small)
        self.sequence = sequence
        if position < end and self.broken is None:
            self._keep_unfinished(data, position)
        return at

    def _keep_unfinished(self, data: bytes | bytearray | memoryview, position: int) -> None:
        """Store the incomplete record that begins at ``position``, until the rest of it arrives."""
        wanted = LENGTH_SIZE
        if len(data) - position >= LENGTH_SIZE:
            # A length field that is too small is refused at once, without waiting for the rest of the record.
            length = int.from_bytes(data[position : position + LENGTH_SIZE], "big")
            if length < OVERHEAD:
                self.broken = _too_short(length)
                return
            wanted += length
        self._held = bytearray(memoryview(data)[position:])
        self._needed = wanted


def _too_short(length: int) -> RemoteProtocolError:
    return RemoteProtocolError(DropReason.BAD_RECORD, f"record of {length} bytes is too short")


def _no_key_change(number: int, expected: int) -> RemoteProtocolError:
    return RemoteProtocolError(
        DropReason.BAD_RECORD, f"record sequence {number} skips {expected}, at which the key changes"
    )


def _append(buffer: bytearray, at: int, pieces: list[bytes]) -> int:
    """Copy ``pieces`` to ``buffer`` from position ``at`` on, clear the list, and return the position after the copied
    bytes."""
    joined = b"".join(pieces)
    pieces.clear()
    end = at + len(joined)
    buffer[at:end] = joined
    return end
