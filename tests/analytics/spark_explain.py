"""Explanations of verdicts: from rows written by hand, then from computed tables."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import date, datetime, timedelta
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from dmsg.analytics.attention import SLOW_SAMPLES
from dmsg.analytics.explain import Section, _latency, _life, _settlement, _spans, explain, find_server
from dmsg.cli.output import EXIT_PIPE
from tests.analytics.spark_tables import Story
from tests.analytics.support import DAY, S1, S2, LakeCase, run_here

PROGRAM = (sys.executable, "-c", "from dmsg.cli.entry import entry; entry()")


class RowsTests(SynchronousTestCase):
    """Plain calls."""

    def latency(self, *p99: float, samples: int = SLOW_SAMPLES) -> Section:
        """Return the section on latency for a day's p99 and those of the days before."""

        def read(table: str, *, of: date = DAY) -> list[dict[str, Any]]:
            back = (DAY - of).days
            if back >= len(p99):
                return []
            row = {"dt": of, "rtt_samples": samples, "rtt_p50": 1.0, "rtt_p99": p99[back]}
            return [row | {"accept_samples": 0, "accept_p50": None, "accept_p99": None}]

        found = _latency(read, DAY)
        assert found is not None
        return found

    def test_latency(self) -> None:
        slow = self.latency(40.0, 9.0, 10.0, 11.0)
        self.assertEqual(slow.verdict, "slow")
        self.assertIn("p99 10.0 ms, the median of 3 days; slow from 20.0 ms on", slow.lines[-1])
        self.assertEqual(self.latency(19.9, 9.0, 10.0, 11.0).verdict, "as usual")
        self.assertEqual(self.latency(6.5, 1.0, 1.0, 1.0).verdict, "slow")
        self.assertEqual(self.latency(5.9, 1.0, 1.0, 1.0).verdict, "as usual")
        self.assertEqual(self.latency(40.0, 9.0, 10.0).verdict, "not compared")
        self.assertEqual(self.latency(40.0, 9.0, 10.0, 11.0, samples=SLOW_SAMPLES - 1).verdict, "not compared")

    def test_lives(self) -> None:
        at = datetime(2026, 3, 10, 12)
        boot = {
            "boot": "ab" * 16,
            "first_at": at - timedelta(days=1),
            "last_at": at,
            "next_at": at,
            "down_seconds": 5.0,
            "lost_transports": 3,
            "lost_witnessed": 2,
            "lost_least_bytes": 1_000_000,
            "lost_most_bytes": 2_000_000,
        }
        day = at.date()
        self.assertIn(
            "from 9 Mar 12:00:00 to 12:00:00, crashed: no stop event", _life(boot | {"ended": "crashed"}, day)
        )
        crash = _life(boot | {"ended": "crashed"}, day)
        self.assertIn("5 s later, 3 transports ended with it; 2 of them had carried 1 MB to 2 MB", crash)
        self.assertIn("no event for at least 15 minutes", _life(boot | {"ended": "silent"}, day))
        self.assertTrue(_life(boot | {"ended": "stopped"}, day).endswith("stopped cleanly"))

    def test_what_both_ends_bound_of_a_killed_server(self) -> None:
        """The verdict contains the bounds, even if nothing else was settled on that day."""
        rows: list[dict[str, Any]] = [
            {"counted_bytes": 100, "least_bytes": 1_000_000, "most_bytes": 1_200_000},
            {"counted_bytes": 7, "least_bytes": None, "most_bytes": None},
        ]

        def read(table: str, **_: Any) -> list[dict[str, Any]]:
            return rows if table == "lost_transport" else []

        found = _settlement(read)
        assert found is not None
        self.assertEqual(
            found.verdict, "nothing to settle; both ends' receipts bound 1 MB to 1.2 MB of a killed or silent process"
        )
        self.assertTrue(
            found.lines[0].startswith("2 transports ended with a killed or silent process; 1 have receipts")
        )
        self.assertIn("1,000,000 to 1,200,000; the process had reported 100", found.lines[1])
        del rows[0]
        found = _settlement(read)
        assert found is not None
        self.assertIn("no two receipts bound the bytes of a killed or silent process", found.verdict)
        rows.clear()
        self.assertIsNone(_settlement(read))

    def test_spans(self) -> None:
        self.assertEqual(_spans([0, 1, 2, 5, 22, 23]), "00h to 02h, 05h, 22h to 23h")
        self.assertEqual(_spans([]), "")

    def test_names(self) -> None:
        self.assertEqual(find_server(["02ab", "02ac", "02ab"], "02AB"), ["02ab"])
        self.assertEqual(find_server(["02ab", "02ac"], "02"), ["02ab", "02ac"])


