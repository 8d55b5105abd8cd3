"""The network as a whole: at a glance, in public, and how complete what is known is."""

from __future__ import annotations

from datetime import date

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from dmsg.analytics.schemas import DAILY, OVERALL

K_ANONYMITY = 10
"""Clients without which a day's cells are withheld."""
LEAST_SERVERS = 3
"""Servers without which sums of the network would be one operator's."""
GRANULARITY = 8
"""Counts of clients, sessions and transports are rounded up to multiples of it."""
PUBLIC_DELAY_DAYS = 2
"""Days younger than this are not published."""


def network_day(
    traffic: DataFrame, sessions: DataFrame, session_rows: DataFrame, refusal: DataFrame, settlement: DataFrame
) -> DataFrame:
    """The network at a glance.

    Clients are those of each server added up: pseudonyms differ from server to server, on purpose.
    """
    nothing = F.lit(0).cast("long")
    carried = traffic.groupBy("dt").agg(
        F.count_distinct("server").alias("servers"),
        F.sum("closed").alias("transports"),
        F.sum("bytes").alias("bytes"),
        F.sum("frames").alias("frames"),
    )
    stayed = sessions.groupBy("dt").agg(F.sum("sessions").alias("sessions"))
    clients = session_rows.groupBy("dt").agg(F.count_distinct("server", "peer").alias("clients"))
    refused = refusal.where(F.col("what") != "drop").groupBy("dt").agg(F.sum("n").alias("refused"))
    signed = settlement.groupBy("dt").agg(
        F.sum(2 * (F.col("matched") + F.col("conflict")) + F.col("one_sided")).alias("receipts")
    )
    joined = carried
    for other in (stayed, clients, refused, signed):
        joined = joined.join(other, "dt", "full_outer")
    names = DAILY["network_day"].schema.fieldNames()
    return joined.select("dt", *[F.coalesce(name, nothing).alias(name) for name in names[1:]])


def _rounded_up(name: str) -> Column:
    return (F.ceil(F.col(name) / GRANULARITY) * GRANULARITY).cast("long")


def public_day(network: DataFrame, latency: DataFrame, *, today: date) -> DataFrame:
    """What may be published.

    Days of at least :data:`PUBLIC_DELAY_DAYS` ago; nothing per server, nothing per client; counts rounded up;
    a day of too few clients or servers is withheld whole, so that nothing can be had by subtraction.
    """
    keys = ["dt"]
    speed = (
        latency.where(F.col("rtt_samples") > 0)
        .groupBy(*keys)
        .agg(
            *[
                F.round(F.sum(F.col(f"rtt_p{share}") * F.col("rtt_samples")) / F.sum("rtt_samples"), 1).alias(
                    f"rtt_p{share}"
                )
                for share in (50, 90)
            ]
        )
    )
    few = (F.col("clients") < K_ANONYMITY) | (F.col("servers") < LEAST_SERVERS)
    withheld = F.when(F.col("servers") < LEAST_SERVERS, "too few servers").when(few, "too few clients")
    shown = {
        "servers": F.col("servers"),
        "clients": _rounded_up("clients"),
        "transports": _rounded_up("transports"),
        "sessions": _rounded_up("sessions"),
        "gigabytes": F.ceil(F.col("bytes") / 1e9 * 10) / 10,
        "rtt_p50": F.col("rtt_p50"),
        "rtt_p90": F.col("rtt_p90"),
    }
    types = {field.name: field.dataType for field in OVERALL["public_day"].schema.fields}
    return (
        network.where(F.col("dt") <= F.date_sub(F.lit(today), PUBLIC_DELAY_DAYS))
        .join(speed, keys, "left")
        .select(
            "dt",
            *[F.when(~few, column).cast(types[name]).alias(name) for name, column in shown.items()],
            withheld.alias("withheld"),
        )
    )


def quality_day(numbers: DataFrame) -> DataFrame:
    """How much of what was written has arrived?

    :param numbers: of :func:`~dmsg.analytics.bronze.numbers`.
    """
    per_boot = numbers.groupBy("producer", "boot", "dt").agg(
        F.sum("events").alias("events"),
        F.sum("distinct_events").alias("distinct_events"),
        (F.max("last") - F.min("first") + 1).alias("expected"),
        (F.max("greatest_start") - F.min("least_start")).alias("steps"),
    )
    return (
        per_boot.groupBy("producer", F.col("dt").cast("date").alias("dt"))
        .agg(
            F.sum("events").alias("events"),
            F.sum("distinct_events").alias("distinct_events"),
            F.sum("expected").alias("expected"),
            F.max("steps").alias("clock_steps_ms"),
        )
        .withColumn("duplicates", F.col("events") - F.col("distinct_events"))
        .withColumn("missing", F.col("expected") - F.col("distinct_events"))
        .withColumn("completeness", F.col("distinct_events") / F.col("expected"))
        .select(*DAILY["quality_day"].schema.fieldNames())
    )
