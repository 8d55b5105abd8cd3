"""Layout of the tables, their current state, and their maintenance; needs no Spark.

::

    OUT/bronze/           all lines that were read
    OUT/silver/TABLE/     checked events; a run rewrites the days that have new events
    OUT/gold/TABLE/       answers to questions
    OUT/runs/             the state that each run left (:mod:`dmsg.analytics.runs`)
    OUT/checkpoints/S/    names of the files that a stream has read

All but the last are tables of Delta Lake (:mod:`dmsg.analytics.delta`).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType

from dmsg.analytics.data_files import File, is_of_run
from dmsg.analytics.delta import Delta, unusable_character
from dmsg.analytics.file_hashes import FileSearch
from dmsg.analytics.lake_error import LakeError
from dmsg.analytics.runs import Claim, Runs, State
from dmsg.analytics.schemas import BRONZE, GOLD, OVERALL, SILVER, Table
from dmsg.analytics.table_queries import days_condition
from dmsg.analytics.views import VIEWS
from dmsg.directory_checks import UnsafeDirectory, check_not_planted

Row = dict[str, Any]
"""Row of a table, by column name; the columns are in ``dmsg.analytics.schemas``."""

SUMS = Table(
    "sums",
    "how many events there are of a process and a bucket of numbers",
    "producer string, boot string, bucket long, events long, first long, last long, total long, squares long,"
    " least_start long, greatest_start long, first_ts long, last_ts long, dt date",
)
NUMBERS = Table(
    "numbers",
    "which numbers of events have arrived",
    "producer string, boot string, bucket long, events long, distinct_events long, first long, last long,"
    " least_start long, greatest_start long, first_ts long, last_ts long, dt date",
)
FILES = Table(
    "files",
    "every file that was read, its size and hash, what is wrong with it, and the batch of bronze that has its lines",
    "file string, lines long, problem string, file_bytes long, file_sha256 string, origin string, batch long",
)
INTERNAL = {table.name: table for table in (SUMS, NUMBERS, FILES)}
_PARTS = {**{("silver", name): one.schema for name, one in (SILVER | INTERNAL).items()}}
_PARTS |= {("gold", name): one.schema for name, one in GOLD.items()}
_PARTS["", "bronze"] = BRONZE
BRONZE_KEY = "/bronze"
"""Key for the table bronze in :attr:`~dmsg.analytics.runs.State.versions`."""
MERGE_AT = 64
"""Number of small files in a partition at which they are merged."""
LEFT_BEHIND_HOURS = 24
"""Age in hours above which files that the log of their table does not name are removed. Killed runs leave such
files."""
TIDY_RUNS = 20
"""Number of runs after which small files are merged and unneeded files are removed."""
TIDY_SECONDS = 6 * 3600
"""Seconds since the previous run after which a run merges and removes files, even if its number is not a multiple of
:data:`TIDY_RUNS` (6 hours).
"""
_BATCH = re.compile(r"run==?(?P<origin>.+)\.(?P<number>\d+)\.[0-9a-f]+/")
"""Regular expression for the start of the path of a bronze file, with the source and the number of the batch."""


def local_path(uri: str) -> Path | None:
    """Return the local directory that a URI names, or None for a URI that names no local directory."""
    if uri.startswith("file:"):
        return Path("/" + uri.removeprefix("file:").lstrip("/"))
    return None if "://" in uri else Path(uri)


class Store:
    """Tables under one directory or URI."""

    def __init__(self, out: str) -> None:
        """Open the tables under ``out``.

        :raises LakeError: the path cannot hold tables.
        """
        local = local_path(out)
        self.root = out.rstrip("/") if local is None else str(local.absolute())
        self.local = local is not None
        if (found := unusable_character(self.root)) is not None:
            raise LakeError(f"tables cannot be in {self.root}: its path has a {found}")
        if self.local and Path(self.root).exists() and not Path(self.root).is_dir():
            raise LakeError(f"tables cannot be in {self.root}: it is not a directory")
        self.runs = Runs(self.root)
        self._claim: Claim | None = None
        # Later runs of the same process search the same files, so what is known about their contents is kept.
        self._searches: dict[str, FileSearch] = {}
        self._tables: dict[tuple[str, str], Delta] = {}

    # --- runs ---

    def state(self, at: datetime | None = None) -> State:
        """Return the state that the newest finished run left.

        :param at: return the state of the newest run that had begun by this time instead.
        :raises LakeError: the state has another format, or is no longer stored.
        """
        return self.runs.state(at)

    def computed_state(self, at: datetime | None = None) -> State:
        """Return the same state as :meth:`state`, but raise an error if there are no tables yet.

        :raises LakeError: there are no tables yet.
        """
        state = self.state(at)
        if not state.days:
            raise LakeError(f"there are no tables in {self.root}: run `dmsg analytics run` first")
        return state

    def claim(self) -> Claim:
        """Claim the right to write to the tables.

        :raises LakeError: another run is writing, the tables have another format, ``OUT/runs`` is missing, or another
            user has put the directory, or one above it, into a shared directory.
        """
        if self.local:
            try:
                check_not_planted(Path(self.root))
            except UnsafeDirectory as error:
                raise LakeError(f"tables cannot be in {self.root}: {error.strerror}") from None
        if self.state().run == 0 and not self.runs.has_begun() and self.table("silver", "sums").version() is not None:
            raise LakeError(
                f"there are tables in {self.root}, but {self.root}/runs, the list of valid tables, is missing: "
                "restore it, or move the tables away and run again"
            )
        claim = self._claim = self.runs.claim()
        # Snapshots that were cached during an earlier claim may be out of date, so they are dropped.
        self._tables = {}
        return claim

    def finish(self, claim: Claim, state: State) -> State:
        """Commit the newest versions of all tables as the state that readers see, in one transaction."""
        versions = {}
        for layer, name in _PARTS:
            if (version := self.table(layer, name).version()) is not None:
                versions[f"{layer}/{name}"] = version
        state = replace(state, versions=versions)
        claim.finish(state)
        return state

    # --- tables ---

    @staticmethod
    def names() -> Iterable[tuple[str, str]]:
        """Return the layer and name of each table. The layer of the table bronze is an empty text."""
        return _PARTS.keys()

    def table(self, layer: str, name: str) -> Delta:
        """Return the object with which the files and transactions of a table are accessed."""
        claim = self._claim
        if claim is None or claim.is_over:
            return self._table(layer, name, lambda: False)
        return self._tables.setdefault((layer, name), self._table(layer, name, lambda: not claim.is_over))

    def _table(self, layer: str, name: str, is_exclusive: Callable[[], bool]) -> Delta:
        schema = _PARTS[layer, name]
        partitions = ["family", "dt"] if name == "bronze" else ["dt"] if _is_daily(schema, name) else []
        place = "/".join(filter(None, (self.root, layer, name)))
        return Delta(place, schema, partitions, is_exclusive=is_exclusive, searches=self._searches)

    def answer(self, name: str, state: State, since: str | None = None, until: str | None = None) -> pa.Table:
        """Read rows of a gold table without Spark or Java. The rows have to fit in memory.

        :param since: first day, as ``2026-01-31``, of a table that has days.
        :param until: last day, included.
        """
        return self.table("gold", name).read(state.versions.get(f"gold/{name}"), since=since, until=until)

    def rows(self, layer: str, name: str, state: State, day: str, where: Mapping[str, str] | None = None) -> list[Row]:
        """Return the rows of a silver or gold table of one day, or all rows of a table without days.

        :param where: mapping from text columns to values; only the rows with these values are returned.
        """
        if layer == "silver" and name in VIEWS and day not in self.stored_days(name, state):
            view = f"SELECT * FROM ({VIEWS[name].sql(name)}) AS v WHERE {days_condition(day, day, where)}"  # noqa: S608
            return self.ask("", "bronze", state, view)
        version = state.versions.get(f"{layer}/{name}")
        found = self.table(layer, name).read(version, since=day, until=day, where=where)
        return [dict(row) for row in found.to_pylist()]

    def stored_days(self, name: str, state: State) -> set[str]:
        """Return the days for which a view, which is a silver table, has stored rows."""
        files = self.table("silver", name).files(state.versions.get(f"silver/{name}"))
        return {file.values["dt"] for file in files}

    def ask(self, layer: str, name: str, state: State, sql: str) -> list[Row]:
        """Return the rows that an SQL query of one table selects, without Spark. In the query the table's name is
        ``it``."""
        key = BRONZE_KEY if name == "bronze" else f"{layer}/{name}"
        found = self.table(layer, name).ask(sql, state.versions.get(key))
        return [] if found is None else [dict(row) for row in found.to_pylist()]

    def gold(self, name: str, state: State, since: str | None = None) -> list[Row]:
        """Return the rows of a small gold table.

        :param since: first day, as ``2026-01-31``; None for all days.
        """
        return [dict(row) for row in self.answer(name, state, since).to_pylist()]

    # --- maintenance ---

    def tidy(self, before: State, claim: Claim, at: int) -> int:
        """Merge small files and remove unneeded files, but only in every twentieth run (:data:`TIDY_RUNS`), or if the
        previous run was at least :data:`TIDY_SECONDS` ago. The first run has nothing to merge or to remove.

        :param before: state that the newest finished run left.
        :param at: time of this run in ms since 1970, by the clock of the states.
        :returns: number of files removed.
        """
        if not before.run or (claim.number % TIDY_RUNS and at - before.at < TIDY_SECONDS * 1000):
            return 0
        return self.make_room(before, claim, MERGE_AT)

    def make_room(self, before: State, claim: Claim, least: int, *, left_behind: int | None = None) -> int:
        """Merge small files, and remove the files of versions that readers may no longer open.

        :param least: number of small files in a partition at which they are merged.
        :param left_behind: see :meth:`~dmsg.analytics.delta.Delta.vacuum`.
        """
        own = str(claim.number)
        self._merge_small(self.table("", "bronze"), least, lambda file: not unrefined(file, before.batches))
        # Partitions with a file of the current run are not merged, because a run finds its own files by their paths. If
        # this run is killed, the run that repeats it finds the files in the same way.
        self._merge_small(self.table("silver", FILES.name), least, lambda file: not is_of_run(file.path, own))
        kept = self.runs.states()
        removed = 0
        for layer, name in _PARTS:
            table = self.table(layer, name)
            versions = {one.versions[key] for one in kept if (key := f"{layer}/{name}") in one.versions}
            claim.check()
            removed += table.vacuum(sorted(versions), left_behind=left_behind)
            if self.local:
                _remove_empty(Path(table.uri))
        return removed

    def _merge_small(self, table: Delta, least: int, is_mergeable: Callable[[File], bool]) -> None:
        table.merge_small(least, is_mergeable)

    def forget(self, claim: Claim, before: str) -> State:
        """Delete all rows of the days before ``before``.

        The next run recomputes the tables without days, such as totals over all days. The names of the files that were
        read are not deleted, so these files are not read again.
        """
        state = self.state()
        for layer, name in _PARTS:
            claim.check()
            self.table(layer, name).forget(before)
        days = {day: run for day, run in state.days.items() if day >= before}
        return self.finish(claim, replace(state, run=claim.number, days=days, at=claim.at, today=""))


def _is_daily(schema: StructType, name: str) -> bool:
    return "dt" in schema.fieldNames() and name not in OVERALL


def batch_of(file: File) -> list[tuple[str, int]]:
    """Return a list with the source and the batch number of a bronze file. The list is empty for a merged file, all
    batches of which are refined."""
    found = _BATCH.match(file.path)
    return [(found["origin"], int(found["number"]))] if found else []


def unrefined(file: File, done: Mapping[str, int]) -> list[str]:
    """Return a list with the source of a bronze file if no run has refined the file yet; otherwise an empty list.

    :param done: number of the last refined batch of each source.
    """
    return [origin for origin, number in batch_of(file) if number > done.get(origin, -1)]


def _remove_empty(table: Path) -> None:
    """Remove directories without Parquet files. They contain only checksums of files that were removed."""
    for directory in table.glob("run=*"):
        if not any(directory.rglob("*.parquet")):
            shutil.rmtree(directory, ignore_errors=True)
