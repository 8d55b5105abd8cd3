"""Reading, transforming, writing: one run over what is new.

Every step is named to ``progress``, so that a person sees where it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from fnmatch import fnmatch
from functools import cache
from threading import Event
from typing import Any
from urllib.parse import unquote

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from dmsg.analytics import bronze, silver
from dmsg.analytics.gold import abuse, capacity, network, settlement, traffic, uptime
from dmsg.analytics.lake import Lake
from dmsg.analytics.runs import Busy, Claim, State
from dmsg.analytics.schemas import CORRUPT, DAILY, DAY_MS, FAMILIES, OVERALL, QUARANTINE, RAW, SILVER
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
STREAM = "-stream"
"""What a stream's part of bronze is called after its source: its checkpoint numbers the batches."""
MIDNIGHT_MS = 10 * 60 * 1000
"""Three words of one transport lie within this of each other: only events so near to midnight matter to the
day before or after."""
SMALL_BYTES = 64 * 1024 * 1024
"""Unread files of less than that are a little work to read."""
SMALL_EVENTS = 500_000
"""Fewer events in the days that are touched are a little work to refine."""
SMALL_WORKERS = 4
_OF_GOLD = ("minute_day", "capacity_day", "latency_day", "network_day")
"""Tables made of other gold tables of the same days."""
PATIENCE = 3600.0
"""Seconds that a stream waits for who else writes."""
FEW_CONFLICTS = 200_000
"""Conflicts of that many have room in the driver's memory."""
HISTORY_DAYS = 28
"""Days that the tables without days look back."""

Progress = Callable[[str, int, int], None]
"""Told (what begins, steps done, steps in all)."""


@dataclass(frozen=True)
class Source:
    """Files to read.

    :ivar name: of its part of bronze.
    :ivar path: directory or URI; looked through with all below.
    :ivar pattern: of the files' names.
    """

    name: str
    path: str
    pattern: str


def spool_source(path: str) -> Source:
    """What entities wrote."""
    return Source("spool", path, f"{EVENTS_PREFIX}*{SEGMENT_SUFFIX}")


