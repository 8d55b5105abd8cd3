"""Where tables lie, and which of them are current.

::

    OUT/bronze/origin=S/batch=N/family=F/dt=DAY/   what was read, once; S-stream by a stream
    OUT/silver/TABLE/run=N/dt=DAY/                 a run writes anew the days that it touches
    OUT/gold/TABLE/run=N/dt=DAY/
    OUT/overall/TABLE/run=N/                       gold tables that a run writes anew as a whole
    OUT/commits/                                   one line of JSON for each run that ended
    OUT/checkpoints/S/                             what a stream has read

A run writes only into directories of its own number and ends with one line in
``commits``: before that line nothing has changed for a reader, after it
everything.  A run that is killed leaves directories that nobody names; the
next one takes the same number and writes over them.  All of it goes through
Spark's own readers and writers, so that it works on any store that Spark knows;
only old directories are removed, and small ones merged, by hand, where the
store is this machine's disk.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import IntegerType, StringType, StructField, StructType

from dmsg.analytics import compaction
from dmsg.analytics.schemas import BRONZE, GOLD, OVERALL, QUARANTINE, SILVER, Table, write_options

FORMAT = 1
"""Of the commits: a lake of another format is not touched."""

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
_BATCH = StructType([one for one in BRONZE.fields if one.name != "batch"])
INTERNAL = {table.name: table for table in (SUMS, NUMBERS, FILES)}


class LakeError(Exception):
    """The tables cannot be used; the text says why."""


@dataclass(frozen=True)
class State:
    """What a commit says.

    :ivar run: its number, from 1; 0 before the first.
    :ivar batches: source -> its last batch that is in the tables.
    :ivar days: day -> the run that wrote its tables last.
    :ivar overall: the run that wrote the tables without days.
    :ivar at: ms since 1970, when the run began.
    """

    run: int = 0
    batches: dict[str, int] = field(default_factory=dict)
    days: dict[str, int] = field(default_factory=dict)
    overall: int = 0
    at: int = 0

    def with_days(self, days: Iterable[str], run: int) -> State:
        """With those days written by ``run``."""
        return replace(self, days={**self.days, **dict.fromkeys(days, run)})


def local_path(uri: str) -> Path | None:
    """The directory, if it is on this machine."""
    if uri.startswith("file:"):
        return Path("/" + uri.removeprefix("file:").lstrip("/"))
    return None if "://" in uri else Path(uri)


class Lake:
    """The tables under one directory or URI."""

    def __init__(self, spark: SparkSession, out: str) -> None:
        self.spark = spark
        local = local_path(out)
        self.root = out.rstrip("/") if local is None else str(local.absolute())
        self.local = local is not None

    # --- commits ---

    def state(self) -> State:
        """What the newest commit says.

        :raises LakeError: it is of another version of this program.
        """
        lines = self._commits()
        newest = State()
        for line in lines:
            try:
                said = json.loads(line)
                if said.get("format") != FORMAT:
                    raise LakeError(f"{self.root} was written by another version of dmsg")
                state = State(**{name: said[name] for name in ("run", "batches", "days", "overall", "at")})
                newest = max(newest, state, key=lambda one: int(one.run))
            except (ValueError, KeyError, TypeError, AttributeError):
                raise LakeError(f"{self.root}/commits holds what is no commit: {line[:60]!r}") from None
        return newest

    def computed(self) -> State:
        """The same, where there must be something.

        :raises LakeError: there are no tables yet.
        """
        state = self.state()
        if not state.days:
            raise LakeError(f"there are no tables in {self.root}: run `dmsg analytics run` first")
        return state

    def _commits(self) -> list[str]:
        try:
            rows = self.spark.read.text(f"{self.root}/commits").orderBy(F.col("value").desc()).collect()
        except AnalysisException as error:
            if "PATH_NOT_FOUND" in str(error) or "UNABLE_TO_INFER_SCHEMA" in str(error):
                return []
            raise
        return [row.value for row in rows]

    def commit(self, state: State) -> None:
        """Make a state the current one: one file appears, whole or not at all."""
        said: dict[str, Any] = {"format": FORMAT, **state.__dict__}
        line = self.spark.createDataFrame([(json.dumps(said),)], StructType([StructField("value", StringType())]))
        line.coalesce(1).write.mode("append").text(f"{self.root}/commits")

    # --- tables ---

    def _table(self, layer: str, name: str) -> Table:
        return INTERNAL.get(name) or (SILVER[name] if layer == "silver" else GOLD[name])

    def write(self, rows: DataFrame, layer: str, name: str, run: int) -> None:
        """Write a table's part of a run, over what a killed run of that number left."""
        table = self._table(layer, name)
        typed = rows.select(*[F.col(one.name).cast(one.dataType).alias(one.name) for one in table.schema.fields])
        writer = typed.write.mode("overwrite").options(**write_options(table.schema))
        if "dt" in table.schema.fieldNames():
            writer = writer.partitionBy("dt")
        writer.parquet(f"{self._place(layer, name)}/run={run}")

    def _place(self, layer: str, name: str) -> str:
        return f"{self.root}/{'overall' if name in OVERALL else layer}/{name}"

    def read(self, layer: str, name: str, state: State, days: Iterable[str] | None = None) -> DataFrame:
        """The current rows of a table.

        :param days: only those.
        """
        schema = self._table(layer, name).schema
        rows = self.spark.read.schema(StructType([*schema.fields, StructField("run", IntegerType())])).parquet(
            self._place(layer, name)
        )
        if name == "files":
            rows = rows.where(F.col("run") <= state.run)
        elif name in OVERALL:
            rows = rows.where(F.col("run") == state.overall)
        else:
            wanted = state.days if days is None else {day: state.days[day] for day in days if day in state.days}
            # partition columns only, so this chooses directories and reads nothing
            pairs = [f"{day}/{run}" for day, run in sorted(wanted.items())]
            rows = rows.where(F.concat_ws("/", F.col("dt").cast("string"), F.col("run").cast("string")).isin(pairs))
        return rows.select(*schema.fieldNames())

    def bronze(self) -> DataFrame:
        """All lines that were read."""
        schema = StructType([StructField("origin", StringType()), *BRONZE.fields])
        return self.spark.read.schema(schema).parquet(f"{self.root}/bronze")

    def quarantine(self) -> DataFrame:
        """What is no event: problem, line, file, batch, dt (the day it was read)."""
        return (
            self.bronze()
            .where(F.col("family") == QUARANTINE)
            .select("problem", "line", "file", "origin", "batch", "dt")
        )

    def paths(self, layer: str, name: str, state: State) -> list[str]:
        """Glob patterns of the Parquet files that are current, for other programs."""
        base = self._place(layer, name)
        if name in OVERALL:
            return [f"{base}/run={state.overall}/*.parquet"]
        return [f"{base}/run={run}/dt={day}/*.parquet" for day, run in sorted(state.days.items())]

    # --- room ---

    def recover(self) -> None:
        """Complete what a kill has interrupted; for those who write."""
        if self.local:
            for parent, kind in self._mergeable():
                compaction.finish(parent, kind)

    def _mergeable(self) -> list[tuple[Path, str]]:
        root = Path(self.root)
        origins = [(path, "batch=") for path in sorted(root.glob("bronze/origin=*"))]
        return [*origins, (root / "silver" / FILES.name, "run=")]

    def compact(self, state: State) -> int:
        """Make few directories of many small ones, on a local disk.

        :returns: how many were merged.
        """
        if not self.local:
            return 0
        compaction.prune(Path(self.root, "commits"))
        merged = 0
        for parent, kind in self._mergeable():
            if parent.name == FILES.name:
                last, schema = state.run, FILES.schema
                partitions: tuple[str, ...] = ()
            else:
                last = state.batches.get(parent.name.removeprefix("origin="), -1)
                schema, partitions = _BATCH, ("family", "dt")
            merged += compaction.merge(parent, kind, last, partial(self._read_directories, schema), partitions)
        return merged

    def _read_directories(self, schema: StructType, directories: list[str]) -> DataFrame:
        base = str(Path(directories[0]).parent)
        return self.spark.read.option("basePath", base).schema(schema).parquet(*directories)

    def vacuum(self, *states: State) -> int:
        """Remove directories that none of the states names, on a local disk.

        :returns: how many.
        """
        if not self.local:
            return 0
        removed = 0
        keep = {(run, day) for state in states for day, run in state.days.items()}
        overall = {state.overall for state in states}
        newest = max(state.run for state in states)
        for layer, names in (("silver", [*SILVER, SUMS.name, NUMBERS.name]), ("gold", GOLD)):
            for name in names:
                for directory in Path(self._place(layer, name)).glob("run=*"):
                    run = int(directory.name.removeprefix("run="))
                    if run > newest:
                        continue
                    if name in OVERALL:
                        old = [] if run in overall else [directory]
                    else:
                        days = list(directory.glob("dt=*"))
                        old = [day for day in days if (run, day.name.removeprefix("dt=")) not in keep]
                        if len(old) == len(days):
                            old = [directory]
                    for one in old:
                        shutil.rmtree(one, ignore_errors=True)
                        removed += 1
        return removed
