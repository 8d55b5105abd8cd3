"""Search for the files of a table that can contain rows of some servers. Needs no Spark.

Late events name few servers, and a file of events usually has the events of few servers, because each sealed file is
written by one server. So most files need not be searched for the events of the named servers. The names of a file's
servers are in the dictionary of a column, which is small. Ranges of names, which Parquet files could state, would
exclude hardly any file, because names of servers are random.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from dmsg.analytics.limited_cache import LimitedCache

MAX_TEXTS_OF_FILE = 1_000
"""Maximum number of different texts of a column to compare. A column with more texts counts as one that can contain any
text."""
MAX_KEPT_TEXTS = 200_000
"""Maximum number of texts of all files together that are kept in memory (about 15 MB). The texts of further files are
read again for each search."""


def server_column(family: str) -> str:
    """Return the name of the column that names the server or discovery whose events a family has."""
    return "server" if family == "receipt" else "producer"


class FileTexts:
    """Different texts in columns of a table's files. The texts of a file are read once, because files never change.
    Texts that were not used for long make room for those of other files.

    :param storage: file system whose root is the table's directory.
    """

    def __init__(self, storage: pafs.FileSystem) -> None:
        self._storage = storage
        self._kept = LimitedCache[pa.Array | None](MAX_KEPT_TEXTS)

    def can_contain(self, path: str, column: str, texts: pa.Array) -> bool:
        """Return whether a file can contain a row with one of ``texts`` in a column.

        :param path: path of the file below the table's directory.
        :raises pyarrow.lib.ArrowInvalid: the file is damaged.
        :raises OSError: the file cannot be read.
        """
        key = path, column
        try:
            found = self._kept[key]
        except KeyError:
            found = self._read(path, column)
            self._kept.add(key, found, 1 if found is None else len(found) + 1)
        return _has_common(found, texts)

    def _read(self, path: str, column: str) -> pa.Array | None:
        """Return the different texts of a column; None if there are too many."""
        with self._storage.open_input_file(path) as opened:
            footer = pq.read_metadata(opened)
            if column not in footer.schema.names:
                return pa.array([], pa.string())
            chunks = pq.ParquetFile(opened, metadata=footer, read_dictionary=[column]).read([column])[column].chunks
        found = pc.unique(pa.chunked_array([_texts(chunk) for chunk in chunks], pa.string()))
        return None if len(found) > MAX_TEXTS_OF_FILE else found


def _texts(values: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(values.type):
        values = values.dictionary
    return values.cast(pa.string())


def _has_common(known: pa.Array | None, texts: pa.Array) -> bool:
    return known is None or bool(pc.any(pc.is_in(known, value_set=texts)).as_py())