def receipts_source(path: str) -> Source:
    """Receipts that were checked."""
    return Source("receipts", path, f"{RECEIPTS_PREFIX}*{SEGMENT_SUFFIX}")


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
        self._claim: Claim | None = None
        self._small = tune
        self._total = len(SILVER) + len(DAILY) + len(OVERALL) + 6

    @property
    def _now_ms(self) -> int:
        return int(self.now.timestamp() * 1000)

    @property
    def today(self) -> date:
        """The day of the run."""
        return self.now.date()

    def _step(self, what: str) -> None:
        self._progress(what, self._done, self._total)
        self._done += 1

    # --- bronze ---

    def follow(
        self,
        source: Source,
        every: str,
        after: Callable[[Claim], Any],
        lock: AbstractContextManager[Any],
        stop: Event,
    ) -> StreamingQuery:
        """Begin to read what comes, as a stream.

        :param every: how often to look, as in ``30 seconds``.
        :param after: called after each batch, before others may write; both hold ``lock``.
        :param stop: when it is set nobody waits for who else writes.
        """
        origin = source.name + STREAM
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
            with lock:
                with self._turn(stop) as claim:
                    state = self.lake.state()
                    if number <= state.batches.get(origin, -1):
                        return  # it is in the tables; Spark was killed before it wrote that down
                    if state.run:
                        # what a run has read in the meantime, of which the stream's checkpoint does not know
                        known = self.lake.read("silver", "files", state).select(F.col("file").alias("known"))
                        batch = batch.join(known, bronze.uri(F.col("file")) == F.col("known"), "left_anti")
                    now_ms = int(datetime.now(UTC).timestamp() * 1000)
                    self._write_bronze(batch, origin, number, now_ms)
                    after(claim)

        writer = (
            lines.writeStream.foreachBatch(write)
            .queryName(f"bronze-{source.name}")
            .option("checkpointLocation", f"{self.lake.root}/checkpoints/{source.name}")
        )
        return writer.trigger(processingTime=every).start()

    def _turn(self, stop: Event) -> Claim:
        """Wait until nobody else writes, but not for ever."""
        patience = time.monotonic() + PATIENCE
        while True:
            try:
                return self.lake.claim()
            except Busy:
                if stop.wait(1.0) or time.monotonic() > patience:
                    raise

    def _write_bronze(self, lines: DataFrame, origin: str, number: int, now_ms: int) -> None:
        rows = bronze.bronze(lines, now_ms=now_ms).withColumns({"origin": F.lit(origin), "batch": F.lit(number)})
        self.lake.add_bronze(rows, origin, number)

    def _ingest(self, source: Source, unread: list[str]) -> None:
        """Read files that no run has seen."""
        files = [file for file in unread if fnmatch(file.rpartition("/")[2], source.pattern)]
        if files:
            lines = self.spark.read.schema(RAW).options(**READ_OPTIONS, **AS_NAMED).json(files)
            lines = lines.withColumn("file", F.col("_metadata.file_path"))
            self._write_bronze(lines, source.name, self.lake.batch(source.name) + 1, self._now_ms)

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
            return self._run(sources, claim)

    def _run(self, sources: list[Source], claim: Claim) -> Outcome:
        before = self.lake.state()
        self._step("listing files")
        unread = self._unread(before, self._listing(sources)).collect()
        names = [source.name for source in sources]
        # a run that was killed after it had read something is taken up where it was
        if again := self.lake.unrefined(before.batches) & set(names):
            read = {row.file for row in bronze.files(self.lake.fresh(before.batches, again.__contains__)).collect()}
            unread = [row for row in unread if row.file not in read]
        elif not unread:
            self._progress("nothing is new", self._total, self._total)
            return Outcome(before, [], 0, 0, 0, 0)
        self._tune(sum(row.length for row in unread) < SMALL_BYTES)
        for source in sources:
            self._step(f"bronze: {source.name}")
            self._ingest(source, [row.path for row in unread])
        return self.refine(before, claim, [row.file for row in unread])

    def begin_small(self) -> None:
        """Expect a little work, until it is seen how much there is."""
        self._tune(True)

    def _tune(self, small: bool) -> None:
        """For a little work compiling it costs more than the work."""
        self._small = small and self._may_tune
        self.spark.conf.set("spark.sql.codegen.wholeStage", str(not self._small).lower())

    def refine(
        self, before: State, claim: Claim, unread: list[str], *, stream: bool = False, known: DataFrame | None = None
    ) -> Outcome:
        """Silver and gold of the days that bronze's new batches touch, and the run's last word.

        :param unread: files that were there, and that no run before has seen.
        :param known: what is known of the files, instead of what their lines tell.
        :param stream: of batches that a stream wrote.  Each sees to its own: those of the other may be unfinished.
        """
        lake, number = self.lake, claim.number
        self._claim = claim

        def origins(origin: str) -> bool:
            return origin.endswith(STREAM) is stream

        fresh = lake.fresh(before.batches, origins)
        self._step("which days are touched")
        batches, days, events, quarantined = self._touched(fresh, before)
        if batches == before.batches and not unread:
            self._progress("nothing is new", self._total, self._total)
            return Outcome(before, [], 0, 0, 0, 0)
        self._write_files(bronze.file_report(fresh) if known is None else known, number, unread)
        if known is None and self._add_passed_over(LINES + (STREAM if stream else ""), number):
            fresh = lake.fresh(before.batches, origins)
            batches, days, events, quarantined = self._touched(fresh, before)
            self._write_files(bronze.file_report(fresh), number, unread)
        state = replace(before.with_days(days, number), run=number, batches=batches, at=self._now_ms, versions={})
        duplicates = 0
        if days:
            self._tune(lake.bronze(days=days).count() < SMALL_EVENTS)
            duplicates = self._silver(state, days, number)
            self._gold_daily(state, days, number)
            self._gold_overall(state, number)
        self._step("commit")
        state = lake.finish(claim, state)
        lake.tidy(state)
        self._progress("done", self._total, self._total)
        return Outcome(state, days, events, quarantined, self._torn(number), duplicates)

    def _touched(self, fresh: DataFrame, before: State) -> tuple[dict[str, int], list[str], int, int]:
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
        return (
            batches,
            sorted(days),
            sum(row.lines for row in rows if row.family != QUARANTINE),
            sum(row.lines for row in rows if row.family == QUARANTINE),
        )

    def _add_passed_over(self, origin: str, number: int) -> bool:
        """Add lines of which Spark's reader of JSON makes no rows, for quarantine.

        :returns: whether there are any.
        """
        lacking = self.lake.of_run("silver", "files", number).where(F.col("problem") == bronze.LACKING)
        files = [unquote(row.file) for row in lacking.limit(MOST_LACKING).collect()]
        if not files:
            return False
        texts = self.spark.read.options(**READ_OPTIONS, **AS_NAMED).text(files)
        lines = texts.where(F.col("value").rlike(bronze.PASSED_OVER)).withColumn("file", F.col("_metadata.file_path"))
        nothing = [F.lit(None).cast(one.dataType).alias(one.name) for one in RAW.fields if one.name != CORRUPT]
        self._write_bronze(lines.select(*nothing, F.col("value").alias(CORRUPT), "file"), origin, number, self._now_ms)
        return True

    def _write_files(self, told: DataFrame, number: int, unread: list[str]) -> None:
        self._step("files")
        lake = self.lake
        if unread:
            names = self.spark.createDataFrame([(name,) for name in unread], "file string")
            told = names.join(told, "file", "full_outer").select(
                "file",
                F.coalesce("lines", F.lit(0)).alias("lines"),
                F.when(F.col("lines").isNull(), "nothing in it can be read")
                .otherwise(F.col("problem"))
                .alias("problem"),
            )
        lake.write(told.coalesce(1), "silver", "files", number, more=True)

    def _unread(self, before: State, listing: DataFrame) -> DataFrame:
        """Files that no run before has seen."""
        if before.run == 0:
            return listing
        return listing.join(self.lake.read("silver", "files", before).select("file"), "file", "left_anti")

    def _torn(self, run: int) -> int:
        """Files of that run that have a problem."""
        return self.lake.of_run("silver", "files", run).where(F.col("problem").isNotNull()).count()

    def _events(self, family: str, days: list[str], doubtful: DataFrame | None) -> DataFrame:
        rows = self.lake.bronze([family], days)
        return rows if doubtful is None else bronze.deduplicate(rows, doubtful)

    def _silver(self, state: State, days: list[str], number: int) -> int:
        lake = self.lake
        self._step("duplicates")
        everything = lake.bronze(FAMILIES, days)
        lake.write(bronze.sums(everything), "silver", "sums", number, days)
        sums = lake.read("silver", "sums", state, days)
        doubt = not bronze.unsure(sums).isEmpty()
        lake.write(bronze.numbers(sums, everything if doubt else None), "silver", "numbers", number, days)
        numbers = lake.read("silver", "numbers", state, days)
        again = numbers.where("events > distinct_events")
        found = again.agg(F.sum(F.col("events") - F.col("distinct_events")).alias("n")).collect()[0].n
        doubtful = again if found else None
        ends = numbers.groupBy("producer", "boot", F.col("dt").cast("string").alias("dt")).agg(
            F.min("first_ts").alias("first_ts"), F.max("last_ts").alias("last_ts")
        )
        tables: dict[str, Callable[[], DataFrame]] = {
            "transports": lambda: silver.transports(self._events("transport", days, doubtful)),
            "sessions": lambda: silver.sessions(self._events("session", days, doubtful), ends),
            "heartbeats": lambda: silver.heartbeats(self._events("beat", days, doubtful)),
            "refusals": lambda: silver.refusals(self._events("refusal", days, doubtful)),
            "entries": lambda: silver.entries(self._events("entry", days, doubtful)),
            "receipts": lambda: silver.receipts(self._events("receipt", days, doubtful)),
            "boots": lambda: silver.boots(
                self._events("life", days, doubtful), self._events("beat", days, doubtful), ends
            ),
        }
        self._write("silver", tables, number, days)
        self._write("silver", {"verdicts": lambda: self._verdicts(state, days)}, number, days)
        return int(found or 0)

    def _write(
        self,
        layer: str,
        tables: dict[str, Callable[[], DataFrame]],
        number: int,
        days: list[str] | None = None,
    ) -> None:
        """Write tables that do not need each other: at the same time, if they are small."""

        def one(name: str) -> None:
            self._step(f"{layer}: {name}")
            if self._claim is not None:
                self._claim.check()
            self.lake.write(tables[name](), layer, name, number, days)

        with ThreadPoolExecutor(SMALL_WORKERS if self._small else 1) as pool:
            list(pool.map(one, tables))

    def _gold_daily(self, state: State, days: list[str], number: int) -> None:
        lake = self.lake

        # several questions are asked of one table, and Spark takes a tenth of a second to look at it
        @cache
        def old(name: str) -> DataFrame:
            return lake.read("silver", name, state, days)

        @cache
        def new(name: str) -> DataFrame:
            return lake.read("gold", name, state, days)

        numbers = lake.read("silver", "numbers", state, days)
        first, last = (F.floor(F.col(name) / 60_000) for name in ("first_ts", "last_ts"))
        window = numbers.groupBy("dt").agg((F.max(last) - F.min(first) + 1).alias("observed_minutes"))
        tables: dict[str, Callable[[], DataFrame]] = {
            "traffic_hour": lambda: traffic.traffic_hour(old("transports")),
            "close_day": lambda: traffic.close_day(old("transports")),
            "pair_day": lambda: traffic.pair_day(old("transports")),
            "latency_hour": lambda: traffic.latency_hour(old("transports")),
            "latency_day": lambda: traffic.latency_day(new("latency_hour")),
            "session_day": lambda: traffic.session_day(old("sessions")),
            "server_hour": lambda: uptime.server_hour(old("heartbeats"), old("entries")),
            "minute_day": lambda: uptime.minute_day(new("server_hour"), window),
            "settlement_day": lambda: settlement.settlement_day(old("verdicts")),
            "settlement_conflict_day": lambda: self._conflicts(state, days),
            "refusal_hour": lambda: abuse.refusal_hour(old("refusals")),
            "abuse_day": lambda: abuse.abuse_day(old("refusals"), old("transports"), old("entries")),
            "clock_day": lambda: uptime.clock_day(old("entries")),
            "refusal_day": lambda: abuse.refusal_day(old("refusals")),
            "discovery_hour": lambda: abuse.discovery_hour(old("entries"), old("refusals")),
            "capacity_day": lambda: capacity.capacity_day(new("server_hour"), old("refusals")),
            "network_day": lambda: network.network_day(
                new("traffic_hour"),
                new("session_day"),
                old("sessions"),
                new("refusal_hour"),
                new("settlement_day"),
                new("latency_hour"),
            ),
        }
        assert tables.keys() == DAILY.keys()
        self._write("gold", {name: rows for name, rows in tables.items() if name not in _OF_GOLD}, number, days)
        self._write("gold", {name: rows for name, rows in tables.items() if name in _OF_GOLD}, number, days)

    @staticmethod
    def _around(days: list[str]) -> list[str]:
        """With the days before and after."""
        return sorted({str(date.fromisoformat(day) + timedelta(step)) for day in days for step in (-1, 0, 1)})

    def _conflicts(self, state: State, days: list[str]) -> DataFrame:
        verdicts = self.lake.read("silver", "verdicts", state, days)
        receipts = self.lake.read("silver", "receipts", state, self._around(days))
        few = verdicts.where(F.col("state") == "conflict").count() <= FEW_CONFLICTS
        return settlement.settlement_conflict_day(verdicts, receipts, few=few)

    def _verdicts(self, state: State, days: list[str]) -> DataFrame:
        """Three words for the transports of these days, with what lies just beyond midnight."""
        around = self._around(days)
        wanted = F.col("dt").cast("string").isin(days)
        of_day = F.unix_millis("at") % DAY_MS
        near = (of_day < MIDNIGHT_MS) | (of_day >= DAY_MS - MIDNIGHT_MS)
        transports = self.lake.read("silver", "transports", state, around).where(wanted | near)
        receipts = self.lake.read("silver", "receipts", state, around)
        rows = settlement.verdicts(settlement.three_words(transports, receipts))
        return rows.where(wanted)

    def _gold_overall(self, state: State, number: int) -> None:
        lake = self.lake
        since = str(self.today - timedelta(HISTORY_DAYS))
        days = [day for day in state.days if day >= since]

        @cache
        def new(name: str) -> DataFrame:
            return lake.read("gold", name, state, days)

        boots = lake.read("silver", "boots", state)
        tables: dict[str, Callable[[], DataFrame]] = {
            "boot": lambda: uptime.boot(boots),
            "uptime_day": lambda: uptime.uptime_day(
                lake.read("gold", "minute_day", state),
                uptime.boot(boots),
                boots,
                lake.read("gold", "clock_day", state),
            ),
            "actor": lambda: abuse.actor(lake.read("gold", "abuse_day", state), boots),
            "quality_day": lambda: network.quality_day(lake.read("silver", "numbers", state)),
            "capacity_forecast": lambda: capacity.capacity_forecast(new("capacity_day"), today=self.today),
            "placement": lambda: capacity.placement(
                lake.read("gold", "uptime_day", state),
                new("capacity_day"),
                new("latency_day"),
                new("settlement_day"),
                today=self.today,
            ),
            "public_day": lambda: network.public_day(lake.read("gold", "network_day", state), today=self.today),
        }
        assert tables.keys() == OVERALL.keys()
        last = {"placement": tables.pop("placement")}  # made of one of the others
        self._write("gold", tables, number)
        self._write("gold", last, number)
