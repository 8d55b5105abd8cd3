"""Conversion of sealed files with Arrow, which reads whole columns at a time. The results are Parquet files for each
family of events and day.

This is the fast path from files to bronze. It runs in executors, or in the driver for little data, and needs no JVM.
Only files in which every line is a valid event are converted. Spark reads all other files line by line
(:mod:`dmsg.analytics.bronze`), so only Spark decides about quarantine. From a file that this module accepts, Spark
would read the same values; a test compares both on random lines.
"""

from __future__ import annotations

import os
import re
import zlib as standard_zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, timedelta
from hashlib import file_digest, sha256
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.json as pj

from dmsg.analytics.event_rules import (
    COUNTS,
    FUTURE_TOLERANCE_MS,
    KEY,
    LARGEST_BUCKET,
    LARGEST_NUMBER,
    LINES_MISSING,
    NO_END,
    OLDEST_TIMESTAMP,
)
from dmsg.analytics.object_stores import NO_STORES, StoreError, StoreFailure, StoreReader, StoreSettings, is_remote
from dmsg.analytics.parquet import Part, arrow_schema, write_part
from dmsg.analytics.schemas import DAY_MS, EVENT, FAMILIES, REGISTER
from dmsg.telemetry.schema import BUCKETS, ENVELOPE, EVENT as EVENT_TYPES, MAX_LINE, SCHEMA_VERSION

zlib: Any = standard_zlib
with suppress(ImportError):  # The workers of a cluster may lack this package.
    # isal unpacks a file in half of the time of the standard library's zlib.
    from isal import isal_zlib

    zlib = isal_zlib

TEXT_LIMIT = 256 * 1024 * 1024
"""Maximum size in bytes of a file and of its unpacked text. A larger file is refused, to limit the memory."""
MEMBER_LIMIT = 64
"""Maximum number of gzip members of a file, because for each member the rest of the file is copied."""
HELD_BYTES = 128 * 1024 * 1024
"""Bytes of text in memory above which the columns that were read are written to Parquet files."""
SAMPLE_BYTES = 64 * 1024
"""Size in bytes of the parts at both ends of a text that are searched for types of events."""
BLOCK_BYTES = 4 * 1024 * 1024
"""Bytes of text that Arrow parses at a time."""
SHORT_LINE = 1000
"""Length of a line in bytes. A line that is not longer cannot contain a number with more than :data:`LONG_NUMBER`
digits."""
LONG_NUMBER = 1000
"""Number of digits above which Spark's reader rejects a number, even in a field that it ignores."""
_DIGITS = bytes(ord("0") if 48 <= code <= 57 else ord(" ") for code in range(256))
_TYPE = re.compile(rb'"type":"(\w+)"')
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_KEY = re.compile(KEY.strip("^$"))
_SCHEMA = arrow_schema(EVENT)
_REGISTER = pa.schema(
    [
        pa.field("file", pa.string()),
        pa.field("file_bytes", pa.int64()),
        pa.field("file_sha256", pa.string()),
        pa.field("lines", pa.int64()),
        pa.field("problem", pa.string()),
        pa.field("origin", pa.string()),
        pa.field("batch", pa.int64()),
    ]
)


@dataclass(frozen=True)
class Sealed:
    """Sealed file of a spool.

    :ivar uri: name of the file in bronze.
    :ivar path: local path, or URI of a file in an object store.
    """

    uri: str
    path: str


@dataclass(frozen=True)
class Content:
    """Description of the content of a sealed file.

    :ivar size: size of the file in bytes.
    :ivar sha256: hash of the file, in hexadecimal.
    :ivar text_size: size of the text in bytes, before compression.
    """

    size: int
    sha256: str
    text_size: int


@dataclass(frozen=True)
class Target:
    """Destination of the Parquet files, and values that are written to all their rows.

    :ivar root: local directory of the table, or its URI in an object store.
    :ivar directory: directory of the batch, below ``root``.
    :ivar origin: name of the source.
    :ivar batch: number of the batch.
    :ivar now_ms: time of the run in ms since 1970.
    :ivar checked: whether the files may contain checked receipts.
    :ivar stores: settings of the object stores in which the files or the table are. Local files need none.
    """

    root: str
    directory: str
    origin: str
    batch: int
    now_ms: int
    checked: bool
    stores: StoreSettings = NO_STORES


