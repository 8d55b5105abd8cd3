"""Self-dealing: which servers are flagged, from receipts written by hand."""

from __future__ import annotations

import json
import subprocess
from datetime import date, timedelta
from typing import Any

import duckdb
import pyarrow as pa
from twisted.trial.unittest import SynchronousTestCase

from dmsg.analytics import explain, self_dealing
from dmsg.analytics.schemas import DAY_MS
from dmsg.analytics.self_dealing import AWAKE_HOURS, Dealing, judge, lines_of
from dmsg.analytics.simulate import Network, Simulation
from dmsg.analytics.simulate.ground_truth import server_anomalies
from dmsg.analytics.simulate.traffic import receipt_lines
from dmsg.analytics.store import Store
from tests.analytics.spark_sql import PROGRAM
from tests.analytics.spark_tables import Story
from tests.analytics.support import DAY, S1, S2, S3, run_here, spark


def judged(receipts: pa.Table, awake: int = 24) -> list[Dealing]:
    """The dealings of a day by the pipeline's queries, which DuckDB runs."""
    with duckdb.connect() as base:
        base.register("it", receipts)

        def ask(sql: str) -> list[dict[str, Any]]:
            credited = self_dealing._CREDITED.format(receipts="SELECT * FROM it")
            return base.sql(credited + sql).to_arrow_table().to_pylist()

        pairs, hours = ask(self_dealing._PAIRS), ask(self_dealing._HOURS)
    return judge(pairs, hours, dict.fromkeys((row["server"] for row in pairs), awake))


