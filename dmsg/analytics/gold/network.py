"""Tables about the whole network: totals by day, totals that may be published, and the completeness of the data."""

from __future__ import annotations

from datetime import date

from pyspark.sql import Column, DataFrame
from pyspark.sql.types import LongType

from dmsg.analytics import functions as F
from dmsg.analytics.functions import Window
from dmsg.analytics.gold.histograms import sum_aggregate, with_percentiles
from dmsg.analytics.gold.totals import bounded_sums
from dmsg.analytics.schemas import DAILY, OVERALL

K_ANONYMITY = 10
"""Minimum number of clients of a day; with fewer, the day's numbers are not published."""
MIN_SERVERS = 3
"""Minimum number of servers of a day; with fewer, the totals would reveal the numbers of a single operator, and are not
published."""
GRANULARITY = 8
"""Multiple to which counts of clients, sessions and transports are rounded up."""
PUBLIC_DELAY_DAYS = 2
"""Minimum age in days of a published day."""


def network_day(
    traffic: DataFrame,
    sessions: DataFrame,
    session_rows: DataFrame,
    refusal: DataFrame,
    settlement: DataFrame,
    hours: DataFrame,
) -> DataFrame:
    """Compute totals of the network by day.

    The clients of each server are counted, and the counts are added. A client at two servers counts twice, because its
    pseudonyms there differ on purpose.

    :param hours: rows of :func:`~dmsg.analytics.gold.traffic.latency_hour`.
    """
    nothing = F.lit(0).cast("long")
    signed = 2 * (F.col("matched") + F.col("cut") + F.col("conflict")) + F.col("one_sided")
    parts = [
        traffic.select("dt", "server", F.col("closed").alias("transports"), "bytes", "frames"),
        sessions.select("dt", "sessions"),
        session_rows.where(F.col("server").isNotNull() & F.col("peer").isNotNull())
        .select("dt", "server", "peer")
        .distinct()
        .select("dt", F.lit(1).alias("clients")),
        refusal.where(~F.col("what").isin("drop", "lookup")).select("dt", F.col("n").alias("refused")),
        settlement.select("dt", signed.alias("receipts")),
        hours.select("dt", "rtt", "accept"),
    ]
    # The parts are combined by one union and one aggregation. With outer joins instead, Spark would have to plan and
    # shuffle once more for each part.
    rows = parts[0]
    for part in parts[1:]:
        rows = rows.unionByName(part, allowMissingColumns=True)
    sums = bounded_sums(*(name for name in rows.columns if name not in ("dt", "server", "rtt", "accept")))
    together = rows.groupBy("dt").agg(
        F.size(F.collect_set("server")).cast("long").alias("servers"),
        *sums,
        sum_aggregate("rtt"),
        sum_aggregate("accept"),
    )
    together = with_percentiles(together, "rtt", "accept")
    counts = {field.name for field in DAILY["network_day"].schema.fields if field.dataType == LongType()}
    names = DAILY["network_day"].schema.fieldNames()
    return together.select(*[F.coalesce(name, nothing).alias(name) if name in counts else name for name in names])


def _rounded_up(name: str) -> Column:
    return (F.ceil(F.col(name) / GRANULARITY) * GRANULARITY).cast("long")


def public_day(network: DataFrame, *, today: date) -> DataFrame:
    """Return the totals that may be published.

    Only days that are at least :data:`PUBLIC_DELAY_DAYS` old are included. There are no numbers of single servers or
    clients, and counts are rounded up. For a day with too few clients or servers, no number is published, because one
    number might be computed from the others.
    """
    few = (F.col("clients") < K_ANONYMITY) | (F.col("servers") < MIN_SERVERS)
    withheld = F.when(F.col("servers") < MIN_SERVERS, "too few servers").when(few, "too few clients")
    shown = {
        "servers": F.col("servers"),
        "clients": _rounded_up("clients"),
        "transports": _rounded_up("transports"),
        "sessions": _rounded_up("sessions"),
        "gigabytes": F.ceil(F.col("bytes") / 1e9 * 10) / 10,
        "rtt_p50": F.round("rtt_p50", 1),
        "rtt_p90": F.round("rtt_p90", 1),
    }
    types = {field.name: field.dataType for field in OVERALL["public_day"].schema.fields}
    return network.where(F.col("dt") <= F.date_sub(F.lit(today), PUBLIC_DELAY_DAYS)).select(
        "dt",
        *[F.when(~few, column).cast(types[name].simpleString()).alias(name) for name, column in shown.items()],
        withheld.alias("withheld"),
    )


def quality_day(numbers: DataFrame) -> DataFrame:
    """Compute the share of each producer's events that have arrived, by day.

    A process numbers its events from 0. Numbers that are missing between the events of two successive days count for
    the later day. If there are days in between for which no event has arrived, the numbers count for the first of those
    days.

    :param numbers: rows of :func:`~dmsg.analytics.bronze.numbers` of all days.
    """
    per_boot = numbers.groupBy("producer", "boot", F.col("dt").cast("date").alias("dt")).agg(
        F.sum("events").alias("events"),
        F.sum("distinct_events").alias("distinct_events"),
        F.min("first").alias("first"),
        F.max("last").alias("last"),
        (F.max("greatest_start") - F.min("least_start")).alias("steps"),
    )
    days_before = Window.partitionBy("producer", "boot").orderBy("dt").rowsBetween(Window.unboundedPreceding, -1)
    nothing = F.lit(0).cast("long")
    gaps = per_boot.select(
        "producer",
        "dt",
        F.max("dt").over(days_before).alias("before"),
        (F.col("first") - F.coalesce(F.max("last").over(days_before), F.lit(-1)) - 1).alias("expected"),
    ).where(F.col("expected") > 0)
    rows = per_boot.select(
        "producer", "dt", "events", "distinct_events", (F.col("last") - F.col("first") + 1).alias("expected"), "steps"
    ).unionByName(
        gaps.select(
            "producer",
            # If no event has arrived for whole days, the missing event numbers are counted on the first of these days.
            F.when(F.date_add("before", 1) < F.col("dt"), F.date_add("before", 1)).otherwise(F.col("dt")).alias("dt"),
            nothing.alias("events"),
            nothing.alias("distinct_events"),
            "expected",
            nothing.alias("steps"),
        )
    )
    return (
        rows.groupBy("producer", "dt")
        .agg(
            *bounded_sums("events", "distinct_events", "expected"),
            F.max("steps").alias("clock_steps_ms"),
        )
        .withColumn("duplicates", F.col("events") - F.col("distinct_events"))
        .withColumn("missing", F.col("expected") - F.col("distinct_events"))
        .withColumn("completeness", F.col("distinct_events") / F.col("expected"))
        .select(*OVERALL["quality_day"].schema.fieldNames())
    )