class Refused(Exception):
    """Error: a file is not converted, so Spark reads it. The text of the error says why."""


Outcome = Part | Sealed | StoreFailure
"""Parquet file that was written, file that was refused, or object store that could not be read."""


def convert(files: Iterable[Sealed], target: Target) -> Iterator[Outcome]:
    """Write Parquet files from all sealed files in which every line is an event.

    :returns: the Parquet files written, the files that were refused, and the object stores that could not be read.
    """
    writer, reader = _Writer(target), StoreReader(target.stores)
    for file in files:
        try:
            table, content = read(file.path, target.now_ms, checked=target.checked, reader=reader)
        except Refused:
            yield file
            continue
        writer.add(file, table, content)
        if writer.held > HELD_BYTES:
            yield from writer.flush()
    yield from writer.flush()
    yield from writer.register()
    yield from reader.failures.values()


def read(path: str, now_ms: int, *, checked: bool, reader: StoreReader | None = None) -> tuple[pa.Table, Content]:
    """Return the events of a file, and a description of the file.

    :param path: as for :class:`Sealed`.
    :param reader: reader of the files in object stores; not needed for a local file.
    :param now_ms: as for :func:`~dmsg.analytics.bronze.problem_column`.
    :raises Refused: a line is no valid event, Spark might read a line differently, or the file cannot be read.
    """
    text, size, digest = _unpack(
        _read_local(path) if reader is None or not is_remote(path) else _read_remote(path, reader)
    )
    lines = _check_text(text)
    try:
        table = _parse(text)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise Refused(str(error)) from None
    if table.num_rows != lines:
        raise Refused("the file has more or fewer lines than events")
    if not all_valid(table, now_ms, checked=checked):
        raise Refused("a line is not a valid event")
    return table, Content(size, digest, len(text))


def describe_file(uri: str) -> dict[str, object]:
    """Return the columns ``file_bytes`` and ``file_sha256`` of a sealed file that Spark has read. They are missing if
    the file is not on this machine.
    """
    if not uri.startswith("file:"):
        return {}
    try:
        with open(unquote(uri.removeprefix("file:")), "rb") as file:
            digest = file_digest(file, "sha256").hexdigest()
            return {"file_bytes": file.tell(), "file_sha256": digest}
    except OSError:
        return {}


def _parse(text: bytes) -> pa.Table:
    """Parse lines of JSON.

    :raises ArrowInvalid: a line is no JSON, or a field has another type.
    """
    types = {name.decode() for name in _TYPE.findall(text, 0, SAMPLE_BYTES)}
    types |= {name.decode() for name in _TYPE.findall(text, max(0, len(text) - SAMPLE_BYTES))}
    names = {field.name for one in types & EVENT_TYPES.keys() for field in EVENT_TYPES[one].fields}
    names |= {field.name for field in ENVELOPE}
    # Arrow takes the same time for each column of the schema, even if no line has it. Most files contain few types of
    # events, so the first attempt parses only the columns of the types found in the sample.
    for schema, unexpected in (
        (pa.schema([one for one in _SCHEMA if one.name in names]), "error"),
        (_SCHEMA, "ignore"),
    ):
        options = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior=unexpected)
        reading = pj.ReadOptions(use_threads=False, block_size=BLOCK_BYTES)
        try:
            return pj.read_json(pa.BufferReader(text), reading, options)
        except pa.ArrowInvalid:
            if unexpected == "ignore":
                raise
    raise AssertionError


def _read_local(path: str) -> bytes:
    try:
        if os.path.getsize(path) > TEXT_LIMIT:
            raise Refused("the file is too large")
        with open(path, "rb") as file:
            return file.read(TEXT_LIMIT + 1)
    except (OSError, ValueError) as error:
        raise Refused(str(error)) from None


def _read_remote(uri: str, reader: StoreReader) -> bytes:
    try:
        return reader.read(uri, TEXT_LIMIT)
    except StoreError as error:
        raise Refused(str(error)) from None


