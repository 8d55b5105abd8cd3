"""Gold against DuckDB, on the day by hand, of which some events came late."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from dmsg.analytics.schemas import GOLD
from tests.analytics.comparison import compare
from tests.analytics.spark_tables import Story
from tests.analytics.support import NOW


class OracleTests(SynchronousTestCase):
    """Spark and DuckDB give the same answers."""

    def test_gold_tables_equal_a_day_computed_by_hand(self) -> None:
        story = Story.told()
        found = compare(story.pipeline().lake, story.spool, story.checked, NOW.date())
        self.assertEqual(set(found), set(GOLD))
        self.assertEqual({name: what[:3] for name, what in found.items() if what}, {})
