"""Link that sends its frames in sealed records. Frames sent in one reactor turn share a record."""

from __future__ import annotations

from typing import Protocol

from twisted.internet.interfaces import IReactorTime

from dmsg.base.cipher_names import Cipher
from dmsg.base.pool import DIRECT_SIZE, BufferPool
from dmsg.errors import DropReason
from dmsg.keys import PubKey, SecKey
from dmsg.net.flush import TurnFlush
from dmsg.net.links.connect import MakeLink
from dmsg.net.links.interfaces import LinkHandshake
from dmsg.net.links.link import HANDSHAKE_TIMEOUT, MAX_TAIL, Link, MakeUser, OnFailure
from dmsg.net.links.reading import READ_SIZE
from dmsg.noise.records import COPY_LIMIT, MAX_PLAINTEXT, MAX_RECORD, MAX_SEQUENCE, RecordOpener, RecordSealer
from dmsg.noise.xk import XKHandshake

SCRATCH_SIZE = MAX_TAIL + READ_SIZE + MAX_RECORD
NONCE_RESERVE = 1 << 16
"""Number of unused nonces below which a link is closed, because no nonce may be used twice."""

_SCRATCH = BufferPool(SCRATCH_SIZE, 2)
RECORDS = BufferPool(4 * MAX_RECORD, 16)
"""Pool of buffers for large records, each in use from sealing until it is written at the end of the same turn."""


class KeyedHandshake(LinkHandshake, Protocol):
    """Interface of a handshake that agrees on encryption keys.

    :ivar keys: keys to send and to receive with; None until the handshake is complete.
    :ivar cipher: cipher on which the two ends have agreed.
    """

    keys: tuple[bytes, bytes] | None
    cipher: Cipher


