"""Run of the pipeline: reads new files, writes their lines to bronze, and computes the silver and gold tables from
them.

The callback ``progress`` gets the name of each step, so that a command can show how far the run is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from threading import Event
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from dmsg.analytics import bronze, functions as F
from dmsg.analytics.changes import days_around
from dmsg.analytics.day_parts import PART_ROWS, part_rows
from dmsg.analytics.event_rules import LINES_MISSING
from dmsg.analytics.intake import LeftToSpark, convert_files
from dmsg.analytics.lake import Lake
from dmsg.analytics.listing import (
    AS_NAMED,
    DirectoriesRead,
    Source,
    Unread,
    as_unread,
    follow_files,
    list_local,
    list_remote,
    open_files,
    unreadable,
)
from dmsg.analytics.new_lines import NewLines, days_to_refine, summarise, with_day_over
from dmsg.analytics.object_stores import NO_STORES, StoreSettings
from dmsg.analytics.parquet import Part, arrow_schema, is_of_arrow
from dmsg.analytics.refine import Refinement
from dmsg.analytics.runs import CLAIM_TIMEOUT, Claim, State, TablesBusy
from dmsg.analytics.schemas import CORRUPT, DAILY, FAMILIES, OVERALL, RAW, SILVER
from dmsg.analytics.sealed_files import Sealed, Target, describe_file
from dmsg.analytics.session import Spark, is_local, is_wanted, session_of
from dmsg.analytics.store import FILES, local_path
from dmsg.analytics.tuning import Tuning
from dmsg.telemetry.spool_listing import Left, Reason, merge

MAX_LINE = 1024 * 1024
"""Maximum length of a spool's line in bytes. A longer line is skipped, and counts as missing from its file."""
READ_OPTIONS = {
    "mode": "PERMISSIVE",
    "columnNameOfCorruptRecord": CORRUPT,
    # A file that is truncated or not in gzip format is read up to the damage. The damage is detected later, because the
    # file's last line is missing.
    "ignoreCorruptFiles": "true",
    "ignoreMissingFiles": "true",
    "mapreduce.input.linerecordreader.line.maxlength": str(MAX_LINE),
    # Only standard JSON is accepted. Another program may have checked the file before. With extensions of JSON, Spark
    # could read other events from the file than that program.
    "lineSep": "\n",
    "allowSingleQuotes": "false",
    "allowNonNumericNumbers": "false",
}
MAX_REREAD_FILES = 1000
"""Maximum number of files that a run reads a second time, because lines of them are missing."""
SMALL_BYTES = 64 * 1024 * 1024
"""Total size in bytes of unread files, below which reading the files is a small job."""
SMALL_EVENTS = 500_000
"""Number of events in the days to recompute, below which computing the tables is a small job."""

Progress = Callable[[str, int, int], None]
"""Callback for progress; its arguments are the name of the step that begins, the number of steps done, and the number
of all steps."""


@dataclass(frozen=True)
class RunOutcome:
    """Result of a run: the new state, the days that were recomputed, and counts for the user.

    :ivar left: files and directories that the run could not read, by reason.
    """

    state: State
    days: list[str]
    events: int
    quarantined: int
    torn_files: int
    duplicates: int
    left: Left


def _no_progress(what: str, done: int, total: int) -> None:
    pass


