"""Crashes, silence and lost files: missing data is noticed."""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any

from dmsg.analytics import functions as F, silver
from dmsg.analytics.gold import traffic
from dmsg.analytics.gold.reasons import MANY, MAX_REASONS
from dmsg.analytics.schemas import BRONZE, DAILY
from tests.analytics.support import (
    DAY,
    DISCOVERY,
    NEXT,
    S1,
    S2,
    Boot,
    RulesCase,
    computed,
    frame_in_memory,
    key,
    rows_of,
)

THIRD = DAY + timedelta(2)


class LivesTests(RulesCase):
    """Three days of servers, each with a different fault; a discovery sees each server while it runs."""

    def setUp(self) -> None:
        super().setUp()
        self.discovery = Boot(DISCOVERY, "boot-d", "discovery")

    def alive(
        self,
        boot: Boot,
        day: date,
        first: int,
        minutes: int,
        *,
        start: bool = False,
        stop: bool = False,
        clock_ms: int = -5,
    ) -> None:
        """Heartbeats from an hour of a day on."""
        if start:
            boot.event("start", day, f"{first:02d}:00:00", capacity=10)
        boot.beats(day, f"{first:02d}:00:30", minutes, sessions=1, transports=0, capacity=10)
        for minute in range(minutes):
            at = first * 60 + minute
            self.discovery.event(
                "entry",
                day,
                f"{at // 60:02d}:{at % 60:02d}:10",
                subject=boot.producer,
                is_server=True,
                result="next",
                clock_ms=clock_ms - minute % 7,
            )
        if stop:
            at = first * 60 + minutes
            boot.event("stop", day, f"{at // 60:02d}:{at % 60:02d}:00")

    def test_uptime_of_servers_with_missing_data(self) -> None:
        steady, crashing, silent, lossy, over_midnight, twice = (key(number) for number in range(1, 7))
        ahead, behind = key(7), key(8)
        boots: list[Boot] = []

        def boot(server: str, name: str) -> Boot:
            boots.append(Boot(server, name))
            return boots[-1]

        # The server runs in order on all three days, and still runs at the end.
        one = boot(steady, "steady")
        for day in (DAY, NEXT, THIRD):
            self.alive(one, day, 8, 60, start=day == DAY)
        # The server is killed on the first day and restarted at once. It is killed on the second day and back on the
        # third.
        first, second, third = (boot(crashing, f"crashing-{number}") for number in range(3))
        self.alive(first, DAY, 8, 30, start=True)
        self.alive(second, DAY, 9, 30, start=True)
        self.alive(second, NEXT, 8, 20)
        self.alive(third, THIRD, 8, 60, start=True)
        # The server is silent for two days.
        self.alive(boot(silent, "silent"), DAY, 8, 60, start=True)
        # The server ran all the time, but the files of the second day and the first events are lost.
        two = boot(lossy, "lossy")
        for day in (DAY, NEXT, THIRD):
            self.alive(two, day, 8, 60, start=day == DAY)
        # The server stops in order on the next day.
        self.alive(boot(over_midnight, "late"), DAY, 8, 60, start=True)
        self.alive(boots[-1], NEXT, 8, 5, stop=True)
        # One clock is so far ahead that the timestamps cannot be true. Another clock is behind.
        self.alive(boot(ahead, "ahead"), DAY, 8, 60, start=True, clock_ms=3_600_000)
        for row in boots[-1].rows:
            row["ts"] += 10 * 86_400_000
        self.alive(boot(behind, "behind"), DAY, 8, 60, start=True, stop=True, clock_ms=-90_000)
        # Two programs use one key at the same time, and neither has crashed.
        for number in range(2):
            three = boot(twice, f"twice-{number}")
            self.alive(three, THIRD, 8, 60, start=True)
        lost_day = {row["seq"] for row in two.rows if row["ts"] // 86_400_000 == NEXT.toordinal() - 719_163}
        self.assertEqual(len(lost_day), 60)
        self.discovery.beats(DAY, "08:00:30", 60, entries=1)
        self.discovery.beats(NEXT, "08:00:30", 60, entries=1)
        self.discovery.beats(THIRD, "08:00:30", 60, entries=1)
        self.discovery.rows.sort(key=lambda row: row["ts"])
        for number, row in enumerate(self.discovery.rows):
            row["seq"] = number
        gone = lambda row: row["boot"] == "lossy" and (row["seq"] in lost_day or row["seq"] < 10)  # noqa: E731
        self.refine([row for one in (*boots, self.discovery) for row in one.rows if not gone(row)])

        ended = {row["boot"]: row["ended"] for row in self.made("boot")}
        self.assertEqual(
            ended,
            {
                "steady": "running",
                "crashing-0": "crashed",
                "crashing-1": "crashed",
                "crashing-2": "running",
                "silent": "silent",
                "lossy": "running",
                "late": "stopped",
                "behind": "stopped",
                "twice-0": "running",
                "twice-1": "running",
                "boot-d": "running",
            },
        )
        days = {(row["server"], row["dt"]): row for row in self.made("uptime_day")}
        self.assertEqual([days[crashing, day]["crashes"] for day in (DAY, NEXT, THIRD)], [1, 1, 0])
        self.assertEqual({row["crashes"] for (server, _), row in days.items() if server != crashing}, {0})
        self.assertEqual([days[silent, day]["state"] for day in (DAY, NEXT, THIRD)], ["up", "down", "down"])
        self.assertEqual([days[silent, day]["uptime"] for day in (NEXT, THIRD)], [0.0, 0.0])
        self.assertEqual([days[silent, day]["availability"] for day in (NEXT, THIRD)], [0.0, 0.0])
        # Discovery is the second witness: the server ran, but its files have not arrived.
        self.assertEqual([days[lossy, day]["state"] for day in (DAY, NEXT, THIRD)], ["up", "unheard", "up"])
        self.assertEqual((days[lossy, NEXT]["uptime"], days[lossy, NEXT]["seen_minutes"]), (None, 60))
        self.assertEqual([days[over_midnight, day]["clean_stops"] for day in (DAY, NEXT)], [0, 1])
        self.assertIn("its clock is behind discovery's", days[behind, DAY]["flags"])
        # The server's own files are rejected, but discovery saw the server and its clock.
        self.assertEqual(days[ahead, DAY]["state"], "unheard")
        # The report takes the remarks apart again.
        self.assertEqual(
            days[ahead, DAY]["flags"].split(", "),
            ["discovery saw it but none of its events arrived", "its clock is ahead of discovery's"],
        )
        self.assertEqual({row["flags"] for (server, _), row in days.items() if server == steady}, {""})
        skews = {row["server"]: row["skew_ms"] for row in self.made("clock_day")}
        self.assertEqual((skews[steady], skews[ahead], skews[behind]), (-5, 3_600_000, -90_000))
        # A server has no rows before its first event.
        self.assertNotIn((twice, NEXT), days)

        quality = {(row["producer"], row["dt"]): row for row in self.made("quality_day")}
        self.assertEqual((quality[lossy, DAY]["missing"], quality[lossy, DAY]["expected"]), (10, 61))
        self.assertEqual((quality[lossy, NEXT]["missing"], quality[lossy, NEXT]["completeness"]), (60, 0.0))
        self.assertEqual(quality[lossy, THIRD]["missing"], 0)
        self.assertEqual({row["missing"] for (name, _), row in quality.items() if name != lossy}, {0})
        placed = {row["server"]: row["availability"] for row in self.made("placement")}
        self.assertLess(placed[silent], 0.4)
        self.assertGreater(placed[lossy], 0.8)


class LostTransportTests(RulesCase):
    """Bytes that a killed server had carried."""

    def setUp(self) -> None:
        super().setUp()
        self.receipts = Boot(S1, "receipts", "server")

    def progress(self, boot: Boot, day: date, time: str, name: str, ab: int, ba: int = 0) -> None:
        boot.event("transport_progress", day, time, transport=name, src="a", dst="b", data_ab=ab, data_ba=ba)

    def signed(self, name: str, initiator: bool, out: int, received: int, **changed: str) -> None:
        """Add a receipt that is handed in after the server's restart."""
        one, other = ("A", "B") if initiator else ("B", "A")
        fields: dict[str, Any] = {"server": S1, "transport": name, "signer": one, "partner": other, **changed}
        said = {"initiator": initiator, "delivered_out": out, "delivered_in": received}
        self.receipts.event("receipt_checked", NEXT, "12:01:00", **fields, **said)

    def lost(self) -> dict[str, tuple[Any, ...]]:
        columns = ("counted_bytes", "least_bytes", "most_bytes", "words")
        return {row["transport"]: tuple(row[name] for name in columns) for row in self.made("lost_transport")}

    def test_a_lost_transport_is_credited_between_both_statements(self) -> None:
        killed, again = Boot(S1, "killed"), Boot(S1, "again")
        killed.event("start", DAY, "23:00:00", capacity=10)
        for name, time in (("long", "23:10:00"), ("ended", "23:11:00"), ("late", "23:12:00")):
            killed.event("transport_open", DAY, time, transport=name, src="a", dst="b", secure=True, accept_ms=1)
        closing = {"src": "a", "dst": "b", "reason": "unspecified", "by": "src", "data_ab": 5, "total_ab": 5}
        closing |= {"data_ba": 0, "total_ba": 0, "accept_ms": 1, "duration_ms": 10}
        killed.event("transport_close", DAY, "23:20:00", transport="ended", **closing)
        self.progress(killed, DAY, "23:30:00", "long", 1000, 20)
        first_day = len(killed.rows)
        killed.event("transport_close", NEXT, "00:30:00", transport="late", **closing)
        self.progress(killed, NEXT, "00:40:00", "long", 500)
        for name in ("unsaid", "half", "self"):
            killed.event("transport_open", NEXT, "00:41:00", transport=name, src="a", dst="b", secure=True, accept_ms=1)
        killed.beats(NEXT, "00:42:00", 5, sessions=2, capacity=10)
        again.event("start", NEXT, "12:00:00", capacity=10)
        again.beats(NEXT, "12:01:00", 5, sessions=2, capacity=10)
        again.event("transport_open", NEXT, "12:03:00", transport="new", src="a", dst="b", secure=True, accept_ms=1)
        self.signed("long", True, 4000, 60)
        self.signed("long", False, 50, 4300)
        self.signed("half", True, 10, 0)
        self.signed("self", True, 10, 0)
        self.signed("self", False, 0, 10, signer="A", partner="B")
        self.signed("never was", True, 10, 0)
        self.refine([*killed.rows[first_day:], *again.rows])
        self.assertEqual(set(self.lost()), {"unsaid", "half", "self"})
        self.refine(killed.rows[:first_day], self.receipts.rows)
        expected = {
            "long": (1520, 4000 + 50, 4300 + 60, 2),
            "unsaid": (0, None, None, 0),
            "half": (0, None, None, 1),
            "self": (0, None, None, 2),
        }
        self.assertEqual(self.lost(), expected)
        self.assertEqual({row["dt"] for row in self.made("lost_transport")}, {NEXT})
        # Transports that only one end reports, because the server has forgotten them, are no evidence against the
        # server.
        (day,) = [row for row in self.made("settlement_day") if row["dt"] == NEXT]
        self.assertEqual((day["unclaimed"], day["credited_bytes"], day["conflict"]), (4, 0, 0))


class ReasonsTests(RulesCase):
    """A producer may write any text as a reason, but its texts do not make the tables grow without limit."""

    def events(self, server: str, count: int, first: int = 0) -> list[dict[str, Any]]:
        """Closes, and refusals to two clients, with so many reasons."""
        boot = Boot(server, f"boot-{first}")
        for number in range(first, first + count):
            at, reason = f"10:{number // 60:02d}:{number % 60:02d}", f"reason-{number}"
            who = f"{server[-1]}-{number % 2}"
            boot.event("transport_close", DAY, at, transport=f"t{number}", src=who, dst="b", reason=reason, by="src")
            boot.event("transport_refuse", DAY, at, src=who, reason=reason, n=2)
        return boot.rows

    def test_more_reasons_than_the_limit_count_as_one(self) -> None:
        self.refine([*self.events(S1, MAX_REASONS + 1), *self.events(S2, MAX_REASONS)])
        closes, refusals = self.made("close_day"), self.made("refusal_hour")
        (row,) = (one for one in closes if one["server"] == S1)
        self.assertEqual((row["reason"], row["by"], row["transports"]), (MANY, None, MAX_REASONS + 1))
        self.assertEqual(len(closes), 1 + MAX_REASONS)
        (row,) = (one for one in refusals if one["producer"] == S1)
        self.assertEqual((row["reason"], row["n"], row["who"]), (MANY, 2 * (MAX_REASONS + 1), 2))
        self.assertEqual(len(refusals), 1 + MAX_REASONS)
        self.assertEqual(len(self.made("refusal_day")), 1 + MAX_REASONS)
        # The limit follows from the text of the reason that stands for all.
        self.assertIn(str(MAX_REASONS), MANY)

    def test_late_reasons_count_as_if_they_had_come_at_once(self) -> None:
        for counts in ((60, 40), (60, 60), (120, 5)):
            parts = [self.events(S1, counts[0]), self.events(S1, counts[1], counts[0])]
            # A run adds the events that came late in memory.
            early, late = (
                silver.transports(
                    frame_in_memory([one for one in part if one["type"] == "transport_close"], BRONZE)
                ).withColumn("dt", F.lit(DAY))
                for part in parts
            )
            added = computed(traffic.add_close_day(traffic.close_day(early), late), DAILY["close_day"].schema)
            at_once = computed(traffic.close_day(early.unionByName(late)), DAILY["close_day"].schema)
            self.assertEqual(rows_of(added), rows_of(at_once))
            self.assertEqual(added.num_rows, 1 if sum(counts) > MAX_REASONS else sum(counts))