def _unpack(packed: bytes) -> tuple[bytes, int, str]:
    """Return the text of a compressed file, and the size and the hash of the file."""
    size, digest = len(packed), sha256(packed).hexdigest()
    pieces: list[bytes] = []
    left = TEXT_LIMIT
    while packed:
        unpack = zlib.decompressobj(31)
        try:
            piece = unpack.decompress(packed, left + 1)
        except zlib.error as error:
            raise Refused(str(error)) from None
        if not unpack.eof or len(piece) > left or len(pieces) == MEMBER_LIMIT:
            raise Refused("the compressed data is incomplete, or too large")
        pieces.append(piece)
        left -= len(piece)
        packed = unpack.unused_data
    return pieces[0] if len(pieces) == 1 else b"".join(pieces), size, digest


def _check_text(text: bytes) -> int:
    """Check that each line is one flat JSON object, without anything that Arrow and Spark might read differently.

    :returns: number of lines.
    :raises Refused: the text may be read differently by Spark.
    """
    lines = text.count(b"\n")
    # A valid line contains one opening brace, at its start, and ends with a closing brace. The counts detect two
    # objects on one line, and one object on two lines. A valid file is refused, too, if a string in it contains a
    # brace, and Spark then reads the file.
    whole = text.startswith(b"{") and text.endswith(b"}\n")
    if not (whole and text.count(b"{") == lines and text.count(b"}\n{") == lines - 1):
        raise Refused("a line is not one JSON object")
    if b"[" in text and text.count(b"[") != text.count(b'"rtt":['):
        raise Refused("an array is in a field other than the histogram rtt")
    if not text.isascii():
        try:
            text.decode()
        except UnicodeDecodeError:
            raise Refused("the file is not UTF-8") from None
    if b"\\" in text and _SURROGATE.search(text):
        raise Refused("a text has an incomplete character (a lone surrogate)")
    if _has_longer_line(text, SHORT_LINE):
        if _has_longer_line(text, MAX_LINE):
            raise Refused("a line is too long")
        if b"0" * LONG_NUMBER in text.translate(_DIGITS):
            raise Refused("a number is too long")
    return lines


def _has_longer_line(text: bytes, limit: int) -> bool:
    """Whether any line of ``text`` is longer than ``limit`` bytes. The text must end with a newline."""
    start = 0
    while start < len(text):
        end = text.rfind(b"\n", start, start + limit + 1)
        if end < 0:
            return True
        start = end + 1
    return False


def _within(column: pa.ChunkedArray, least: int, most: int) -> bool:
    found = pc.min_max(column)
    low, high = found["min"].as_py(), found["max"].as_py()
    return low is None or (low >= least and high <= most)


def all_valid(table: pa.Table, now_ms: int, *, checked: bool) -> bool:
    """Whether no row has a problem, by the rules of :func:`~dmsg.analytics.bronze.problem_column`."""
    there = set(table.column_names)
    needed = ("v", "type", "ts", "producer", "boot", "seq", "mono")
    if not there.issuperset(needed) or any(table[name].null_count for name in needed):
        return False
    types = [name for family in FAMILIES.values() for name in family if checked or name != "receipt_checked"]
    # A producer's name has to be a key only if the producer is a server. Many rows have the same producer, so each
    # distinct name is checked once.
    servers = []
    if "role" in there:
        servers = pc.unique(table["producer"].filter(pc.equal(table["role"], "server"))).to_pylist()
    return (
        _has_required_fields(table)
        and _within(table["v"], SCHEMA_VERSION, SCHEMA_VERSION)
        and _within(table["ts"], OLDEST_TIMESTAMP, now_ms + FUTURE_TOLERANCE_MS)
        and set(pc.unique(table["type"]).to_pylist()) <= set(types)
        and all(_KEY.fullmatch(name) for name in servers)
        and ("rtt" not in there or _has_whole_histograms(table["rtt"]))
        and all(_within(table[name], 0, LARGEST_NUMBER) for name in COUNTS if name in there)
    )


