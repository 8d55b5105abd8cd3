"""Tables in the format of Delta Lake: rows in memory, merging of files, and removal of files and rows.

Spark and Arrow read and write the Parquet files of a table. Any program that reads Delta Lake can open the tables.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from functools import partial

import pyarrow as pa
from deltalake.exceptions import DeltaError

from dmsg.analytics.data_files import File
from dmsg.analytics.delta_log import LOG_DAYS, NO_LOG_CLEANUP, DeltaLog
from dmsg.analytics.lake_error import LakeError
from dmsg.analytics.parquet import Part, arrow_schema
from dmsg.analytics.table_queries import SQL_TYPES, days_condition, run_query

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


class Delta(DeltaLog):
    """Table of Delta Lake, with its rows and the upkeep of its files."""

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

    def location(self, file: File) -> str:
        """Return the URI at which Spark reads the file."""
        return f"{self.uri}/{file.path}"

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
                self.replace_files(small[key], rewrite(small[key]))
            return len(wanted)
        for key in wanted:
            filters = [(name, "=", value) for name, value in zip(self.partitions, key, strict=True)]
            with self.update_snapshot():
                table.optimize.compact(filters or None, post_commithook_properties=NO_LOG_CLEANUP)
        return len(wanted)

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
            with self.update_snapshot():
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
            with self.update_snapshot():
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
            return self.open(version) is not None
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
        with self.try_once() as properties:
            table.delete(
                f"dt < '{day}'" if text else f"dt < DATE '{day}'",
                commit_properties=properties,
                post_commithook_properties=NO_LOG_CLEANUP,
            )