class Pipeline:
    """Jobs that read files into bronze and compute the tables of one directory.

    :param out: directory or URI of the tables.
    :param now: time of the run. It decides which events are from the future, and which days are recent.
    :param tune: True to use the settings for small jobs if there is little to do; False to always use those for large
        jobs.
    :param left: paths of files that could not be read before the run, by reason.
    :param memory: number of bytes of memory that this process may use; None if it is large.
    """

    def __init__(
        self,
        spark: Spark,
        out: str,
        *,
        now: datetime | None = None,
        progress: Progress = _no_progress,
        tune: bool = True,
        left: Mapping[Reason, set[str]] | None = None,
        memory: int | None = None,
    ) -> None:
        self.lake = Lake(spark, out)
        self._part_rows = PART_ROWS if memory is None else part_rows(memory)
        self._spark = spark
        self.now = now or datetime.now(UTC)
        self._progress = progress
        self._left: list[Mapping[Reason, set[str]]] = [left or {}]
        self._lists = False
        self._directories: DirectoriesRead | None = None
        self._quiet: dict[Path, Mapping[str, int]] = {}
        self._begun: set[str] = set()
        self._left_to_spark = LeftToSpark()
        self._tuning = Tuning(spark, can_be_small=tune)
        self._total = len(SILVER) + len(DAILY) + len(OVERALL) + 6

    @property
    def spark(self) -> SparkSession:
        """Spark session, which is started if necessary."""
        return session_of(self._spark)

    @property
    def _now_ms(self) -> int:
        return int(self.now.timestamp() * 1000)

    def _step(self, what: str) -> None:
        """Report that a step begins. A step that begins again, for other days, is counted only once."""
        self._begun.add(what)
        self._progress(what, len(self._begun) - 1, self._total)

    # --- bronze ---

    def follow(
        self,
        source: Source,
        every: str,
        on_claim: Callable[[Claim], object],
        lock: AbstractContextManager[object],
        stop: Event,
    ) -> StreamingQuery:
        """Start a streaming query that writes new lines to bronze.

        :param every: interval between listings of the directory, such as ``30 seconds``.
        :param on_claim: called with the claim after each batch, before the claim and ``lock`` are released.
        :param lock: lock by which the streams of this process write their batches one at a time.
        :param stop: event. Once it is set, the query no longer waits for another run to finish.
        """
        files = follow_files(self.spark, source)

        def write(batch: DataFrame, number: int) -> None:
            # Each query needs a source name of its own, because a query with a new checkpoint numbers its batches from
            # 0 again.
            query = batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId") or ""
            origin = f"{source.name}-stream-{query[:8]}"
            # Here and before run_claimed(), the lock of this process is acquired first, and then the claim. With
            # different orders at the two places, two streams could deadlock.
            with lock:
                with self._wait_for_claim(stop) as claim:
                    self.lake.held = claim
                    state = self.lake.state()
                    if number <= state.batches.get(origin, -1):
                        # The batch was refined before, but Spark was killed before it had recorded the batch in its
                        # checkpoint.
                        return
                    if not self.lake.has_batch(origin, number):
                        # A separate run may have read some of the files. The stream's checkpoint does not contain them,
                        # so they are left out here.
                        files = self._drop_known(as_unread(batch.collect()), state)
                        now_ms = int(datetime.now(UTC).timestamp() * 1000)
                        self._add_batch(files, origin, number, now_ms, checked=source.checked, here=False)
                    on_claim(claim)

        writer = (
            files.writeStream.foreachBatch(write)
            .queryName(f"bronze-{source.name}")
            .option("checkpointLocation", f"{self.lake.root}/checkpoints/{source.name}")
        )
        return writer.trigger(processingTime=every).start()

    def run_claimed(self, on_claim: Callable[[Claim], object]) -> None:
        """Claim the right to write to the tables, and call ``on_claim`` with the claim. Do nothing if another run is
        writing."""
        with suppress(TablesBusy), self.lake.claim() as claim:
            self.lake.held = claim
            on_claim(claim)

    def _wait_for_claim(self, stop: Event) -> Claim:
        """Claim the right to write to the tables. If another run is writing, try again for
        :data:`CLAIM_TIMEOUT` seconds, or until ``stop`` is set.

        :raises TablesBusy: the other run has not finished by then.
        """
        deadline = time.monotonic() + CLAIM_TIMEOUT
        while True:
            try:
                return self.lake.claim()
            except TablesBusy:
                if stop.wait(1.0) or time.monotonic() > deadline:
                    raise

    def _bronze_rows(self, lines: DataFrame, origin: str, number: int, now_ms: int, *, checked: bool) -> DataFrame:
        rows = bronze.bronze_rows(lines, now_ms=now_ms, checked=checked)
        return rows.withColumns({"origin": F.lit(origin), "batch": F.lit(number)})

    def _ingest(self, source: Source, unread: list[Unread]) -> None:
        """Write the lines of unread files of a source to bronze, as one batch."""
        files = [file for file in unread if fnmatch(file.path.rpartition("/")[2], source.pattern)]
        if not files:
            return
        number = self.lake.batch(source.name) + 1
        is_small = sum(file.size for file in files) < SMALL_BYTES and not is_wanted(self._spark)
        self._add_batch(files, source.name, number, self._now_ms, checked=source.checked, here=is_small)

    def _add_batch(
        self, files: list[Unread], origin: str, number: int, now_ms: int, *, checked: bool, here: bool
    ) -> None:
        """Write the lines of files to bronze, as one batch.

        :param here: whether this process converts the files, if they and the tables are local.
        """
        parts, refused = self._convert(files, origin, number, now_ms, checked=checked, here=here)
        rows = None
        if refused:
            lines = self._lines("json", refused)
            if lines is not None:
                rows = self._bronze_rows(lines, origin, number, now_ms, checked=checked)
        if rows is not None or parts:
            self.lake.add_bronze(rows, origin, number, parts=parts)

    def _lines(self, kind: str, paths: list[str]) -> DataFrame | None:
        """Return the lines that Spark reads from files, as rows; None if it can open none of the files.

        :param kind: ``json`` to parse each line, ``text`` for a column with the unchanged line.
        """
        reader = self.spark.read.options(**READ_OPTIONS, **AS_NAMED).format(kind)
        return open_files(reader.schema(RAW) if kind == "json" else reader, paths)

    def _convert(
        self, files: list[Unread], origin: str, number: int, now_ms: int, *, checked: bool, here: bool
    ) -> tuple[list[Part], list[str]]:
        """Convert files to Parquet, except those that Arrow cannot read.

        :returns: the Parquet files, and the paths of the files that Spark has to read.
        """
        lake = self.lake
        places = [(file, local_path(file.path)) for file in files]
        all_local = lake.local and all(place is not None for _, place in places)
        # The settings may contain keys, so they are sent to tasks only if the tasks need them.
        stores = NO_STORES if all_local else StoreSettings(os.environ)
        directory = lake.batch_directory(origin, number)
        target = Target(lake.table("", "bronze").uri, directory, origin, number, now_ms, checked, stores)
        found = convert_files(
            lambda: self.spark,
            [(Sealed(file.uri, file.path if place is None else str(place)), file.size) for file, place in places],
            target,
            here=here and all_local,
            left=self._left_to_spark,
        )
        refused = {one.uri for one in found.refused}
        return found.parts, [file.path for file in files if file.uri in refused]

    # --- a run ---

    def run(self, sources: list[Source]) -> RunOutcome:
        """Read new files and bring every table up to date.

        :raises LakeError: another run is writing, or the tables are of another version.
        """
        with self.lake.claim() as claim:
            self.lake.held = claim
            return self._run(sources, claim)

    def _run(self, sources: list[Source], claim: Claim) -> RunOutcome:
        before = self.lake.state()
        outcome = self.refine(before, claim, self.read(sources, before))
        if self._directories is not None:
            self._directories.save(outcome.state.run)
        return outcome

    def read(self, sources: list[Source], before: State) -> list[str]:
        """Write the lines of unread files to bronze.

        :param before: state that the last finished run left.
        :returns: URIs of the files that no run has refined.
        """
        self._step("listing files")
        self._lists = True
        self._directories = DirectoriesRead(local_path(self.lake.root), before.run)
        unread = self._drop_known(list_local(sources, self._left, self._directories), before)
        if (elsewhere := list_remote(lambda: self.spark, sources)) is not None:
            unread += as_unread(elsewhere.join(self._known_files(before), "file", "left_anti").collect())
        # The run continues even without unread files if a killed run or stream has left lines in bronze that are not
        # refined.
        if unread or self.lake.unrefined(before.batches):
            self._tuning.choose(small=sum(file.size for file in unread) < SMALL_BYTES)
            for source in sources:
                self._step(f"bronze: {source.name}")
                self._ingest(source, unread)
        return [file.uri for file in unread]

    def note_unreadable(self, sources: list[Source]) -> None:
        """Record which files and directories of local sources cannot be read. A stream has to call this method before
        it refines. A run finds these files itself."""
        self._left, self._lists = unreadable(sources, self._quiet), True

    def begin_small(self) -> None:
        """Use the settings for small jobs. A stream calls this method at its start, when the amount of work is
        unknown."""
        self._tuning.choose(small=True)

    def refine(self, before: State, claim: Claim, unread: list[str]) -> RunOutcome:
        """Compute the silver and gold tables of the days that have new events in bronze, and commit the run.

        :param before: state that the last finished run left.
        :param unread: URIs of the files that only this run has read; empty in a stream.
        """
        lake, number = self.lake, claim.number
        taken = self.take_in(before, number, unread)
        # If this pipeline has not listed the files itself, it has not searched for unreadable files. An example is a
        # stream, in which Spark lists the files. The unreadable files that the last run recorded are then kept.
        left = merge(self._left) if self._lists else before.left
        if taken is None:
            if before.run and left != before.left:
                before = replace(before, run=number, at=self._now_ms, left=left)
                claim.finish(before)
            self._progress("nothing is new", self._total, self._total)
            return RunOutcome(before, [], 0, 0, 0, 0, left)
        days = taken.days
        at = self._now_ms
        counted = before.with_unusable(str(self.now.date()), taken.quarantined, taken.torn_files)
        state = replace(
            counted.with_days(days, number), run=number, batches=taken.batches, at=at, versions={}, left=left
        )
        duplicates = 0
        if days:
            table, near = lake.table("", "bronze"), days_around(days)
            files = [one for one in table.files() if one.values["family"] in FAMILIES and one.values["dt"] in near]
            of_day = dict.fromkeys(days, 0)
            for one in files:
                if (day := one.values["dt"]) in of_day:
                    of_day[day] += one.rows or 0
            events = sum(of_day.values())
            in_memory = self._tuning.can_be_small and lake.hold(table, files) is not None
            self._tuning.choose(small=events < SMALL_EVENTS, in_memory=in_memory, events=events)
            tables = Refinement(
                *(lake, claim, before, state, days),
                today=self.now.date(),
                changed=taken.changed,
                events_of_day=of_day,
                part_rows=self._part_rows,
                collects_all=in_memory,
                # On a cluster, days are computed by the executors and not in the driver's memory. So the driver's work
                # does not grow with the amount of data.
                memory=self._tuning.can_be_small and is_local(self._spark),
                by_tasks=is_wanted(self._spark),
                small=self._tuning.is_small,
                step=self._step,
            )
            duplicates = tables.silver()
            tables.gold_daily()
            tables.gold_overall()
            state = replace(state, today=str(self.now.date()))
        self._step("commit")
        # Files are removed before the commit, because the claim excludes other writers until then. A reader may be
        # reading files of the current state, so these are not removed.
        lake.tidy(before, claim, at)
        state = lake.finish(claim, state)
        self._progress("done", self._total, self._total)
        return RunOutcome(state, days, taken.events, taken.quarantined, taken.torn_files, duplicates, left)

    def take_in(self, before: State, number: int, unread: list[str]) -> NewLines | None:
        """Record the files from which new lines in bronze were read, and find the days to refine.

        :param before: as for :meth:`refine`.
        :param number: number of the run.
        :param unread: as for :meth:`refine`.
        :returns: a summary of the new lines; None if there are no new lines or files.
        """
        lake = self.lake
        if not unread and not lake.unrefined(before.batches):
            return None
        self._step("which days are touched")
        taken = summarise(lake.fresh_files(before.batches), before)
        if taken.batches == before.batches and not unread:
            return None
        problems = self._write_files(before, number, unread)
        if self._add_passed_over(number, [file for file, problem in problems.items() if problem == LINES_MISSING]):
            taken = summarise(lake.fresh_files(before.batches), before)
            problems = self._write_files(before, number, unread)
        torn = sum(problem is not None for problem in problems.values())
        taken = with_day_over(lake, replace(taken, torn_files=torn), before)
        return replace(taken, days=days_to_refine(lake, taken, before))

    def _add_passed_over(self, number: int, lacking: list[str]) -> bool:
        """Read files a second time, and add to the quarantine the lines that Spark's JSON reader has skipped.

        :param lacking: files of which lines are missing.
        :returns: whether any file was read.
        """
        files = [unquote(file) for file in lacking[:MAX_REREAD_FILES]]
        if not files:
            return False
        texts = self._lines("text", files)
        if texts is None:
            return False
        lines = texts.where(F.col("value").rlike(bronze.PASSED_OVER))
        nothing = [
            f"CAST(NULL AS {one.dataType.simpleString()}) AS `{one.name}`" for one in RAW.fields if one.name != CORRUPT
        ]
        lines = lines.selectExpr(*nothing, f"value AS `{CORRUPT}`", "file")
        self.lake.add_bronze(
            self._bronze_rows(lines, bronze.LINES, number, self._now_ms, checked=False), bronze.LINES, number
        )
        return True

    def _write_files(self, before: State, number: int, unread: list[str]) -> dict[str, str | None]:
        """Write a row for each file of the run to the table ``files``.

        :returns: the problem of each file; None for a file without a problem.
        """
        self._step("files")
        lake = self.lake
        found = lake.register(before.batches).to_pylist()
        if any(not is_of_arrow(file.path) for file in lake.fresh_files(before.batches)):
            found += bronze.file_report(lake.fresh_lines(before.batches)).toArrow().to_pylist()
        nothing = {"lines": 0, "problem": "nothing in it can be read"}
        rows = {row["file"]: row for row in found}
        gone: dict[Reason, set[str]] = {Reason.GONE: set()}
        for file in unread:
            if file not in rows:
                path = unquote(file.removeprefix("file:"))
                if file.startswith("file:") and not os.path.exists(path):
                    # A file that was removed is not recorded as read. If it appears again, a later run reads it.
                    gone[Reason.GONE].add(path)
                else:
                    rows[file] = {"file": file, **nothing}
        self._left.append(gone)
        for row in rows.values():
            if row.get("file_sha256") is None:
                row.update(describe_file(row["file"]))
        schema = arrow_schema(FILES.schema)
        lake.put(pa.Table.from_pylist(list(rows.values()), schema=schema), "silver", "files", number, more=True)
        return {file: row["problem"] for file, row in rows.items()}

    def _drop_known(self, files: Iterable[Unread], state: State) -> list[Unread]:
        """Return the files that neither finished nor killed runs have read."""
        unread = {file.uri: file for file in files}
        for names in self.lake.names_of_files(state):
            for name in pc.unique(names.filter(pc.is_in(names, pa.array(unread, pa.string())))).to_pylist():
                del unread[name]
            if not unread:
                break
        return list(unread.values())

    def _known_files(self, state: State) -> DataFrame:
        """Return the files that runs have read, including runs that were killed."""
        lake = self.lake
        known = lake.read("silver", "files", state).select("file")
        if state.run == 0:  # If no run has finished, all records are those of a killed first run, and do not count.
            known = known.limit(0)
        if any(not is_of_arrow(file.path) for file in lake.fresh_files(state.batches)):
            known = known.unionByName(bronze.file_names(lake.fresh_lines(state.batches)))
        if (registered := lake.register(state.batches)).num_rows:
            known = known.unionByName(lake.frame(registered.select(["file"])))
        return known
