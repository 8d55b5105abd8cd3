"""Tables in the format of Delta Lake: transactions over Parquet files that Spark wrote.

Spark reads and writes the rows; what a table consists of is in its log, which
delta-rs keeps in this process: a transaction costs it some milliseconds, and
Spark's own writer of this format 0.7 s of computing (docs/pipeline/running.md).
Any program that reads Delta Lake can open the tables.

Every transaction here is made on the version that was looked at, and fails if
another one came between: nobody's rows are lost, and nobody's stand twice.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, QueryBuilder, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.fs import DeltaStorageHandler
from deltalake.schema import Schema
from deltalake.transaction import AddAction, RemoveAction
from pyspark.sql.types import ArrayType, DataType, StructType

READER_VERSION = 1
"""Of the protocol: a table that needs more of its readers was changed by another program, in ways that the files
alone do not show."""
APPLICATION = "dmsg"
"""In the log: whose numbers the runs are."""
CONFIGURATION: dict[str, str | None] = {
    "delta.checkpointInterval": "20",
    "delta.logRetentionDuration": "interval 9 days",
    "delta.deletedFileRetentionDuration": "interval 1 days",
}
"""How long the log can tell of earlier versions: longer than any of a run that is kept (:mod:`dmsg.analytics.runs`)."""
QUIET = PostCommitHookProperties(cleanup_expired_logs=False)
"""The log is shortened by :meth:`Delta.vacuum` alone, when no version is needed that it loses by that."""
UNUSABLE = r"[\[\]%\\^|]"
"""Characters of a path that delta-rs cannot write to."""
SMALL_FILE = 32 * 1024 * 1024
"""Bytes up to which a file may be merged with others."""
_ARROW: dict[str, pa.DataType] = {
    "string": pa.string(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
}


_SQL = {
    "string": "VARCHAR",
    "int": "INT",
    "bigint": "BIGINT",
    "double": "DOUBLE",
    "boolean": "BOOLEAN",
    "date": "DATE",
    "timestamp": "TIMESTAMP",
    "array<int>": "INT[]",
    "array<bigint>": "BIGINT[]",
}


class LakeError(Exception):
    """The tables cannot be used; the text says why."""


@dataclass(frozen=True)
class File:
    """A file of a table.

    :ivar path: below the table's place.
    :ivar values: of the partition columns.
    """

    path: str
    size: int
    values: Mapping[str, str]


def _arrow_type(kind: DataType) -> pa.DataType:
    if isinstance(kind, ArrayType):
        return pa.list_(_arrow_type(kind.elementType))
    return _ARROW[kind.simpleString()]


def arrow_schema(schema: StructType) -> pa.Schema:
    """The columns as Arrow knows them."""
    return pa.schema([pa.field(one.name, _arrow_type(one.dataType)) for one in schema.fields])


def unusable(uri: str) -> str | None:
    """The first character of a path that cannot be used, if there is one."""
    found = re.search(UNUSABLE, uri)
    return found and found[0]


def asked(table: DeltaTable, sql: str) -> pa.Table:
    """What a query of it answers, in which the table is called ``it``.

    Arrow's own reader would call Python on threads of its own to get at the
    files, and one of those that is not done when the program ends aborts it.

    :param sql: texts of strangers in it are quoted.
    :raises LakeError: a file cannot be read, or is there no more.
    """
    try:
        batches = QueryBuilder().register("it", table).execute(sql).read_all()
    except Exception as error:  # nothing more exact is raised by delta-rs
        raise LakeError(f"{table.table_uri} cannot be read: {str(error).splitlines()[0]}") from None
    found = pa.table(batches)
    views = {pa.string_view(): pa.string()}
    return found.cast(pa.schema([pa.field(one.name, views.get(one.type, one.type)) for one in found.schema]))


def rows_of(table: DeltaTable, condition: str = "true") -> pa.Table:
    """Its rows, in no order.

    :param condition: true of those that are wanted.
    :raises LakeError: as :func:`asked`.
    """
    return asked(table, f"SELECT * FROM it WHERE {condition}")  # noqa: S608


class Delta:
    """One table.

    :param uri: directory or URI.
    :param partitions: columns that are in the paths of its files.
    """

    def __init__(self, uri: str, schema: StructType, partitions: Sequence[str] = ()) -> None:
        self.uri = uri
        self.schema = schema
        self.partitions = list(partitions)

    def open(self, version: int | None = None) -> DeltaTable | None:
        """As it is, or was; None if there is none.

        :param version: one that there has been.
        :raises LakeError: it is of another program, or of no use, or that version is no more.
        """
        try:
            table = DeltaTable(self.uri, version=version)
        except TableNotFoundError:
            if version is not None:
                raise LakeError(f"version {version} of {self.uri} is gone, or the whole of it") from None
            return None
        except DeltaError as error:
            raise LakeError(f"{self.uri} cannot be read: {str(error).splitlines()[0]}") from None
        protocol = table.protocol()
        if protocol.min_reader_version > READER_VERSION:
            raise LakeError(f"{self.uri} was changed by a program that needs version {protocol.min_reader_version}")
        there = {one.name for one in table.schema().fields}
        if table.metadata().partition_columns != self.partitions or self.schema.fieldNames()[0] not in there:
            raise LakeError(f"{self.uri} is another program's table")
        return table

    def version(self) -> int | None:
        """Of the newest transaction."""
        table = self.open()
        return None if table is None else table.version()

    def transaction(self, application: str) -> int:
        """The number of that application's newest transaction; -1 if it has none."""
        table = self.open()
        found = None if table is None else table.transaction_version(application)
        return -1 if found is None else found

    def files(self, version: int | None = None) -> list[File]:
        """What it consists of, or did.  A version that is no more raises :class:`LakeError`."""
        table = self.open(version)
        if table is None:
            return []
        actions = pa.table(table.get_add_actions(flatten=True))
        columns = [actions.column(name).to_pylist() for name in ("path", "size_bytes")]
        values = [[str(one) for one in actions.column(f"partition.{name}").to_pylist()] for name in self.partitions]
        rows = zip(*columns, *values, strict=True)
        return [
            File(unquote(path), size, dict(zip(self.partitions, of_file, strict=True))) for path, size, *of_file in rows
        ]

    def read(
        self,
        version: int | None = None,
        *,
        since: str | None = None,
        until: str | None = None,
        where: Mapping[str, str] | None = None,
    ) -> pa.Table:
        """Its rows, without Spark: all of them are held in memory.

        :param since: of a table with days: only of this one and later ones; ``until``: and no later ones.
        :param where: columns of text, and what has to stand in them.
        :raises LakeError: that version is no more.
        """
        wanted = [f"{column} = '{text.replace(chr(39), chr(39) * 2)}'" for column, text in (where or {}).items()]
        if "dt" in self.schema.fieldNames():
            for day, compare in ((since, ">="), (until, "<=")):
                if day is not None:
                    wanted.append(f"dt {compare} DATE '{date.fromisoformat(day)}'")
        found = self.ask(f"SELECT * FROM it WHERE {' AND '.join(wanted) or 'true'}", version)  # noqa: S608
        return arrow_schema(self.schema).empty_table() if found is None else found

    def ask(self, sql: str, version: int | None = None) -> pa.Table | None:
        """What a query of it answers, in which it is called ``it``; None: there is no such table yet.

        :raises LakeError: it cannot be read.
        """
        table = self.open(version)
        if table is None:
            return None
        there = {one.name for one in table.schema().fields}
        # columns that this version of the program has and the one that made the table had not
        nulls = [
            f", CAST(NULL AS {_SQL[one.dataType.simpleString()]}) AS {one.name}"
            for one in self.schema.fields
            if one.name not in there
        ]
        if nulls:
            sql = f"WITH it AS (SELECT *{''.join(nulls)} FROM it) {sql}"  # noqa: S608
        return asked(table, sql)

    def location(self, file: File) -> str:
        """Where Spark finds it."""
        return f"{self.uri}/{file.path}"

    # --- transactions ---

    def _overtaken(self) -> LakeError:
        return LakeError(f"another run has written to {self.uri}")

    def commit(
        self,
        directory: str,
        number: int,
        *,
        application: str = APPLICATION,
        replaces: Mapping[str, Iterable[str]] | None = None,
        again: str = "",
    ) -> None:
        """Take in what Spark wrote into a directory below the table's place.

        :param number: of the application's transaction: one that is not greater than its newest is an old one.
        :param replaces: partitions, by values of their columns, that consist of the new files alone from now on; of
            no columns: all.  None: nothing, but
            files whose path begins with ``again``: what the same transaction wrote before it was killed.
        :raises LakeError: somebody else has changed the table, or the number is an old one.
        """
        table = self.open()
        if table is None:
            table = self._create()
        newest = table.transaction_version(application)
        if newest is not None and newest > number:
            raise self._overtaken()
        self._widen(table)
        filters = [(name, "in", sorted(values)) for name, values in (replaces or {}).items()]
        try:
            table.create_write_transaction(
                [*self._written(directory), *(self._removed(again) if again and replaces is None else ())],
                "append" if replaces is None else "overwrite",
                Schema.from_arrow(arrow_schema(self.schema)),
                self.partitions,
                filters or None,
                commit_properties=CommitProperties(
                    max_commit_retries=0, app_transactions=[Transaction(application, number)]
                ),
                post_commithook_properties=QUIET,
            )
        except CommitFailedError:
            raise self._overtaken() from None

    def _removed(self, prefix: str) -> Iterable[RemoveAction]:
        now = int(time.time() * 1000)
        for file in self.files():
            if file.path.startswith(prefix):
                yield RemoveAction(file.path, True, now, file.size, dict(file.values))

    def _create(self) -> DeltaTable:
        try:
            return DeltaTable.create(
                self.uri,
                Schema.from_arrow(arrow_schema(self.schema)),
                partition_by=self.partitions,
                configuration=CONFIGURATION,
            )
        except CommitFailedError:
            raise self._overtaken() from None
        except DeltaError as error:
            raise LakeError(f"{self.uri} cannot be made: {str(error).splitlines()[0]}") from None

    def _widen(self, table: DeltaTable) -> None:
        """Columns that this version of the program has and the one that made the table had not."""
        wanted = Schema.from_arrow(arrow_schema(self.schema)).fields
        there = {one.name for one in table.schema().fields}
        if fresh := [one for one in wanted if one.name not in there]:
            table.alter.add_columns(fresh, post_commithook_properties=QUIET)

    def _written(self, directory: str) -> Iterable[AddAction]:
        """The files that Spark wrote there."""
        store = pafs.PyFileSystem(DeltaStorageHandler(self.uri))
        for found in store.get_file_info(pafs.FileSelector(directory, recursive=True, allow_not_found=True)):
            if found.type is not pafs.FileType.File or not found.base_name.endswith(".parquet"):
                continue
            path = found.path.lstrip("/")
            values = dict(part.split("=", 1) for part in path.split("/")[1:-1])
            with store.open_input_file(path) as file:
                rows = pq.read_metadata(file).num_rows
            yield AddAction(
                path=path,
                size=found.size,
                partition_values={name: unquote(values[name]) for name in self.partitions},
                modification_time=int((found.mtime_ns or 0) / 1_000_000),
                data_change=True,
                stats=f'{{"numRecords": {rows}}}',
            )

    # --- room ---

    def merge_small(self, least: int, may: Callable[[File], bool] = lambda file: True) -> int:
        """Make few files of many small ones, partition by partition.

        :param least: small files of a partition that are too many.
        :param may: a partition with a file that may not is left alone.
        :returns: how many partitions were too many.
        """
        table = self.open()
        if table is None:
            return 0
        small: dict[tuple[str, ...], int] = {}
        held: set[tuple[str, ...]] = set()
        for file in self.files():
            key = tuple(file.values[name] for name in self.partitions)
            small[key] = small.get(key, 0) + (file.size < SMALL_FILE)
            if not may(file):
                held.add(key)
        wanted = sorted(key for key, count in small.items() if count >= least and key not in held)
        for key in wanted:
            filters = [(name, "=", value) for name, value in zip(self.partitions, key, strict=True)]
            table.optimize.compact(filters or None, post_commithook_properties=QUIET)
        return len(wanted)

    def vacuum(self, keep: Sequence[int], *, left_behind: int | None = None) -> int:
        """Remove files that neither the newest version nor one of those to keep has, and what the log need not tell.

        :param left_behind: also files of which the log tells nothing, if they are older than so many hours: what
            killed runs left, and what was replaced so long ago that the log has forgotten it.
        :returns: how many.
        :raises LakeError: a version to keep is no more.
        """
        table = self.open()
        if table is None:
            return 0
        versions = [one for one in keep if one < table.version()] or None
        try:
            vacuum = partial(
                table.vacuum,
                dry_run=False,
                enforce_retention_duration=False,
                keep_versions=versions,
                post_commithook_properties=QUIET,
            )
            removed = vacuum(0)
            if left_behind is not None:
                removed += vacuum(left_behind, full=True)
            table.cleanup_metadata()
        except DeltaError as error:
            raise LakeError(f"{self.uri} cannot be made smaller: {str(error).splitlines()[0]}") from None
        return len(set(removed))

    def forget(self, before: str) -> None:
        """Take out the days before one: of a table that has days.

        :param before: as 2026-01-31.
        :raises LakeError: somebody else has changed the table.
        """
        table = self.open()
        if table is None or "dt" not in self.schema.fieldNames():
            return
        text = self.schema["dt"].dataType.typeName() == "string"
        day = date.fromisoformat(before)
        try:
            table.delete(
                f"dt < '{day}'" if text else f"dt < DATE '{day}'",
                commit_properties=CommitProperties(max_commit_retries=0),
                post_commithook_properties=QUIET,
            )
        except CommitFailedError:
            raise self._overtaken() from None
