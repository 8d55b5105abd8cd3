"""Parquet files that Arrow writes: types of the columns, and a description of each file for the table's log."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from pyspark.sql.types import ArrayType, DataType, StructType

PREFIX = "arrow-"
"""Prefix of the names of files that Arrow wrote. The names of Spark's files begin with ``part-``."""
_ARROW: dict[str, pa.DataType] = {
    "string": pa.string(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
}
TEXTS = (pa.string(), pa.dictionary(pa.int32(), pa.string()))
WITHOUT_DICTIONARY = ("transport",)
"""Text columns that are written without a dictionary, because nearly all of their values differ."""


@dataclass(frozen=True)
class Part:
    """Parquet file that was written to a table's directory, and that is perhaps not in the table's log yet.

    :ivar path: path below the table's directory.
    :ivar values: values of the partition columns, by name.
    :ivar first: smallest ``ts`` of its events, None if there are none.
    :ivar last: largest ``ts``.
    :ivar at: time at which the file was written, in ms since 1970; None for now.
    """

    path: str
    size: int
    rows: int
    values: tuple[tuple[str, str], ...]
    first: int | None = None
    last: int | None = None
    at: int | None = None


def arrow_type(kind: DataType) -> pa.DataType:
    """Return the Arrow type of a column."""
    if isinstance(kind, ArrayType):
        return pa.list_(arrow_type(kind.elementType))
    return _ARROW[kind.simpleString()]


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema of these columns."""
    return pa.schema([pa.field(one.name, arrow_type(one.dataType)) for one in schema.fields])


def write_part(files: pafs.FileSystem, table: pa.Table, directory: str, values: dict[str, str]) -> Part:
    """Write rows to a new Parquet file.

    :param files: file system whose root is the table's directory.
    :param directory: directory below the table.
    :param values: values of the partition columns, which are not in the rows.
    """
    place = "/".join([directory, *(f"{name}={value}" for name, value in values.items())])
    path = f"{place}/{PREFIX}{uuid4().hex}.parquet"
    names = table.column_names
    with files.open_output_stream(path) as stream:
        pq.write_table(
            table,
            stream,
            compression="zstd",
            compression_level=1,
            use_dictionary=[
                one.name for one in table.schema if one.type in TEXTS and one.name not in WITHOUT_DICTIONARY
            ],
            write_statistics=[name for name in ("ts", "seq") if name in names],
        )
    found = pc.min_max(table["ts"]) if "ts" in names else {}
    first, last = (found[name].as_py() if found else None for name in ("min", "max"))
    return Part(path, files.get_file_info(path).size, table.num_rows, tuple(values.items()), first, last)


def read_part(files: pafs.FileSystem, path: str, names: list[str] | None = None) -> pa.Table:
    """Read a Parquet file into memory.

    :param names: names of the columns to read; None for all columns.
    """
    with files.open_input_file(path) as file:
        return pq.ParquetFile(file).read(names)


def read_small(files: pafs.FileSystem, path: str, most: int) -> pa.Table | None:
    """Read a Parquet file into memory. Return None if the file is damaged, or if its values take more than ``most``
    bytes.

    In a small file, a million rows can share one long text. Such a text is in memory once, but its size is counted for
    each row.
    """
    try:
        with files.open_input_file(path) as file:
            found = pq.ParquetFile(file)
            footer, texts = found.metadata, [one.name for one in found.schema_arrow if one.type in TEXTS]
            if sum(footer.row_group(index).total_byte_size for index in range(footer.num_row_groups)) > most:
                return None
            rows = pq.ParquetFile(file, metadata=footer, read_dictionary=texts).read()
    except (pa.ArrowInvalid, OSError):
        return None
    return rows if sum(map(column_bytes, rows.columns)) <= most else None


def column_bytes(column: pa.ChunkedArray) -> int:
    """Return the size of a column in bytes, counting each text as often as it occurs."""
    if not pa.types.is_dictionary(column.type):
        return int(column.nbytes)
    lengths = [pc.sum(pc.binary_length(chunk.dictionary).take(chunk.indices)).as_py() or 0 for chunk in column.chunks]
    return sum(lengths)


def is_of_arrow(path: str) -> bool:
    """Whether Arrow wrote the Parquet file at that path."""
    return path.rpartition("/")[2].startswith(PREFIX)