class TablesTests(LakeCase):
    """Explanations from the tables of two servers: S1 is honest, S2 crashes and reports wrong counts."""

    def sections(self, server: str) -> dict[str, Section]:
        lake = Story.told().pipeline().lake
        return {one.title: one for one in explain(lake, lake.computed_state(), server, DAY)}

    def test_the_explanation_of_a_liar_names_the_conflicts(self) -> None:
        found = self.sections(S2)
        settled = Story.lines["settlement_day"]
        (row,) = [one for one in settled if one["server"] == S2 and one["dt"] == DAY]
        self.assertEqual(found["Settlement"].verdict, row["verdict"])
        text = "\n".join(found["Settlement"].lines)
        self.assertIn(f"claimed {row['claimed_bytes']:,} bytes", text)
        conflicts = [one for one in Story.lines["settlement_conflict_day"] if one["server"] == S2]
        for one in conflicts:
            self.assertIn(f"transport {one['transport']}: {one['word']}", text)
        self.assertTrue(conflicts)
        # The text goes down to the events: how the server closed a transport, and what its ends signed.
        self.assertRegex(text, r"\n  \d\d:\d\d:\d\d close, process ")
        self.assertRegex(text, r"\n  receipt of the initiator ")

    def test_the_explanation_of_an_honest_server_names_no_conflict(self) -> None:
        found = self.sections(S1)
        self.assertNotIn("transport ", "\n".join(found["Settlement"].lines[1:]).replace("transports", ""))
        (row,) = [one for one in Story.lines["uptime_day"] if one["server"] == S1 and one["dt"] == DAY]
        uptime = "\n".join(found["Uptime"].lines)
        self.assertIn(f"{row['alive_minutes']} minutes with heartbeats", uptime)
        self.assertIn(f"uptime {row['uptime'] * 100:.2f} %", uptime)
        self.assertEqual(found["Data"].verdict.endswith("missing"), any(self.missing(S1)))
        total = sum(one["transports"] for one in Story.lines["close_day"] if one["server"] == S1 and one["dt"] == DAY)
        self.assertEqual(found["Ends of transports"].verdict, str(total))

    def test_the_explanation_gives_the_limits_of_self_dealing(self) -> None:
        found = self.sections(S2)["Self-dealing"]
        self.assertEqual(found.verdict, "no sign of it")
        text = "\n".join(found.lines)
        self.assertIn(
            "2 of 2 clients deal with nobody else: 2,000,000 of 2,000,000 credited bytes, 100.0 % (limit 25 %", text
        )
        self.assertIn("2 servers have credit (at least 3)", text)

    def missing(self, server: str) -> list[int]:
        rows = Story.lines["quality_day"]
        return [one["missing"] for one in rows if one["producer"] == server and one["dt"] == DAY and one["missing"]]

    def test_the_command_works_without_java_and_with_a_key_prefix(self) -> None:
        root = Story.told().pipeline().lake.root

        def said(*arguments: str) -> tuple[str, str, int]:
            return run_here("explain", "--out", root, *arguments)

        command = (*PROGRAM, "analytics", "explain", "--out", root, S2, str(DAY), "--json")
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": "/nonexistent"})
        self.assertEqual((done.stderr, done.returncode), ("", 0))
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        self.assertEqual([line["section"] for line in lines], list(self.sections(S2)))
        out, err, status = said(S2, str(DAY))
        self.assertEqual((err, status), ("", 0))
        self.assertIn(f"{S2} on {DAY}\n", out)
        self.assertIn("\n    receipt of the initiator ", out)
        self.assertEqual(said("02", str(DAY))[2], 1)
        self.assertIn("type more of the name", said("02", str(DAY))[1])
        self.assertIn("no server or discovery is called nobody; refused clients are in", said("nobody", str(DAY))[1])
        self.assertIn("the tables have no data of 2020-01-01; the newest day is", said(S1, "2020-01-01")[1])

    def test_a_reader_that_closes_the_pipe_ends_the_command(self) -> None:
        command = (*PROGRAM, "analytics", "explain", "--out", Story.told().pipeline().lake.root, S1, str(DAY), "--json")
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert running.stdout is not None
        running.stdout.close()
        self.assertEqual(running.stderr.read() if running.stderr else "", "")
        self.assertEqual(running.wait(), EXIT_PIPE)
        if running.stderr:
            running.stderr.close()
