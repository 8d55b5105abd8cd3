"""Tables in the format of Delta Lake: transactions over Parquet files that Spark wrote.

Spark reads and writes the rows. The list of a table's files is in its log, which delta-rs writes
in this process. A transaction of delta-rs takes some milliseconds; Spark's own writer of this format
takes 0.7 s (docs/pipeline/running.md). Any program that reads Delta Lake can open the tables.

Concurrency is optimistic: a transaction names the version that it has read, and fails if another transaction was
committed after that version. So no rows are lost, and none are written twice.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import date
from functools import partial
from threading import Lock
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs as pafs
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.fs import DeltaStorageHandler
from deltalake.schema import Schema
from deltalake.transaction import RemoveAction
from pyspark.sql.types import StructType

from dmsg.analytics.data_files import Count, File, added, is_of_run, written_files
from dmsg.analytics.file_hashes import FileSearch
from dmsg.analytics.lake_error import LakeError
from dmsg.analytics.parquet import Part, arrow_schema
from dmsg.analytics.table_queries import SQL_TYPES, days_condition, run_query

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
"""Options of a commit that keep delta-rs from shortening the log. Only :meth:`Delta.vacuum` shortens the log. It
removes entries that are older than :data:`LOG_DAYS`. delta-rs ignores these options when it removes old files.
"""
UNUSABLE_CHARACTERS = r"[\[\]%\\^|]"
"""Regular expression for the characters with which delta-rs cannot write to a path."""
SMALL_FILE = 32 * 1024 * 1024
"""Size in bytes below which a file is small, and may be merged with others."""
MERGED_HERE = 256 * 1024 * 1024
"""Maximum total size in bytes of a table's small files that this process merges. If the files are larger, Spark merges
them; without a session of Spark, this process merges them all the same.
"""


def unusable_character(uri: str) -> str | None:
    """Return the first character in a path that delta-rs cannot handle, or None."""
    found = re.search(UNUSABLE_CHARACTERS, uri)
    return found and found[0]


def _removed(file: File, *, moved: bool = False) -> RemoveAction:
    """Return the log entry that removes a file from a table.

    :param moved: whether the same transaction adds the rows of this file to other files.
    """
    return RemoveAction(file.path, not moved, int(time.time() * 1000), file.size, dict(file.values))


class Delta:
    """Table of Delta Lake.

    :param uri: directory or URI.
    :param partitions: partition columns, whose values are in the paths of the files.
    :param is_exclusive: function that returns whether only this object may write to the table now. While it returns
        true, the newest snapshot of the log is cached in memory, and each transaction of this object updates the cached
        snapshot.
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
    def _transaction(self) -> Iterator[None]:
        """Context manager for a transaction, which updates the cached snapshot at the end."""
        kept, self._snapshot, self._is_looked_up = self._snapshot, None, False
        yield
        if kept is not None:
            # The update reads only the new entries of the log. If it fails, no snapshot is cached, and the next access
            # reads the whole log.
            with suppress(DeltaError):
                kept.update_incremental()
                self._snapshot, self._is_looked_up = kept, True

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

    def read(
        self,
        version: int | None = None,
        *,
        since: str | None = None,
        until: str | None = None,
        where: Mapping[str, str] | None = None,
    ) -> pa.Table:
        """Read rows into memory, without Spark.

        :param since: first day, as ``2026-01-31``, of a table that has days.
        :param until: last day, included.
        :param where: mapping from text columns to values; only the rows with these values are returned.
        :raises LakeError: that version no longer exists.
        """
        if "dt" not in self.schema.fieldNames():
            since = until = None
        found = self.ask(f"SELECT * FROM it WHERE {days_condition(since, until, where)}", version)  # noqa: S608
        return arrow_schema(self.schema).empty_table() if found is None else found

    def ask(self, sql: str, version: int | None = None) -> pa.Table | None:
        """Run an SQL query of the table; in the query the table's name is ``it``.  Return None if there is no table
        yet.

        :raises LakeError: the table cannot be read.
        """
        table = self.open(version)
        if table is None:
            return None
        there = {one.name for one in table.schema().fields}
        # A table that an older version of dmsg made may lack columns. A missing column is read as NULL.
        nulls = [
            f", CAST(NULL AS {SQL_TYPES[one.dataType.simpleString()]}) AS {one.name}"
            for one in self.schema.fields
            if one.name not in there
        ]
        if nulls:
            sql = f"WITH it AS (SELECT *{''.join(nulls)} FROM it) {sql}"  # noqa: S608
        return run_query(table, sql)

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

    def location(self, file: File) -> str:
        """Return the URI at which Spark reads the file."""
        return f"{self.uri}/{file.path}"

    # --- transactions ---

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
        removed = []
        if replaced is None:
            own = [file for file in self.files() if is_of_run(file.path, earlier_attempt)] if earlier_attempt else []
            removed = [_removed(file) for file in (*own, *gone)]
        try:
            with self._transaction():
                table.create_write_transaction(
                    [*fresh, *removed],
                    "append" if replaced is None else "overwrite",
                    Schema.from_arrow(arrow_schema(self.schema)),
                    self.partitions,
                    filters or None,
                    # Retries are turned off. If another run has committed meanwhile, this commit must fail. With
                    # retries, this transaction would be committed after the other run's.
                    commit_properties=CommitProperties(
                        max_commit_retries=0, app_transactions=[Transaction(application, number)]
                    ),
                    post_commithook_properties=NO_LOG_CLEANUP,
                )
        except CommitFailedError:
            raise self._overtaken_error() from None

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

    # --- maintenance ---

    def merge_small(
        self,
        least: int,
        is_mergeable: Callable[[File], bool] = lambda file: True,
        rewrite: Callable[[Sequence[File]], Iterable[Part]] | None = None,
    ) -> int:
        """Merge the small files of each partition that has many of them.

        :param least: number of small files in a partition at which they are merged.
        :param is_mergeable: returns whether a file may be merged. In a partition with a file for which it returns
            False, nothing is merged.
        :param rewrite: writes the rows of small files to few files, in executors. Without this function, or for at most
            :data:`MERGED_HERE` bytes, this process merges the files.
        :returns: number of partitions in which files were merged.
        """
        table = self.open()
        if table is None:
            return 0
        small: dict[tuple[str, ...], list[File]] = {}
        held: set[tuple[str, ...]] = set()
        for file in self.files():
            key = tuple(file.values[name] for name in self.partitions)
            if file.size < SMALL_FILE:
                small.setdefault(key, []).append(file)
            if not is_mergeable(file):
                held.add(key)
        wanted = sorted(key for key, files in small.items() if len(files) >= least and key not in held)
        if rewrite is not None and sum(file.size for key in wanted for file in small[key]) > MERGED_HERE:
            for key in wanted:
                self._replace_files(small[key], rewrite(small[key]))
            return len(wanted)
        for key in wanted:
            filters = [(name, "=", value) for name, value in zip(self.partitions, key, strict=True)]
            with self._transaction():
                table.optimize.compact(filters or None, post_commithook_properties=NO_LOG_CLEANUP)
        return len(wanted)

    def _replace_files(self, files: Iterable[File], parts: Iterable[Part]) -> None:
        """Replace files by other files with the same rows.

        :raises LakeError: another run has changed the table.
        """
        table = self.open()
        assert table is not None
        fresh = [added(part, moved=True) for part in parts]
        removed = [_removed(file, moved=True) for file in files]
        try:
            with self._transaction():
                table.create_write_transaction(
                    [*fresh, *removed],
                    "append",
                    Schema.from_arrow(arrow_schema(self.schema)),
                    self.partitions,
                    commit_properties=CommitProperties(max_commit_retries=0),
                    post_commithook_properties=NO_LOG_CLEANUP,
                )
        except CommitFailedError:
            raise self._overtaken_error() from None

    def vacuum(self, keep: Sequence[int], *, left_behind: int | None = None) -> int:
        """Remove the files that belong neither to the newest version nor to one of the versions to keep, and shorten
        the log.

        :param keep: numbers of the versions to keep.
        :param left_behind: age in hours above which files that the log does not mention are removed. Such files are
            left by killed runs, or were replaced so long ago that the log no longer mentions them.  None keeps such
            files.
        :returns: number of files removed.
        :raises LakeError: the table cannot be read or written.
        """
        table = self.open()
        if table is None:
            return 0
        if table.metadata().configuration.get("delta.enableExpiredLogCleanup") != "false":
            # An earlier version of dmsg made the table.
            with self._transaction():
                table.alter.set_table_properties({"delta.enableExpiredLogCleanup": "false"})
            return self.vacuum(keep, left_behind=left_behind)
        versions = [one for one in keep if one < table.version()]
        try:
            vacuum = partial(
                table.vacuum,
                dry_run=False,
                enforce_retention_duration=False,
                keep_versions=versions or None,
                post_commithook_properties=NO_LOG_CLEANUP,
            )
            with self._transaction():
                removed = vacuum(0)
                if left_behind is not None:
                    removed += vacuum(left_behind, full=True)
                # After a long pause, a version to keep may be older than the log. Shortening the log would remove this
                # version, so a later run shortens the log.
                if self._is_in_log(min(keep, default=None)):
                    table.cleanup_metadata()
        except DeltaError as error:
            # If another program has shortened the log, a version is missing. A missing version must not stop every
            # later run.
            if (readable := [one for one in versions if self._exists(one)]) != versions:
                return self.vacuum(readable, left_behind=left_behind)
            raise LakeError(f"{self.uri} cannot be compacted: {str(error).splitlines()[0]}") from None
        return len(set(removed))

    def _is_in_log(self, version: int | None) -> bool:
        """Whether the log entry of a version is so young that shortening the log does not remove this entry."""
        if version is None:
            return True
        try:
            with self.storage().open_input_stream(f"_delta_log/{version:020}.json") as entry:
                actions = [json.loads(line) for line in entry.read().splitlines()]
        except FileNotFoundError:
            return False
        at = next((action["commitInfo"]["timestamp"] for action in actions if "commitInfo" in action), 0)
        return bool(time.time() - at / 1000 < (LOG_DAYS - 1) * 86_400)

    def _exists(self, version: int) -> bool:
        try:
            return self._read_log(version) is not None
        except LakeError:
            return False

    def forget(self, before: str) -> None:
        """Delete the rows of the days before ``before``. A table without days stays as it is.

        :param before: first day to keep, as ``2026-01-31``.
        :raises LakeError: another run has changed the table.
        """
        table = self.open()
        if table is None or "dt" not in self.schema.fieldNames():
            return
        text = self.schema["dt"].dataType.typeName() == "string"
        day = date.fromisoformat(before)
        try:
            with self._transaction():
                table.delete(
                    f"dt < '{day}'" if text else f"dt < DATE '{day}'",
                    commit_properties=CommitProperties(max_commit_retries=0),
                    post_commithook_properties=NO_LOG_CLEANUP,
                )
        except CommitFailedError:
            raise self._overtaken_error() from None
