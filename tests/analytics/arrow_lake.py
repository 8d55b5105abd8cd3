"""Runs and transactions of the stored tables: one writer at a time, former states, and files that are replaced, merged
and removed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, write_deltalake
from twisted.trial.unittest import SynchronousTestCase

from dmsg.analytics import delta_log, runs
from dmsg.analytics.delta import Delta
from dmsg.analytics.delta_log import APPLICATION
from dmsg.analytics.lake_error import LakeError
from dmsg.analytics.runs import DONE, Runs, State, TablesBusy
from dmsg.analytics.schemas import Table

WRITER = """
import os, sys
from dmsg.analytics.runs import Runs
claim = Runs(sys.argv[1]).claim()
print("begun", flush=True)
sys.stdin.read()
os._exit(9)
"""


class RunsTests(SynchronousTestCase):
    """Claims to write, and the runs that count."""

    def setUp(self) -> None:
        self.root = str(Path(self.mktemp()).absolute())
        self.now = 1_000_000.0
        self.runs = Runs(self.root, lambda: self.now)

    def finish(self, at: float) -> State:
        """A run that does nothing."""
        self.now = at
        with self.runs.claim() as claim:
            state = State(run=claim.number, at=int(at * 1000), days={"2026-03-10": claim.number})
            claim.finish(state)
        return state

    def test_only_one_run_may_write(self) -> None:
        self.assertEqual(self.runs.state(), State())
        with self.runs.claim() as claim:
            self.assertEqual(claim.number, 1)
            self.assertRaisesRegex(TablesBusy, "another run writes to .*, last sign of life 0 s ago", self.runs.claim)
            self.assertRaises(TablesBusy, self.runs.check_free)
            self.assertEqual(self.runs.state().run, 0)
            claim.finish(State(run=1, at=5))
        self.assertEqual(self.runs.state(), State(run=1, at=5))
        # A claim that fails leaves nothing.
        with self.runs.claim() as claim:
            self.assertEqual(claim.number, 2)
        self.runs.check_free()
        self.assertEqual(self.runs.state().run, 1)

    def test_of_several_that_begin_at_once_one_does(self) -> None:
        """If several runs begin at once, one of them wins. Both runs read the state before either writes its claim."""
        with self.runs.claim():
            pass
        seen = self.runs._open()
        with self.runs.claim():
            looked = self.patch(self.runs, "_open", lambda: seen)
            self.assertRaisesRegex(TablesBusy, "another run writes", self.runs.claim)
            looked.restore()

    def test_who_is_silent_for_long_is_taken_over_from_and_cannot_go_on(self) -> None:
        self.patch(runs, "owner_exists", lambda owner: None)
        first = self.runs.claim()
        self.now += runs.LEASE_SECONDS - 1
        self.assertRaises(TablesBusy, self.runs.claim)
        self.now += 2
        second = self.runs.claim()
        self.assertRaisesRegex(LakeError, "another run has taken over", first.finish, State(run=1))
        second.finish(State(run=1, at=7))
        self.assertEqual(self.runs.state().at, 7)

    def test_who_is_seen_to_be_there_keeps_it(self) -> None:
        """A process of this machine that was suspended, or whose clock was set."""
        first = self.runs.claim()
        self.now += 10 * runs.LEASE_SECONDS
        self.assertRaises(TablesBusy, self.runs.claim)
        self.now -= 30 * runs.LEASE_SECONDS
        self.assertRaisesRegex(TablesBusy, "from a clock that is 12000 s ahead", self.runs.claim)
        first.check()
        first.finish(State(run=1))

    def test_who_was_taken_over_from_hears_it_before_he_writes(self) -> None:
        self.patch(runs, "owner_exists", lambda owner: None)
        first = self.runs.claim()
        first.check()
        self.now += runs.LEASE_SECONDS + 1
        first.check()
        second = self.runs.claim()
        self.assertRaisesRegex(LakeError, "another run has taken over", first.check)
        second.check()
        # A check reads the list only if another process has written.
        reads = self.patch(self.runs, "_read_rows", lambda: self.fail("the list was read"))
        second.check()
        reads.restore()
        second.finish(State(run=1))

    def test_the_table_of_runs_of_another_program_is_refused(self) -> None:
        write_deltalake(f"{self.root}/runs", pa.table({"x": [1]}))
        self.assertRaisesRegex(LakeError, "the table of another program", self.runs.state)

    def test_a_place_where_nothing_can_be(self) -> None:
        Path(self.root).parent.mkdir(parents=True, exist_ok=True)
        Path(self.root).write_text("")
        self.assertRaisesRegex(LakeError, "there can be no tables in", self.runs.claim)

    def test_a_run_that_renews_its_claim_is_not_taken_over(self) -> None:
        self.patch(runs, "RENEW_SECONDS", 0.01)
        self.patch(runs, "owner_exists", lambda owner: None)
        with self.runs.claim() as claim:
            before = self.now
            self.now += runs.LEASE_SECONDS + 1
            until = time.monotonic() + 30
            while claim._row.at <= before * 1000 and time.monotonic() < until:
                claim._over.wait(0.01)
            self.assertRaises(TablesBusy, self.runs.claim)
            claim.check()
            claim.finish(State(run=1))

    def test_the_claim_of_a_killed_process_is_taken_over(self) -> None:
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, self.root],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(runs.__file__).parents[2],
        )
        self.addCleanup(process.kill)
        assert process.stdout is not None and process.stdin is not None
        self.assertEqual(process.stdout.readline(), b"begun\n")
        now = Runs(self.root)
        self.assertRaises(TablesBusy, now.claim)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        process.stdin.close()
        with now.claim() as claim:
            self.assertEqual(claim.number, 1)

    def test_the_last_run_of_each_day_is_kept(self) -> None:
        self.patch(runs, "TIDY_AT", 32)
        day = 86_400.0
        for number in range(20):
            self.finish(day * (100 + number / 2))
        kept = self.runs.states()
        self.assertEqual([state.run for state in kept[-3:]], [18, 19, 20])
        days = [state.at // 86_400_000 for state in kept]
        self.assertEqual(sorted(set(days)), list(range(109 - runs.KEPT_DAYS + 1, 110)))
        # The last run of each day is kept.
        self.assertEqual(self.runs.state(datetime.fromtimestamp(day * 108 - 1, UTC)).at, int(day * 107.5 * 1000))
        self.assertRaisesRegex(
            LakeError, "no tables from before 1970-01-02", self.runs.state, datetime.fromtimestamp(day, UTC)
        )

    def test_unusable_lines_are_counted_for_a_week(self) -> None:
        state = State()
        self.assertIs(state.with_unusable("2026-03-01", 0, 0), state)
        for day in range(1, 10):
            state = state.with_unusable(f"2026-03-{day:02d}", day, 0).with_unusable(f"2026-03-{day:02d}", 1, 2)
        self.assertEqual(state.unusable, {f"2026-03-{day:02d}": (day + 1, 2) for day in range(3, 10)})

    def test_a_table_of_another_format_is_refused(self) -> None:
        self.finish(5)
        table = self.runs._open()
        assert table is not None
        for said, text in (
            ('{"format": 3}', "of format 3, this version of dmsg has format 2: update"),
            ("[]", "a row that is not a run"),
            ("{", "a row that is not a run"),
        ):
            row = self.runs._read_rows()[1][-1]
            self.runs.write(cast(Any, self.runs._open()), [replace(row, phase=DONE, said=said)])
            self.assertRaisesRegex(LakeError, text, self.runs.state)


class DeltaTests(SynchronousTestCase):
    """Transactions over files."""

    table = Table("numbers", "numbers of a day", "n long, dt date")

    def setUp(self) -> None:
        self.place = Path(self.mktemp()).absolute() / "a {b} c"
        self.delta = Delta(str(self.place), self.table.schema, ["dt"])

    def add(self, directory: str, number: int, count: int = 2, **options: object) -> None:
        """Rows of two days, in a transaction. ``MemoryTests`` has rows that Spark writes."""
        for first, day in enumerate(("2026-03-10", "2026-03-11")):
            self.write(directory, day, n=range(first, count, 2))
        self.delta.commit(directory, number, **options)  # type: ignore[arg-type]

    def write(self, directory: str, day: str, **columns: Sequence[object]) -> None:
        """Write a file as Spark and Arrow write it."""
        if columns["n"]:
            place = self.place / directory / f"dt={day}"
            place.mkdir(parents=True)
            pq.write_table(pa.table({name: list(values) for name, values in columns.items()}), place / "part-0.parquet")

    def rows(self) -> list[tuple[int, str]]:
        """Return the rows as another program reads them."""
        table = DeltaTable(str(self.place)).to_pyarrow_table()
        return sorted((row["n"], str(row["dt"])) for row in table.to_pylist())

    def test_days_are_replaced(self) -> None:
        self.add("run=1.a", 1, 4, replaced={"dt": ["2026-03-10", "2026-03-11"]})
        self.add("run=2.a", 2, 1, replaced={"dt": ["2026-03-10"]})
        self.assertEqual(self.rows(), [(0, "2026-03-10"), (1, "2026-03-11"), (3, "2026-03-11")])
        self.add("run=3.a", 3, 1, replaced={})
        self.assertEqual(self.rows(), [(0, "2026-03-10")])
        # This version has been deleted.
        self.delta.vacuum([])
        self.assertRaises(LakeError, self.delta.files, 99)

    def test_a_transaction_that_is_done_again_stands_once(self) -> None:
        self.add("run=1.a", 1)
        self.add("run=1.b", 1, earlier_attempt="1")
        self.assertEqual(len(self.rows()), 2)
        self.add("run=2.a", 2, earlier_attempt="2")
        self.assertEqual(len(self.rows()), 4)
        self.assertEqual(self.delta.transaction(APPLICATION), 2)
        # A process whose claim was taken over cannot write any more.
        self.assertRaisesRegex(LakeError, "another run has written", self.add, "run=1.c", 1)
        self.assertEqual(len(self.rows()), 4)

    def test_a_concurrent_transaction_is_noticed(self) -> None:
        self.add("run=1.a", 1)
        old = DeltaTable(str(self.place))
        self.add("run=2.a", 2)
        self.patch(self.delta, "open", lambda version=None: old)
        self.assertRaisesRegex(LakeError, "another run has written", self.add, "run=3.a", 3)
        self.assertEqual(len(self.rows()), 4)

    def test_a_snapshot_is_kept_only_while_nobody_else_writes(self) -> None:
        alone = [True]
        kept = Delta(str(self.place), self.table.schema, ["dt"], is_exclusive=lambda: alone[0])
        self.assertIsNone(kept.version())
        kept.ensure()
        snapshot = kept.open()
        self.assertIs(kept.open(kept.version()), snapshot)
        files = kept.files()
        self.assertIs(kept.files(), files)
        # The snapshot contains the process's own transactions.
        self.write("run=2.a", "2026-03-12", n=[7])
        kept.commit("run=2.a", 2)
        self.assertIs(kept.open(), snapshot)
        self.assertEqual(len([file for file in kept.files() if file.path.startswith("run=2.a/")]), 1)
        self.assertEqual((files, kept.files(0)), ([], []))
        kept.vacuum([1])
        self.assertEqual(kept.version(), self.delta.version())
        # A transaction of another process makes the next one fail.
        self.add("run=3.a", 3)
        self.assertRaisesRegex(LakeError, "another run has written", kept.commit, None, 3, replaced={})
        self.assertEqual(kept.version(), self.delta.version())
        self.add("run=4.a", 4)
        alone[0] = False
        self.assertEqual(kept.version(), self.delta.version())

    def test_a_version_that_is_no_more_is_not_empty(self) -> None:
        self.assertEqual(self.delta.read().num_rows, 0)
        self.assertRaisesRegex(LakeError, "version 3 or the whole table was removed", self.delta.read, 3)
        self.add("run=1.a", 1)
        self.assertRaises(LakeError, self.delta.files, 3)

    def replace_all(self, number: int) -> int:
        """Replace all rows by one row, as the run with this number does. Return the version of the table."""
        self.write(f"run={number}.a", "2026-03-10", n=[number])
        self.delta.commit(f"run={number}.a", number, replaced={})
        version = self.delta.version()
        assert version is not None
        return version

    def age_log(self, days: float) -> None:
        """Make the whole log older by some days."""
        for log in (self.place / "_delta_log").iterdir():
            at = log.stat().st_mtime - days * 86_400
            if log.suffix == ".json":
                earlier = rb'"commitInfo":{"timestamp":%d' % (at * 1000)
                log.write_bytes(re.sub(rb'"commitInfo":{"timestamp":\d+', earlier, log.read_bytes()))
            os.utime(log, (at, at))

    @patch.dict(delta_log.CONFIGURATION, {"delta.checkpointInterval": "4"})
    def test_what_is_kept_can_be_read_after_many_runs(self) -> None:
        """Each day a run replaces rows and removes old files, also files that the log does not name."""
        versions: list[int] = []
        for number in range(1, 21):
            versions.append(self.replace_all(number))
            kept = versions[-runs.KEPT_DAYS : -1]
            self.delta.vacuum(kept, left_behind=0 if number % 5 == 0 else None)
            for back, version in enumerate(reversed(kept), 1):
                self.assertEqual(self.delta.read(version).column("n").to_pylist(), [number - back])
            self.assertEqual(self.rows(), [(number, "2026-03-10")])
            self.age_log(1)
        self.assertLess(len(list(self.place.rglob("*.parquet"))), 20)
        # The log is shortened: of each day it has the transactions of the run and of removing its old files.
        self.assertLess(len(list((self.place / "_delta_log").glob("*.json"))), 40)

    @patch.dict(delta_log.CONFIGURATION, {"delta.checkpointInterval": "4"})
    def test_a_version_to_keep_survives_a_long_pause(self) -> None:
        """The tables of the last run can be read until the next run has finished, which may be a month later."""
        for number in range(1, 9):
            with self.subTest(runs=number):
                self.setUp()
                before = [self.replace_all(run) for run in range(1, number + 1)][-1]
                self.age_log(30)
                self.replace_all(number + 1)
                self.delta.vacuum([before])
                self.assertEqual(self.delta.read(before).column("n").to_pylist(), [number])
                self.assertEqual(self.rows(), [(number + 1, "2026-03-10")])
                self.replace_all(number + 2)
                self.delta.vacuum([])
                self.assertEqual(self.rows(), [(number + 2, "2026-03-10")])

    @patch.dict(delta_log.CONFIGURATION, {"delta.checkpointInterval": "4", "delta.enableExpiredLogCleanup": None})
    def test_a_version_that_another_program_removed_stops_no_run(self) -> None:
        """Without its property, the table is as an earlier version of dmsg made it."""
        for number in range(1, 4):
            self.replace_all(number)
        self.age_log(30)
        newest = self.replace_all(4)
        DeltaTable(str(self.place)).create_checkpoint()
        DeltaTable(str(self.place)).cleanup_metadata()
        self.assertRaises(LakeError, self.delta.read, newest - 1)
        for _ in range(2):
            self.delta.vacuum([newest - 1, newest])
            self.assertEqual(self.rows(), [(4, "2026-03-10")])
        table = self.delta.open()
        assert table is not None
        self.assertEqual(table.metadata().configuration["delta.enableExpiredLogCleanup"], "false")

    def test_a_table_written_by_another_program_is_refused(self) -> None:
        write_deltalake(str(self.place), pa.table({"x": [1, 2]}))
        self.assertRaisesRegex(LakeError, "the table of another program", self.add, "run=1.a", 1)
        self.assertRaisesRegex(LakeError, "the table of another program", self.delta.read)
        self.assertEqual(DeltaTable(str(self.place)).version(), 0)

    def test_days_are_forgotten(self) -> None:
        self.add("run=1.a", 1, 4)
        version = self.delta.version()
        self.delta.forget("2026-03-11")
        self.assertEqual(self.rows(), [(1, "2026-03-11"), (3, "2026-03-11")])
        self.assertEqual(self.delta.read(version).num_rows, 4)
        text = Delta(str(self.place), Table("numbers", "", "n long, dt string").schema, ["dt"])
        text.forget("2026-03-11")

    def test_files_are_merged_and_removed(self) -> None:
        for number in range(3):
            self.add(f"run={number}.a", number)
        before = self.rows()
        self.assertEqual(self.delta.merge_small(4), 0)
        self.assertEqual(self.delta.merge_small(3, lambda file: "2026-03-10" not in file.path), 1)
        self.assertEqual(len(self.delta.files()), 4)
        self.assertEqual(self.rows(), before)
        self.assertEqual(self.delta.vacuum([]), 3)
        self.assertEqual(self.rows(), before)
        # A killed run left this file.
        (self.place / "run=9.a" / "dt=2026-03-10").mkdir(parents=True)
        left = self.place / "run=9.a" / "dt=2026-03-10" / "part-0.parquet"
        left.write_bytes(b"x")
        self.delta.vacuum([], left_behind=24)
        self.assertTrue(left.exists())
        os.utime(left, (1, 1))
        self.delta.vacuum([], left_behind=24)
        self.assertFalse(left.exists())
        self.assertEqual(self.rows(), before)

    def test_columns_are_added(self) -> None:
        self.add("run=1.a", 1)
        self.delta = Delta(str(self.place), Table("n", "", "n long, more string, dt date").schema, ["dt"])
        self.write("run=2.a", "2026-03-12", n=[0], more=["x"])
        self.delta.commit("run=2.a", 2)
        found = DeltaTable(str(self.place)).to_pyarrow_table().to_pylist()
        self.assertEqual(sorted(str(row["more"]) for row in found), ["None", "None", "x"])
