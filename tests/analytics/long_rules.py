"""The tests of rules by runs over files, with all tables beside DuckDB's (``make long WHICH=pipeline``)."""

from __future__ import annotations

import os

from dmsg.analytics import lake
from dmsg.analytics.attention import needs_attention
from dmsg.cli.pipeline.watch import _render_findings
from dmsg.telemetry.spool_listing import Reason, shorten_path
from tests.analytics import arrow_earlier, spark_lives, spark_self_dealing, spark_settlement, spark_sql, spark_tables
from tests.analytics.comparison import compare
from tests.analytics.support import DAY, NOW, S1, Boot, ByRuns, LakeCase, write_file


class CutTests(ByRuns, spark_settlement.CutTests):
    """Settlement with three counts for each transport, by runs over files."""


class LivesTests(ByRuns, spark_lives.LivesTests):
    """Crashes, silence and lost files."""


class ReasonsTests(ByRuns, spark_lives.ReasonsTests):
    """Producers that write too many reasons."""


class LostTransportTests(ByRuns, spark_lives.LostTransportTests):
    """Transports of a server that was killed."""


class StoredDayTests(spark_sql.StoredDayTests):
    """Days on which events came twice, by a whole run."""

    def refine(self, story: spark_tables.Story) -> None:
        story.run_jobs()
        found = compare(story.pipeline().lake, story.spool, story.checked, NOW.date())
        self.assertEqual([(name, one) for name, what in found.items() for one in what[:3]], [])


class BySparkTests(arrow_earlier.TakenOverTests):
    """Tables of an earlier version, with rows that do not fit in memory: Spark reads and writes all of them."""

    def setUp(self) -> None:
        super().setUp()
        self.patch(lake, "HELD_ROWS", 0)


class PlantedTests(spark_self_dealing.PlantedTests):
    """Self-dealing in other networks."""

    seeds = (2, 3)


class ListingTests(LakeCase):
    """Files that cannot be read beside readable events; ``spark_intake`` has the same beside lines that are none."""

    def test_what_cannot_be_read_ends_no_run(self) -> None:
        """Files that cannot be read are reported until they can be read; then they are read."""
        boot = Boot(S1, "b")
        boot.event("start", DAY, "10:00:00", capacity=5)
        boot.beats(DAY, "10:01:00", 3, sessions=1)
        write_file(self.spool / "events-1.jsonl.gz", boot.rows[:2])
        write_file(self.root / "outside" / "events-2.jsonl.gz", boot.rows[2:])
        (self.spool / "relay").symlink_to(self.root / "not yet")
        os.mkfifo(self.spool / "events-3.jsonl.gz")
        vanishing = self.spool / "events-4.jsonl.gz"
        write_file(vanishing, [], garbage=[b"hello"])
        pipeline = self.pipeline(left={Reason.FORBIDDEN: {"/receipts"}})

        def vanish(what: str, done: int, total: int) -> None:
            if what == "bronze: spool":
                vanishing.unlink()

        pipeline._progress = vanish
        first = pipeline.run(self.sources())
        self.assertEqual(first.events, 3)
        expected = {
            Reason.DANGLING: (1, shorten_path(f"{self.spool}/relay")),
            Reason.SPECIAL: (1, shorten_path(f"{self.spool}/events-3.jsonl.gz")),
            Reason.GONE: (1, shorten_path(str(vanishing))),
            Reason.FORBIDDEN: (1, "/receipts"),
        }
        self.assertEqual(first.left, expected)
        lake = pipeline.lake
        self.assertEqual(lake.state().left, expected)
        told = [one.text for one in needs_attention(lake, lake.state(), now=NOW) if one.kind == "not read"]
        self.assertEqual(len(told), 4)
        self.assertIn("not read, because the link leads to nothing: " + shorten_path(f"{self.spool}/relay"), told)
        # Nothing new, but fewer faults: attention has to know.
        (self.spool / "events-3.jsonl.gz").unlink()
        second = self.run_jobs()
        self.assertEqual((second.days, set(second.left)), ([], {Reason.DANGLING}))
        self.assertEqual(set(lake.state().left), {Reason.DANGLING})
        self.assertEqual(lake.state().versions, first.state.versions)
        (self.root / "outside").rename(self.root / "not yet")
        write_file(vanishing, [{**boot.event("stop", DAY, "10:30:00")}])
        third = self.run_jobs()
        self.assertEqual((third.events, third.left), (5, {}))
        self.assertEqual(lake.state().left, {})
        self.assertEqual(self.run_jobs().state, lake.state())


class NamelessTests(LakeCase):
    """A producer that leaves out the fields by which tables group."""

    def test_closes_without_a_source_do_not_blind_the_operator(self) -> None:
        boot = Boot(S1, "b")
        boot.event("start", DAY, "10:00:00")
        for number in range(100):
            boot.event("transport_close", DAY, f"10:{number // 60:02d}:{number % 60:02d}", dst="b", reason="aborted")
        write_file(self.spool / "events-1.jsonl.gz", boot.rows)
        self.assertEqual(self.run_jobs().quarantined, 100)
        lake = self.pipeline().lake
        state = lake.computed_state()
        found = needs_attention(lake, state, now=NOW)
        self.assertNotIn("unanswered", {one.kind for one in found})
        _render_findings(state, found, NOW)
