"""Gold against DuckDB: on the day by hand, and on simulated events (`make long WHICH=pipeline`)."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from dmsg.analytics.lake import Lake
from dmsg.analytics.schemas import DAY_MS, GOLD
from tests.analytics.oracle import connect, differences, queries
from tests.analytics.spark_tables import Story
from tests.analytics.support import NOW

KEYS = (
    "server",
    "producer",
    "boot",
    "dt",
    "hour",
    "what",
    "who",
    "kind",
    "names",
    "reason",
    "by",
    "src",
    "dst",
    "transport",
)


def compare(lake: Lake, spool: Path, checked: Path, today: date) -> dict[str, list[str]]:
    """Table -> what is different."""
    base = connect(spool, checked, until=(today - date(1970, 1, 1)).days * DAY_MS + DAY_MS)
    state = lake.state()
    found = {}
    for name, question in queries(today).items():
        cursor = base.execute(question)
        assert cursor.description is not None
        names = [column[0] for column in cursor.description]
        oracle: list[dict[str, Any]] = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
        columns = GOLD[name].schema.fieldNames()
        keys = [key for key in KEYS if key in columns and key in names]
        if name == "network_day":
            keys = ["dt"]
        gold = [row.asDict() for row in lake.read("gold", name, state).collect()]
        if name == "network_day":
            gold = [row for row in gold if row["servers"]]
        if name == "public_day":
            gold = [row for row in gold if row["dt"] in {one["dt"] for one in oracle}]
        found[name] = differences(gold, oracle, keys)
    base.close()
    return found


class OracleTests(SynchronousTestCase):
    """Two engines, the same answers."""

    def test_the_day_by_hand(self) -> None:
        story = Story.told()
        found = compare(story.pipeline().lake, story.spool, story.checked, NOW.date())
        self.assertEqual(set(found), set(GOLD))
        self.assertEqual({name: what[:3] for name, what in found.items() if what}, {})
