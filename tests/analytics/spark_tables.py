"""Each gold table compared with values worked out by hand, for a day of two servers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from random import Random
from typing import Any, ClassVar
from unittest.mock import patch

from dmsg.analytics import memory_tables, shards
from dmsg.analytics.affected_tables import AffectedTables, Rows
from dmsg.analytics.schemas import GOLD
from tests.analytics.inputs import Inputs
from tests.analytics.support import DAY, DISCOVERY, NEXT, S1, S2, S3, Boot, LakeCase, ms, write_file


def histogram(**counts: int) -> list[int]:
    """``b10=3``: three samples in bucket 10."""
    return [counts.get(f"b{index}", 0) for index in range(34)]


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The events in a file, without its last line."""
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    return [row for row in rows if row["type"] != "segment_end"]


class Story(LakeCase):
    """S1 is up from 10:00 to 12:00 and honest, S2 from 10:00 to 10:30, crashes, and lies; S3 comes the next day.

    Written once and computed once, for all tests that look at it: in two runs.  In the first Spark computes all tables.
    The second takes events that were left out at random, and computes only what they affect, in memory.
    """

    _told: ClassVar[list[Story]] = []
    lines: ClassVar[dict[str, list[dict[str, Any]]]] = {}
    inputs: ClassVar[Inputs] = Inputs()
    """Inputs of the tables, noted in the first run, which computes all of them."""
    affected: ClassVar[set[str]] = set()
    """Tables of which the second run replaced only the rows that its events affect."""
    warnings: ClassVar[list[str]] = []
    """Warnings of the first run about executors that cannot compute tables."""

    @classmethod
    def written(cls, *, for_spark: bool = False) -> Story:
        """Return a story whose files no run has read.

        :param for_spark: whether Spark has to read the file of discovery. If not, Arrow reads all files.
        """
        story = cls("write")
        story.setUp()
        story.write(for_spark=for_spark)
        return story

    @classmethod
    def told(cls) -> Story:
        """The story, with the tables computed from it."""
        if not cls._told:
            story = cls.written()
            late = story.hold_back(Random(5), 0.1)

            # Spark's workers get the code of a local function, and need not import this module.
            def fail_to_import(job: Any, groups: Any) -> Any:
                """Fail as a task does on a machine without Arrow."""
                raise ImportError("no pyarrow")

            with (
                cls.inputs.noted(),
                patch.object(memory_tables, "MEMORY_ROWS", 0),
                patch.object(shards, "divide_files", fail_to_import),
                patch.object(shards, "sum_files", fail_to_import),
                patch.object(shards, "_log") as log,
            ):
                story.run_jobs()
            cls.warnings += [call.args[0] for call in log.warning.call_args_list]
            for path, rows in late.items():
                write_file(path, rows)
            rows_of = AffectedTables.rows

            def recorded(tables: AffectedTables, name: str, days: tuple[str, ...]) -> Rows:
                found = rows_of(tables, name, days)
                cls.affected.add(name)
                return found

            with patch.object(AffectedTables, "rows", recorded):
                story.run_jobs()
            cls.lines.update(story.tables(GOLD))
            for name in ("sessions", "heartbeats"):
                cls.lines[name] = story.table(name, "silver")
            cls._told.append(story)
        return cls._told[0]

    def hold_back(self, random: Random, share: float) -> dict[Path, list[dict[str, Any]]]:
        """Take some events out of the files. :returns: new files to write them to, and their events."""
        late: dict[Path, list[dict[str, Any]]] = {}
        for root in (self.spool, self.checked):
            for path in sorted(root.rglob("*.gz")):
                kept: list[dict[str, Any]] = []
                some = late.setdefault(path.with_name(path.name.replace("-", "-late-")), [])
                for row in lines_of(path):
                    (some if random.random() < share else kept).append(row)
                # Arrow reads all other files.
                write_file(path, kept, for_spark=path.name == "events-d.jsonl.gz")
        return {path: some for path, some in late.items() if some}

    def write(self, *, for_spark: bool) -> None:
        one, two = Boot(S1, "boot-1"), Boot(S2, "boot-2")
        discovery = Boot(DISCOVERY, "boot-d", "discovery", started=ms(DAY, "10:00:00"))
        # Heartbeats last from 10:00:30 to 11:59:30. In the hour from 11 there are twice as many sessions.
        one.event("start", DAY, "10:00:00", capacity=100)
        one.beats(
            DAY,
            "10:00:30",
            60,
            sessions=10,
            transports=4,
            capacity=100,
            frames=600,
            bytes=6000,
            cpu_ms=100,
            lag_ms=5,
            rss_kb=70_000,
            lost=0,
        )
        one.beats(
            DAY,
            "11:00:30",
            60,
            sessions=20,
            transports=8,
            capacity=100,
            frames=600,
            bytes=6000,
            cpu_ms=100,
            lag_ms=7,
            rss_kb=71_000,
            lost=1,
        )
        one.event("stop", DAY, "11:59:59")
        # Later, discovery sends no heartbeats.
        one.beats(DAY, "13:00:30", 1, sessions=1, transports=0, capacity=100)
        two.event("start", DAY, "10:00:00", capacity=10)
        two.beats(
            DAY,
            "10:00:30",
            30,
            sessions=9,
            transports=1,
            capacity=10,
            frames=1,
            bytes=1,
            cpu_ms=1,
            lag_ms=1,
            rss_kb=1,
            lost=0,
        )
        discovery.beats(DAY, "10:00:30", 120, entries=5, requests=100)
        # Discovery sees S1 all the time, and S2 for 20 of its 30 minutes.
        for minute in range(120):
            discovery.event(
                "entry",
                DAY,
                f"{10 + minute // 60}:{minute % 60:02d}:10",
                subject=S1,
                is_server=True,
                result="next",
                sequence=minute,
                available=90,
            )
        for minute in range(19):
            discovery.event(
                "entry",
                DAY,
                f"10:{minute:02d}:20",
                subject=S2,
                is_server=True,
                result="next",
                sequence=minute,
                available=1,
            )
        discovery.event(
            "entry", DAY, "10:05:00", subject="c1", is_server=False, result="first", sequence=0, delegated=2
        )
        discovery.event("entry", DAY, "10:06:00", subject="c1", is_server=False, result="deleted", sequence=1)
        discovery.event("entry_refuse", DAY, "10:07:00", reason="signature", source="n1", n=60)
        # Of the sessions of S1, one ends and one is of the day before. One session of S2 is lost in the crash.
        one.event("session_open", DAY, "10:10:00", peer="p1", session=1, handshake_ms=4)
        one.event(
            "session_close",
            DAY,
            "10:20:00",
            peer="p1",
            session=1,
            reason="connection_lost",
            duration_ms=600_000,
            frames=50,
            bytes=5000,
        )
        one.event(
            "session_close",
            DAY,
            "10:01:00",
            peer="p2",
            session=0,
            reason="connection_lost",
            duration_ms=7_200_000,
            frames=1,
            bytes=10,
        )
        two.event("session_open", DAY, "10:11:00", peer="p1", session=1, handshake_ms=4)
        self.transports(one, two)
        one.event("transport_refuse", DAY, "10:40:00", src="a", reason="no_such_peer", n=1, targets=1)
        one.event("transport_refuse", DAY, "10:41:00", src="a", reason="no_such_peer", n=149, targets=149)
        one.event("transport_refuse", DAY, "11:41:00", src="b", reason="rate_limited", n=500, targets=1)
        one.event("handshake_fail", DAY, "11:42:00", reason="handshake_failed", source="n2", n=100)
        two.event("drop", DAY, "10:15:00", reason="too_many_connections", n=3)
        write_file(self.spool / "one" / "events-1.jsonl.gz", one.rows)
        write_file(self.spool / "two" / "events-2.jsonl.gz", two.rows)
        write_file(self.spool / "events-d.jsonl.gz", discovery.rows, for_spark=for_spark)
        late = Boot(S3, "boot-3")
        late.event("start", NEXT, "08:00:00", capacity=5)
        late.beats(NEXT, "08:00:30", 3, sessions=1, transports=0, capacity=5)
        write_file(self.spool / "events-3.jsonl.gz", late.rows)

    def transports(self, one: Boot, two: Boot) -> None:
        receipts = Boot(S1, "boot-r")

        def carried(boot: Boot, name: str, time: str, ab: int, ba: int, **fields: Any) -> None:
            both = {"transport": name, "src": "a", "dst": fields.pop("dst", "b"), "secure": True, "accept_ms": 3}
            boot.event("transport_open", DAY, time, **both)
            counts = {"data_ab": ab, "data_ba": ba, "frames_ab": 2, "frames_ba": 1, "acks_ab": 2, "acks_ba": 1}
            end = {"reason": "unspecified", "by": "src", "duration_ms": 1000, "total_ab": ab, "total_ba": ba}
            boot.event("transport_close", DAY, time, **{**both, **counts, **end, **fields})

        def signed(
            server: str,
            name: str,
            initiator: bool,
            out: int,
            received: int,
            day: Any = DAY,
            time: str = "11:00:00",
            who: tuple[str, str] | None = None,
        ) -> None:
            who = who or (("s-a", "s-b") if initiator else ("s-b", "s-a"))
            receipts.event(
                "receipt_checked",
                day,
                time,
                server=server,
                transport=name,
                signer=who[0],
                partner=who[1],
                initiator=initiator,
                delivered_out=out,
                delivered_in=received,
            )

        # The transports of S1 are matched, one-sided, known to the relay only, and in progress before the end.
        carried(one, "t1", "10:30:00", 10_000, 5_000, rtt=histogram(b10=3))
        signed(S1, "t1", True, 10_000, 5_000)
        signed(S1, "t1", False, 5_000, 10_000)
        carried(one, "t2", "10:31:00", 100, 0, rtt=histogram(b10=1, b20=4))
        signed(S1, "t2", True, 100, 0)
        carried(one, "t3", "11:30:00", 1_000, 0)
        one.event(
            "transport_progress",
            DAY,
            "11:31:00",
            transport="t4",
            src="a",
            dst="c",
            secure=True,
            data_ab=70,
            data_ba=0,
            frames_ab=1,
            frames_ba=0,
            acks_ab=1,
            acks_ba=0,
        )
        carried(one, "t4", "11:32:00", 30, 0, dst="c", total_ab=100)
        # The remote refuses this REQUEST.
        one.event(
            "transport_close", DAY, "11:33:00", src="a", dst="z", secure=True, reason="refused", by="dst", duration_ms=2
        )
        # S2 claims 20 % more than both ends, once with the support of one end, and omits one transport.
        carried(two, "u1", "10:20:00", 1_200_000, 0)
        signed(S2, "u1", True, 1_000_000, 0)
        signed(S2, "u1", False, 0, 1_000_000)
        carried(two, "u2", "10:21:00", 1_200_000, 0)
        signed(S2, "u2", True, 1_200_000, 0)
        signed(S2, "u2", False, 0, 1_000_000)
        signed(S2, "u3", True, 50, 0)
        # A friend signs for both ends of a transport that did not carry these bytes.
        carried(two, "u4", "10:22:00", 5_000_000, 0)
        signed(S2, "u4", True, 5_000_000, 0, who=("s-f", "s-x"))
        signed(S2, "u4", False, 0, 5_000_000, who=("s-f", "s-x"))
        # Of two receipts of the same end, the smaller one counts. A receipt just after midnight belongs to its
        # transport's day.
        signed(S1, "t1", True, 11_000, 5_000)
        carried(one, "t5", "23:59:59", 40, 0)
        signed(S1, "t5", True, 40, 0)
        signed(S1, "t5", False, 0, 40, NEXT, "00:00:01")
        # The receipt is rejected, and does not count.
        receipts.event(
            "receipt_checked", DAY, "11:00:00", reason="the receipt is not signed by the client that it names"
        )
        write_file(self.checked / "receipts-1.jsonl.gz", receipts.rows)


