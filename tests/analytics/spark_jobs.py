"""Runs that are killed, files that are late, doubled, cut or garbage: the same tables."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from twisted.trial.unittest import SynchronousTestCase

from dmsg.analytics import store
from dmsg.analytics.bronze import UNCHECKED
from dmsg.analytics.delta import LakeError
from dmsg.analytics.jobs import MAX_LINE
from dmsg.analytics.main import Turns
from dmsg.analytics.runs import Busy, State
from dmsg.analytics.schemas import GOLD
from dmsg.telemetry.schema import BUCKETS
from tests.analytics.spark_tables import Story
from tests.analytics.support import DAY, NEXT, S1, Boot, LakeCase, write_file

COMPARED = [name for name in GOLD if name != "quality_day"]
"""Tables that may not depend on how events came."""


class Killed(Exception):
    """In place of kill -9, at a step of a run."""


class RunTests(LakeCase):
    """What the incremental run promises."""

    def killed_at(self, step: int) -> Any:
        """A progress that ends the run there."""

        def progress(what: str, done: int, total: int) -> None:
            if done == step:
                raise Killed(what)

        return progress

    def test_killed_late_doubled_and_in_pieces(self) -> None:
        self.patch(store, "MERGE_AT", 3)
        story = Story.told()
        expected = {name: story.lines[name] for name in COMPARED}
        aside = story.spool
        shutil.copytree(story.checked, self.checked, dirs_exist_ok=True)
        random = Random(7)
        told: list[str] = []
        begun: list[State] = []

        def at_work(what: str, done: int, total: int) -> None:
            if what == "gold: close_day" and not told:
                told.append(str(self.assertRaises(Busy, self.run_jobs)))

        # first the next day and one server; then, a day late, the rest; each run is killed before it succeeds
        for names in (("events-3.jsonl.gz", "one/events-1.jsonl.gz"), ("two/events-2.jsonl.gz", "events-d.jsonl.gz")):
            for name in names:
                (self.spool / name).parent.mkdir(exist_ok=True)
                shutil.copy(aside / name, self.spool / name)
            step = random.randrange(4, 30)
            self.assertRaises(Killed, self.run_jobs, progress=self.killed_at(step))
            # who comes second meanwhile is told
            outcome = self.run_jobs(progress=at_work)
            begun.append(outcome.state)
            # the checked receipts were there from the start
            self.assertIn(str(DAY), outcome.days)
        self.assertIn("another run writes to", told[0])
        self.assertEqual(self.tables(COMPARED), expected)
        # what was there before can be read on
        then = self.pipeline().lake.read("gold", "uptime_day", begun[0]).collect()
        self.assertTrue(then)
        self.assertLess(len(then), len(expected["uptime_day"]))

        # the same files again under other names, a part of one, and nothing new in it
        shutil.copy(self.spool / "one" / "events-1.jsonl.gz", self.spool / "events-copy.jsonl.gz")
        again = self.run_jobs()
        self.assertGreater(again.duplicates, 100)
        self.assertEqual(self.tables(COMPARED), expected)
        quality = [row for row in self.table("quality_day") if row["dt"] == DAY]
        self.assertEqual(sum(row["duplicates"] for row in quality), again.duplicates)
        distinct = {(row["producer"], row["distinct_events"], row["missing"]) for row in quality}
        self.assertEqual(
            distinct,
            {
                (row["producer"], row["distinct_events"], row["missing"])
                for row in story.lines["quality_day"]
                if row["dt"] == DAY
            },
        )

        # a run with nothing new changes nothing
        before = self.pipeline().lake.state()
        self.assertEqual(self.run_jobs().state, before)
        # what no run that is kept names is gone from the disk
        lake = self.pipeline().lake
        with lake.claim() as claim:
            lake.make_room(before, claim, 3)
        for layer, name in (("gold", "traffic_hour"), ("silver", "transports")):
            table = lake.table(layer, name)
            named = {file.path for one in lake.runs.states() for file in table.files(one.versions[f"{layer}/{name}"])}
            there = {str(path.relative_to(table.uri)) for path in Path(table.uri).rglob("*.parquet")}
            self.assertEqual(there, named)
        listed = [row["file"] for row in self.table("files", "silver")]
        self.assertEqual(len(listed), len(set(listed)))
        # three small files of a kind and day were made one of, and nothing was lost
        lines = lake.table("", "bronze").files()
        self.assertTrue([file for file in lines if not file.path.startswith("run=")])
        self.assertEqual(self.tables(COMPARED), expected)

    def test_what_is_no_event_is_in_quarantine(self) -> None:
        boot = Boot(S1, "boot-1")
        boot.event("start", DAY, "08:00:00", capacity=5)
        boot.beats(DAY, "08:00:30", 50, sessions=1, transports=0, capacity=5)
        good = list(boot.rows)
        future = {**good[5], "ts": 1_900_000_000_000, "seq": 1000}
        version = {**good[5], "v": 2, "seq": 1001}
        unknown = {**good[5], "type": "something", "seq": 1002}
        nobody = {**good[5], "producer": None, "seq": 1003}
        short = {**good[5], "rtt": [1, 2], "seq": 1004}
        stranger = {**good[5], "producer": "[/foo]", "seq": 1008}
        forged = {**good[5], "type": "receipt_checked", "seq": 1009}
        absurd = [
            {**good[5], "mono": -(2**63), "seq": 1005},
            {**good[5], "bytes": 2**62, "seq": 1006},
            {**good[5], "seq": 2**63 - 1},
            {**good[5], "rtt": [-1] * BUCKETS, "seq": 1007},
        ]
        write_file(
            self.spool / "events-a.jsonl.gz",
            [*good, future, version, unknown, nobody, short, stranger, forged, *absurd],
            # some programs take these two for events, and who looked at the file before did not
            garbage=[repr({**good[5], "seq": 1010}).encode(), b"x\r" + json.dumps({**good[5], "seq": 1011}).encode()]
            + [b"{", b"hello", b'{"v": "one", "type": "start"}', b"[]", b" ", b"\xff\xfe\x00", b'{"v": 1}'],
        )
        packed = gzip.compress(bytes(Random(1).randbytes(100)).hex().encode() + b"\n", 0)
        (self.spool / "events-noise.jsonl.gz").write_bytes(Random(2).randbytes(5000))
        write_file(self.spool / "whole.gz", good)
        whole = (self.spool / "whole.gz").read_bytes()
        (self.spool / "events-cut.jsonl.gz").write_bytes(whole[: len(whole) * 2 // 3])
        (self.spool / "whole.gz").unlink()
        (self.spool / "events-text.jsonl.gz").write_bytes(packed)
        # names are names, whatever is in them, and a line has a limit
        odd = Boot(S1, "boot-2")
        odd.event("start", DAY, "10:00:00", capacity=5)
        for number, directory in enumerate(("a b", "a%20b", "a[1]", "a1", "{x,y}", "a:b", "h#1", "st*r", "x=1")):
            odd.beats(DAY, f"10:{number:02}:30", 1, sessions=1, transports=0, capacity=5)
            write_file(self.spool / directory / "events-x.jsonl.gz", odd.rows[-1:])
        write_file(
            self.spool / "lo ng%20[1]" / "events-y.jsonl.gz", odd.rows[:1], garbage=[b'{"x":"%s"}' % (b"y" * MAX_LINE)]
        )
        outcome = self.run_jobs()
        problems: dict[str, list[Any]] = {}
        for row in self.pipeline().lake.quarantine().collect():
            problems.setdefault(row.problem, []).append(row.line)
        counts = {problem: len(lines) for problem, lines in problems.items()}
        self.assertEqual(
            counts,
            {
                "from the future": 1,
                "a version that is not known": 1,
                "a type that is not known": 1,
                UNCHECKED: 1,
                "without an identity": 1,
                "a server whose name is no key": 1,
                "a histogram of a wrong size": 1,
                "a number out of range": 4,
                "not an event": 1,
                "not JSON, or a field of a wrong type": 9,
            },
        )
        self.assertIn("hello", problems["not JSON, or a field of a wrong type"])
        self.assertIn('"seq":1000', problems["from the future"][0])
        self.assertEqual(outcome.quarantined, sum(map(len, problems.values())))
        files = {row["file"].rpartition("/")[2]: row["problem"] for row in self.table("files", "silver")}
        self.assertEqual(
            files,
            {
                "events-a.jsonl.gz": None,
                "events-cut.jsonl.gz": "the end is missing",
                "events-noise.jsonl.gz": "nothing in it can be read",
                "events-text.jsonl.gz": "the end is missing",
                "events-x.jsonl.gz": None,
                "events-y.jsonl.gz": "lines are missing",
            },
        )
        self.assertEqual(outcome.torn_files, 4)
        self.assertEqual(len([row for row in self.table("files", "silver") if "events-x" in row["file"]]), 9)
        # all that was whole is counted, once
        (day,) = self.table("uptime_day")
        self.assertEqual((day["alive_minutes"], day["starts"]), (61, 2))
        self.assertEqual(self.run_jobs().events, 0)
        # what the pipeline wrote itself has to be whole
        part = next((self.out / "bronze").rglob("family=beat/dt=*/*.parquet"))
        part.write_bytes(part.read_bytes()[:-100])
        (part.parent / f".{part.name}.crc").unlink()
        write_file(self.spool / "events-late.jsonl.gz", odd.rows[-1:])
        error = self.assertRaises((PySparkException, Py4JError), self.run_jobs)
        self.assertIn(part.name, str(error))


class RoomTests(LakeCase):
    """What makes room, as commands."""

    def setUp(self) -> None:
        super().setUp()
        boot = Boot(S1, "boot-1")
        for day in (DAY, NEXT):
            boot.beats(day, "10:00:30", 5, sessions=1, capacity=10)
        write_file(self.spool / f"events-{1:032x}-000001.jsonl.gz", boot.rows)
        (self.spool / f"events-{3:032x}-000001.jsonl.gz").symlink_to("nowhere")
        self.run_jobs()

    def command(self, *arguments: str) -> str:
        """Its output; nothing on standard error."""
        program = (sys.executable, "-c", "from dmsg.cli.entry import entry; entry()", "analytics")
        out = self.pipeline().lake.root
        command = (*program, arguments[0], "--out", out, *arguments[1:])
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": "/nonexistent"})
        self.assertEqual(done.stderr if done.returncode == 0 else "", "")
        return done.stdout or done.stderr

    def days(self, name: str, layer: str = "gold") -> set[str]:
        return {str(row["dt"]) for row in self.table(name, layer)}

    def test_forget_and_optimize(self) -> None:
        self.assertEqual(self.days("server_hour"), {str(DAY), str(NEXT)})
        self.assertEqual(self.command("forget", "--before", str(NEXT)), "1 days forgotten, 1 are left\n")
        for layer, name in (("gold", "server_hour"), ("silver", "heartbeats"), ("silver", "numbers")):
            self.assertEqual(self.days(name, layer), {str(NEXT)}, name)
        for name in ("uptime_day", "quality_day", "public_day"):
            self.assertLessEqual(self.days(name), {str(NEXT)}, name)
        self.assertIn("nothing would be left", self.command("forget", "--before", "2030-01-01"))
        # the file is there still, and known
        before = self.pipeline().lake.state()
        self.assertEqual(self.run_jobs().state, before)
        self.assertRegex(self.command("optimize"), r"\A\d+ files removed\n\Z")
        boot = Boot(S1, "boot-2")
        boot.beats(NEXT, "12:00:30", 5, sessions=1, capacity=10)
        write_file(self.spool / f"events-{2:032x}-000001.jsonl.gz", boot.rows)
        self.run_jobs()
        self.assertEqual(self.days("server_hour"), {str(NEXT)})
        self.assertEqual(self.days("uptime_day"), {str(NEXT)})

    def test_what_is_gone(self) -> None:
        """A claim, a table, the list of runs."""
        lake = self.pipeline().lake
        version = lake.table("gold", "placement").version()

        def guard() -> None:
            raise LakeError("another run has taken over")

        lake.guard = guard
        rows = lake.read("gold", "placement", lake.state())
        self.assertRaisesRegex(LakeError, "taken over", lake.write, rows, "gold", "placement", 99)
        self.assertEqual(lake.table("gold", "placement").version(), version)
        shutil.rmtree(f"{lake.root}/gold/boot")
        self.assertIn("is gone", self.command("attention"))
        shutil.rmtree(f"{lake.root}/runs")
        self.assertRaisesRegex(LakeError, "runs, which says which of them count, is gone", self.run_jobs)


class TurnsTests(SynchronousTestCase):
    """When a stream makes its tables."""

    def test_half_of_the_time_at_most(self) -> None:
        now = [100.0]
        turns = Turns(lambda: now[0])
        self.assertTrue(turns.due())  # what was read before it began
        with turns.taken():
            now[0] += 5
        self.assertFalse(turns.due())
        now[0] += 60
        self.assertFalse(turns.due())  # nothing came
        turns.wanted = True
        self.assertTrue(turns.due())
        with turns.taken():
            now[0] += 20
            turns.wanted = True  # while it worked
        for passed, due in ((19, False), (1, True)):
            now[0] += passed
            self.assertIs(turns.due(), due)
