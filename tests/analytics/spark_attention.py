"""Findings that need attention: each kind from rows written by hand, then from computed tables."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, cast

from twisted.trial.unittest import SynchronousTestCase

import dmsg
from dmsg.analytics.attention import (
    MAX_ABUSE_LINES,
    MAX_LINES,
    TABLES,
    UNHEARD_MINUTES,
    Finding,
    Urgency,
    attention,
    needs_attention,
    shorten_findings,
)
from dmsg.analytics.schemas import DAILY, GOLD
from dmsg.cli.output import EXIT_INTERRUPTED, EXIT_PIPE
from tests.analytics.spark_tables import Story
from tests.analytics.support import NOW, S1, S2, Boot, LakeCase, run_here, write_file

DAY = date(2026, 3, 10)
BEFORE = DAY - timedelta(1)
PROGRAM = (sys.executable, "-c", "from dmsg.cli.entry import entry; entry()")
NOON = datetime(2026, 3, 10, 12, tzinfo=UTC)


def boot(producer: str = "a", last: datetime = NOON, **values: Any) -> dict[str, Any]:
    row = {"producer": producer, "role": "server", "boot": "b", "first_at": NOON - timedelta(days=3), "last_at": last}
    nothing = {"lost_transports": 0, "lost_witnessed": 0, "lost_least_bytes": None, "lost_most_bytes": None}
    return row | {"ended": "running", "next_at": None, "down_seconds": None} | nothing | values


def network(day: date, **values: Any) -> dict[str, Any]:
    return {"dt": day, "bytes": 1000, "transports": 100, "clients": 50, "refused": 0} | values


class RowsTests(SynchronousTestCase):
    """Plain calls."""

    def found(self, now: datetime = NOON, **tables: list[dict[str, Any]]) -> list[Finding]:
        empty: dict[str, list[dict[str, Any]]] = {name: [] for name in TABLES}
        quiet = {"boot": [boot()], "network_day": [network(DAY)]}
        return attention(empty | quiet | tables, now=now)

    def only(self, **tables: list[dict[str, Any]]) -> Finding:
        found = self.found(**cast(Any, tables))
        self.assertEqual(len(found), 1, found)
        return found[0]

    def test_no_data_gives_no_findings(self) -> None:
        self.assertEqual(self.found(), [])
        self.assertEqual(attention({name: [] for name in TABLES}, now=NOON), [])

    def test_unusable_lines_and_files_are_reported_for_two_days(self) -> None:
        unusable = {"2026-03-08": (9, 9), "2026-03-09": (1, 0), "2026-03-10": (1_200, 3)}
        empty: dict[str, list[dict[str, Any]]] = {name: [] for name in TABLES}
        for tables in (empty, empty | {"boot": [boot()], "network_day": [network(DAY)]}):
            found = attention(tables, now=NOON, unusable=unusable)
            self.assertEqual(
                [(one.text, one.urgency, one.place) for one in found],
                [
                    ("1 line in quarantine, read on 9 Mar", Urgency.SOON, "Data"),
                    ("1,200 lines in quarantine and 3 files with a problem, read on 10 Mar", Urgency.SOON, "Data"),
                ],
            )

    def test_servers_that_are_down_are_found(self) -> None:
        gone = boot("gone", NOON - timedelta(hours=3), ended="silent")
        found = self.only(boot=[boot(), gone])
        self.assertEqual((found.about, found.urgency, found.place), ("gone", Urgency.NOW, "Servers"))
        self.assertEqual(found.text, "server is silent since 10 Mar 09:00, for 3 h")
        # A server that has started again, or has been away for more than four weeks, is not reported.
        again = gone | {"next_at": NOON}
        old = boot("old", NOON - timedelta(days=29), ended="silent")
        self.assertEqual(self.found(boot=[boot(), again, old]), [])

    def test_who_crashed_and_what_it_cost(self) -> None:
        crashed = boot(last=NOON - timedelta(hours=1), ended="crashed", next_at=NOON, down_seconds=30.0)
        sessions = [{"server": "a", "dt": DAY, "lost": 7}]
        found = self.only(boot=[boot(), crashed, crashed], session_day=sessions)
        self.assertEqual(
            found.text, "server crashed 2 times, the last at 10 Mar 11:00; was down for 60 s, 7 sessions were lost"
        )
        took = {"lost_transports": 3, "lost_witnessed": 2, "lost_least_bytes": 1_000_000, "lost_most_bytes": 1_200_000}
        text = self.only(boot=[boot(), crashed | took]).text
        self.assertIn(
            "down for 30 s, 3 transports ended with it; 2 of them had carried 1 MB to 1.2 MB, both ends say", text
        )
        exact = {"lost_transports": 2, "lost_most_bytes": 1_000_000}
        text = self.only(boot=[boot(), crashed | took | exact]).text
        self.assertIn(", 2 transports ended with it; they had carried 1 MB, both ends say", text)
        unsaid = took | {"lost_witnessed": 0, "lost_least_bytes": None, "lost_most_bytes": None}
        text = self.only(boot=[boot(), crashed | unsaid]).text
        self.assertTrue(text.endswith("down for 30 s, 3 transports ended with it"), text)
        old = crashed | {"last_at": NOON - timedelta(days=2)}
        self.assertEqual(self.found(boot=[boot(), old]), [])

    def test_full_servers_are_found(self) -> None:
        row = {"server": "a", "dt": DAY, "peak_sessions": 90, "capacity": 100, "peak_share": 0.9, "busy_hours": 0}
        full = row | {"refused_full": 12}
        self.assertIn("refused 12 connections", self.only(capacity_day=[full]).text)
        self.assertEqual(self.only(capacity_day=[full]).urgency, Urgency.NOW)
        # The server has room: only one address had too many connections.
        self.assertEqual(self.only(capacity_day=[full | {"peak_share": 0.1}]).urgency, Urgency.SOON)
        self.assertIn("in 3 hours", self.only(capacity_day=[row | {"refused_full": 0, "busy_hours": 3}]).text)
        self.assertEqual(self.found(capacity_day=[row | {"refused_full": 0}]), [])

    def test_slow_readers(self) -> None:
        def ends(reason: str, transports: int) -> dict[str, Any]:
            return {"server": "a", "dt": DAY, "reason": reason, "by": "server", "transports": transports}

        found = self.only(close_day=[ends("queue_full", 10), ends("unspecified", 990)])
        self.assertEqual(found.text, "10 of 1,000 transports of 10 Mar ended because a receiver was slow (queue_full)")
        self.assertEqual(self.found(close_day=[ends("queue_full", 9), ends("unspecified", 100)]), [])
        self.assertEqual(self.found(close_day=[ends("queue_full", 10), ends("unspecified", 991)]), [])

    def test_bytes_that_nobody_is_credited_with(self) -> None:
        """A few slow receivers can cost a server much of what it really delivered."""
        settled = {"server": "a", "dt": DAY, "verdict": "agrees", "claimed_bytes": 100 << 20, "cut": 6}
        full = {"server": "a", "dt": DAY, "reason": "queue_full", "by": "server", "transports": 5}
        found = self.only(settlement_day=[settled | {"uncertain_bytes": 14 << 20}], close_day=[full])
        self.assertEqual((found.kind, found.urgency, found.place), ("uncertain", Urgency.SOON, "Settlement"))
        self.assertEqual(
            found.text,
            "14.7 MB of 10 Mar, 14 % of its claim, are credited to nobody: 6 transports ended with data in transit; "
            "5 ended because a receiver was slow (queue_full)",
        )
        text = self.only(settlement_day=[settled | {"uncertain_bytes": 100 << 20}]).text
        self.assertIn("100 % of its claim", text)
        self.assertNotIn("queue_full", text)
        for changed in (
            {"uncertain_bytes": (2 << 20) - 1},
            {"uncertain_bytes": (1 << 20) - 1, "claimed_bytes": 1 << 20},
            {"uncertain_bytes": None, "claimed_bytes": None},
            {"uncertain_bytes": 14 << 20, "dt": DAY - timedelta(2)},
        ):
            self.assertEqual(self.found(settlement_day=[settled | changed]), [], changed)

    def test_who_is_slow_against_its_own_week(self) -> None:
        def day(back: int, p99: float, samples: int = 100) -> dict[str, Any]:
            return {"server": "a", "dt": DAY - timedelta(back), "rtt_p99": p99, "rtt_samples": samples}

        week = [day(1, 20.0), day(2, 30.0), day(3, 400.0)]
        self.assertIn("p99 of answers 60 ms, 30 ms in the week", self.only(latency_day=[day(0, 60.0), *week]).text)
        for rows in (
            [day(0, 59.0), *week],
            [day(0, 60.0, 99), *week],
            [day(0, 60.0), *week[:2]],
            [day(0, 60.0), *week[:2], day(8, 30.0)],
            [day(0, 4.0), day(1, 1.0), day(2, 1.0), day(3, 1.0)],
        ):
            self.assertEqual(self.found(latency_day=rows), [])

    def test_lying_servers_are_found(self) -> None:
        def claim(back: int, verdict: str) -> dict[str, Any]:
            row = {"server": "a", "dt": DAY - timedelta(back), "verdict": verdict, "inflation": 0.031}
            return row | {"witnesses": 40, "accusers": 39, "uncertain_bytes": 0, "claimed_bytes": 1 << 30}

        lies = [claim(0, "claims more than both ends"), claim(6, "claims more than both ends")]
        found = self.only(settlement_day=lies)
        self.assertEqual(
            found.text,
            "claims more than both ends on 10 Mar, by 3.1 %; 39 of 40 clients say so; on 2 days of the week",
        )
        self.assertEqual((found.urgency, found.kind), (Urgency.NOW, "claims"))
        # A finding that a few clients can fake is not urgent.
        for verdict in ("claims more, as few of its clients say", "claims more, supported by one end"):
            self.assertEqual(self.only(settlement_day=[claim(0, verdict)]).urgency, Urgency.SOON)
        self.assertEqual(self.found(settlement_day=[claim(0, "uncertain: too much data was in transit")]), [])
        self.assertEqual(self.found(settlement_day=[claim(0, "agrees"), claim(7, "claims more than both ends")]), [])

    def test_attackers_are_found(self) -> None:
        row = {"who": "x", "kind": "scan", "score": 100.0, "servers": 3, "last_day": DAY, "targets": 1200}
        row |= {"refused": 5, "posts": 0, "requests": 0, "most_at": "02ab" * 16}
        text = (
            "scan: asked for 1,200 clients that are not connected, at 3 servers, most at 02ab02ab, until 10 Mar; "
            "score 100"
        )
        self.assertEqual(self.only(actor=[row]).text, text)
        self.assertEqual(self.only(actor=[row]).urgency, Urgency.NOW)
        self.assertIn("connected, at 02ab02ab, until", self.only(actor=[row | {"servers": 1}]).text)
        seen_by = row | {"kind": "entries", "servers": 1, "most_at": "discovery-1"}
        self.assertIn("discovery refused, at discovery-1, until", self.only(actor=[seen_by]).text)
        self.assertEqual(self.only(actor=[row | {"last_day": DAY - timedelta(1)}]).urgency, Urgency.SOON)
        self.assertEqual(self.found(actor=[row | {"score": 99.9}, row | {"last_day": DAY - timedelta(2)}]), [])

    def test_an_actor_without_a_name_is_shown(self) -> None:
        row = {"who": None, "kind": "unanswered", "servers": 1, "most_at": None, "last_day": DAY, "score": 200.0}
        found = self.only(actor=[row | {"targets": None, "refused": 100, "posts": 0, "requests": 100}])
        self.assertEqual(found.about, "unnamed")

    def test_a_person_is_shown_few_and_a_program_all(self) -> None:
        row = {"who": "x", "kind": "scan", "score": 100.0, "servers": 1, "last_day": DAY, "targets": 1200}
        row |= {"refused": 5, "posts": 0, "requests": 0, "most_at": "02ab" * 16}
        clocks = [{"server": str(index), "dt": DAY, "skew_ms": -180_000} for index in range(MAX_LINES)]
        found = self.found(actor=[row | {"who": str(index)} for index in range(100)], clock_day=clocks)
        self.assertEqual(len(found), 100 + MAX_LINES)
        shown = shorten_findings(found)
        self.assertEqual([one.kind for one in shown], ["scan"] * MAX_ABUSE_LINES + ["clock"] * MAX_LINES)
        self.assertEqual(shown[MAX_ABUSE_LINES - 1].text, "scan: and 98 more (attention --json has all)")

    def test_what_is_silent_in_old_data(self) -> None:
        """No events after the newest one are known, so nothing after it counts as silence."""
        gone, other = boot("b", NOON - timedelta(hours=3), ended="silent"), boot("a", NOON)
        fresh, later = (
            [one for one in self.found(NOON + timedelta(hours=hours), boot=[gone, other]) if one.kind == "silent"]
            for hours in (1, 30)
        )
        self.assertTrue(fresh[0].text.endswith("for 4 h"), fresh)
        self.assertTrue(later[0].text.endswith("for 3 h until the newest event"), later)

    def test_wrong_clocks_are_found(self) -> None:
        row = {"server": "a", "dt": DAY, "skew_ms": -180_000}
        self.assertEqual(self.only(clock_day=[row]).text, "its clock was 3 min behind discovery's on 10 Mar")
        self.assertEqual(self.found(clock_day=[row | {"skew_ms": 60_000}]), [])

    def test_missing_data_is_found(self) -> None:
        missing = {"producer": "a", "dt": DAY, "completeness": 0.98, "missing": 20}
        self.assertIn("20 events of 10 Mar", self.only(quality_day=[missing]).text)
        both = [missing, missing | {"dt": BEFORE}]
        self.assertIn("40 events of 9 Mar to 10 Mar", self.only(quality_day=both).text)
        self.assertEqual(self.found(quality_day=[missing | {"completeness": 0.99}]), [])
        unheard = {"server": "a", "dt": DAY, "state": "unheard", "seen_minutes": UNHEARD_MINUTES + 1}
        self.assertIn("no events of it have arrived", self.only(uptime_day=[unheard]).text)
        # The server's first file of the day arrives later than that of discovery.
        self.assertEqual(self.found(uptime_day=[unheard | {"seen_minutes": UNHEARD_MINUTES}]), [])
        old = self.found(NOON + timedelta(hours=2, seconds=1))
        self.assertIn("the newest event is of 10 Mar 12:00", old[0].text)
        self.assertEqual(self.found(NOON + timedelta(hours=2)), [])

    def test_changes_are_found(self) -> None:
        days = [network(DAY), network(BEFORE, bytes=500, clients=10), network(BEFORE - timedelta(1))]
        texts = [one.text for one in self.found(network_day=days)]
        self.assertEqual(
            texts[:2], ["carried: 500 B on 9 Mar, 1 kB the day before", "clients: 10 on 9 Mar, 50 the day before"]
        )
        states = [{"server": name, "dt": BEFORE, "state": "up"} for name in ("a" * 66, "b" * 66)]
        states.append({"server": "a" * 66, "dt": BEFORE - timedelta(1), "state": "up"})
        quiet = [network(BEFORE), network(BEFORE - timedelta(1))]
        found = self.only(network_day=[network(DAY), *quiet], uptime_day=states)
        self.assertEqual(found.text, "new on 9 Mar: bbbbbbbb")


class NamelessTests(LakeCase):
    """A producer that leaves out the fields by which tables group."""

    def test_closes_without_a_source_do_not_blind_the_operator(self) -> None:
        boot = Boot(S1, "b")
        for number in range(100):
            boot.event("transport_close", DAY, f"10:{number // 60:02d}:{number % 60:02d}", dst="b", reason="aborted")
        write_file(self.spool / "events-1.jsonl.gz", boot.rows, end=False)
        outcome = self.run_jobs()
        # No row without a name reaches the tables; how attention shows one of older tables is tested with RowsTests.
        self.assertEqual((outcome.events, outcome.quarantined, outcome.state.days), (0, 100, {}))


class TablesTests(LakeCase):
    """Findings from the tables of two servers: S2 crashes or falls silent, and reports wrong counts."""

    def test_findings_of_the_two_servers(self) -> None:
        lake = Story.told().pipeline().lake
        found = needs_attention(lake, lake.computed_state(), now=NOW)
        about = {(one.about, one.place) for one in found}
        self.assertIn((S2, "Settlement"), about)
        self.assertNotIn((S1, "Settlement"), about)
        self.assertTrue(all(one.text for one in found))

    def test_the_command_prints_the_same_findings_without_java(self) -> None:
        story = Story.told()
        lake = story.pipeline().lake
        arguments = (*PROGRAM, "analytics", "attention", "--out", lake.root, "--json")
        said = subprocess.run(arguments, capture_output=True, text=True, check=True, env={"PATH": "/nonexistent"})
        lines = [json.loads(line) for line in said.stdout.splitlines()]
        self.assertIn(S2, {line["about"] for line in lines if line["place"] == "Settlement"})

    def test_arrow_does_not_call_python_from_its_threads(self) -> None:
        """Arrow's reader of datasets would call Python from its own threads; a thread that is late aborts a program
        that ends.
        """
        for path in Path(dmsg.__file__).parent.rglob("*.py"):
            self.assertNotIn("to_pyarrow_", path.read_text(), str(path))

    def test_top_shows_the_same_rows_as_spark(self) -> None:
        """The same rows as Spark has, those of the newest or another day, the largest first; NULL last."""
        lake = Story.told().pipeline().lake
        newest = date.fromisoformat(max(lake.computed_state().days))
        for table, by, day in (
            ("traffic_hour", "bytes", None),
            ("settlement_day", "inflation", DAY),
            ("uptime_day", "uptime", None),
        ):
            chosen = () if day is None else ("--day", str(day))
            arguments = ("top", "--out", lake.root, table, "--by", by, "--rows", "3", *chosen)
            if table == "traffic_hour":
                command = (*PROGRAM, "analytics", *arguments)
                said = subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": "/nonexistent"})
                out, err = said.stdout, said.stderr
            else:
                out, err, _ = run_here(*arguments)
            self.assertEqual(err, "")
            shown = [line.split("│")[1:-1] for line in out.splitlines() if line.startswith("│")]
            names = GOLD[table].schema.fieldNames()
            rows = [row for row in Story.lines[table] if table not in DAILY or row["dt"] == (day or newest)]
            self.assertTrue(rows or table == "traffic_hour", table)
            rows.sort(key=lambda row: (row[by] is None, -(row[by] or 0), *(row[name] for name in names[:3])))
            days = [cells[names.index("dt")].strip() for cells in shown]
            self.assertEqual(days, [str(row["dt"]) for row in rows[:3]], table)
            servers = [cells[names.index("server")].strip() for cells in shown]
            self.assertEqual(servers, [row["server"][:8] for row in rows[:3]], table)

    def test_watch_tells_each_run_once_and_ends_at_ctrl_c(self) -> None:
        """With its output in a file, the command reports each run once; Ctrl-C ends it, and so does a reader that
        closes the pipe.
        """
        root = Story.told().pipeline().lake.root
        for how, status in ((signal.SIGINT, EXIT_INTERRUPTED), (None, EXIT_PIPE)):
            watching = subprocess.Popen(
                (*PROGRAM, "analytics", "watch", "--out", root, "--every", "0.5"), stdout=subprocess.PIPE
            )
            self.addCleanup(watching.kill)
            assert watching.stdout is not None
            self.assertIn(b"run 2 of", watching.stdout.readline())
            if how is not None:
                watching.send_signal(how)
                self.assertNotIn(b"run 2 of", watching.stdout.read())
            watching.stdout.close()
            self.assertEqual(watching.wait(60), status)
