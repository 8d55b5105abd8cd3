"""Search for the files of a table that can contain rows of some transports. Needs no Spark.

Late events and receipts name transports, whose earlier events can be in any file of the same servers. A process that
makes many runs, such as a stream, would read the names of all these transports in each run. So it keeps a hash of each
name. Most files have none of the hashes of the named transports, and are not read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from dmsg.analytics.file_texts import FileTexts
from dmsg.analytics.limited_cache import LimitedCache

MAX_KEPT_HASHES = 16_000_000
"""Maximum number of hashes of a table that are kept in memory (64 MB). Files without kept hashes are read in each
search."""
MAX_NOTED_FILES = 100_000
"""Maximum number of files of a table of which it is noted that they were searched."""
_FACTOR = pa.scalar(0x9E3779B97F4A7C15, pa.uint64())
_WORD = 8


def short_hashes(texts: pa.StringArray) -> pa.Array | None:
    """Return the different hashes of some texts, 4 bytes each, or None if a text has fewer than 8 bytes.

    Different texts can have the same hash. The hash is simple, because names of transports are random, and a stranger
    who chooses names with equal hashes only causes files to be read.
    """
    found = [pa.array([], pa.int32())]
    lengths = pc.binary_length(texts)
    for length in pc.unique(lengths.drop_null()).to_pylist():
        if length < _WORD:
            return None
        # ``filter`` copies the texts, so they follow each other in the buffer from its start.
        some = texts.filter(pc.equal(lengths, length))
        bytes_of = pa.Array.from_buffers(pa.binary(length), len(some), [None, some.buffers()[2]])
        mixed = pa.scalar(length, pa.uint64())
        for start in (*range(0, length - _WORD, _WORD), length - _WORD):
            word = pc.binary_slice(bytes_of, start, start + _WORD).cast(pa.binary(_WORD)).view(pa.uint64())
            mixed = pc.multiply(pc.bit_wise_xor(mixed, word), _FACTOR)
        found.append(pc.shift_right(mixed, pa.scalar(33, pa.uint64())).cast(pa.int32()))
    return pc.unique(pa.chunked_array(found))


class FileHashes:
    """Hashes of the texts in columns of a table's files. Files never change, so kept hashes stay valid.

    A file's hashes are kept when the file is searched for the second time, because most processes make only one run.

    :param storage: file system whose root is the table's directory.
    :param clock: function that returns monotonic seconds; None for ``time.monotonic``.
    """

    def __init__(self, storage: pafs.FileSystem, clock: Callable[[], float] | None = None) -> None:
        self._storage = storage
        self._kept = LimitedCache[pa.Array | None](MAX_KEPT_HASHES, clock)
        self._searched = LimitedCache[None](MAX_NOTED_FILES, clock)

    def can_contain(self, path: str, column: str, hashes: pa.Array | None) -> bool:
        """Return whether a file can contain a text with one of some hashes in a column.

        :param path: path of the file below the table's directory.
        :param hashes: result of :func:`short_hashes`.
        :raises pyarrow.lib.ArrowInvalid: the file is damaged.
        :raises OSError: the file cannot be read.
        """
        key = path, column
        try:
            known = self._kept[key]
        except KeyError:
            if key not in self._searched:
                self._searched.add(key, None, 1)
                return True
            known = self._read(path, column)
            self._kept.add(key, known, 1 if known is None else len(known))
        return known is None or hashes is None or bool(pc.any(pc.is_in(known, hashes)).as_py())

    def _read(self, path: str, column: str) -> pa.Array | None:
        with self._storage.open_input_file(path) as opened:
            source = pq.ParquetFile(opened)
            if column not in source.schema_arrow.names:
                return pa.array([], pa.int32())
            texts = source.read([column])[column].cast(pa.string())
        return short_hashes(texts.combine_chunks())


@dataclass(frozen=True)
class FileSearch:
    """What is known about the contents of a table's files, by which a search can skip files.

    :ivar texts: different texts in columns with few of them.
    :ivar hashes: hashes of texts in columns that have a different text in nearly each row.
    """

    texts: FileTexts
    hashes: FileHashes

    @classmethod
    def of(cls, storage: pafs.FileSystem) -> FileSearch:
        """Know nothing about the files yet.

        :param storage: file system whose root is the table's directory.
        """
        return cls(FileTexts(storage), FileHashes(storage))
