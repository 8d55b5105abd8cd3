"""Refinement of a run: silver and gold tables of the touched days, and gold tables that are recomputed as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date, timedelta
from functools import cache

from pyspark.sql import DataFrame, functions as F

from dmsg.analytics import bronze, silver
from dmsg.analytics.broadcasts import Hint, bounded
from dmsg.analytics.gold import abuse, capacity, lost_transports, network, settlement, traffic, uptime
from dmsg.analytics.lake import Lake, with_types
from dmsg.analytics.neighbour_days import MIDNIGHT_MS
from dmsg.analytics.parquet import arrow_schema
from dmsg.analytics.runs import Claim, State
from dmsg.analytics.schemas import DAILY, DAY_MS, FAMILIES, GOLD, OVERALL, SILVER
from dmsg.analytics.views import VIEWS

SMALL_WORKERS = 4
_OF_GOLD = ("minute_day", "capacity_day", "latency_day", "network_day")
"""Gold tables made from other gold tables of the same days."""
_OF_OVERALL = ("boot", "placement")
"""Gold tables that are recomputed as a whole, from others of that kind."""
_OF_SILVER = ("verdicts", "unfinished")
"""Silver tables made from other silver tables, one after the other."""
_OF_CLIENTS = {
    *("sessions", "heartbeats", "verdicts", "unfinished", "transports", "refusals", "entries", "receipts"),
    *("pair_day", "settlement_conflict_day", "abuse_day", "lost_transport", "actor"),
}
"""Tables whose rows grow with clients, transports or events. The rows of all others grow with servers and hours."""
_FAMILIES_OF: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("sessions", "boots", "session_day", "minute_day"), tuple(FAMILIES)),
    **dict.fromkeys(("traffic_hour", "close_day", "pair_day", "latency_hour", "latency_day"), ("transport",)),
    **dict.fromkeys(("refusal_hour", "refusal_day"), ("refusal",)),
    "heartbeats": ("beat",),
    "server_hour": ("beat", "entry"),
    "clock_day": ("entry",),
    "abuse_day": ("refusal", "transport", "entry"),
    "discovery_hour": ("entry", "refusal"),
    "capacity_day": ("beat", "entry", "refusal"),
}
"""Families of events that a table is made from. The tables that are not named are made from the words of transports,
which may lie beyond midnight, or from all others.
"""
MEMORY_EVENTS = 50_000_000
"""Number of events in the touched days up to which tables of servers and hours are collected and written by Arrow.
Above it Spark writes them, so that the driver's memory does not grow with the number of days.
"""
HISTORY_DAYS = 28
"""Days that gold tables without days look back."""

Read = Callable[[str], DataFrame]
"""Function that returns the rows of the silver or gold table, or of the family of events, of that name."""
Tables = dict[str, Callable[[], DataFrame]]
"""Functions that plan the tables, by name. Nothing is computed before the rows are written or collected."""


def silver_tables(
    events: Read,
    read: Read,
    around: Read,
    days: Iterable[str],
    accepted: Callable[[], DataFrame] | None = None,
    hint: Hint = F.broadcast,
    *,
    last_day: date,
) -> Tables:
    """Plan the silver tables of some days. The last two are made from the others.

    :param events: returns the events of a family.
    :param around: as ``read``, including the days before and after.
    :param accepted: returns the receipts of ``around``, which need not be joined to one row for each end.
    :param hint: marks rows for a broadcast if they are few.
    :param last_day: the last day of all that has events.
    """

    def ends() -> DataFrame:
        return (
            read("numbers")
            .groupBy("producer", "boot", F.col("dt").cast("string").alias("dt"))
            .agg(F.min("first_ts").alias("first_ts"), F.max("last_ts").alias("last_ts"))
        )

    return {
        "transports": lambda: silver.transports(events("transport")),
        "sessions": lambda: silver.sessions(events("session"), ends(), events("life"), hint, last_day=last_day),
        "heartbeats": lambda: silver.heartbeats(events("beat")),
        "refusals": lambda: silver.refusals(events("refusal")),
        "entries": lambda: silver.entries(events("entry")),
        "receipts": lambda: silver.receipts(events("receipt")),
        "boots": lambda: silver.boots(events("life"), events("beat"), ends(), hint),
        "verdicts": lambda: _verdicts(
            around("transports"), around("receipts") if accepted is None else accepted(), days, hint
        ),
        "unfinished": lambda: lost_transports.select_unfinished(
            read("transports"), read("verdicts"), read("receipts").where("former"), hint
        ),
    }


def _verdicts(transports: DataFrame, receipts: DataFrame, days: Iterable[str], hint: Hint) -> DataFrame:
    """Compare the three counts of the transports of these days, including data just beyond midnight."""
    wanted = F.col("dt").cast("string").isin(list(days))
    of_day = F.unix_millis("at") % DAY_MS
    near = (of_day < MIDNIGHT_MS) | (of_day >= DAY_MS - MIDNIGHT_MS)
    transports = transports.where(wanted | near)
    is_former = F.coalesce("former", F.lit(False))
    former = settlement.of_ends(receipts.where(is_former), transports, hint)
    # A receipt arrives within ten minutes of its transport's end, so receipts of other days belong to other transports.
    due = receipts.where(~is_former & (wanted | near))
    rows = settlement.verdicts(settlement.three_words(transports, due.unionByName(former)))
    return rows.where(wanted)


def daily_tables(read: Read, around: Read, hint: Hint = F.broadcast) -> Tables:
    """Plan the gold tables of some days, from their silver tables and from each other (``_OF_GOLD``).

    :param around: as ``read``, including the days before and after.
    :param hint: marks rows for a broadcast if they are few.
    """

    def observed() -> DataFrame:
        first, last = (F.floor(F.col(name) / 60_000) for name in ("first_ts", "last_ts"))
        return read("numbers").groupBy("dt").agg((F.max(last) - F.min(first) + 1).alias("observed_minutes"))

    return {
        "traffic_hour": lambda: traffic.traffic_hour(read("transports")),
        "close_day": lambda: traffic.close_day(read("transports")),
        "pair_day": lambda: traffic.pair_day(read("transports")),
        "latency_hour": lambda: traffic.latency_hour(read("transports")),
        "latency_day": lambda: traffic.latency_day(read("latency_hour")),
        "session_day": lambda: traffic.session_day(read("sessions")),
        "server_hour": lambda: uptime.server_hour(read("heartbeats"), read("entries")),
        "minute_day": lambda: uptime.minute_day(read("server_hour"), observed()),
        "settlement_day": lambda: settlement.settlement_day(read("verdicts")),
        "settlement_conflict_day": lambda: settlement.settlement_conflict_day(
            read("verdicts"), around("receipts"), hint
        ),
        "refusal_hour": lambda: abuse.refusal_hour(read("refusals")),
        "abuse_day": lambda: abuse.abuse_day(read("refusals"), read("transports"), read("entries")),
        "clock_day": lambda: uptime.clock_day(read("entries")),
        "refusal_day": lambda: abuse.refusal_day(read("refusals")),
        "discovery_hour": lambda: abuse.discovery_hour(read("entries"), read("refusals")),
        "capacity_day": lambda: capacity.capacity_day(read("server_hour"), read("refusals")),
        "network_day": lambda: network.network_day(
            *(read("traffic_hour"), read("session_day"), read("sessions")),
            *(read("refusal_hour"), read("settlement_day"), read("latency_hour")),
        ),
    }


def overall_tables(read: Read, recent: Read, today: date) -> Tables:
    """Plan the gold tables that are recomputed as a whole. ``placement`` and ``boot`` are made from one of the others.

    :param read: returns the rows of all days.
    :param recent: returns the rows of the last :data:`HISTORY_DAYS`.
    :param today: day of the run.
    """

    return {
        "boot": lambda: lost_transports.with_lost(uptime.boot(read("boots")), read("lost_transport")),
        "uptime_day": lambda: uptime.uptime_day(
            read("minute_day"), uptime.boot(read("boots")), read("boots"), read("clock_day")
        ),
        "lost_transport": lambda: lost_transports.lost_transport(recent("unfinished"), uptime.boot(read("boots"))),
        "actor": lambda: abuse.actor(read("abuse_day"), read("boots")),
        "quality_day": lambda: network.quality_day(read("numbers")),
        "capacity_forecast": lambda: capacity.capacity_forecast(recent("capacity_day"), today=today),
        "placement": lambda: capacity.placement(
            *(read("uptime_day"), recent("capacity_day"), recent("latency_day"), recent("settlement_day")),
            today=today,
        ),
        "public_day": lambda: network.public_day(read("network_day"), today=today),
    }


class Refinement:
    """Refinement of the tables by one run.

    :param state: state that the run will leave.
    :param days: days whose rows are rewritten.
    :param today: day of the run.
    :param changed: days that have new events, by family.
    :param events: number of events in those days.
    :param small: whether to write several tables at the same time.
    :param step: called with the name of each step as it begins.
    """

    def __init__(
        self,
        lake: Lake,
        claim: Claim,
        state: State,
        days: list[str],
        *,
        today: date,
        changed: Mapping[str, Iterable[str]],
        events: int,
        small: bool,
        step: Callable[[str], None],
    ) -> None:
        self._lake = lake
        self._claim = claim
        self._state = state
        self._days = days
        self._today = today
        self._small = small
        self._hint = bounded(events)
        self._in_memory = events <= MEMORY_EVENTS
        self._collected: dict[str, tuple[tuple[str, ...], DataFrame]] = {}
        self._changed = {family: set(some) for family, some in changed.items()}
        self._everything = False
        self._step = step

    def _days_of(self, name: str) -> tuple[str, ...]:
        """Return the touched days on which a table can change."""
        families = _FAMILIES_OF.get(name)
        if families is None or self._everything:
            return tuple(self._days)
        found = {day for family in families for day in self._changed.get(family, ())}
        return tuple(sorted(found.intersection(self._days)))

    def _events(self, family: str, days: Iterable[str], doubtful: DataFrame | None) -> DataFrame:
        rows = self._lake.bronze([family], days)
        return rows if doubtful is None else bronze.deduplicate(rows, doubtful, self._hint)

    def _reader(self, days: Sequence[str] | None) -> Read:
        """Return a reader of the tables as this run leaves them.

        :param days: limit the rows to these days; None for all.
        """

        # Several queries read the same table, and Spark takes 0.1 s to open one.
        @cache
        def read(name: str) -> DataFrame:
            if name in self._collected and days is not None:
                collected_days, rows = self._collected[name]
                if collected_days == tuple(days):
                    return rows
            return self._lake.read("gold" if name in GOLD else "silver", name, self._state, days)

        return read

    def silver(self) -> int:
        """Write the silver tables of the touched days.

        :returns: number of duplicate events.
        """
        lake, state, days = self._lake, self._state, self._days
        self._step("duplicates")
        everything = lake.bronze(FAMILIES, days)
        read = self._reader(days)
        self._replace("silver", "sums", bronze.sums(everything), days)
        sums = read("sums")
        doubt = not bronze.incomplete_sums(sums).isEmpty()
        self._replace("silver", "numbers", bronze.numbers(sums, everything if doubt else None, self._hint), days)
        again = read("numbers").where("events > distinct_events")
        found = again.agg(F.sum(F.col("events") - F.col("distinct_events")).alias("n")).collect()[0].n
        doubtful = again if found else None
        # Which of several events counts depends on all days of a run.
        self._everything = doubtful is not None

        @cache
        def plan(days: tuple[str, ...]) -> Tables:
            around = self._days_around(days)
            return silver_tables(
                lambda family: self._events(family, days, doubtful),
                self._reader(days),
                self._reader(around),
                days,
                lambda: lake.accepted(state, around),
                self._hint,
                last_day=date.fromisoformat(max(state.days)),
            )

        names = [name for name in SILVER if name not in _OF_SILVER]
        if doubtful is None:
            for name in VIEWS:
                names.remove(name)
                lake.clear(name, self._claim.number, days)
        for some in (names, *([name] for name in _OF_SILVER)):
            self._write_days("silver", some, plan)
        return int(found or 0)

    def _write_days(self, layer: str, names: Iterable[str], plan: Callable[[tuple[str, ...]], Tables]) -> None:
        """Write the days of each table on which it can change.

        :param plan: returns the plans of the tables of some days.
        """
        days = {name: self._days_of(name) for name in names}
        for name, some in days.items():
            if not some:
                self._lake.table(layer, name).ensure()
        self._write(layer, {name: plan(some)[name] for name, some in days.items() if some}, days)

    def _write(self, layer: str, tables: Tables, days: Mapping[str, Sequence[str]] | None = None) -> None:
        """Write tables that do not depend on each other; at the same time if they are small."""

        def one(name: str) -> None:
            self._step(f"{layer}: {name}")
            self._claim.check()
            self._replace(layer, name, tables[name](), None if days is None else days[name])

        with ThreadPoolExecutor(SMALL_WORKERS if self._small else 1) as pool:
            list(pool.map(one, tables))

    def _replace(self, layer: str, name: str, rows: DataFrame, days: Sequence[str] | None) -> None:
        """Replace the rows of a table. Small tables are collected: Spark takes 0.3 CPU s to write one, Arrow 0.02."""
        lake, number = self._lake, self._claim.number
        if not self._in_memory or name in _OF_CLIENTS:
            lake.write(rows, layer, name, number, days)
            return
        schema = lake.table(layer, name).schema
        collected = with_types(rows, schema).toArrow().cast(arrow_schema(schema))
        lake.put(collected, layer, name, number, days)
        if days is not None:
            self._collected[name] = tuple(days), lake.spark.createDataFrame(collected, schema)

    def gold_daily(self) -> None:
        """Write the gold tables of the touched days."""

        @cache
        def plan(days: tuple[str, ...]) -> Tables:
            tables = daily_tables(self._reader(days), self._reader(self._days_around(days)), self._hint)
            assert tables.keys() == DAILY.keys()
            return tables

        self._write_days("gold", [name for name in DAILY if name not in _OF_GOLD], plan)
        self._write_days("gold", _OF_GOLD, plan)

    @staticmethod
    def _days_around(days: Iterable[str]) -> list[str]:
        """Return days with the days before and after each."""
        return sorted({str(date.fromisoformat(day) + timedelta(step)) for day in days for step in (-1, 0, 1)})

    def gold_overall(self) -> None:
        """Write the gold tables that are recomputed as a whole."""
        since = str(self._today - timedelta(HISTORY_DAYS))
        recent = [day for day in self._state.days if day >= since]
        tables = overall_tables(self._reader(None), self._reader(recent), self._today)
        assert tables.keys() == OVERALL.keys()
        last = {name: tables.pop(name) for name in _OF_OVERALL}
        self._write("gold", tables)
        self._write("gold", last)