class RuleTests(SynchronousTestCase):
    """Receipts in memory, read by the queries; each method adds transports to an ordinary day of three servers."""

    def setUp(self) -> None:
        self.rows: list[dict[str, Any]] = []
        # Forty clients, each with many partners, over three servers.
        for number in range(600):
            a, b = number % 40, (number * 7 + 1 + number // 40) % 40
            if a != b:
                self.carry((S1, S2, S3)[number % 3], f"c{a}", f"c{b}", 1000, hour=number % 24)

    def carry(self, server: str, a: str, b: str, size: int, *, hour: int = 12, times: int = 1, said: int = 2) -> None:
        for _ in range(times):
            name = f"{len(self.rows):032x}"
            both = [(a, b, True, size, 0), (b, a, False, 0, size)]
            for signer, partner, initiator, sent, received in both[:said]:
                self.rows.append(
                    {"server": server, "transport": name, "signer": signer, "partner": partner}
                    | {"initiator": initiator, "delivered_out": sent, "delivered_in": received, "hour": hour}
                )

    def dealings(self, awake: int = 24) -> dict[str, Dealing]:
        return {one.server: one for one in judged(pa.Table.from_pylist(self.rows), awake)}

    def flags(self, **options: int) -> dict[str, list[str]]:
        return {server: one.flags for server, one in self.dealings(**options).items() if one.flags}

    def test_an_ordinary_day_has_no_flag(self) -> None:
        found = self.dealings()
        self.assertEqual(self.flags(), {})
        self.assertEqual([one.closed_clients for one in found.values()], [0, 0, 0])
        self.assertEqual(found[S1].network, (3, 40, 0))

    def test_two_own_keys(self) -> None:
        self.carry(S2, "x1", "x2", 3000, times=40)
        self.assertEqual(self.flags(), {S2: ["closed group"]})
        found = self.dealings()[S2]
        self.assertEqual((found.closed_bytes, found.closed_transports, found.closed_clients), (120_000, 40, 2))
        self.assertEqual(found.names, ["x1", "x2"])
        text = "\n".join(lines_of(found))
        self.assertIn("120,000 of ", text)
        self.assertIn("(limit 25 %, and 30 transports)", text)
        self.assertIn("these clients: x1, x2", text)

    def test_a_ring_and_a_clique(self) -> None:
        for number in range(50):
            self.carry(S1, f"x{number % 5}", f"x{(number + 1) % 5}", 3000, hour=number % 24)
            self.carry(S3, f"y{number % 6}", f"y{number * 7 % 5}", 3000, hour=number % 24)
        self.assertEqual(self.flags(), {S1: ["closed group"], S3: ["closed group"]})

    def test_a_little_traffic_with_others_hides_no_group(self) -> None:
        self.carry(S2, "x1", "x2", 3000, times=40)
        self.carry(S2, "x1", "c3", 10)
        self.carry(S1, "x2", "x1", 10)
        self.assertEqual(self.flags(), {S2: ["closed group"]})

    def test_clients_with_partners_who_deal_with_others_are_no_group(self) -> None:
        """Users of one service look like a group: they use one server and have one partner, but the partner has many
        others.
        """
        for number in range(60):
            self.carry(S2, f"user{number}", "service", 3000, hour=number % 24)
        self.assertEqual(self.flags(), {})

    def test_groups_that_use_several_servers_are_not_flagged(self) -> None:
        self.carry(S2, "x1", "x2", 3000, times=40)
        self.carry(S1, "x1", "x2", 3000, times=10)
        self.assertEqual(self.flags(), {})

    def test_few_transports_or_bytes_are_not_flagged(self) -> None:
        self.carry(S2, "x1", "x2", 100_000, times=29, hour=3)
        self.assertEqual(self.flags(), {})
        self.carry(S1, "y1", "y2", 1000, times=40)
        self.assertEqual(self.flags(), {})

    def test_one_word_is_nothing(self) -> None:
        self.carry(S2, "x1", "x2", 3000, times=40, said=1)
        self.assertEqual(self.flags(), {})

    def test_a_network_in_which_clients_have_no_choice_is_not_flagged(self) -> None:
        self.rows = [row for row in self.rows if row["server"] != S3]
        self.carry(S2, "x1", "x2", 3000, times=40)
        self.assertEqual(self.flags(), {})
        self.rows.clear()
        for server in (S1, S2, S3):
            self.carry(server, f"x{server}", f"y{server}", 3000, times=40)
        self.assertEqual(self.flags(), {})

    def test_a_burst(self) -> None:
        for number in range(250):
            self.carry(S2, f"c{number % 40}", f"c{(number + 3) % 40}", 3000, hour=4)
        self.assertEqual(self.flags(), {S2: ["burst"]})
        self.assertEqual(self.flags(awake=AWAKE_HOURS - 1), {})
        for number in range(250):
            for server in (S1, S3):
                self.carry(server, f"c{number % 40}", f"c{(number + 3) % 40}", 3000, hour=4)
        self.assertEqual(self.flags(), {}, "an hour that was busy everywhere")

    def test_private_pairs_that_are_usual_everywhere_are_not_flagged(self) -> None:
        for number in range(30):
            self.carry((S1, S2, S3)[number % 3], f"laptop{number % 15}", f"home{number % 15}", 9000, times=10)
        self.assertEqual(self.flags(), {})
        self.assertGreater(self.dealings()[S1].closed_share, 0.25)

    def test_giant_numbers_hide_nothing(self) -> None:
        self.carry(S2, "x1", "x2", 2**50, times=10_000)
        self.assertEqual(self.flags(), {S2: ["closed group", "burst"]})

    def test_a_day_without_receipts(self) -> None:
        self.assertEqual(judge([], [], {}), [])


FLAGS = {"closed group": "self-dealing", "burst": "burst"}


class PlantedTests(SynchronousTestCase):
    """A simulated network; ``long_rules`` has others, and ``long_simulated`` has tables that were computed."""

    seeds: tuple[int, ...] = (1,)

    def check(self, seed: int) -> None:
        last = date(2026, 3, 10)
        simulation = Simulation(spark(), Network(3000, 13, 60, 2, seed, last))
        planted = server_anomalies(13, last, 2)
        wanted = {(one.kind, one.about, one.day) for one in planted if one.kind in FLAGS.values()}
        self.assertEqual(len(wanted), 3)
        lines = receipt_lines(simulation.stage).toArrow()["value"].to_pylist()
        rows = [row | {"hour": row["ts"] // 3_600_000 % 24} for row in map(json.loads, lines)]
        found = set()
        for back in range(2):
            day = last - timedelta(back)
            rows_of_day = [row for row in rows if row["ts"] // DAY_MS == (day - date(1970, 1, 1)).days]
            dealings = judged(pa.Table.from_pylist(rows_of_day))
            self.assertEqual(len(dealings), 13)
            found |= {(FLAGS[flag], one.server, day) for one in dealings for flag in one.flags}
        self.assertEqual(found, wanted)

    def test_what_is_planted_is_flagged_and_nobody_else(self) -> None:
        for seed in self.seeds:
            self.check(seed)


class CommandTests(SynchronousTestCase):
    """The command on the tables of two servers."""

    def test_the_command_works_without_java(self) -> None:
        options = ("self-dealing", "--out", str(Story.told().out))
        text = f"{DAY}: 0 of 2 servers with credit have a flag\n"
        self.assertEqual(run_here(*options, str(DAY)), (text, "", 0))
        command = (*PROGRAM, "analytics", *options, str(DAY), "--json")
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": "/nonexistent"})
        rows = {row["server"]: row for row in map(json.loads, done.stdout.splitlines())}
        # Of t1 (15,000), and of u1 and u2 (1,000,000 each, by the smaller word).
        self.assertEqual({name: row["credited"] for name, row in rows.items()}, {S1: 15_000, S2: 2_000_000})
        self.assertIn("the tables have no data of 2020-01-01", run_here(*options, "2020-01-01")[1])

    def test_too_many_pairs_are_not_judged(self) -> None:
        self.patch(explain, "MAX_PAIRS", 0)
        store = Store(str(Story.told().out))
        sections = {one.title: one for one in explain.explain(store, store.computed_state(), S1, DAY)}
        self.assertEqual(sections["Self-dealing"].verdict, "not judged")
        self.assertIn("more than 0 pairs of clients have credit on 2026-03-10", sections["Self-dealing"].lines[0])
