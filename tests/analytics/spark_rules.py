"""Rules of gold that the story does not reach, each from a few rows of the tables it reads.

Arrow computes them here. ``spark_tables`` has the tables of both engines, and ``spark_memory`` each operation.
"""

from __future__ import annotations

import math
import re
from datetime import date, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType
from twisted.trial.unittest import SynchronousTestCase

from dmsg.analytics import silver
from dmsg.analytics.event_rules import LARGEST_NUMBER
from dmsg.analytics.gold import abuse, capacity, lost_transports, network, settlement, traffic, uptime
from dmsg.analytics.gold.histograms import FIRST_MS, SHARES, percentile
from dmsg.analytics.schemas import BRONZE, DAILY, LIES, OVERALL, SILVER
from dmsg.analytics.store import NUMBERS
from dmsg.telemetry.schema import BUCKETS
from tests.analytics.support import DAY, DISCOVERY, NEXT, NOW, S1, S2, S3, frame_in_memory as frame, ms, rows_of

TODAY = NOW.date()


def counts(**filled: int) -> list[int]:
    """``b3=2``: two samples in bucket 3."""
    return [filled.get(f"b{index}", 0) for index in range(BUCKETS)]


class AbuseTests(SynchronousTestCase):
    """Clients that flood, scan or reconnect too often, over all servers."""

    def day(self, producer: str, who: str, day: date = DAY, score: float = 60.0, **values: Any) -> dict[str, Any]:
        row = {"producer": producer, "dt": day, "who": who, "kind": "scan", "score": score, "evidence": ""}
        return row | {"requests": 0, "refused": 5, "targets": 60, "posts": 0} | values

    def boots(self, *names: tuple[str, str | None]) -> list[dict[str, Any]]:
        return [{"producer": server, "last_at": datetime(2026, 3, 10, 9), "names": name} for server, name in names]

    def actors(self, days: list[dict[str, Any]], boots: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
        found = abuse.actor(frame(days, DAILY["abuse_day"].schema), frame(boots, SILVER["boots"].schema))
        rows = rows_of(found)
        return {who: [row for row in rows if row["who"] == who] for who in {row["who"] for row in rows}}

    def test_servers_that_name_clients_alike_are_put_together(self) -> None:
        days = [
            self.day(S1, "x"),
            self.day(S2, "x", score=70.0),
            self.day(S1, "x", NEXT, score=90.0),
            # The same name at two servers means two clients, because each server names clients in its own way.
            self.day(S3, "x", score=20.0),
            # The sum over both servers is below the limit.
            self.day(S1, "small", score=4.0),
            self.day(S2, "small", score=5.9),
            self.day(S1, "just", score=4.0),
            self.day(S2, "just", score=6.0),
        ]
        found = self.actors(days, self.boots((S1, "alike"), (S2, "alike"), (S3, None)))
        self.assertEqual(found.keys(), {"x", "just"})
        together, alone = sorted(found["x"], key=lambda row: -row["servers"])
        self.assertEqual((together["names"], together["servers"], together["days"]), ("alike", 2, 2))
        self.assertEqual((together["first_day"], together["last_day"]), (DAY, NEXT))
        # The row names the worst day and the server of the worst score.
        self.assertEqual((together["score"], together["most_at"]), (130.0, S2))
        self.assertEqual((together["refused"], together["targets"]), (15, 180))
        self.assertEqual((alone["names"], alone["servers"], alone["most_at"]), (None, 1, S3))

    def refused(self, producer: str, what: str, who: str | None, n: int = 1, **values: Any) -> dict[str, Any]:
        row = {"producer": producer, "dt": DAY, "hour": 1, "what": what, "who": who, "n": n, "targets": 0}
        return row | {"reason": "other"} | values

    def test_refusal_day(self) -> None:
        rows = [
            self.refused(S1, "request", "a", 2),
            self.refused(S1, "request", "a", 3, hour=5),
            self.refused(S2, "request", "a", 5),
            self.refused(S2, "drop", None, 7),
        ]
        found = {row["what"]: row for row in rows_of(abuse.refusal_day(frame(rows, SILVER["refusals"].schema)))}
        self.assertEqual([found["request"][name] for name in ("n", "who", "producers")], [10, 2, 2])
        self.assertEqual([found["drop"][name] for name in ("n", "who", "producers")], [7, 0, 1])

    def scores(
        self,
        refusals: list[dict[str, Any]],
        closes: list[dict[str, Any]] = [],
        entries: list[dict[str, Any]] = [],  # noqa: B006
    ) -> dict[tuple[str, str], float]:
        found = abuse.abuse_day(
            frame(refusals, SILVER["refusals"].schema),
            frame(closes, SILVER["transports"].schema),
            frame(entries, SILVER["entries"].schema),
        )
        return {(row["kind"], row["who"]): row["score"] for row in rows_of(found)}

    def test_each_kind(self) -> None:
        refusals = [
            self.refused(S1, "request", "scanner", 9, reason="no_such_peer", targets=100),
            self.refused(S1, "request", "flooder", 400, reason="rate_limited"),
            self.refused(S1, "request", "flooder", 600, reason="flood"),
            self.refused(S1, "handshake", "net", 200),
            self.refused(S1, "entry", "poster", 500),
            self.refused(S1, "lookup", "asker", 3, targets=1000),
            # These counts are less than a hundredth of the limit.
            self.refused(S1, "request", "nobody", 9, reason="rate_limited"),
            self.refused(S1, "drop", None, 10_000),
        ]
        expected = {
            ("scan", "scanner"): 100.0,
            ("flood", "flooder"): 100.0,
            ("handshakes", "net"): 100.0,
            ("entries", "poster"): 100.0,
            ("lookups", "asker"): 100.0,
        }
        self.assertEqual(self.scores(refusals), expected)

    def test_requests_that_nobody_accepts(self) -> None:
        def closes(who: str, accepted: int, refused: int) -> list[dict[str, Any]]:
            row = {"server": S1, "dt": DAY, "what": "close", "src": who}
            return [row | {"accept_ms": 3}] * accepted + [row | {"accept_ms": None}] * refused

        rows = [*closes("few", 0, 49), *closes("many", 4, 46), *closes("usual", 5, 45)]
        self.assertEqual(self.scores([], rows), {("unanswered", "many"): 46.0})

    def test_who_posts_without_end(self) -> None:
        row = {"producer": "discovery-1", "dt": DAY, "is_server": False, "result": "next"}
        posts = (
            [row | {"subject": "c"}] * 50
            + [row | {"subject": "d"}] * 40
            + [row | {"subject": "s", "is_server": True}] * 60
        )
        self.assertEqual(self.scores([], [], posts), {("churn", "c"): 1.0})


class NetworkTests(SynchronousTestCase):
    """Totals of all servers."""

    def hours(self) -> list[dict[str, Any]]:
        """A server with many quick answers, and one with few slow ones."""
        row: dict[str, Any] = {"dt": DAY, "hour": 10, "accept": counts()}
        return [row | {"server": S1, "rtt": counts(b4=95)}, row | {"server": S2, "rtt": counts(b20=5)}]

    def test_percentiles_are_those_of_all_samples(self) -> None:
        """A percentile of the network is not an average of the servers' percentiles."""
        empty = [DAILY["traffic_hour"], DAILY["session_day"], SILVER["sessions"], DAILY["refusal_hour"]]
        hours = frame(self.hours(), DAILY["latency_hour"].schema)
        tables = [*(frame([], table.schema) for table in (*empty, DAILY["settlement_day"])), hours]
        (day,) = rows_of(network.network_day(*tables))
        self.assertEqual((day["rtt_samples"], day["accept_samples"], day["accept_p50"]), (100, 0, None))
        parts = {row["server"]: row for row in rows_of(traffic.latency_day(hours))}
        self.assertEqual((parts[S1]["rtt_samples"], parts[S2]["rtt_samples"]), (95, 5))
        # Bucket 4 ends at 0.4 ms. Bucket 20 begins at 72.4 ms and ends at 102.4 ms.
        self.assertLess(day["rtt_p50"], 0.4)
        self.assertLess(day["rtt_p90"], 0.4)
        self.assertAlmostEqual(day["rtt_p99"], 72.4077 + 4 / 5 * (102.4 - 72.4077), 3)
        self.assertLess(parts[S1]["rtt_p99"], 0.4)

    def public(self, day: date = DAY, **values: Any) -> dict[str, Any]:
        row = {"dt": day, "servers": 3, "clients": 10, "transports": 17, "sessions": 8, "bytes": 1_250_000_001}
        rows = [row | {"rtt_p50": 1.26, "rtt_p90": 9.0} | values]
        found = rows_of(network.public_day(frame(rows, DAILY["network_day"].schema), today=TODAY))
        return found[0] if found else {}

    def test_what_may_be_published(self) -> None:
        shown = self.public()
        self.assertEqual([shown[name] for name in ("servers", "clients", "transports", "sessions")], [3, 16, 24, 8])
        self.assertEqual((shown["gigabytes"], shown["rtt_p50"], shown["withheld"]), (1.3, 1.3, None))
        for hidden, why in ((self.public(servers=2), "too few servers"), (self.public(clients=9), "too few clients")):
            self.assertEqual(hidden.pop("withheld"), why)
            self.assertEqual(hidden.pop("dt"), DAY)
            self.assertEqual(set(hidden.values()), {None}, why)
        self.assertTrue(self.public(TODAY - timedelta(2)))
        self.assertEqual(self.public(TODAY - timedelta(1)), {})


class PercentileTests(SynchronousTestCase):
    """Percentiles from buckets differ from exact percentiles by no more than the table in the documentation says."""

    def test_the_documented_errors(self) -> None:
        text = (Path(__file__).parents[2] / "docs" / "pipeline" / "tables.md").read_text()
        rows = re.findall(r"^\| (0\.\d) \| (\d+) % \| (\d+) % \| (\d+) % \|$", text, re.MULTILINE)
        self.assertEqual(len(rows), 4)
        for sigma, *told in rows:
            for share, percent in zip(SHARES, told, strict=True):
                worst = self.worst(float(sigma), share / 100)
                self.assertLessEqual(worst, int(percent) / 100, (sigma, share))
                self.assertGreater(worst, int(percent) / 100 - 0.015, (sigma, share))

    @staticmethod
    def worst(sigma: float, share: float) -> float:
        """The largest error for log-normal times whose medians span a bucket."""
        normal = NormalDist()
        bounds = [FIRST_MS * 2 ** (index / 2) for index in range(BUCKETS - 1)]
        errors = []
        for step in range(50):
            middle = math.log(3) + step / 50 * math.log(2) / 2
            below = [0.0, *(normal.cdf((math.log(bound) - middle) / sigma) for bound in bounds), 1.0]
            counts = [round(1e9 * (after - before)) for before, after in pairwise(below)]
            found = percentile(counts, share)
            assert found is not None
            errors.append(abs(found / math.exp(middle + sigma * normal.inv_cdf(share)) - 1))
        return max(errors)


class LostTests(SynchronousTestCase):
    """Transports whose two halves are rows of different days."""

    def test_what_was_closed_on_another_day_is_not_lost(self) -> None:
        opened = {"server": S1, "boot": "killed", "opened_at": datetime(2026, 3, 10, 23), "closed": False, "dt": DAY}
        rows = [opened | {"transport": name, "told_ab": 5} for name in ("late", "long")]
        rows += [
            {"server": S1, "boot": "killed", "transport": name, "closed": closed, "told_ab": 7, "dt": NEXT}
            for name, closed in (("late", True), ("long", False), ("never opened", False))
        ]
        boots = [{"producer": S1, "boot": "killed", "ended": "crashed", "last_at": datetime(2026, 3, 11, 1)}]
        found = lost_transports.lost_transport(
            frame(rows, SILVER["unfinished"].schema), frame(boots, OVERALL["boot"].schema)
        )
        self.assertEqual([(row["transport"], row["counted_bytes"]) for row in rows_of(found)], [("long", 12)])


class CapacityTests(SynchronousTestCase):
    """How close servers are to their limits, and to which servers clients are sent."""

    def forecast(self, *peaks: int, first: date = TODAY - timedelta(4), capacity_of: int = 100) -> dict[str, Any]:
        rows = [
            {"server": S1, "dt": first + timedelta(day), "peak_sessions": peak, "capacity": capacity_of}
            for day, peak in enumerate(peaks)
        ]
        found = rows_of(capacity.capacity_forecast(frame(rows, DAILY["capacity_day"].schema), today=TODAY))
        return found[0] if found else {}

    def test_a_line_through_the_peaks(self) -> None:
        row = self.forecast(60, 70, 80, 90)
        self.assertEqual((row["days"], row["peak_sessions"], row["growth_per_day"], row["fit"]), (4, 90, 10.0, 1.0))
        self.assertEqual((row["days_left"], row["full_on"]), (1.0, TODAY))
        # The cases are: a full server, shrinking load, a limit more than ten years away, and too few days.
        self.assertEqual(self.forecast(110, 120, 130)["days_left"], 0.0)
        self.assertEqual([self.forecast(9, 8, 7)[name] for name in ("growth_per_day", "days_left")], [-1.0, None])
        late = self.forecast(1, 2, 3, capacity_of=100_000)
        self.assertEqual((late["days_left"], late["full_on"]), (99_997.0, None))
        self.assertEqual([self.forecast(1, 2)[name] for name in ("days", "growth_per_day", "fit")], [2, None, None])
        # Today is not complete, so it does not count. Only the last four weeks count.
        self.assertEqual(self.forecast(1, 2, 3, 4, 500)["growth_per_day"], 1.0)
        self.assertEqual(self.forecast(9, 1, 2, 3, first=TODAY - timedelta(29))["days"], 3)

    def placed(self, latency: dict[str, list[int]], **verdicts: str) -> dict[str, dict[str, Any]]:
        servers = (S1, S2, S3)
        up = [{"server": one, "dt": DAY, "availability": 1.0, "observed_minutes": 60} for one in servers]
        free = [{"server": one, "dt": DAY, "capacity": 100, "peak_sessions": 20, "peak_share": 0.2} for one in servers]
        found = capacity.placement(
            frame(up, OVERALL["uptime_day"].schema),
            frame(free, DAILY["capacity_day"].schema),
            frame(
                [{"server": one, "dt": DAY, "rtt": rtt} for one, rtt in latency.items()], DAILY["latency_day"].schema
            ),
            frame(
                [{"server": one, "dt": DAY, "verdict": said} for one, said in verdicts.items()],
                DAILY["settlement_day"].schema,
            ),
            today=TODAY,
        )
        return {row["server"]: row for row in rows_of(found)}

    def test_the_quick_and_the_honest_come_first(self) -> None:
        found = self.placed({S1: counts(b4=9), S2: counts(b6=9)}, **{S2: "agrees"})
        factors = [found[one]["latency_factor"] for one in (S1, S2, S3)]
        # A server without measurements gets a default. A server with half as quick round trips gets half the factor.
        self.assertEqual((factors[0], factors[2]), (1.0, capacity.LATENCY_UNKNOWN))
        self.assertAlmostEqual(factors[1], 0.5, 3)
        slow = self.placed({S1: counts(b4=9), S2: counts(b30=9)})[S2]
        self.assertEqual(slow["latency_factor"], capacity.LATENCY_FLOOR)
        self.assertIn("answers in", slow["reasons"])
        self.assertEqual([found[one]["honesty"] for one in (S1, S2)], [1.0, 1.0])
        liar = self.placed({S1: counts(b4=9), S2: counts(b4=9)}, **{S2: LIES})
        self.assertEqual([liar[one]["honesty"] for one in (S1, S2)], [1.0, capacity.DISHONEST_FACTOR])
        self.assertLess(liar[S2]["weight"], liar[S1]["weight"])


class SumTests(SynchronousTestCase):
    """Sums of numbers that servers choose freely, each within the limit of an event."""

    LIMIT = 2**53
    EVENTS = 9000
    """Number of events whose largest numbers add up to more than 2^63."""

    def only(self, rows: DataFrame) -> dict[str, Any]:
        (row,) = rows_of(rows)
        return row

    def closes(self, count: int, **values: Any) -> DataFrame:
        row = {"server": S1, "dt": DAY, "hour": 1, "what": "close", "src": "a", "dst": "b", "reason": "unspecified"}
        ways = ("data_ab", "data_ba", "total_ab", "total_ba", "frames_ab", "frames_ba", "acks_ab", "acks_ba")
        row |= dict.fromkeys(ways, LARGEST_NUMBER) | values
        rows = [row | {"transport": str(number)} for number in range(count)]
        return frame(rows, SILVER["transports"].schema)

    def test_traffic(self) -> None:
        many = self.closes(self.EVENTS)
        hour, pair = self.only(traffic.traffic_hour(many)), self.only(traffic.pair_day(many))
        self.assertEqual(
            [hour[name] for name in ("bytes", "dropped_bytes", "frames", "acks")], [self.LIMIT, 0, *[self.LIMIT] * 2]
        )
        self.assertEqual([pair[name] for name in ("bytes_ab", "bytes_ba")], [self.LIMIT] * 2)
        exact = self.only(traffic.traffic_hour(self.closes(3)))
        self.assertEqual((exact["bytes"], exact["frames"]), (6 * LARGEST_NUMBER, 6 * LARGEST_NUMBER))
        none = self.only(
            traffic.traffic_hour(self.closes(1, **dict.fromkeys(("data_ab", "data_ba", "frames_ab", "frames_ba"))))
        )
        self.assertEqual((none["bytes"], none["frames"]), (0, 0))

    def test_traffic_is_never_negative(self) -> None:
        dropped = self.closes(2, data_ab=1, data_ba=1, dropped_ab=LARGEST_NUMBER, dropped_ba=LARGEST_NUMBER)
        hour, pair = self.only(traffic.traffic_hour(dropped)), self.only(traffic.pair_day(dropped))
        self.assertEqual((hour["bytes"], hour["dropped_bytes"]), (0, 4 * LARGEST_NUMBER))
        self.assertEqual((pair["bytes_ab"], pair["bytes_ba"]), (0, 0))

    def test_settlement(self) -> None:
        receipts = frame([], SILVER["receipts"].schema)
        verdicts = settlement.verdicts(settlement.three_words(self.closes(self.EVENTS), receipts))
        day = self.only(settlement.settlement_day(verdicts))
        self.assertEqual((day["transports"], day["claimed_bytes"]), (self.EVENTS, self.LIMIT))
        words = {name: LARGEST_NUMBER for name in ("sure_claimed", "sure_word", "left_claimed", "left_word")}
        row = {
            "server": S1,
            "dt": DAY,
            "state": "conflict",
            "claimed": 2 * LARGEST_NUMBER,
            "credited": LARGEST_NUMBER,
            **words,
        }
        # The initiators differ, so that sums of sums are tested.
        rows = [row | {"initiator": number % 50} for number in range(2 * self.EVENTS)]
        day = self.only(settlement.settlement_day(frame(rows, SILVER["verdicts"].schema)))
        names = ("claimed_bytes", "credited_bytes", "inflated_bytes")
        self.assertEqual([day[name] for name in names], [self.LIMIT] * 3)

    def test_a_claim_is_never_negative(self) -> None:
        """A server may report more dropped bytes than received ones."""
        closes = self.closes(2, total_ab=5, dropped_ab=LARGEST_NUMBER, total_ba=7)
        receipts = frame([], SILVER["receipts"].schema)
        words = rows_of(settlement.three_words(closes, receipts))
        self.assertEqual([(row["relay_ab"], row["relay_ba"]) for row in words], [(0, 7)] * 2)
        day = self.only(settlement.settlement_day(settlement.verdicts(settlement.three_words(closes, receipts))))
        self.assertEqual((day["claimed_bytes"], day["uncertain_bytes"], day["inflated_bytes"]), (14, 0, 0))

    def test_a_claim_below_its_drops_is_a_conflict_of_its_server_only(self) -> None:
        closes = [
            {"server": server, "transport": server, "dt": DAY, "what": "close", "reason": "unspecified", "by": "src"}
            | {"total_ab": 10**6, "total_ba": 0, "dropped_ab": dropped}
            for server, dropped in ((S1, 2 * 10**6), (S2, None))
        ]
        receipts = [
            {"server": server, "transport": server, "dt": DAY, "initiator": asked, "signer": signer, "partner": partner}
            | {"delivered_out": out, "delivered_in": 10**6 - out}
            for server in (S1, S2)
            for asked, signer, partner, out in ((True, "a", "b", 10**6), (False, "b", "a", 0))
        ]
        tables = frame(closes, SILVER["transports"].schema), frame(receipts, SILVER["receipts"].schema)
        days = rows_of(settlement.settlement_day(settlement.verdicts(settlement.three_words(*tables))))
        found = {row["server"]: [row[name] for name in ("claimed_bytes", "conflict", "matched")] for row in days}
        self.assertEqual(found, {S1: [0, 1, 0], S2: [10**6, 0, 1]})

    def test_other_counters(self) -> None:
        many = range(self.EVENTS)
        session = {"server": S1, "dt": DAY, "peer": "p", "reason": "connection_lost", "bytes": LARGEST_NUMBER}
        day = self.only(traffic.session_day(frame([session for _ in many], SILVER["sessions"].schema)))
        self.assertEqual((day["bytes"], day["sessions"]), (self.LIMIT, self.EVENTS))
        refused = {
            "producer": S1,
            "dt": DAY,
            "hour": 1,
            "what": "lookup",
            "who": "w",
            "n": LARGEST_NUMBER,
            "targets": LARGEST_NUMBER,
        }
        refusals = frame([refused | {"reason": "rate_limited"} for _ in many], SILVER["refusals"].schema)
        entries, closes = (frame([], SILVER[name].schema) for name in ("entries", "transports"))
        self.assertEqual(self.only(abuse.refusal_hour(refusals))["n"], self.LIMIT)
        self.assertEqual(self.only(abuse.refusal_day(refusals))["n"], self.LIMIT)
        self.assertEqual(self.only(abuse.discovery_hour(entries, refusals))["absent"], self.LIMIT)
        found = self.only(abuse.abuse_day(refusals, closes, entries))
        self.assertEqual((found["refused"], found["targets"]), (self.LIMIT, self.LIMIT))
        beat = {"producer": S1, "role": "server", "boot": "b", "dt": DAY, "at": datetime(2026, 3, 10, 1)}
        beat |= {"covers_from": datetime(2026, 3, 10, 1), "capacity": 5, "sessions": 1}
        beats = [beat | dict.fromkeys(("frames", "bytes", "cpu_ms", "lost"), LARGEST_NUMBER) for _ in many]
        hours = uptime.server_hour(frame(beats, SILVER["heartbeats"].schema), entries)
        hour = self.only(hours)
        self.assertEqual([hour[name] for name in ("frames", "bytes", "cpu_ms", "lost_events")], [self.LIMIT] * 4)

    def test_sums_of_sums(self) -> None:
        hours = [{"server": S1, "dt": DAY, "hour": hour, "capacity": 5, "bytes": self.LIMIT} for hour in range(24)]
        none = frame([], SILVER["refusals"].schema)
        day = self.only(capacity.capacity_day(frame(hours, DAILY["server_hour"].schema), none))
        self.assertEqual(day["bytes"], self.LIMIT)
        empty = (DAILY["session_day"], SILVER["sessions"], DAILY["refusal_hour"], DAILY["settlement_day"])
        tables = [frame([], table.schema) for table in (*empty, DAILY["latency_hour"])]
        carried = [{"server": S1, "dt": DAY, "hour": hour, "closed": 1, "bytes": self.LIMIT} for hour in range(24)]
        day = self.only(network.network_day(frame(carried, DAILY["traffic_hour"].schema), *tables))
        self.assertEqual((day["bytes"], day["transports"]), (self.LIMIT, 24))

    def test_traffic_of_killed_servers(self) -> None:
        opened = {"server": S1, "boot": "killed", "transport": "t", "dt": DAY, "what": "open"}
        told = opened | {"what": "progress", "data_ab": LARGEST_NUMBER, "data_ba": LARGEST_NUMBER}
        rows = [opened | {"at": datetime(2026, 3, 10, 9)}, *[told for _ in range(self.EVENTS)]]
        verdicts, receipts = (frame([], SILVER[name].schema) for name in ("verdicts", "receipts"))
        events = frame(rows, SILVER["transports"].schema)
        half = self.only(lost_transports.select_unfinished(events, verdicts, receipts))
        self.assertEqual((half["told_ab"], half["told_ba"]), (self.LIMIT, self.LIMIT))
        boots = frame(
            [{"producer": S1, "boot": "killed", "ended": "crashed", "last_at": datetime(2026, 3, 11, 1)}],
            OVERALL["boot"].schema,
        )
        halves = [half | {"transport": str(number)} for number in range(9)]
        lost = lost_transports.lost_transport(frame(halves, SILVER["unfinished"].schema), boots)
        plain = boots.select(*boots.columns[:8])
        self.assertEqual(self.only(lost_transports.with_lost(plain, lost))["lost_counted_bytes"], self.LIMIT)

    def test_numbers_of_events(self) -> None:
        """A process may number its only event as high as it likes."""
        row = {
            "producer": S1,
            "dt": DAY,
            "events": 1,
            "distinct_events": 1,
            "first": LARGEST_NUMBER,
            "last": LARGEST_NUMBER,
        }
        row |= {"greatest_start": 0, "least_start": 0}
        rows = [row | {"boot": str(number)} for number in range(self.EVENTS)]
        day = self.only(network.quality_day(frame(rows, NUMBERS.schema)))
        self.assertEqual(day["missing"], self.LIMIT - self.EVENTS)


ENDS = StructType().add("producer", "string").add("boot", "string").add("dt", "string").add("last_ts", "long")


class SessionTests(SynchronousTestCase):
    """Sessions without an end on their day: open, or lost with their server's process."""

    def reason(
        self, last: str, *, newest: str = "14:00:00", started: str | None = None, last_day: date = DAY
    ) -> tuple[str, str | None]:
        """Return how a session counts whose server last wrote at ``last``, and when it ended.

        :param newest: time of the last event of anybody.
        :param started: start of another process of the same server.
        """
        same = {"producer": S1, "boot": "one", "dt": str(DAY), "session": 1, "peer": "p"}
        events = [same | {"type": "session_open", "ts": ms(DAY, "09:00:00")}]
        ends = [same | {"last_ts": ms(DAY, last)}, same | {"producer": DISCOVERY, "last_ts": ms(DAY, newest)}]
        lives = [same | {"type": "start", "ts": ms(DAY, "08:00:00")}]
        if started is not None:
            lives.append(same | {"boot": "two", "type": "start", "ts": ms(DAY, started)})
        found = rows_of(
            silver.sessions(
                frame(events, BRONZE),
                frame(ends, ENDS),
                frame(lives, BRONZE),
                last_day=last_day,
            )
        )
        (row,) = found
        closed = row["closed_at"]
        return row["reason"], None if closed is None else f"{closed:%H:%M:%S}"

    def test_a_running_server_loses_nothing(self) -> None:
        self.assertEqual(self.reason("14:00:00"), ("open", None))
        # Its last file is not there yet.
        self.assertEqual(self.reason("13:45:00"), ("open", None))

    def test_a_silent_server_has_lost_its_sessions(self) -> None:
        self.assertEqual(self.reason("13:44:59"), ("lost", "13:44:59"))

    def test_another_process_of_the_server_ends_them(self) -> None:
        self.assertEqual(self.reason("13:59:00", started="13:59:30"), ("lost", "13:59:00"))
        # Two programs with one key run at the same time.
        self.assertEqual(self.reason("13:59:00", started="13:00:00"), ("open", None))

    def test_a_day_that_is_over(self) -> None:
        self.assertEqual(self.reason("14:00:00", last_day=NEXT), ("lost", "14:00:00"))
        self.assertEqual(self.reason("23:45:00", newest="23:50:00", last_day=NEXT), ("open", None))
