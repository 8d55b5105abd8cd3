"""Contents of a parcel's files at its receiver: existing parts are resumed, further bytes written and verified."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator, Sequence
from io import FileIO
from typing import TYPE_CHECKING

from dmsg.apps.chunks import ChunkReader, digest_of
from dmsg.apps.parcels.destination import Destination
from dmsg.apps.parcels.manifest import FILE, Item
from dmsg.apps.parcels.wire import CHANGED_LIMIT, DIGEST_SIZE, Messages
from dmsg.apps.transfer import TransferError

if TYPE_CHECKING:
    from _hashlib import HASH


class FileContents:
    """Contents of the files of one parcel, one file after another.

    :param place: directory that the files are written to.
    :param messages: parser of the received bytes.
    :param progress: callback invoked with the number of bytes present so far, with those of earlier transfers.
    :ivar item: file that is written now, or was written last.
    :ivar size: number of bytes received.
    :ivar resumed: number of bytes of earlier transfers that need not be sent again.
    :ivar changed: names of files that somebody changed at the sender while they were sent; at most ``CHANGED_LIMIT``.
    :ivar sha256: hash in hexadecimal if the parcel is one file and the file is complete, else empty.
    :ivar is_complete: whether ``item`` is complete and has its final name or will get it.
    :ivar in_chunks: whether the other side sends the contents in chunks.
    """

    def __init__(self, place: Destination, messages: Messages, progress: Callable[[int], object]) -> None:
        self._place = place
        self._messages = messages
        self._progress = progress
        self._have: dict[int, tuple[int, HASH]] = {}
        """Number of bytes that exist of a file, and their hash, by index of the file in the manifest."""
        self._from: dict[int, int] = {}
        """Offsets at which files are resumed, by index."""
        self._number_of_entries = 0
        self._files: Iterator[tuple[int, Item]] = iter(())
        self.item = Item("", FILE)
        self._file: FileIO | None = None
        self._left = 0
        self._hash = hashlib.sha256()
        self.in_chunks = False
        self._chunks = ChunkReader()
        self._chunks_over = self.is_complete = False
        self.changed: list[str] = []
        self.sha256 = ""
        self.size = self.resumed = 0

    # --- bytes that exist already ---

    def find_existing(self, entries: Sequence[Item]) -> Generator[object, None, int]:
        """Clear the paths of the parcel's items, and read the parts of files that exist already, in steps.

        :returns: number of bytes that exist already.
        """
        here = 0
        for index, entry in enumerate(entries):
            size = yield from self._place.clear(entry)
            if size:
                digest = hashlib.sha256()
                for data in self._place.read(entry, size):
                    digest.update(data)
                    yield None
                self._have[index] = size, digest
                here += size
            yield None
        return here

    def existing(self) -> Iterator[tuple[int, int, str]]:
        """Return the index of each file of which a part exists, the number of its bytes, and their hash."""
        for index, (size, digest) in self._have.items():
            yield index, size, digest.hexdigest()

    def resume(self, index: int, offset: int) -> bool:
        """Resume a file at ``offset``. Return False if this is not the number of its bytes that exist."""
        if index not in self._have or offset != self._have[index][0]:
            return False
        self.resumed += offset - self._from.get(index, 0)
        self._from[index] = offset
        return True

    # --- contents ---

    def begin(self, entries: Sequence[Item]) -> None:
        """Begin to receive the contents of all files among ``entries``."""
        self._number_of_entries = len(entries)
        self._files = (one for one in enumerate(entries) if one[1].kind == FILE)

    def open_next(self) -> bool:
        """Open the next file for writing. Return False if there is none."""
        following = next(self._files, None)
        if following is None:
            return False
        index, self.item = following
        offset = self._from.get(index, 0)
        self._hash = self._have[index][1] if offset else hashlib.sha256()
        self._file = self._place.write_from(self.item, offset)
        self._left = self.item.size - offset
        self._chunks_over = self.is_complete = False
        return True

    def take(self) -> bool:
        """Write received bytes to the open file, or finish the file. Return False if more data have to arrive first."""
        return self._take_chunks() if self.in_chunks else self._take_bytes()

    def close(self) -> None:
        """Close the file that is incomplete, because the transfer ends."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _take_bytes(self) -> bool:
        if self._left:
            data = self._messages.take_some(self._left)
            self._store(data)
            return bool(data)
        digest = self._messages.exactly(DIGEST_SIZE)
        if digest is None:
            return False
        self._end_file(digest)
        return True

    def _take_chunks(self) -> bool:
        if not self._chunks_over:
            data = self._messages.part_of_piece(self._chunks, self._left)
            self._chunks_over = data is None
            if data is not None:
                self._store(data)
                return bool(data)
        message = self._messages.take()
        if message is None:
            return False
        if message.get("changed") is True and len(self.changed) < CHANGED_LIMIT:
            self.changed.append(self.item.path)
        self._end_file(digest_of(message, self._left))
        return True

    def _store(self, data: bytes) -> None:
        assert self._file is not None
        # An unbuffered write may write only a part of the data, for example if the disk is full, so it is repeated.
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        self._hash.update(data)
        self._left -= len(data)
        self.size += len(data)
        self._progress(self.resumed + self.size)

    def _end_file(self, digest: bytes) -> None:
        assert self._file is not None
        if digest != self._hash.digest():
            # The content is deleted, because nobody knows which of its bytes are wrong. A later transfer must not
            # resume it.
            self._file.truncate(0)
            raise TransferError(f"the SHA-256 of {self.item.path} differs from the sender's: send it again")
        if self._number_of_entries == 1:
            self.sha256 = digest.hex()
        file, self._file = self._file, None
        self._place.finish_file(self.item, file)
        self.is_complete = True