def _has_required_fields(table: pa.Table) -> bool:
    """Whether every event has the fields that its type requires."""
    there = set(table.column_names)
    for name in pc.unique(table["type"]).to_pylist():
        required = EVENT_TYPES[name].required if name in EVENT_TYPES else ()
        if not there.issuperset(required):
            return False
        if lacking := [one for one in required if table[one].null_count]:
            of_type = table.select(lacking).filter(pc.equal(table["type"], name))
            if any(of_type[one].null_count for one in lacking):
                return False
    return True


def _has_whole_histograms(column: pa.ChunkedArray) -> bool:
    if column.null_count == len(column):
        return True
    counts = pa.chunked_array([chunk.flatten() for chunk in column.chunks])
    sizes = pc.list_value_length(column)
    return not counts.null_count and _within(counts, 0, LARGEST_BUCKET) and _within(sizes, BUCKETS, BUCKETS)


class _Writer:
    """Writer that collects the columns of files, by family of events and day, and writes them to Parquet files."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._place: pafs.FileSystem
        if is_remote(target.root):
            self._place = target.stores.file_system(target.root)
        else:
            self._place = pafs.SubTreeFileSystem(target.root, pafs.LocalFileSystem())
        self._parts: dict[tuple[str, int], list[pa.Table]] = {}
        self._files: list[dict[str, object]] = []
        self.held = 0

    def add(self, file: Sealed, table: pa.Table, content: Content) -> None:
        """Add the events of a file."""
        self.held += content.text_size
        ends = pc.sum(pc.equal(table["type"], "segment_end")).as_py() or 0
        told = pc.max(table["lines"]).as_py() if "lines" in table.column_names else None
        problem = NO_END if not ends else LINES_MISSING if told is not None and told > table.num_rows - ends else None
        target = self._target
        self._files.append(
            {"file": file.uri, "lines": table.num_rows, "problem": problem}
            | {"file_bytes": content.size, "file_sha256": content.sha256}
            | {"origin": target.origin, "batch": target.batch}
        )
        table = table.select([name for name in table.column_names if table[name].null_count < table.num_rows])
        kinds = set(pc.unique(table["type"]).to_pylist())
        for family, types in FAMILIES.items():
            if not kinds.isdisjoint(types):
                of_family = table
                if not kinds.issubset(types):
                    of_family = table.filter(pc.is_in(table["type"], pa.array(types, pa.string())))
                self._add_days(file, family, of_family)

    def _add_days(self, file: Sealed, family: str, table: pa.Table) -> None:
        number = pc.divide(table["ts"], pa.scalar(DAY_MS, pa.int64()))
        days = pc.unique(number).to_pylist()
        for day in days:
            rows_of_day = table if len(days) == 1 else table.filter(pc.equal(number, pa.scalar(day, pa.int64())))
            for name, value in (("file", file.uri), ("origin", self._target.origin)):
                rows_of_day = rows_of_day.append_column(name, _repeat(value, rows_of_day.num_rows))
            batch = pa.repeat(pa.scalar(self._target.batch, pa.int64()), rows_of_day.num_rows)
            self._parts.setdefault((family, day), []).append(rows_of_day.append_column("batch", batch))

    def flush(self) -> Iterator[Part]:
        """Write the columns collected so far to Parquet files."""
        for (family, day), tables in self._parts.items():
            table = pa.concat_tables(tables, promote_options="default").unify_dictionaries()
            yield self._write(table, family, _day(day))
        self._parts.clear()
        self.held = 0

    def register(self) -> Iterator[Part]:
        """Write a Parquet file with a row for each file that was converted."""
        if self._files:
            yield self._write(
                pa.Table.from_pylist(self._files, schema=_REGISTER), REGISTER, _day(self._target.now_ms // DAY_MS)
            )
        self._files = []

    def _write(self, table: pa.Table, family: str, day: str) -> Part:
        if not is_remote(self._target.root):
            os.makedirs(f"{self._target.root}/{self._target.directory}/family={family}/dt={day}", exist_ok=True)
        return write_part(self._place, table, self._target.directory, {"family": family, "dt": day})


def _repeat(value: str, count: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.repeat(pa.scalar(0, pa.int32()), count), pa.array([value], pa.string()))


def _day(number: int) -> str:
    return str(date(1970, 1, 1) + timedelta(number))
