"""Complete runs with files that come late or twice, with runs that are killed, and with days that are forgotten (``make
long WHICH=pipeline``).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random
from typing import Any

from dmsg.analytics import store
from dmsg.analytics.runs import State, TablesBusy
from dmsg.analytics.schemas import GOLD
from dmsg.analytics.views import VIEWS
from tests.analytics import spark_jobs
from tests.analytics.spark_jobs import Killed
from tests.analytics.spark_tables import Story
from tests.analytics.support import DAY, NEXT, S1, Boot, LakeCase, write_file

COMPARED = [name for name in GOLD if name != "quality_day"]
"""Tables that may not depend on how events came."""


class RunTests(LakeCase):
    """Guarantees of an incremental run."""

    def killed_at(self, step: int) -> Any:
        """A progress that ends the run there."""

        def progress(what: str, done: int, total: int) -> None:
            if done == step:
                raise Killed(what)

        return progress

    def test_killed_late_doubled_and_in_pieces(self) -> None:
        self.patch(store, "MERGE_AT", 3)
        story = Story.written(for_spark=True)
        story.run_jobs()
        expected = story.tables(COMPARED)
        # That run took everything at once; the tables that most tests look at were made in two.
        self.assertEqual({name: Story.told().lines[name] for name in COMPARED}, expected)
        aside = story.spool
        shutil.copytree(story.checked, self.checked, dirs_exist_ok=True)
        random = Random(7)
        told: list[str] = []
        begun: list[State] = []

        def at_work(what: str, done: int, total: int) -> None:
            if what == "gold: close_day" and not told:
                told.append(str(self.assertRaises(TablesBusy, self.run_jobs)))

        # The first runs get the next day and one server. The other files come a day late. Each run is killed before it
        # succeeds.
        for names in (("events-3.jsonl.gz", "one/events-1.jsonl.gz"), ("two/events-2.jsonl.gz", "events-d.jsonl.gz")):
            for name in names:
                (self.spool / name).parent.mkdir(exist_ok=True)
                shutil.copy(aside / name, self.spool / name)
            step = random.randrange(4, 30)
            self.assertRaises(Killed, self.run_jobs, progress=self.killed_at(step))
            # A second run at the same time fails with an error message.
            outcome = self.run_jobs(progress=at_work)
            begun.append(outcome.state)
            # The checked receipts were there from the start.
            self.assertIn(str(DAY), outcome.days)
        self.assertIn("another run writes to", told[0])
        self.assertEqual(self.tables(COMPARED), expected)
        # The tables of an earlier run can still be read.
        then = self.pipeline().lake.read("gold", "uptime_day", begun[0]).collect()
        self.assertTrue(then)
        self.assertLess(len(then), len(expected["uptime_day"]))

        # The run gets a copy of known files under other names, which contains a part of the events and nothing new.
        shutil.copy(self.spool / "one" / "events-1.jsonl.gz", self.spool / "events-copy.jsonl.gz")
        again = self.run_jobs()
        self.assertGreater(again.duplicates, 100)
        self.assertEqual(self.tables(COMPARED), expected)
        # Views have stored rows of the days on which events came twice.
        lake = self.pipeline().lake
        self.assertIn(str(DAY), lake.stored_days("transports", lake.state()))
        for name in VIEWS:
            self.assertEqual(self.table(name, "silver"), story.table(name, "silver"), name)
            by_day = lake.rows("silver", name, lake.state(), str(DAY))
            self.assertEqual(len(by_day), len([one for one in self.table(name, "silver") if one["dt"] == DAY]))
        quality = [row for row in self.table("quality_day") if row["dt"] == DAY]
        self.assertEqual(sum(row["duplicates"] for row in quality), again.duplicates)
        distinct = {(row["producer"], row["distinct_events"], row["missing"]) for row in quality}
        self.assertEqual(
            distinct,
            {
                (row["producer"], row["distinct_events"], row["missing"])
                for row in story.table("quality_day")
                if row["dt"] == DAY
            },
        )

        # A run without new files changes nothing.
        before = self.pipeline().lake.state()
        self.assertEqual(self.run_jobs().state, before)
        # Files that no kept run names are deleted from the disk.
        lake = self.pipeline().lake
        with lake.claim() as claim:
            lake.make_room(before, claim, 3)
        for layer, name in (("gold", "traffic_hour"), ("silver", "sessions")):
            table = lake.table(layer, name)
            named = {file.path for one in lake.runs.states() for file in table.files(one.versions[f"{layer}/{name}"])}
            there = {str(path.relative_to(table.uri)) for path in Path(table.uri).rglob("*.parquet")}
            self.assertEqual(there, named)
        listed = [row["file"] for row in self.table("files", "silver")]
        self.assertEqual(len(listed), len(set(listed)))
        # Three small files of a kind and day were merged into one, and nothing was lost.
        lines = lake.table("", "bronze").files()
        self.assertTrue([file for file in lines if not file.path.startswith("run=")])
        self.assertEqual(self.tables(COMPARED), expected)


class QuarantineTests(spark_jobs.QuarantineTests):
    """Lines that are no events, and all tables of the other lines."""

    def take_in(self) -> tuple[int, int]:
        outcome = self.run_jobs()
        return outcome.quarantined, outcome.torn_files

    def check_events(self) -> None:
        (day,) = self.table("uptime_day")
        self.assertEqual((day["alive_minutes"], day["starts"]), (61, 2))
        self.assertEqual(self.run_jobs().events, 0)

    def look_again(self) -> None:
        write_file(self.spool / "events-late.jsonl.gz", self.odd.rows[-1:])
        self.run_jobs()


class ForgottenTests(LakeCase):
    """Days that were forgotten stay so."""

    def test_what_comes_later_brings_no_day_back(self) -> None:
        boot = Boot(S1, "boot-1")
        for day in (DAY, NEXT):
            boot.beats(day, "10:00:30", 5, sessions=1, capacity=10)
        write_file(self.spool / f"events-{1:032x}-000001.jsonl.gz", boot.rows)
        (self.spool / f"events-{3:032x}-000001.jsonl.gz").symlink_to("nowhere")
        self.run_jobs()
        lake = self.pipeline().lake
        spark_jobs.command(lake.root, "forget", "--before", str(NEXT))
        before = lake.state()
        self.assertEqual(self.run_jobs().state, before)
        spark_jobs.command(lake.root, "optimize")
        boot = Boot(S1, "boot-2")
        boot.beats(NEXT, "12:00:30", 5, sessions=1, capacity=10)
        write_file(self.spool / f"events-{2:032x}-000001.jsonl.gz", boot.rows)
        self.run_jobs()
        for name in ("server_hour", "uptime_day"):
            self.assertEqual({row["dt"] for row in self.table(name)}, {NEXT}, name)
