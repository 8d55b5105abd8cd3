"""Runs on this machine: tasks of Spark read the files and compute the large tables, however few events there are."""

from __future__ import annotations

import signal
from typing import Any
from unittest.mock import patch

from click.testing import CliRunner

from dmsg.analytics import jobs, main, shards
from dmsg.analytics.intake import convert_files
from dmsg.analytics.jobs import Pipeline
from dmsg.analytics.lake_error import LakeError
from dmsg.analytics.schemas import GOLD
from dmsg.analytics.session import SparkOnDemand, is_wanted
from dmsg.analytics.shard_tasks import FAMILIES_OF
from dmsg.cli.pipeline.commands import analytics
from tests.analytics.support import DAY, NOW, S1, Boot, LakeCase, spark, write_file


class WantedTests(LakeCase):
    """Few events."""

    def test_tasks_read_and_compute_few_events(self) -> None:
        boot = Boot(S1, "b")
        boot.beats(DAY, "10:00:00", 3, sessions=1)
        ends = {"transport": "t", "src": "a", "dst": "b", "secure": True, "by": "src", "reason": "unspecified"}
        boot.event("transport_close", DAY, "10:05:00", **ends, data_ab=7, data_ba=0, total_ab=7, total_ba=0)
        write_file(self.spool / "events-1.jsonl.gz", boot.rows)
        here: list[bool] = []
        computed: set[str] = set()
        run_job: Any = shards.run_job

        def converted(*arguments: Any, **options: Any) -> Any:
            here.append(options["here"])
            return convert_files(*arguments, **options)

        def ran(*arguments: Any) -> Any:
            found = run_job(*arguments)
            computed.update(name for name, _ in found.tables)
            return found

        other = self.root / "other"
        with patch.object(jobs, "convert_files", converted), patch.object(shards, "run_job", ran):
            self.run_jobs(other)
            self.assertEqual((here, computed), ([True], set()))
            here.clear()
            Pipeline(SparkOnDemand(spark, is_wanted=True), str(self.out), now=NOW).run(self.sources())
        self.assertEqual((here, computed), ([False], set(FAMILIES_OF)))
        self.assertEqual(self.tables(GOLD), self.tables(GOLD, out=other))

    def test_a_run_on_this_machine_uses_spark_unless_the_user_says_otherwise(self) -> None:
        """On a cluster, the amount of data decides between tasks with Arrow and Spark's own plans."""
        self.addCleanup(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT))
        for words, wanted in (
            ((), True),
            (("--master", "local[2]"), True),
            (("--spark", "if-needed"), False),
            (("--spark", "if-needed", "--master", "local[2]"), False),
            (("--master", "spark://host:7077"), False),
        ):
            used: list[bool] = []

            def run(spark: Any, *_: object, used: list[bool] = used) -> Any:
                used.append(is_wanted(spark))
                self.assertFalse(spark.has_started)
                raise LakeError("enough")

            self.out.mkdir(exist_ok=True)
            arguments = ("run", "--spool", str(self.spool), "--out", str(self.out), *words)
            with patch.object(main, "run", run):
                done = CliRunner().invoke(analytics, arguments)
            self.assertIn("enough", done.stderr)
            self.assertEqual(used, [wanted], words)
