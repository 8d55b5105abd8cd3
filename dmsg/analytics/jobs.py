"""Reading, transforming, writing: one run over what is new.

Every step is named to ``progress``, so that a person sees where it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from fnmatch import fnmatch
from threading import Event
from urllib.parse import unquote

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession, functions as F
from pyspark.sql.streaming.query import StreamingQuery

from dmsg.analytics import bronze
from dmsg.analytics.lake import Lake
from dmsg.analytics.refine import MIDNIGHT_MS, Refinement
from dmsg.analytics.runs import Busy, Claim, State
from dmsg.analytics.schemas import CORRUPT, DAILY, DAY_MS, OVERALL, QUARANTINE, RAW, SILVER
from dmsg.telemetry.schema import EVENTS_PREFIX, RECEIPTS_PREFIX, SEGMENT_SUFFIX

MAX_LINE = 1024 * 1024
"""Bytes of a line of a spool; of a longer one the file lacks a line, which is noticed at its end."""
READ_OPTIONS = {
    "mode": "PERMISSIVE",
    "columnNameOfCorruptRecord": CORRUPT,
    # a file that is cut or is no gzip ends there; what it lacks is found by its missing last line
    "ignoreCorruptFiles": "true",
    "ignoreMissingFiles": "true",
    "mapreduce.input.linerecordreader.line.maxlength": str(MAX_LINE),
    # an event is what every reader of JSON takes for the same one: whoever looked at a file before must have seen it
    "lineSep": "\n",
    "allowSingleQuotes": "false",
    "allowNonNumericNumbers": "false",
}
AS_NAMED = {"__globPaths__": "false", "recursiveFileLookup": "true"}
"""Names of files and directories are names, whatever characters are in them: no patterns, no partitions.
Spark itself reads by the first of these what a stream has found; there is no other word for it."""
BATCH_BYTES = 2 * 1024**3
"""Bytes of files of one batch of a stream."""
LINES = "lines"
"""What is found by looking at files once more is called so in bronze."""
MOST_LACKING = 1000
"""Files of a run that are looked at once more."""
SMALL_BYTES = 64 * 1024 * 1024
"""Unread files of less than that are a little work to read."""
SMALL_EVENTS = 500_000
"""Fewer events in the days that are touched are a little work to refine."""
LITTLE = {
    # compiling it costs more than the work
    "spark.sql.codegen.wholeStage": "false",
    # so does each task; several tables are made at the same time
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.files.minPartitionNum": "1",
}
"""How Spark does a little work."""
PATIENCE = 3600.0
"""Seconds that a stream waits for who else writes."""

Progress = Callable[[str, int, int], None]
"""Told (what begins, steps done, steps in all)."""


@dataclass(frozen=True)
class Source:
    """Files to read.

    :ivar name: of its part of bronze.
    :ivar path: directory or URI; looked through with all below.
    :ivar pattern: of the files' names.
    :ivar checked: they hold receipts whose signatures were checked.
    """

    name: str
    path: str
    pattern: str
    checked: bool = False


def spool_source(path: str) -> Source:
    """What entities wrote."""
    return Source("spool", path, f"{EVENTS_PREFIX}*{SEGMENT_SUFFIX}")


def receipts_source(path: str) -> Source:
    """Receipts that were checked."""
    return Source("receipts", path, f"{RECEIPTS_PREFIX}*{SEGMENT_SUFFIX}", checked=True)


@dataclass(frozen=True)
class Outcome:
    """What a run did."""

    state: State
    days: list[str]
    events: int
    quarantined: int
    torn_files: int
    duplicates: int


def _no_progress(what: str, done: int, total: int) -> None:
    pass


@dataclass(frozen=True)
class Taken:
    """The new lines of bronze, as one run takes them in.

    :ivar batches: source -> its last batch.
    :ivar days: days to refine, in order; none if there are no events.
    :ivar events: number of lines that are events.
    :ivar quarantined: number of lines that are not.
    """

    batches: dict[str, int]
    days: list[str]
    events: int
    quarantined: int


class Pipeline:
    """The jobs over one lake.

    :param now: the time of the run, for events of the future, the age of days.
    :param tune: do little work in another way than much; else all as if it were much.
    """

    def __init__(
        self,
        spark: SparkSession,
        out: str,
        *,
        now: datetime | None = None,
        progress: Progress = _no_progress,
        tune: bool = True,
    ) -> None:
        self.lake = Lake(spark, out)
        self.spark = spark
        self.now = now or datetime.now(UTC)
        self._progress = progress
        self._done = 0
        self._may_tune = tune
        self._small = tune
        self._usual: dict[str, str | None] = {}
        self._total = len(SILVER) + len(DAILY) + len(OVERALL) + 6

    @property
    def _now_ms(self) -> int:
        return int(self.now.timestamp() * 1000)

    def _step(self, what: str) -> None:
        self._progress(what, self._done, self._total)
        self._done += 1

    # --- bronze ---

    def follow(
        self,
        source: Source,
        every: str,
        after: Callable[[Claim], object],
        lock: AbstractContextManager[object],
        stop: Event,
    ) -> StreamingQuery:
        """Begin to read what comes, as a stream.

        :param every: how often to look, as in ``30 seconds``.
        :param after: called after each batch, before others may write; both hold ``lock``.
        :param stop: when it is set nobody waits for who else writes.
        """
        lines = (
            self.spark.readStream.schema(RAW)
            .options(**READ_OPTIONS)
            .option("recursiveFileLookup", "true")
            .option("pathGlobFilter", source.pattern)
            .option("maxBytesPerTrigger", BATCH_BYTES)
            .json(source.path)
            .withColumn("file", F.col("_metadata.file_path"))
        )

        def write(batch: DataFrame, number: int) -> None:
            # a new checkpoint counts from 0 again
            query = batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId") or ""
            origin = f"{source.name}-stream-{query[:8]}"
            with lock:
                with self._turn(stop) as claim:
                    self.lake.held = claim
                    state = self.lake.state()
                    if number <= state.batches.get(origin, -1):
                        return  # it is in the tables; Spark was killed before it wrote that down
                    # what a run has read in the meantime, of which the stream's checkpoint does not know
                    known = self._known(state).withColumnRenamed("file", "known")
                    batch = batch.join(known, bronze.uri(F.col("file")) == F.col("known"), "left_anti")
                    now_ms = int(datetime.now(UTC).timestamp() * 1000)
                    self._write_bronze(batch, origin, number, now_ms, checked=source.checked)
                    after(claim)

        writer = (
            lines.writeStream.foreachBatch(write)
            .queryName(f"bronze-{source.name}")
            .option("checkpointLocation", f"{self.lake.root}/checkpoints/{source.name}")
        )
        return writer.trigger(processingTime=every).start()

    def catch_up(self, after: Callable[[Claim], object]) -> None:
        """Call ``after``, unless somebody else writes now."""
        with suppress(Busy), self.lake.claim() as claim:
            self.lake.held = claim
            after(claim)

    def _turn(self, stop: Event) -> Claim:
        """Wait until nobody else writes, but not for ever."""
        patience = time.monotonic() + PATIENCE
        while True:
            try:
                return self.lake.claim()
            except Busy:
                if stop.wait(1.0) or time.monotonic() > patience:
                    raise

    def _write_bronze(
        self, lines: DataFrame, origin: str, number: int, now_ms: int, *, checked: bool = False, anew: bool = False
    ) -> None:
        rows = bronze.bronze(lines, now_ms=now_ms, checked=checked)
        rows = rows.withColumns({"origin": F.lit(origin), "batch": F.lit(number)})
        self.lake.add_bronze(rows, origin, number, anew=anew)

    def _ingest(self, source: Source, unread: list[str]) -> None:
        """Read files that no run has seen."""
        files = [file for file in unread if fnmatch(file.rpartition("/")[2], source.pattern)]
        if files:
            lines = self.spark.read.schema(RAW).options(**READ_OPTIONS, **AS_NAMED).json(files)
            lines = lines.withColumn("file", F.col("_metadata.file_path"))
            number = self.lake.batch(source.name) + 1
            self._write_bronze(lines, source.name, number, self._now_ms, checked=source.checked)

    def _listing(self, sources: Iterable[Source]) -> DataFrame:
        """All files that are there: as Spark calls them, as they are called, and their lengths."""
        listing = None
        for source in sources:
            files = (
                self.spark.read.format("binaryFile")
                .option("pathGlobFilter", source.pattern)
                .options(**AS_NAMED)
                .load(source.path)
                .select(bronze.uri(F.col("_metadata.file_path")).alias("file"), "path", "length")
            )
            listing = files if listing is None else listing.unionByName(files)
        assert listing is not None
        return listing

    # --- a run ---

    def run(self, sources: list[Source]) -> Outcome:
        """Read what is new and bring every table up to date.

        :raises LakeError: the tables are of another version.
        """
        with self.lake.claim() as claim:
            self.lake.held = claim
            return self._run(sources, claim)

    def _run(self, sources: list[Source], claim: Claim) -> Outcome:
        before = self.lake.state()
        return self.refine(before, claim, self.read(sources, before))

    def read(self, sources: list[Source], before: State) -> list[str]:
        """Write the lines of unread files to bronze.

        :param before: as the last run left it.
        :returns: the files that no run has refined, as Spark calls them.
        """
        self._step("listing files")
        unread = self._listing(sources).join(self._known(before), "file", "left_anti").collect()
        # a run or a stream that was killed after it had read something is taken up where it was
        if unread or self.lake.unrefined(before.batches):
            self._tune(sum(row.length for row in unread) < SMALL_BYTES)
            for source in sources:
                self._step(f"bronze: {source.name}")
                self._ingest(source, [row.path for row in unread])
        return [row.file for row in unread]

    def begin_small(self) -> None:
        """Expect a little work, until it is seen how much there is."""
        self._tune(True)

    def _tune(self, small: bool) -> None:
        """For a little work compiling it costs more than the work."""
        self._small = small and self._may_tune
        for name, little in LITTLE.items():
            self._usual.setdefault(name, self.spark.conf.get(name, None))
            if self._small:
                self.spark.conf.set(name, little)
            elif (usual := self._usual[name]) is None:
                self.spark.conf.unset(name)
            else:
                self.spark.conf.set(name, usual)

    def refine(self, before: State, claim: Claim, unread: list[str]) -> Outcome:
        """Silver and gold of the days that bronze's new batches touch, and the run's last word.

        :param unread: files that were there, and that no run before has seen.
        """
        lake, number = self.lake, claim.number
        taken = self.take_in(before, number, unread)
        if taken is None:
            self._progress("nothing is new", self._total, self._total)
            return Outcome(before, [], 0, 0, 0, 0)
        days = taken.days
        at = self._now_ms
        state = replace(before.with_days(days, number), run=number, batches=taken.batches, at=at, versions={})
        duplicates = 0
        if days:
            self._tune(lake.bronze(days=days).count() < SMALL_EVENTS)
            tables = Refinement(lake, claim, state, days, today=self.now.date(), small=self._small, step=self._step)
            duplicates = tables.silver()
            tables.gold_daily()
            tables.gold_overall()
        torn = self._torn(number)
        self._step("commit")
        # before the last word: the files of what a reader may be reading stay, and nobody else writes meanwhile
        lake.tidy(before, claim)
        state = lake.finish(claim, state)
        self._progress("done", self._total, self._total)
        return Outcome(state, days, taken.events, taken.quarantined, torn, duplicates)

    def take_in(self, before: State, number: int, unread: list[str]) -> Taken | None:
        """Write what is known of the files of bronze's new batches, and find the days that these touch.

        :param number: of the run.  For the others see :meth:`refine`.
        :returns: None if nothing is new.
        """
        lake = self.lake
        if not unread and not lake.unrefined(before.batches):
            return None
        fresh = lake.fresh(before.batches)
        self._step("which days are touched")
        taken = self._touched(fresh, before)
        if taken.batches == before.batches and not unread:
            return None
        self._write_files(bronze.file_report(fresh), number, unread)
        if self._add_passed_over(number):
            fresh = lake.fresh(before.batches)
            taken = self._touched(fresh, before)
            self._write_files(bronze.file_report(fresh), number, unread)
        return taken

    @staticmethod
    def _touched(fresh: DataFrame, before: State) -> Taken:
        of_day = F.col("ts") % DAY_MS
        witness = F.col("family").isin("transport", "receipt")
        rows = (
            fresh.groupBy("origin", "family", "dt")
            .agg(
                F.max("batch").alias("batch"),
                F.count(F.lit(1)).alias("lines"),
                F.coalesce(F.bool_or(witness & (of_day < MIDNIGHT_MS)), F.lit(False)).alias("early"),
                F.coalesce(F.bool_or(witness & (of_day >= DAY_MS - MIDNIGHT_MS)), F.lit(False)).alias("late"),
            )
            .collect()
        )
        batches = dict(before.batches)
        days: set[str] = set()
        near: set[str] = set()
        for row in rows:
            batches[row.origin] = max(batches.get(row.origin, -1), row.batch)
            if row.family != QUARANTINE:
                days.add(row.dt)
                day = date.fromisoformat(row.dt)
                near |= {str(day - timedelta(1))} if row.early else set()
                near |= {str(day + timedelta(1))} if row.late else set()
        days |= near & set(before.days)
        quarantined = sum(row.lines for row in rows if row.family == QUARANTINE)
        return Taken(batches, sorted(days), sum(row.lines for row in rows) - quarantined, quarantined)

    def _add_passed_over(self, number: int) -> bool:
        """Add lines of which Spark's reader of JSON makes no rows, for quarantine.

        :returns: whether there are any.
        """
        lacking = self.lake.of_run("silver", "files", number).where(F.col("problem") == bronze.LACKING)
        files = [unquote(row.file) for row in lacking.limit(MOST_LACKING).collect()]
        if not files:
            return False
        texts = self.spark.read.options(**READ_OPTIONS, **AS_NAMED).text(files)
        lines = texts.where(F.col("value").rlike(bronze.PASSED_OVER)).withColumn("file", F.col("_metadata.file_path"))
        nothing = [
            f"CAST(NULL AS {one.dataType.simpleString()}) AS `{one.name}`" for one in RAW.fields if one.name != CORRUPT
        ]
        self._write_bronze(
            lines.selectExpr(*nothing, f"value AS `{CORRUPT}`", "file"), LINES, number, self._now_ms, anew=True
        )
        return True

    def _write_files(self, told: DataFrame, number: int, unread: list[str]) -> None:
        self._step("files")
        lake = self.lake
        if unread:
            names = self.spark.createDataFrame(pa.table({"file": pa.array(unread, pa.string())}))
            told = names.join(told, "file", "full_outer").select(
                "file",
                F.coalesce("lines", F.lit(0)).alias("lines"),
                F.when(F.col("lines").isNull(), "nothing in it can be read")
                .otherwise(F.col("problem"))
                .alias("problem"),
            )
        lake.write(told.coalesce(1), "silver", "files", number, more=True)

    def _known(self, state: State) -> DataFrame:
        """Files that were read: by runs that ended, and by those that were killed."""
        known = self.lake.read("silver", "files", state).select("file")
        if state.run == 0:  # what the first one wrote before it was killed counts for nothing
            known = known.limit(0)
        return known.unionByName(bronze.files(self.lake.fresh(state.batches)))

    def _torn(self, run: int) -> int:
        """Files of that run that have a problem."""
        return self.lake.of_run("silver", "files", run).where(F.col("problem").isNotNull()).count()
