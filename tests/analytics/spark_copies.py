"""Events that arrived twice: Spark chooses the same copies, and Spark's tasks leave out the same ones."""

from __future__ import annotations

from random import Random
from typing import Any
from unittest.mock import patch

from dmsg.analytics import bronze, functions as F, refine, shards
from dmsg.analytics.memory_columns import NotInMemory
from dmsg.analytics.schemas import EVENT, GOLD
from dmsg.analytics.shard_tasks import FAMILIES_OF
from dmsg.analytics.shards import LargeDays
from tests.analytics.arrow_copies import CopiesCase
from tests.analytics.support import S1, S2, frame, rows_by_spark

ODD_TEXTS = ("", 'a"b\\c', "\x00\x01\x1f\x7f", "\\u001f", "ü€\U0001f600\u2028", "\b\t\n\f\r/<>&'")


class SparkCopiesTests(CopiesCase):
    """Runs in which Spark chooses, or computes the tables."""

    def test_the_texts_are_those_by_which_spark_chooses(self) -> None:
        random = Random(7)
        events: list[dict[str, Any]] = []
        for text in ODD_TEXTS:
            events.append({"producer": text, "type": text, "seq": random.randrange(-(2**63), 2**63)})
            events.append({"reason": text, "secure": bool(len(events) % 3), "rtt": [0, 2**31 - 1, None]})
        found = frame(events, EVENT).select(F.to_json(F.struct(*EVENT.fieldNames())).alias("text")).toArrow()
        self.assertEqual([bronze.text_of_copy(one).decode() for one in events], found["text"].to_pylist())

    def test_a_late_copy_that_differs_replaces_an_event(self) -> None:
        """The replaced event was counted, so whole days are computed. The tables are those of a run over all files in
        which Spark chooses among the copies.
        """
        self.assertEqual(self.differ("aaa"), set())
        whole = self.root / "at-once"
        with patch.object(refine, "find_copies", side_effect=NotInMemory("Spark chooses")):
            self.run_jobs(whole)
        self.assertEqual(self.tables(GOLD), self.tables(GOLD, out=whole))
        lake = self.pipeline().lake
        for name in self.compared:
            rows = self.table(name, "silver")
            self.assertEqual(rows, self.table(name, "silver", whole), name)
            self.assertEqual(rows, rows_by_spark(lake, "silver", name), name)

    def test_copies_on_a_day_in_shards(self) -> None:
        """Tasks of Spark leave the copies out."""
        for server in (S1, S2):
            self.many(server, "t")
        self.arrive("again", self.again(S1))
        results: list[Any] = []
        run_job = shards.run_job

        def recorded(*arguments: Any) -> Any:
            results.append(run_job(*arguments))
            return results[-1]

        with (
            patch.object(shards, "SHARD_ROWS", 4),
            patch.object(LargeDays, "are_needed", return_value=True),
            patch.object(shards, "run_job", recorded),
        ):
            self.taken_in()
        self.assertEqual({name for name, _ in results[0].tables}, set(FAMILIES_OF))
        self.check_oracle()
