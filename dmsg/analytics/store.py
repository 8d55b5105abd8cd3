"""Where tables lie, what runs left of them, and how they are kept small; without Spark.

::

    OUT/bronze/           every line that was read
    OUT/silver/TABLE/     events, cleaned: a run writes anew the days that it touches
    OUT/gold/TABLE/       answers
    OUT/runs/             what each run left (:mod:`dmsg.analytics.runs`)
    OUT/checkpoints/S/    what a stream has read

All but the last are tables of Delta Lake (:mod:`dmsg.analytics.delta`).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType

from dmsg.analytics.delta import Delta, File, LakeError, unusable
from dmsg.analytics.runs import Claim, Runs, State
from dmsg.analytics.schemas import BRONZE, GOLD, OVERALL, SILVER, Table

Row = dict[str, Any]
"""A row of a table: its columns are in :mod:`dmsg.analytics.schemas`."""

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
    "every file that was read, and what is wrong with it",
    "file string, lines long, problem string",
)
INTERNAL = {table.name: table for table in (SUMS, NUMBERS, FILES)}
_PARTS = {**{("silver", name): one.schema for name, one in (SILVER | INTERNAL).items()}}
_PARTS |= {("gold", name): one.schema for name, one in GOLD.items()}
_PARTS["", "bronze"] = BRONZE
BRONZE_KEY = "/bronze"
"""In the versions of a state."""
MERGE_AT = 64
"""Small files of a partition that are made one of."""
LEFT_BEHIND_HOURS = 24
"""Files that no table names are removed when they are older: what killed runs left."""
TIDY_RUNS = 20
"""Runs after which files are merged and removed, if they follow each other fast;"""
TIDY_SECONDS = 6 * 3600
"""else after so long."""
_BATCH = re.compile(r"run=(?P<origin>.+)\.(?P<number>\d+)\.[0-9a-f]+/")
"""In the path of a file of bronze: of which source, and of which of its batches."""


def local_path(uri: str) -> Path | None:
    """The directory, if it is on this machine."""
    if uri.startswith("file:"):
        return Path("/" + uri.removeprefix("file:").lstrip("/"))
    return None if "://" in uri else Path(uri)


class Store:
    """The tables under one directory or URI."""

    def __init__(self, out: str) -> None:
        """:raises LakeError: tables cannot be there."""
        local = local_path(out)
        self.root = out.rstrip("/") if local is None else str(local.absolute())
        self.local = local is not None
        if (found := unusable(self.root)) is not None:
            raise LakeError(f"tables cannot be in {self.root}: its path has a {found}")
        if self.local and Path(self.root).exists() and not Path(self.root).is_dir():
            raise LakeError(f"tables cannot be in {self.root}: it is no directory")
        self.runs = Runs(self.root)

    # --- runs ---

    def state(self, at: datetime | None = None) -> State:
        """What the newest run left, or the newest that had begun by then.

        :raises LakeError: it is of another version of this program, or no longer there.
        """
        return self.runs.state(at)

    def computed(self, at: datetime | None = None) -> State:
        """The same, where there must be something.

        :raises LakeError: there are no tables yet.
        """
        state = self.state(at)
        if not state.days:
            raise LakeError(f"there are no tables in {self.root}: run `dmsg analytics run` first")
        return state

    def claim(self) -> Claim:
        """Begin to write.

        :raises LakeError: somebody else does, or the tables are of another version.
        """
        if self.state().run == 0 and not self.runs.any() and self.table("silver", "sums").version() is not None:
            raise LakeError(
                f"there are tables in {self.root}, but {self.root}/runs, which says which of them count, is gone: "
                "put it back, or move the tables away and run again"
            )
        return self.runs.claim()

    def finish(self, claim: Claim, state: State) -> State:
        """Make what was written current, as a whole."""
        versions = {}
        for layer, name in _PARTS:
            if (version := self.table(layer, name).version()) is not None:
                versions[f"{layer}/{name}"] = version
        state = replace(state, versions=versions)
        claim.finish(state)
        return state

    # --- tables ---

    def table(self, layer: str, name: str) -> Delta:
        """A table's files and transactions."""
        schema = _PARTS[layer, name]
        partitions = ["family", "dt"] if name == "bronze" else ["dt"] if _is_daily(schema, name) else []
        place = "/".join(filter(None, (self.root, layer, name)))
        return Delta(place, schema, partitions)

    def answer(self, name: str, state: State, since: str | None = None, until: str | None = None) -> pa.Table:
        """An answer, without Spark and its Java; those days have to have room in memory.

        :param since: of a table with days: only of this one, ``2026-01-31``, and later ones; ``until``: and no later.
        """
        return self.table("gold", name).read(state.versions.get(f"gold/{name}"), since=since, until=until)

    def rows(self, layer: str, name: str, state: State, day: str, where: Mapping[str, str] | None = None) -> list[Row]:
        """Rows of silver or gold of one day; of tables without days all.

        :param where: columns of text, and what has to stand in them.
        """
        version = state.versions.get(f"{layer}/{name}")
        found = self.table(layer, name).read(version, since=day, until=day, where=where)
        return [dict(row) for row in found.to_pylist()]

    def ask(self, layer: str, name: str, state: State, sql: str) -> list[Row]:
        """What a query of one table answers, without Spark; it is called ``it`` there."""
        key = BRONZE_KEY if name == "bronze" else f"{layer}/{name}"
        found = self.table(layer, name).ask(sql, state.versions.get(key))
        return [] if found is None else [dict(row) for row in found.to_pylist()]

    def gold(self, name: str, state: State, since: str | None = None) -> list[Row]:
        """The same as rows, of a table that has few."""
        return [dict(row) for row in self.answer(name, state, since).to_pylist()]

    # --- room ---

    def tidy(self, before: State, claim: Claim) -> int:
        """Now and then merge small files, and remove what no run that is kept names.

        :param before: what the newest run that ended has left.
        :returns: how many files were removed.
        """
        if claim.number % TIDY_RUNS and claim.at - before.at < TIDY_SECONDS * 1000:
            return 0
        return self.make_room(before, claim, MERGE_AT)

    def make_room(self, before: State, claim: Claim, least: int, *, left_behind: int | None = None) -> int:
        """The same at once.

        :param least: small files of one kind that are too many.
        :param left_behind: see :meth:`~dmsg.analytics.delta.Delta.vacuum`.
        """
        own = f"run={claim.number}."
        self.table("", "bronze").merge_small(least, lambda file: not unrefined(file, before.batches))
        # what this run has written, or one of its number that was killed, keeps its place
        self.table("silver", FILES.name).merge_small(least, lambda file: not file.path.startswith(own))
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

    def forget(self, claim: Claim, before: str) -> State:
        """Take the days before one out of all tables, and out of what is read.

        What has no days, as sums over all of them, is made anew by the next run.  Files that were read stay known:
        they are not read again.
        """
        state = self.state()
        for layer, name in _PARTS:
            claim.check()
            self.table(layer, name).forget(before)
        days = {day: run for day, run in state.days.items() if day >= before}
        return self.finish(claim, replace(state, run=claim.number, days=days, at=claim.at))


def _is_daily(schema: StructType, name: str) -> bool:
    return "dt" in schema.fieldNames() and name not in OVERALL


def unrefined(file: File, done: Mapping[str, int]) -> list[str]:
    """The source of a file of bronze that no run has refined; of others nothing.

    :param done: source -> its last batch that was refined.
    """
    found = _BATCH.match(file.path)
    return [found["origin"]] if found and int(found["number"]) > done.get(found["origin"], -1) else []


def _remove_empty(table: Path) -> None:
    """Directories of which all files were removed; nothing but checksums of those is in them."""
    for directory in table.glob("run=*"):
        if not any(directory.rglob("*.parquet")):
            shutil.rmtree(directory, ignore_errors=True)