class RecordLink(Link):
    """Link that encrypts its frames in records of 2019, with the keys of its handshake."""

    __slots__ = (
        "_buffers",
        "_filled",
        "_keyed",
        "_opener",
        "_record_start",
        "_records",
        "_records_size",
        "_sealer",
        "_writing",
    )

    def __init__(
        self,
        reactor: IReactorTime,
        turn: TurnFlush,
        handshake: KeyedHandshake,
        make_user: MakeUser,
        *,
        on_failure: OnFailure | None = None,
        timeout: float = HANDSHAKE_TIMEOUT,
        tuned: bool = False,
    ) -> None:
        super().__init__(reactor, turn, handshake, make_user, on_failure=on_failure, timeout=timeout, tuned=tuned)
        self._keyed: KeyedHandshake | None = handshake
        """Handshake; None once its keys are in use."""
        self._sealer: RecordSealer | None = None
        self._opener: RecordOpener | None = None
        self._records: list[bytes | bytearray | memoryview] = []
        self._records_size = 0
        self._buffers: list[bytearray] = []
        self._writing: list[bytearray] = []
        self._filled = self._record_start = 0
        """Two offsets in the last buffer: ``_filled`` is the end of its used bytes, ``_record_start`` the start of the
        last piece of ``_records`` (-1 for none)."""

    def _begin(self, handshake: LinkHandshake) -> None:
        keyed, self._keyed = self._keyed, None
        assert keyed is not None and keyed.keys is not None
        send, receive = keyed.keys
        cipher = keyed.cipher
        self._sealer, self._opener = RecordSealer(send, cipher=cipher), RecordOpener(receive, cipher=cipher)

    # --- receiving records ---

    def _receive(self, data: bytes | memoryview) -> None:
        opener = self._opener
        assert opener is not None
        # Each call uses a separate buffer, because a callback may deliver data to another link before it returns.
        buffer = _SCRATCH.take()
        try:
            tail = self._tail
            start = len(tail)
            buffer[:start] = tail
            end = opener.open_into(data, buffer, start)
            if end > start and self._user is not None:
                taken = self._user.frames_received(buffer, end)
                self._tail = b"" if taken == end else bytes(memoryview(buffer)[taken:end])
            # The records before the invalid one are authentic, so their frames are delivered first.
            if opener.broken is not None:
                self.fail_after_frames(opener.broken)
        finally:
            _SCRATCH.give_back(buffer)

    def release_ciphers(self) -> None:
        if self._sealer is not None and self._opener is not None:
            self._sealer.release_cipher()
            self._opener.release_cipher()

    def _unopened_size(self) -> int:
        return self._opener.held if self._opener is not None else 0

    # --- sending records ---

    def send(self, data: bytes | bytearray | memoryview) -> None:
        """Queue whole frames, which are sent in records at the end of the reactor turn."""
        if self._is_lost or self._closing:
            return
        size = len(data)
        if size >= DIRECT_SIZE:
            # The caller may reuse the buffer of its data after this call. A large piece is therefore sealed at once,
            # which takes no copy. Smaller pieces before it are sealed first, so that the order is kept.
            if self._pending:
                self._seal_pending()
            self._seal(data)
        else:
            # Small pieces share a record, because a record of its own would cost each piece 22 bytes and a call of the
            # cipher, more than the copy.
            self._pending.append(bytes(data))
            self._pending_size += size
            # The record is sealed now if another small piece could exceed the maximum size of a record.
            if self._pending_size > MAX_PLAINTEXT - DIRECT_SIZE:
                self._seal_pending()
        self._mark_dirty()

    def _seal(self, data: bytes | bytearray | memoryview) -> None:
        sealer = self._sealer
        assert sealer is not None
        if len(data) > MAX_PLAINTEXT:
            view = memoryview(data)
            for start in range(0, len(data), MAX_PLAINTEXT):
                self._seal(view[start : start + MAX_PLAINTEXT])
            return
        if len(data) <= COPY_LIMIT:
            record = sealer.seal(data)
            self._record_start = -1
            self._records.append(record)
            self._records_size += len(record)
            return
        buffers = self._buffers
        if not buffers or self._filled + MAX_RECORD > len(buffers[-1]):
            buffers.append(RECORDS.take())
            self._filled, self._record_start = 0, -1
        start = self._filled
        view = memoryview(buffers[-1])
        size = sealer.seal_into(data, view[start:])
        self._filled = start + size
        self._records_size += size
        if self._record_start < 0:
            self._record_start = start
            self._records.append(view[start : self._filled])
        else:  # The record directly follows the previous record in the buffer, so both are written as one piece.
            self._records[-1] = view[self._record_start : self._filled]

    def _seal_pending(self) -> None:
        pending = self._pending
        data = pending[0] if len(pending) == 1 else b"".join(pending)
        pending.clear()
        self._pending_size = 0
        self._seal(data)

    def _take_outgoing(self) -> tuple[list[bytes | bytearray | memoryview], int]:
        if self._pending:
            if not self._records and self._pending_size <= COPY_LIMIT and self._sealer is not None:
                # Most turns send little data. These data are sealed as one small record, without a buffer of the pool.
                pending, self._pending, self._pending_size = self._pending, [], 0
                record = self._sealer.seal(pending[0] if len(pending) == 1 else b"".join(pending))
                return [record], len(record)
            self._seal_pending()
        records, size = self._records, self._records_size
        self._records = []
        self._records_size = 0
        # The buffers are replaced before the write, so that records that are sealed during the write do not overwrite
        # the records in them.
        self._writing += self._buffers
        self._buffers = []
        self._filled, self._record_start = 0, -1
        return records, size

    def _release_written(self) -> None:
        if self._writing:
            for buffer in self._writing:
                RECORDS.give_back(buffer)
            self._writing.clear()

    def _unwritten_size(self) -> int:
        return self._records_size + self._pending_size

    def flush(self) -> None:
        super().flush()
        if self._sealer is not None and self._sealer.sequence > MAX_SEQUENCE - NONCE_RESERVE:
            self.close(DropReason.NONCES_USED_UP)


def record_links(
    reactor: IReactorTime,
    turn: TurnFlush,
    key: SecKey,
    remote: PubKey,
    *,
    timeout: float = HANDSHAKE_TIMEOUT,
    aes_gcm: bool = False,
) -> MakeLink:
    """Return a function that makes links to a server with a known key: a Noise XK handshake, then records.

    :param aes_gcm: see :class:`~dmsg.noise.xk.XKHandshake`.
    """

    def make_link(make_user: MakeUser, on_failure: OnFailure) -> RecordLink:
        handshake = XKHandshake(key, remote, aes_gcm=aes_gcm)
        return RecordLink(reactor, turn, handshake, make_user, on_failure=on_failure, timeout=timeout)

    return make_link
