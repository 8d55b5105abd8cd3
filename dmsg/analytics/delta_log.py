"""Log of a table of Delta Lake: versions of the table, the files of each, and transactions.

The list of a table's files is in its log, which delta-rs writes in this process. A transaction of delta-rs takes some
milliseconds; Spark's own writer of this format takes 0.7 s (docs/pipeline/running.md).

Concurrency is optimistic: a transaction names the version that it has read, and fails if another transaction was
committed after that version. So no rows are lost, and none are written twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Literal
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs as pafs
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.fs import DeltaStorageHandler
from deltalake.schema import Schema
from deltalake.transaction import AddAction, RemoveAction
from pyspark.sql.types import StructType

from dmsg.analytics.data_files import Count, File, added, is_of_run, removed, written_files
from dmsg.analytics.file_hashes import FileSearch
from dmsg.analytics.lake_error import LakeError
from dmsg.analytics.parquet import Part, arrow_schema

READER_VERSION = 1
"""Highest ``minReaderVersion`` of the Delta protocol that is accepted. A table with a higher one was changed by another
program, and its list of files alone does not describe its rows.
"""
APPLICATION = "dmsg"
"""Name of the application in the log. The log records the number of an application's last run under the name of the
application.
"""
LOG_DAYS = 9
"""Age in days from which entries of the log can be removed."""
CONFIGURATION: dict[str, str | None] = {
    "delta.checkpointInterval": "20",
    "delta.logRetentionDuration": f"interval {LOG_DAYS} days",
    "delta.deletedFileRetentionDuration": "interval 1 days",
    "delta.enableExpiredLogCleanup": "false",
}
"""Table properties. The log keeps earlier versions for :data:`LOG_DAYS` days, because readers may open the tables of
runs of the last :data:`~dmsg.analytics.runs.KEPT_DAYS` days. delta-rs does not shorten the log by itself, because it
would also remove older versions that are still needed after a long pause."""
NO_LOG_CLEANUP = PostCommitHookProperties(cleanup_expired_logs=False)
"""Options of a commit that keep delta-rs from shortening the log. Only
:meth:`~dmsg.analytics.delta.Delta.vacuum` shortens the log. It removes entries that are older than :data:`LOG_DAYS`.
delta-rs ignores these options when it removes old files.
"""


class DeltaLog:
    """Log of a table of Delta Lake.

    :param uri: directory or URI.
    :param partitions: partition columns, whose values are in the paths of the files.
    :param is_exclusive: function that returns whether only this object may write to the table now. While it returns
        true, the newest snapshot of the log is cached in memory, and each transaction of this object updates the cached
        snapshot.
    :param searches: what is known about the contents of files, by the URIs of tables. Tables that are opened again and
        again share it.
    """

    def __init__(
        self,
        uri: str,
        schema: StructType,
        partitions: Sequence[str] = (),
        *,
        is_exclusive: Callable[[], bool] = lambda: False,
        searches: dict[str, FileSearch] | None = None,
    ) -> None:
        self.uri = uri
        self.schema = schema
        self.partitions = list(partitions)
        self._is_exclusive = is_exclusive
        self._searches = {} if searches is None else searches
        self._snapshot: DeltaTable | None = None
        self._is_looked_up = False
        self._listed: tuple[DeltaTable, int, list[File]] | None = None
        self._opening = Lock()

    def open(self, version: int | None = None) -> DeltaTable | None:
        """Open the table; None if it does not exist.

        :param version: number of an earlier version; None for the newest.
        :raises LakeError: the table was made by another program, cannot be read, or no longer has that version.
        """
        if self._is_exclusive():
            with self._opening:
                if not self._is_looked_up:
                    self._snapshot, self._is_looked_up = self._read_log(None), True
                newest = self._snapshot
            if version is None or (newest is not None and newest.version() == version):
                return newest
        return self._read_log(version)

    @contextmanager
    def update_snapshot(self) -> Iterator[None]:
        """Context manager for a transaction, which updates the cached snapshot at the end."""
        kept, self._snapshot, self._is_looked_up = self._snapshot, None, False
        yield
        if kept is not None:
            # The update reads only the new entries of the log. If it fails, no snapshot is cached, and the next access
            # reads the whole log.
            with suppress(DeltaError):
                kept.update_incremental()
                self._snapshot, self._is_looked_up = kept, True

    @contextmanager
    def try_once(self, transactions: list[Transaction] | None = None) -> Iterator[CommitProperties]:
        """Context manager for a transaction that fails if another run has written to the table meanwhile. It yields the
        options of the commit.

        :param transactions: numbers that applications give to the transaction.
        :raises LakeError: another run has changed the table.
        """
        # With retries, this transaction would be committed after the other run's.
        try:
            with self.update_snapshot():
                yield CommitProperties(max_commit_retries=0, app_transactions=transactions)
        except CommitFailedError:
            raise self._overtaken_error() from None

    def _read_log(self, version: int | None) -> DeltaTable | None:
        if version is None and "://" not in self.uri:
            # A local table without a log does not exist. The operating system answers faster than delta-rs. delta-rs
            # reports other errors below.
            try:
                os.stat(f"{self.uri}/_delta_log")
            except FileNotFoundError:
                return None
            except OSError:
                pass
        try:
            table = DeltaTable(self.uri, version=version)
        except TableNotFoundError:
            if version is not None:
                raise LakeError(f"{self.uri}: version {version} or the whole table was removed") from None
            return None
        except DeltaError as error:
            raise LakeError(f"{self.uri} cannot be read: {str(error).splitlines()[0]}") from None
        protocol = table.protocol()
        if protocol.min_reader_version > READER_VERSION:
            raise LakeError(
                f"{self.uri} uses version {protocol.min_reader_version} of the Delta format, which is too "
                "new for this dmsg: update dmsg"
            )
        there = {one.name for one in table.schema().fields}
        if table.metadata().partition_columns != self.partitions or self.schema.fieldNames()[0] not in there:
            raise LakeError(f"{self.uri} is the table of another program: choose another directory for dmsg's tables")
        return table

    def version(self) -> int | None:
        """Return the number of the newest transaction, or None if the table does not exist."""
        table = self.open()
        return None if table is None else table.version()

    def transaction(self, application: str) -> int:
        """Return the number that an application gave to its newest transaction; -1 if it has none."""
        table = self.open()
        found = None if table is None else table.transaction_version(application)
        return -1 if found is None else found

    def files(self, version: int | None = None) -> Sequence[File]:
        """Return the files of the table.

        :param version: number of an earlier version; None for the newest.
        :raises LakeError: that version no longer exists.
        """
        table = self.open(version)
        if table is None:
            return []
        listed = self._listed
        if listed is None or listed[0] is not table or listed[1] != table.version():
            listed = (table, table.version(), self._list_files(table))
            if table is self._snapshot:
                self._listed = listed
        return listed[2]

    def _list_files(self, table: DeltaTable) -> list[File]:
        actions = pa.table(table.get_add_actions(flatten=True))
        found = {name: actions.column(name).to_pylist() for name in actions.column_names}
        nothing: list[int | None] = [None] * actions.num_rows
        told = [found.get(name, nothing) for name in ("num_records", "min.ts", "max.ts")]
        values = [[str(one) for one in found[f"partition.{name}"]] for name in self.partitions]
        rows = zip(found["path"], found["size_bytes"], *told, *values, strict=True)
        return [
            File(unquote(path), size, dict(zip(self.partitions, of_file, strict=True)), *numbers)
            for path, size, *numbers, of_file in ((one[0], one[1], *one[2:5], one[5:]) for one in rows)
        ]

    def storage(self) -> pafs.FileSystem:
        """Return the file system whose root is the table's directory."""
        return pafs.PyFileSystem(DeltaStorageHandler(self.uri))

    def reading_storage(self) -> pafs.FileSystem:
        """Return the file system whose root is the table's directory, for reading only. For a local directory it is
        Arrow's own, which reads without a call to Python."""
        if "://" in self.uri:
            return self.storage()
        return pafs.SubTreeFileSystem(self.uri, pafs.LocalFileSystem())

    @property
    def search(self) -> FileSearch:
        """What is known about the contents of the table's files, by which a search can skip files."""
        if (found := self._searches.get(self.uri)) is None:
            found = self._searches[self.uri] = FileSearch.of(self.reading_storage())
        return found

    def written_files(self, directory: str, count: Count | None = None) -> list[Part]:
        """Return the Parquet files that Spark wrote to ``directory``; see
        :func:`~dmsg.analytics.data_files.written_files`.
        """
        return written_files(self.storage(), directory, self.partitions, count)

    def _overtaken_error(self) -> LakeError:
        return LakeError(f"another run has written to {self.uri}")

    def commit(
        self,
        directory: str | None,
        number: int,
        *,
        application: str = APPLICATION,
        replaced: Mapping[str, Iterable[str]] | None = None,
        earlier_attempt: str = "",
        parts: Iterable[Part] = (),
        count: Count | None = None,
        gone: Iterable[File] = (),
    ) -> None:
        """Add files that Spark and Arrow have written to the table, in one transaction.

        :param directory: directory below the table to which Spark wrote; None if Spark wrote nothing.
        :param number: number of the application's transaction. It must not be lower than that of the application's
            newest transaction.
        :param replaced: values of partition columns. The new files replace all files in the partitions with these
            values. If the mapping is empty, they replace all files of the table. None replaces no partition: the new
            files are added, and the files of ``earlier_attempt`` and ``gone`` are removed.
        :param parts: the files that Arrow wrote.
        :param count: as for :meth:`written_files`.
        :param gone: further files to remove.
        :param earlier_attempt: label of directories, see :func:`~dmsg.analytics.data_files.run_directory`. A killed run
            may have made an earlier attempt at this transaction, and committed files in directories with this label.
        :raises LakeError: another run has changed the table, or the number is too low.
        """
        table = self.open()
        if table is None:
            table = self._create()
        newest = table.transaction_version(application)
        if newest is not None and newest > number:
            raise self._overtaken_error()
        self._widen(table)
        filters = [(name, "in", sorted(values)) for name, values in (replaced or {}).items()]
        fresh = [added(part) for part in (*(() if directory is None else self.written_files(directory, count)), *parts)]
        leaving = []
        if replaced is None:
            own = [file for file in self.files() if is_of_run(file.path, earlier_attempt)] if earlier_attempt else []
            leaving = [removed(file) for file in (*own, *gone)]
        self._write(
            table,
            [*fresh, *leaving],
            "append" if replaced is None else "overwrite",
            filters,
            [Transaction(application, number)],
        )

    def replace_files(self, files: Iterable[File], parts: Iterable[Part]) -> None:
        """Replace files by other files with the same rows.

        :raises LakeError: another run has changed the table.
        """
        table = self.open()
        assert table is not None
        fresh = [added(part, moved=True) for part in parts]
        self._write(table, [*fresh, *(removed(file, moved=True) for file in files)])

    def _write(
        self,
        table: DeltaTable,
        actions: list[AddAction | RemoveAction],
        mode: Literal["append", "overwrite"] = "append",
        filters: list[tuple[str, str, list[str]]] | None = None,
        transactions: list[Transaction] | None = None,
    ) -> None:
        """Record added and removed files in the log, in one transaction.

        :param filters: with ``overwrite``, the partitions whose other files are removed; none for the whole table.
        :param transactions: numbers that applications give to the transaction.
        :raises LakeError: another run has changed the table.
        """
        with self.try_once(transactions) as properties:
            table.create_write_transaction(
                actions,
                mode,
                Schema.from_arrow(arrow_schema(self.schema)),
                self.partitions,
                filters or None,
                commit_properties=properties,
                post_commithook_properties=NO_LOG_CLEANUP,
            )

    def ensure(self) -> None:
        """Create the table if it does not exist.

        :raises LakeError: the table cannot be made.
        """
        if self.open() is None:
            self._create()

    def _create(self) -> DeltaTable:
        self._is_looked_up = False
        try:
            table = DeltaTable.create(
                self.uri,
                Schema.from_arrow(arrow_schema(self.schema)),
                partition_by=self.partitions,
                configuration=CONFIGURATION,
            )
        except CommitFailedError:
            raise self._overtaken_error() from None
        except DeltaError as error:
            raise LakeError(f"{self.uri} cannot be created: {str(error).splitlines()[0]}") from None
        if self._is_exclusive():
            with self._opening:
                self._snapshot, self._is_looked_up = table, True
        return table

    def _widen(self, table: DeltaTable) -> None:
        """Add the columns that the table lacks because an older version of dmsg made it."""
        wanted = Schema.from_arrow(arrow_schema(self.schema)).fields
        there = {one.name for one in table.schema().fields}
        if fresh := [one for one in wanted if one.name not in there]:
            table.alter.add_columns(fresh, post_commithook_properties=NO_LOG_CLEANUP)
