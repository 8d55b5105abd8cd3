"""A run's tables: silver of the days that it touches, gold of those, and gold that is made anew as a whole."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import date, timedelta
from functools import cache

from pyspark.sql import DataFrame, functions as F

from dmsg.analytics import bronze, silver
from dmsg.analytics.gold import abuse, capacity, lost, network, settlement, traffic, uptime
from dmsg.analytics.lake import Lake
from dmsg.analytics.runs import Claim, State
from dmsg.analytics.schemas import DAILY, DAY_MS, FAMILIES, OVERALL

MIDNIGHT_MS = 10 * 60 * 1000
"""Three words of one transport lie within this of each other: only events so near to midnight matter to the
day before or after."""
SMALL_WORKERS = 4
_OF_GOLD = ("minute_day", "capacity_day", "latency_day", "network_day")
"""Tables made of other gold tables of the same days."""
FEW_CONFLICTS = 200_000
"""Conflicts of that many have room in the driver's memory."""
HISTORY_DAYS = 28
"""Days that the tables without days look back."""


class Refinement:
    """The tables of one run.

    :param state: as it will be.
    :param days: that are written anew.
    :param today: the day of the run.
    :param small: several tables are written at the same time.
    :param step: told what begins.
    """

    def __init__(
        self,
        lake: Lake,
        claim: Claim,
        state: State,
        days: list[str],
        *,
        today: date,
        small: bool,
        step: Callable[[str], None],
    ) -> None:
        self._lake = lake
        self._claim = claim
        self._state = state
        self._days = days
        self._today = today
        self._small = small
        self._step = step

    def _events(self, family: str, doubtful: DataFrame | None) -> DataFrame:
        rows = self._lake.bronze([family], self._days)
        return rows if doubtful is None else bronze.deduplicate(rows, doubtful)

    def silver(self) -> int:
        """Silver tables of those days.  :returns: how many events came twice."""
        lake, state, days = self._lake, self._state, self._days
        self._step("duplicates")
        everything = lake.bronze(FAMILIES, days)
        lake.write(bronze.sums(everything), "silver", "sums", self._claim.number, days)
        sums = lake.read("silver", "sums", state, days)
        doubt = not bronze.unsure(sums).isEmpty()
        lake.write(bronze.numbers(sums, everything if doubt else None), "silver", "numbers", self._claim.number, days)
        numbers = lake.read("silver", "numbers", state, days)
        again = numbers.where("events > distinct_events")
        found = again.agg(F.sum(F.col("events") - F.col("distinct_events")).alias("n")).collect()[0].n
        doubtful = again if found else None
        ends = numbers.groupBy("producer", "boot", F.col("dt").cast("string").alias("dt")).agg(
            F.min("first_ts").alias("first_ts"), F.max("last_ts").alias("last_ts")
        )
        tables: dict[str, Callable[[], DataFrame]] = {
            "transports": lambda: silver.transports(self._events("transport", doubtful)),
            "sessions": lambda: silver.sessions(self._events("session", doubtful), ends),
            "heartbeats": lambda: silver.heartbeats(self._events("beat", doubtful)),
            "refusals": lambda: silver.refusals(self._events("refusal", doubtful)),
            "entries": lambda: silver.entries(self._events("entry", doubtful)),
            "receipts": lambda: silver.receipts(self._events("receipt", doubtful)),
            "boots": lambda: silver.boots(self._events("life", doubtful), self._events("beat", doubtful), ends),
        }
        self._write("silver", tables, days)
        self._write("silver", {"verdicts": self._verdicts}, days)
        self._write("silver", {"unfinished": self._unfinished}, days)
        return int(found or 0)

    def _write(
        self,
        layer: str,
        tables: dict[str, Callable[[], DataFrame]],
        days: list[str] | None = None,
    ) -> None:
        """Write tables that do not need each other: at the same time, if they are small."""

        def one(name: str) -> None:
            self._step(f"{layer}: {name}")
            self._claim.check()
            self._lake.write(tables[name](), layer, name, self._claim.number, days)

        with ThreadPoolExecutor(SMALL_WORKERS if self._small else 1) as pool:
            list(pool.map(one, tables))

    def gold_daily(self) -> None:
        """Gold tables of those days."""
        lake, state, days = self._lake, self._state, self._days

        # several questions are asked of one table, and Spark takes a tenth of a second to look at it
        @cache
        def old(name: str) -> DataFrame:
            return lake.read("silver", name, state, days)

        @cache
        def new(name: str) -> DataFrame:
            return lake.read("gold", name, state, days)

        numbers = lake.read("silver", "numbers", state, days)
        first, last = (F.floor(F.col(name) / 60_000) for name in ("first_ts", "last_ts"))
        window = numbers.groupBy("dt").agg((F.max(last) - F.min(first) + 1).alias("observed_minutes"))
        tables: dict[str, Callable[[], DataFrame]] = {
            "traffic_hour": lambda: traffic.traffic_hour(old("transports")),
            "close_day": lambda: traffic.close_day(old("transports")),
            "pair_day": lambda: traffic.pair_day(old("transports")),
            "latency_hour": lambda: traffic.latency_hour(old("transports")),
            "latency_day": lambda: traffic.latency_day(new("latency_hour")),
            "session_day": lambda: traffic.session_day(old("sessions")),
            "server_hour": lambda: uptime.server_hour(old("heartbeats"), old("entries")),
            "minute_day": lambda: uptime.minute_day(new("server_hour"), window),
            "settlement_day": lambda: settlement.settlement_day(old("verdicts")),
            "settlement_conflict_day": self._conflicts,
            "refusal_hour": lambda: abuse.refusal_hour(old("refusals")),
            "abuse_day": lambda: abuse.abuse_day(old("refusals"), old("transports"), old("entries")),
            "clock_day": lambda: uptime.clock_day(old("entries")),
            "refusal_day": lambda: abuse.refusal_day(old("refusals")),
            "discovery_hour": lambda: abuse.discovery_hour(old("entries"), old("refusals")),
            "capacity_day": lambda: capacity.capacity_day(new("server_hour"), old("refusals")),
            "network_day": lambda: network.network_day(
                new("traffic_hour"),
                new("session_day"),
                old("sessions"),
                new("refusal_hour"),
                new("settlement_day"),
                new("latency_hour"),
            ),
        }
        assert tables.keys() == DAILY.keys()
        self._write("gold", {name: rows for name, rows in tables.items() if name not in _OF_GOLD}, days)
        self._write("gold", {name: rows for name, rows in tables.items() if name in _OF_GOLD}, days)

    def _around(self) -> list[str]:
        """With the days before and after."""
        return sorted({str(date.fromisoformat(day) + timedelta(step)) for day in self._days for step in (-1, 0, 1)})

    def _conflicts(self) -> DataFrame:
        verdicts = self._lake.read("silver", "verdicts", self._state, self._days)
        receipts = self._lake.read("silver", "receipts", self._state, self._around())
        few = verdicts.where(F.col("state") == "conflict").count() <= FEW_CONFLICTS
        return settlement.settlement_conflict_day(verdicts, receipts, few=few)

    def _verdicts(self) -> DataFrame:
        """Three words for the transports of these days, with what lies just beyond midnight."""
        around = self._around()
        wanted = F.col("dt").cast("string").isin(self._days)
        of_day = F.unix_millis("at") % DAY_MS
        near = (of_day < MIDNIGHT_MS) | (of_day >= DAY_MS - MIDNIGHT_MS)
        transports = self._lake.read("silver", "transports", self._state, around).where(wanted | near)
        receipts = self._lake.read("silver", "receipts", self._state, around)
        is_former = F.coalesce("former", F.lit(False))
        former = settlement.of_ends(receipts.where(is_former), transports)
        # a receipt is due for some minutes after its transport: one of another day is of no transport of this one
        due = receipts.where(~is_former & (wanted | near))
        rows = settlement.verdicts(settlement.three_words(transports, due.unionByName(former)))
        return rows.where(wanted)

    def _unfinished(self) -> DataFrame:
        transports, verdicts, receipts = (
            self._lake.read("silver", name, self._state, self._days) for name in ("transports", "verdicts", "receipts")
        )
        return lost.unfinished(transports, verdicts, receipts.where("former"))

    def gold_overall(self) -> None:
        """Gold tables that are made anew as a whole."""
        lake, state = self._lake, self._state
        since = str(self._today - timedelta(HISTORY_DAYS))
        days = [day for day in state.days if day >= since]

        @cache
        def new(name: str) -> DataFrame:
            return lake.read("gold", name, state, days)

        boots = lake.read("silver", "boots", state)

        def gone() -> DataFrame:
            return lost.lost_transport(lake.read("silver", "unfinished", state, days), uptime.boot(boots))

        tables: dict[str, Callable[[], DataFrame]] = {
            "boot": lambda: lost.with_lost(uptime.boot(boots), gone()),
            "uptime_day": lambda: uptime.uptime_day(
                lake.read("gold", "minute_day", state),
                uptime.boot(boots),
                boots,
                lake.read("gold", "clock_day", state),
            ),
            "lost_transport": gone,
            "actor": lambda: abuse.actor(lake.read("gold", "abuse_day", state), boots),
            "quality_day": lambda: network.quality_day(lake.read("silver", "numbers", state)),
            "capacity_forecast": lambda: capacity.capacity_forecast(new("capacity_day"), today=self._today),
            "placement": lambda: capacity.placement(
                lake.read("gold", "uptime_day", state),
                new("capacity_day"),
                new("latency_day"),
                new("settlement_day"),
                today=self._today,
            ),
            "public_day": lambda: network.public_day(lake.read("gold", "network_day", state), today=self._today),
        }
        assert tables.keys() == OVERALL.keys()
        last = {"placement": tables.pop("placement")}  # made of one of the others
        self._write("gold", tables)
        self._write("gold", last)
