"""A simulated network: both engines say the same of it, what was planted is found, and nobody else is accused."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from dmsg.analytics.simulate import COLLUDER, LIAR, Network, Simulation
from tests.spark.spark_oracle import compare
from tests.spark.support import NOW, LakeCase, spark

LIES = ("claims more than both ends", "claims more, with one end's word")


class SimulatedTests(LakeCase):
    """One small network; three of them, and larger ones, are in the long runs."""

    def test_what_was_planted_is_found(self) -> None:
        self.check(seed=8)

    def check(self, seed: int) -> None:
        """One seed."""
        last = NOW.date() - timedelta(1)  # a whole one
        simulation = Simulation(spark(), Network(1500, 10, 40, 2, seed, last, fleet=True))
        simulation.write(Path(self.root))
        crashed = {(row.producer, row.day) for row in simulation._plan().where("crashed").collect()}
        keys = {row.server: row.producer for row in simulation._plan().collect()}
        self.run_jobs()
        found = compare(self.pipeline().lake, self.spool, self.checked, NOW.date())
        self.assertEqual([(name, one) for name, what in found.items() for one in what[:3]], [])

        verdicts = {(row["server"], row["verdict"]) for row in self.table("settlement_day")}
        liars = {(keys[LIAR], LIES[0]), (keys[COLLUDER], LIES[1])}
        self.assertEqual({one for one in verdicts if one[1] in LIES}, liars)
        first = min(row["dt"] for row in self.table("uptime_day"))
        days = {(row["server"], (row["dt"] - first).days) for row in self.table("uptime_day") if row["crashes"]}
        self.assertTrue(crashed)
        self.assertEqual(days, crashed)
        self.assertEqual({row["missing"] for row in self.table("quality_day")}, {0})
        # percentiles of all servers are those of all samples, and no average of theirs
        (day,) = [row for row in self.table("network_day") if row["dt"] == last]
        parts = [row for row in self.table("latency_day") if row["dt"] == last]
        self.assertEqual(sum(row["rtt_samples"] for row in parts), day["rtt_samples"])
        average = sum(row["rtt_p99"] * row["rtt_samples"] for row in parts) / day["rtt_samples"]
        self.assertGreater(abs(average - day["rtt_p99"]), 0.1 * day["rtt_p99"])
        (public,) = [row for row in self.table("public_day") if row["dt"] == first]
        self.assertIsNotNone(public["rtt_p50"])
        self.attacks()

    def attacks(self) -> None:
        """Each kind that was planted, and none else, at all servers together."""
        actors = self.table("actor")
        self.assertEqual({row["kind"] for row in actors}, {"scan", "flood", "handshakes", "entries"})
        # three scan; a tag of a network is another one each day
        of_kind = {kind: [row for row in actors if row["kind"] == kind] for kind in ("scan", "flood", "handshakes")}
        self.assertEqual([len(rows) for rows in of_kind.values()], [3, 1, 2])
        for rows in of_kind.values():
            self.assertEqual({row["servers"] for row in rows}, {10})
            self.assertTrue(all(row["names"] for row in rows))
        self.assertEqual([row["days"] for row in of_kind["flood"]], [2])
        (flood,) = [row for row in self.table("refusal_day") if row["reason"] == "rate_limited"][-1:]
        self.assertEqual((flood["who"], flood["producers"]), (10, 10))