class TableTests(LakeCase):
    """The expected rows of each table."""

    def setUp(self) -> None:
        super().setUp()
        story = Story.told()
        self._lines = story.lines

    def rows(self, name: str, **wanted: Any) -> list[dict[str, Any]]:
        return [row for row in self._lines[name] if all(row[key] == value for key, value in wanted.items())]

    def row(self, name: str, **wanted: Any) -> dict[str, Any]:
        (row,) = self.rows(name, **wanted)
        return row

    def check(self, row: dict[str, Any], **values: Any) -> None:
        self.assertEqual({key: row[key] for key in values}, values)

    def test_traffic_hour(self) -> None:
        self.check(
            self.row("traffic_hour", server=S1, hour=10),
            opened=2,
            accepted=2,
            closed=2,
            refused_by_peer=0,
            bytes=15_100,
            frames=6,
            acks=6,
        )
        self.check(
            self.row("traffic_hour", server=S1, hour=11),
            opened=2,
            accepted=2,
            closed=3,
            refused_by_peer=1,
            bytes=1_100,
            frames=7,
            acks=7,
        )
        self.check(self.row("traffic_hour", server=S2, hour=10), closed=3, bytes=7_400_000)

    def test_close_day(self) -> None:
        self.assertEqual(self.row("close_day", server=S1, reason="refused")["transports"], 1)
        self.assertEqual(self.row("close_day", server=S1, reason="unspecified", by="src")["transports"], 5)

    def test_pair_day(self) -> None:
        self.check(self.row("pair_day", server=S1, dst="c"), src="a", transports=1, bytes_ab=100, bytes_ba=0)
        self.check(self.row("pair_day", server=S1, dst="b"), transports=4, bytes_ab=11_140, bytes_ba=5_000)
        self.check(self.row("pair_day", server=S1, dst="z"), transports=1, bytes_ab=0)

    def test_latency_hour(self) -> None:
        row = self.row("latency_hour", server=S1, hour=10)
        # Buckets 10 (2.26 to 3.2 ms) and 20 (72.4 to 102.4 ms) have 4 samples each.
        self.assertEqual(row["rtt_samples"], 8)
        self.assertAlmostEqual(row["rtt_p50"], 3.2, 6)
        self.assertAlmostEqual(row["rtt_p90"], 72.4077 + (7.2 - 4) / 4 * (102.4 - 72.4077), 3)
        self.assertAlmostEqual(row["rtt_p99"], 72.4077 + (7.92 - 4) / 4 * (102.4 - 72.4077), 3)
        # Both values are 3 ms, so the result is the middle of bucket 10.
        self.assertEqual(row["accept_samples"], 2)
        self.assertAlmostEqual(row["accept_p50"], 2.26274 + (3.2 - 2.26274) / 2, 4)
        self.check(self.row("latency_hour", server=S1, hour=11), rtt_samples=0, rtt_p50=None, accept_samples=2)

    def test_server_hour(self) -> None:
        self.check(
            self.row("server_hour", server=S1, hour=10),
            alive_minutes=60,
            seen_minutes=60,
            agreed_minutes=60,
            peak_sessions=10,
            peak_transports=4,
            capacity=100,
            frames=36_000,
            bytes=360_000,
            max_lag_ms=5,
            cpu_ms=6_000,
            max_rss_kb=70_000,
            lost_events=0,
        )
        self.check(self.row("server_hour", server=S1, hour=11), alive_minutes=60, peak_sessions=20, lost_events=60)
        # The last POST, at 10:18, counts for 10:19, too.
        self.check(self.row("server_hour", server=S2, hour=10), alive_minutes=30, seen_minutes=20, agreed_minutes=20)

    def test_what_no_discovery_could_have_seen_is_not_known(self) -> None:
        self.check(self.row("server_hour", server=S1, hour=9), alive_minutes=1, seen_minutes=0)
        self.check(self.row("server_hour", server=S1, hour=13), alive_minutes=1, seen_minutes=None, agreed_minutes=None)

    def test_uptime_day(self) -> None:
        # The day's first event is one minute before the first heartbeat. Its last event is t5 at 23:59.
        row = self.row("uptime_day", server=S1, dt=DAY)
        self.check(row, state="up", agreed_minutes=120, starts=1, clean_stops=1, crashes=0, flags="")
        self.assertAlmostEqual(row["uptime"], 123 / 840, 6)
        self.assertAlmostEqual(row["availability"], 120 / 840, 6)
        self.check(
            self.row("uptime_day", server=S2, dt=DAY),
            alive_minutes=31,
            agreed_minutes=20,
            flags="says it was up when discovery did not see it",
        )
        self.check(self.row("uptime_day", server=S3), alive_minutes=4, seen_minutes=None, availability=None)
        # Other servers have events on this day, but these two have none.
        for server in (S1, S2):
            self.check(
                self.row("uptime_day", server=server, dt=NEXT),
                state="down",
                alive_minutes=0,
                seen_minutes=None,
                observed_minutes=483,
                uptime=0.0,
                availability=None,
                flags="down all day",
            )

    def test_minute_day(self) -> None:
        self.check(self.row("minute_day", server=S1), alive_minutes=123, seen_minutes=120, agreed_minutes=120, dt=DAY)
        self.assertEqual(len(self.rows("minute_day")), 3)

    def test_boot(self) -> None:
        """Processes that write receipts have event numbers of their own, and do not count as boots."""
        ended = {row["boot"]: row["ended"] for row in self.rows("boot")}
        self.assertEqual(ended, {"boot-1": "stopped", "boot-2": "silent", "boot-3": "running", "boot-d": "silent"})
        self.check(self.row("boot", producer=S2), role="server", next_at=None, down_seconds=None)

    def test_session_day(self) -> None:
        self.check(self.row("session_day", server=S1), sessions=2, clients=2, lost=0, mean_seconds=3900.0, bytes=5_010)
        # The last event of S2 is at 10:29:30, and its session began at 10:11.
        self.check(self.row("session_day", server=S2), sessions=1, lost=1, mean_seconds=1110.0)

    def test_settlement_day(self) -> None:
        honest = self.row("settlement_day", server=S1)
        self.check(
            honest, transports=5, matched=2, conflict=0, one_sided=1, relay_only=2, unclaimed=0, inflated_bytes=0
        )
        self.check(honest, claimed_bytes=16_240, credited_bytes=15_040, inflation=0.0, verdict="too few receipts")
        liar = self.row("settlement_day", server=S2)
        self.check(liar, transports=4, matched=0, conflict=3, unclaimed=1, sided_with_one=1, inflated_bytes=5_400_000)
        self.check(liar, claimed_bytes=7_400_000, credited_bytes=2_000_000, verdict="claims more than both ends")
        self.assertAlmostEqual(liar["inflation"], 0.2)  # The inflation covers the transports whose ends agree.

    def test_settlement_conflict_day(self) -> None:
        self.check(
            self.row("settlement_conflict_day", transport="u1"),
            relay_ab=1_200_000,
            a_out=1_000_000,
            b_in=1_000_000,
            credited=1_000_000,
            claimed=1_200_000,
            word="relay claims more than both ends",
        )
        self.check(
            self.row("settlement_conflict_day", transport="u2"),
            word="relay and initiator against responder",
            signer_a="s-a",
        )
        self.check(
            self.row("settlement_conflict_day", transport="u4"),
            word="the two ends do not name each other",
            signer_a="s-f",
            signer_b="s-f",
            credited=0,
            claimed=5_000_000,
        )
        self.assertEqual(len(self.rows("settlement_conflict_day")), 3)

    def test_refusal_hour(self) -> None:
        self.check(self.row("refusal_hour", hour=10, what="request"), reason="no_such_peer", n=150, who=1)
        self.check(self.row("refusal_hour", what="drop"), producer=S2, n=3, who=0)
        self.check(self.row("refusal_hour", what="entry"), producer=DISCOVERY, reason="signature", n=60)

    def test_abuse_day(self) -> None:
        scan = self.row("abuse_day", kind="scan")
        self.check(scan, who="a", score=150.0, targets=150, evidence="asked for 150 clients that are not connected")
        self.check(self.row("abuse_day", kind="flood"), who="b", score=50.0, evidence="500 requests over its rate")
        self.check(self.row("abuse_day", kind="handshakes"), who="n2", score=50.0, refused=100)
        self.check(self.row("abuse_day", kind="entries"), who="n1", score=12.0)
        self.assertEqual(len(self.rows("abuse_day")), 4)

    def test_discovery_hour(self) -> None:
        self.check(self.row("discovery_hour", hour=10), first=1, next=79, deleted=1, refused=60, servers=2)
        self.check(self.row("discovery_hour", hour=11), first=0, next=60, refused=0, servers=1)

    def test_capacity_day(self) -> None:
        self.check(self.row("capacity_day", server=S1), peak_sessions=20, peak_share=0.2, busy_hours=0, refused_full=0)
        self.check(self.row("capacity_day", server=S2), peak_share=0.9, busy_hours=1, refused_full=3)

    def test_capacity_forecast(self) -> None:
        self.check(self.row("capacity_forecast", server=S1), days=1, growth_per_day=None, days_left=None)

    def test_network_day(self) -> None:
        # The clients by server are p1 and p2 of S1, and p1 of S2.
        row = self.row("network_day", dt=DAY)
        self.check(row, servers=2, transports=9, sessions=3, clients=3, bytes=7_416_240, refused=810, receipts=11)

    def test_placement(self) -> None:
        one, two = self.row("placement", server=S1), self.row("placement", server=S2)
        # S1 has 80 free places, and S2 has 1. Only S1 has latency samples.
        self.check(one, headroom=1.0, latency_factor=1.0, honesty=1.0)
        # The server was down on the second of two days.
        self.assertAlmostEqual(one["weight"], (120 / 840 / 2) ** 2, 3)
        self.check(two, headroom=0.0125, latency_factor=0.5, honesty=0.1, weight=0.001)
        self.assertIn("claims more than it delivered", two["reasons"])
        self.assertIn("90 % full at its peak", two["reasons"])

    def test_public_day(self) -> None:
        self.check(self.row("public_day", dt=DAY), servers=None, clients=None, withheld="too few servers")

    def test_quality_day(self) -> None:
        self.check(self.row("quality_day", producer=S2), duplicates=0, missing=0, completeness=1.0, clock_steps_ms=0)

    def test_silver_sessions(self) -> None:
        lost = self.row("sessions", server=S2)
        self.check(lost, reason="lost", duration_ms=1_110_000)
        self.assertEqual(self.row("sessions", server=S1, session=0)["reason"], "connection_lost")

    def test_silver_heartbeats_close_gaps(self) -> None:
        row = min(self.rows("heartbeats", producer=S1), key=lambda one: one["at"])
        self.assertEqual((row["at"] - row["covers_from"]).total_seconds(), 60)
