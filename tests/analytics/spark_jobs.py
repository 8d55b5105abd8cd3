"""Runs that are killed, files that are doubled, cut or garbage; the whole of it is in ``long_jobs``."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

from deltalake import DeltaTable
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from twisted.trial.unittest import SynchronousTestCase

from dmsg.analytics import delta, delta_log
from dmsg.analytics.bronze import UNCHECKED
from dmsg.analytics.data_files import File
from dmsg.analytics.day_parts import BASE_BYTES, EVENT_BYTES, PART_ROWS, day_parts, part_rows
from dmsg.analytics.jobs import MAX_LINE
from dmsg.analytics.lake_error import LakeError
from dmsg.analytics.listing import FULL_LISTING, DirectoriesRead, recent_bytes, spool_source
from dmsg.analytics.new_lines import summarise
from dmsg.analytics.runs import Claim, State, TablesBusy
from dmsg.analytics.schemas import QUARANTINE
from dmsg.analytics.store import batch_of, unrefined
from dmsg.telemetry.schema import BUCKETS
from tests.analytics.spark_tables import Story
from tests.analytics.support import DAY, NEXT, NOW, S1, Boot, LakeCase, Memory, key, run_here, write_file


def command(root: str, *arguments: str) -> str:
    """The output of a command that needs no Java; one that ends well says nothing on standard error."""
    program = (sys.executable, "-c", "from dmsg.cli.entry import entry; entry()", "analytics")
    line = (*program, arguments[0], "--out", root, *arguments[1:])
    done = subprocess.run(line, capture_output=True, text=True, check=False, env={"PATH": "/nonexistent"})
    if done.returncode == 0 and done.stderr:
        raise AssertionError(done.stderr)
    return done.stdout or done.stderr


class Killed(Exception):
    """Error that takes the place of kill -9 at a step of a run."""


class TakenUpTests(LakeCase):
    """Runs over lines that are no events: all of a run but the tables of days."""

    def spoil(self, number: int) -> None:
        """Write a file with one line that is no event."""
        write_file(self.spool / f"events-{number}.jsonl.gz", [], end=False, garbage=[b"hello %d" % number])

    def lines(self) -> list[str]:
        rows = self.pipeline().lake.ask("", "bronze", State(), "SELECT line FROM it WHERE family = 'quarantine'")
        return sorted(row["line"] for row in rows)

    def files(self, state: State) -> set[str]:
        files = self.pipeline().lake.stored("silver", "files", state)["file"].to_pylist()
        self.assertEqual(len(files), len(set(files)))
        return {file.rpartition("/")[2] for file in files}

    def killed_at(self, step: str) -> None:
        """A run that ends there."""

        def progress(what: str, done: int, total: int) -> None:
            if what == step:
                raise Killed(what)

        self.assertRaises(Killed, self.run_jobs, progress=progress)

    def test_a_run_that_was_killed_is_taken_up(self) -> None:
        self.spoil(1)
        self.killed_at("bronze: receipts")
        # A file that arrives meanwhile is read, too. A file that was read is not read again.
        self.spoil(2)
        self.killed_at("commit")
        told: list[str] = []

        def at_work(what: str, done: int, total: int) -> None:
            if what == "files" and not told:
                told.append(str(self.assertRaises(TablesBusy, self.run_jobs)))

        first = self.run_jobs(progress=at_work)
        self.assertIn("another run writes to", told[0])
        self.assertEqual((first.events, first.quarantined, first.torn_files), (0, 2, 2))
        self.assertEqual(first.state.unusable, {str(NOW.date()): (2, 2)})
        self.assertEqual(self.lines(), ["hello 1", "hello 2"])
        self.assertEqual(self.files(first.state), {"events-1.jsonl.gz", "events-2.jsonl.gz"})
        # Without new files, nothing changes. A directory that was quiet for a while is skipped until it changes.
        os.utime(self.spool, (1, 1))
        self.assertEqual(self.run_jobs().state, first.state)
        read = DirectoriesRead(self.out, first.state.run)
        self.assertEqual(read.of(self.sources()[0]), {str(self.spool): 1_000_000_000})
        self.assertEqual(recent_bytes(self.sources()[0], read), 0)
        self.spoil(3)
        opened: Counter[str] = Counter()

        class Counting(DeltaTable):
            def __init__(self, table_uri: str, *rest: Any, **more: Any) -> None:
                opened[table_uri] += 1
                super().__init__(table_uri, *rest, **more)

        counting = self.patch(delta_log, "DeltaTable", Counting)
        second = self.run_jobs()
        counting.restore()
        self.assertEqual(second.quarantined, 1)
        self.assertEqual(second.state.unusable, {str(NOW.date()): (3, 3)})
        # The log of each table was read once.
        self.assertEqual(opened, Counter({uri: 1 for uri in opened}))
        self.assertIn(f"{self.out}/bronze", opened)
        self.assertEqual(len(self.files(second.state)), 3)
        # The tables of the earlier run can still be read.
        self.assertEqual(len(self.files(first.state)), 2)
        # Spark merges three small files of a kind and day, and nothing is lost.
        lake = self.pipeline().lake
        self.patch(delta, "MERGED_HERE", 0)
        with lake.claim() as claim:
            lake.make_room(second.state, claim, 3)
        (file,) = lake.table("", "bronze").files()
        self.assertRegex(file.path, r"\Arun==merged-\w+/family=quarantine/dt=2026-03-13/part-")
        self.assertEqual((file.rows, unrefined(file, {}), batch_of(file)), (3, [], []))
        self.assertEqual(self.lines(), ["hello 1", "hello 2", "hello 3"])
        self.assertEqual(self.run_jobs().state, second.state)


ONCE, TWICE, ONE_FOR_ONE, TWO_FOR_TWO, OTHER_LAST, OTHER_FIRST = (key(number) for number in range(1, 7))
"""Servers whose events come once, twice, with duplicates in the place of as many others, and with two that differ."""


class DoubledTests(SynchronousTestCase):
    """Events that came twice, in memory. The tables of all servers are computed once."""

    @staticmethod
    def rows(server: str) -> list[dict[str, Any]]:
        boot = Boot(server, "boot-1")
        boot.event("start", DAY, "08:00:00", capacity=5)
        boot.beats(DAY, "08:00:30", 20, sessions=1, transports=0, capacity=5, bytes=7)
        for minute in range(10):
            boot.event("transport_close", DAY, f"08:{30 + minute}:00", transport=f"t{minute}", src="a", dst="b")
            boot.event("session_close", DAY, f"08:{30 + minute}:30", peer="p", session=minute, reason="connection_lost")
            boot.event("transport_refuse", DAY, f"08:{30 + minute}:40", src="a", reason="rate_limited", n=20)
        return boot.rows

    @classmethod
    @cache
    def memory(cls) -> Memory:
        """The tables of all servers."""
        twice = cls.rows(TWICE)
        events = [*cls.rows(ONCE), *twice[3:], *twice[:45], *twice[40:42]]
        # The second server has the right sum of event numbers, too.
        for server, (gone, again) in ((ONE_FOR_ONE, ([10], [20])), (TWO_FOR_TWO, ([10, 12], [11, 11]))):
            rows = cls.rows(server)
            events += [*(row for row in rows if row["seq"] not in gone), *(rows[number] for number in again)]
        last, first = cls.rows(OTHER_LAST), cls.rows(OTHER_FIRST)
        other = {"bytes": 1_000_000}
        events += [*last, last[5] | other, first[5] | other, *first]
        return Memory(events)

    def of(self, server: str, table: str) -> list[dict[str, Any]]:
        """Return the rows of a server, without its name."""
        rows = [dict(row) for row in self.memory().table(table)]
        return [row for row in rows if server in (row.pop("server", None), row.pop("producer", None))]

    def test_duplicate_events_count_once(self) -> None:
        for name in ("server_hour", "close_day", "session_day", "refusal_hour"):
            self.assertEqual(self.of(TWICE, name), self.of(ONCE, name), name)
            self.assertTrue(self.of(ONCE, name), name)
        self.assertEqual([row["transports"] for row in self.of(ONCE, "close_day")], [10])
        (quality,) = self.of(TWICE, "quality_day")
        self.assertEqual((quality["events"], quality["distinct_events"], quality["missing"]), (95, 51, 0))
        self.assertEqual(quality["duplicates"], 44)

    def test_missing_and_duplicate_events_in_equal_number_are_found(self) -> None:
        """The number of events is right, but the sum or the sum of squares of their numbers is not."""
        for server, count in ((ONE_FOR_ONE, 1), (TWO_FOR_TWO, 2)):
            (quality,) = self.of(server, "quality_day")
            self.assertEqual((quality["duplicates"], quality["missing"], quality["expected"]), (count, count, 51))

    def test_of_two_that_differ_it_is_always_the_same(self) -> None:
        """The order in which they come makes no difference."""
        found = [self.of(server, "server_hour") for server in (OTHER_LAST, OTHER_FIRST)]
        self.assertEqual(found[0], found[1])
        self.assertTrue(found[0])

    def test_what_is_near_to_midnight_touches_the_day_beside(self) -> None:
        boot, receipts = Boot(S1, "boot-1"), Boot(S1, "receipts")
        boot.beats(DAY, "23:59:30", 1)
        closing = {"transport": "t", "src": "a", "dst": "b"}
        boot.event("transport_close", NEXT, "23:49:59", **closing)
        receipts.event("receipt_checked", NEXT, "00:10:00", server=S1, transport="t", signer="s", partner="o")
        everything = State(days={str(DAY + timedelta(step)): 1 for step in range(-1, 4)})

        def touched(state: State) -> list[str]:
            families = {"transport_close": "transport", "receipt_checked": "receipt", "heartbeat": "beat"}
            files = [
                File(
                    "run=spool.0.ab/part-0.parquet",
                    1,
                    {"family": families[row["type"]], "dt": str(datetime.fromtimestamp(row["ts"] / 1000, UTC).date())},
                    *(1, row["ts"], row["ts"]),
                )
                for row in (*boot.rows, *receipts.rows)
            ]
            return summarise(files, state).days

        self.assertEqual(touched(everything), [str(DAY), str(NEXT)])
        boot.event("transport_close", NEXT, "23:50:00", **closing)
        self.assertEqual(touched(everything), [str(DAY), str(NEXT), str(NEXT + timedelta(1))])
        self.assertEqual(touched(State()), [str(DAY), str(NEXT)])
        receipts.event("receipt_checked", DAY, "00:09:59", server=S1, transport="t", signer="s", partner="o")
        self.assertEqual(touched(everything)[0], str(DAY - timedelta(1)))


class NeighbourDaysTests(LakeCase):
    """Days beside new events, which the new events are near to."""

    before = State(run=1, batches={"spool": 0}, days={str(DAY): 1, str(NEXT): 1})

    def days(self, *late: tuple[str, str], checked: bool = False, **fields: Any) -> list[str]:
        """The days that a run refines for events of the second day: their times and transports."""
        late_boot = Boot(S1, "late")
        for at, transport in late:
            if checked:
                told = {"server": S1, "signer": "s", "partner": "o"} | fields
                late_boot.event("receipt_checked", NEXT, at, transport=transport, **told)
            else:
                late_boot.event("transport_close", NEXT, at, transport=transport, src="a", dst="b")
        write_file(
            (self.checked if checked else self.spool) / f"{'receipts' if checked else 'events'}-late.jsonl.gz",
            late_boot.rows,
        )
        pipeline = self.pipeline()
        with pipeline.lake.claim() as claim:
            taken = pipeline.take_in(self.before, claim.number, pipeline.read(self.sources(), self.before))
        assert taken is not None
        return taken.days

    def setUp(self) -> None:
        super().setUp()
        boot = Boot(S1, "boot-1")
        boot.event("session_open", DAY, "23:50:00", peer="p", session=1)
        boot.event("transport_close", DAY, "23:55:00", transport="old", src="a", dst="b")
        write_file(self.spool / "events-1.jsonl.gz", boot.rows)
        pipeline, nothing = self.pipeline(), State()
        with pipeline.lake.claim() as claim:
            pipeline.take_in(nothing, claim.number, pipeline.read(self.sources(), nothing))

    def test_a_day_without_the_transports_is_left_alone(self) -> None:
        self.assertEqual(self.days(("00:05:00", "new"), ("12:00:00", "old")), [str(NEXT)])

    def test_a_day_with_one_of_the_transports_is_refined(self) -> None:
        self.assertEqual(self.days(("00:05:00", "old")), [str(DAY), str(NEXT)])

    def test_a_last_day_with_sessions_is_refined_once_it_is_over(self) -> None:
        self.before = replace(self.before, days={str(DAY): 1})
        self.assertEqual(self.days(("12:00:00", "new")), [str(DAY), str(NEXT)])

    def test_a_receipt_after_a_restart_counts_at_any_time(self) -> None:
        late = (("00:05:00", "new"), ("12:00:00", "old"))
        self.assertEqual(self.days(*late, checked=True, former=True, initiator=True), [str(DAY), str(NEXT)])


class QuarantineTests(LakeCase):
    """Files that contain lines that are no events."""

    def take_in(self) -> tuple[int, int]:
        """Read what is new.  :returns: lines in quarantine, and files that have a problem."""
        pipeline = self.pipeline()
        lake = pipeline.lake
        with lake.claim() as claim:
            before = lake.state()
            taken = pipeline.take_in(before, claim.number, pipeline.read(self.sources(), before))
            assert taken is not None
            return taken.quarantined, taken.torn_files

    def check_events(self) -> None:
        """Assert that each event of the complete files is stored exactly once."""
        rows = self.pipeline().lake.bronze(["beat", "life"]).collect()
        found = Counter((row.boot, row.type) for row in rows if row.type != "segment_end")
        expected = {("boot-1", "start"): 1, ("boot-1", "heartbeat"): 50}
        expected |= {("boot-2", "start"): 1, ("boot-2", "heartbeat"): 9}
        # The file that was cut contains some events of the first file again.
        self.assertEqual(found.keys(), expected.keys())
        once = {(row.boot, row.seq) for row in rows if row.type != "segment_end"}
        self.assertEqual(len(once), sum(expected.values()))

    def look_again(self) -> None:
        """Read what is in bronze."""
        self.pipeline().lake.bronze(["beat"]).collect()

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
            # Some JSON parsers accept these two lines as events. The program that checked the file before does not.
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
        # Names may contain any characters, and the length of a line is limited.
        odd = Boot(S1, "boot-2")
        odd.event("start", DAY, "10:00:00", capacity=5)
        for number, directory in enumerate(("a b", "a%20b", "a[1]", "a1", "{x,y}", "a:b", "h#1", "st*r", "x=1")):
            odd.beats(DAY, f"10:{number:02}:30", 1, sessions=1, transports=0, capacity=5)
            write_file(self.spool / directory / "events-x.jsonl.gz", odd.rows[-1:])
        write_file(
            self.spool / "lo ng%20[1]" / "events-y.jsonl.gz", odd.rows[:1], garbage=[b'{"x":"%s"}' % (b"y" * MAX_LINE)]
        )
        quarantined, torn = self.take_in()
        problems: dict[str, list[Any]] = {}
        for row in self.pipeline().lake.bronze([QUARANTINE]).collect():
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
        self.assertEqual(quarantined, sum(map(len, problems.values())))
        files = {row["file"].rpartition("/")[2]: row["problem"] for row in self.table("files", "silver")}
        self.assertEqual(
            files,
            {
                "events-a.jsonl.gz": None,
                "events-cut.jsonl.gz": "the end of the file is missing",
                "events-noise.jsonl.gz": "nothing in it can be read",
                "events-text.jsonl.gz": "the end of the file is missing",
                "events-x.jsonl.gz": None,
                "events-y.jsonl.gz": "lines are missing",
            },
        )
        self.assertEqual(torn, 4)
        self.assertEqual(len([row for row in self.table("files", "silver") if "events-x" in row["file"]]), 9)
        self.odd = odd
        self.check_events()
        # The pipeline fails if a file that the pipeline itself has written is incomplete.
        part = next((self.out / "bronze").rglob("family=beat/dt=*/*.parquet"))
        part.write_bytes(part.read_bytes()[:-100])
        (part.parent / f".{part.name}.crc").unlink(missing_ok=True)
        error = self.assertRaises((PySparkException, Py4JError), self.look_again)
        self.assertIn(part.name, str(error))


class RoomTests(LakeCase):
    """The commands that free space, on a copy of the tables."""

    def setUp(self) -> None:
        super().setUp()
        shutil.copytree(Story.told().out, self.out)

    def command(self, *arguments: str) -> str:
        return command(self.pipeline().lake.root, *arguments)

    def days(self, name: str, layer: str = "gold") -> set[str]:
        return {str(row["dt"]) for row in self.table(name, layer)}

    def test_forget_and_optimize(self) -> None:
        self.assertEqual(self.days("server_hour"), {str(DAY), str(NEXT)})
        self.assertEqual(self.command("forget", "--before", str(NEXT)), "1 day forgotten, 1 day left\n")
        for layer, name in (("gold", "server_hour"), ("silver", "heartbeats"), ("silver", "numbers")):
            self.assertEqual(self.days(name, layer), {str(NEXT)}, name)
        for name in ("uptime_day", "quality_day", "public_day"):
            self.assertLessEqual(self.days(name), {str(NEXT)}, name)
        _, error, _ = run_here("forget", "--out", str(self.out), "--before", "2030-01-01")
        self.assertIn("every day would be removed", error)
        # The removed days' input files still exist, and the pipeline remembers them.
        before = self.pipeline().lake.state()
        self.assertEqual(Story.told().run_jobs(self.out).state, before)
        self.assertRegex(self.command("optimize"), r"\A\d+ files removed\n\Z")
        self.assertEqual(self.days("server_hour"), {str(NEXT)})

    def test_lost_tables_and_claims_raise_clear_errors(self) -> None:
        """A claim, a table, the list of runs."""
        lake = self.pipeline().lake
        version = lake.table("gold", "placement").version()

        def guard() -> None:
            raise LakeError("another run has taken over")

        lake.held = cast(Claim, SimpleNamespace(check=guard))
        rows = lake.read("gold", "placement", lake.state())
        self.assertRaisesRegex(LakeError, "taken over", lake.write, rows, "gold", "placement", 99)
        self.assertEqual(lake.table("gold", "placement").version(), version)
        shutil.rmtree(f"{lake.root}/gold/boot")
        self.assertIn("was removed", run_here("attention", "--out", lake.root)[1])
        shutil.rmtree(f"{lake.root}/runs")
        self.assertRaisesRegex(LakeError, "runs, the list of valid tables, is missing", self.run_jobs)


class DirectoriesTests(SynchronousTestCase):
    """The file of directories that need not be listed."""

    def test_it_belongs_to_a_run_and_a_day(self) -> None:
        out = Path(self.mktemp())
        out.mkdir()
        now = [1000.0]
        source = spool_source("/spool")
        first = DirectoriesRead(out, 0, lambda: now[0])
        first.add(source, {"/spool/a": 5})
        first.save(7)
        self.assertEqual(DirectoriesRead(out, 7, lambda: now[0]).of(source), {"/spool/a": 5})
        # Tables of before that run have no list of directories. Once a day, everything is listed.
        self.assertEqual(DirectoriesRead(out, 6, lambda: now[0]).of(source), {})
        now[0] += FULL_LISTING - 1
        again = DirectoriesRead(out, 8, lambda: now[0])
        again.add(source, again.of(source))
        again.save(8)
        now[0] += 1
        self.assertEqual(DirectoriesRead(out, 8, lambda: now[0]).of(source), {})
        for text in ("", "{", "[]", '{"run": 1}', '{"run": "x", "at": 0, "directories": {}}'):
            (out / ".directories-read.json").write_text(text)
            self.assertEqual(DirectoriesRead(out, 8, lambda: now[0]).of(source), {})
        DirectoriesRead(None, 8).save(8)


class PartTests(SynchronousTestCase):
    """Days that are computed in memory together."""

    def test_a_part_has_fewer_events_in_little_memory(self) -> None:
        mib = 1 << 20
        self.assertEqual(part_rows(64 << 30), PART_ROWS)
        rows = part_rows(600 * mib)
        self.assertLess(rows * EVENT_BYTES + BASE_BYTES, 600 * mib)
        self.assertGreater(rows, 200_000)
        self.assertEqual(part_rows(100 * mib), 1)

    def test_each_part_has_whole_days(self) -> None:
        events = {"1": 40, "2": 50, "3": 20, "4": 200, "5": 1}
        self.assertEqual(day_parts(["5", "4", "3", "2", "1"], events, 100), [("1", "2"), ("3",), ("4",), ("5",)])
        self.assertEqual(day_parts(events, events, 1), [("1",), ("2",), ("3",), ("4",), ("5",)])
