"""Plans of the silver and gold tables: how Spark, or Arrow in memory, computes each table from events and from other
tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import date

from pyspark.sql import DataFrame

from dmsg.analytics import functions as F, silver
from dmsg.analytics.broadcasts import Hint
from dmsg.analytics.event_rules import MIDNIGHT_MS
from dmsg.analytics.gold import abuse, capacity, lost_transports, network, settlement, traffic, uptime
from dmsg.analytics.schemas import DAY_MS

HISTORY_DAYS = 28
"""Number of past days from which some of the gold tables without days are computed."""

Read = Callable[[str], DataFrame]
"""Function that returns the rows of a table or of a family of events, by the name of the table or family."""
Tables = dict[str, Callable[[], DataFrame]]
"""Functions that return the plans of tables, by table name. Rows are computed only when they are written or
collected."""


def silver_tables(
    events: Read,
    read: Read,
    around: Read,
    days: Iterable[str],
    accepted: Callable[[], DataFrame] | None = None,
    hint: Hint = F.broadcast,
    *,
    last_day: date,
    accepted_on_days: Callable[[], DataFrame] | None = None,
) -> Tables:
    """Return the plans of the silver tables of some days. The last two tables are computed from the others.

    :param events: returns the events of a family on these days.
    :param read: returns the rows of a table on these days.
    :param around: returns the rows of a table on these days, the day before and the day after.
    :param accepted: returns the accepted receipts of the same days as ``around``, possibly several of one end of a
        transport. If None, they are read from the table ``receipts``.
    :param hint: function that marks rows for a broadcast join if there are few of them.
    :param last_day: the last of all days with events.
    :param accepted_on_days: returns the same as ``accepted``, but only for these days. If None, the table ``receipts``
        is read.
    """

    def ends() -> DataFrame:
        return (
            read("numbers")
            .groupBy("producer", "boot", F.col("dt").cast("string").alias("dt"))
            .agg(F.min("first_ts").alias("first_ts"), F.max("last_ts").alias("last_ts"))
        )

    def former() -> DataFrame:
        if accepted_on_days is None:
            return read("receipts").where("former")
        # Few receipts are sent after a restart. In memory, it is cheaper to select them first and to group them then.
        return silver.receipts_of_ends(accepted_on_days().where("former"))

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
        "unfinished": lambda: lost_transports.select_unfinished(read("transports"), read("verdicts"), former(), hint),
    }


def _verdicts(transports: DataFrame, receipts: DataFrame, days: Iterable[str], hint: Hint) -> DataFrame:
    """Return the verdicts on the transports of some days. Of the day before and the day after, only the rows near
    midnight are used."""
    # Dates are compared, because to write the date of each row as text takes longer.
    wanted = F.col("dt").isin([date.fromisoformat(day) for day in days])
    rows_of_day = F.unix_millis("at") % DAY_MS
    near = (rows_of_day < MIDNIGHT_MS) | (rows_of_day >= DAY_MS - MIDNIGHT_MS)
    transports = transports.where(wanted | near)
    is_former = F.coalesce("former", F.lit(False))
    former = settlement.receipts_of_real_ends(receipts.where(is_former), transports, hint)
    # Receipts arrive within ten minutes of their transport's end. So of the receipts of the day before and the day
    # after, only those sent near midnight can belong to a transport of these days. The others are left out.
    due = receipts.where(~is_former & (wanted | near))
    rows = settlement.verdicts(settlement.three_words(transports, due.unionByName(former)))
    return rows.where(wanted)


def daily_tables(
    read: Read, around: Read, hint: Hint = F.broadcast, *, accepted: Callable[[], DataFrame] | None = None
) -> Tables:
    """Return the plans of the gold tables of some days.

    :param read: returns the rows of a table on these days.
    :param around: returns the rows of a table on these days, the day before and the day after.
    :param hint: function that marks rows for a broadcast join if there are few of them.
    :param accepted: as for :func:`silver_tables`.
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
            read("verdicts"), around("receipts") if accepted is None else accepted(), hint
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
    """Return the plans of the gold tables without days. ``placement`` and ``boot`` are each computed from another of
    these tables.

    :param read: returns the rows of a table on all days.
    :param recent: returns the rows of a table on the last :data:`HISTORY_DAYS` days.
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
