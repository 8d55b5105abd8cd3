"""What servers carried, how fast, and how it ended."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from dmsg.analytics.gold.histograms import bucket_of, merged, quantile
from dmsg.analytics.schemas import DAILY
from dmsg.telemetry.schema import BUCKETS


def _sum(*names: str) -> Column:
    total = F.lit(0).cast("long")
    for name in names:
        total = total + F.coalesce(F.sum(name), F.lit(0))
    return total


def traffic_hour(transports: DataFrame) -> DataFrame:
    """What did each server carry?  Bytes and frames belong to the hour of the event that counts them."""
    close = F.col("what") == "close"
    return transports.groupBy("server", "dt", "hour").agg(
        F.count_if(F.col("what") == "open").alias("opened"),
        F.count_if(close & F.col("accept_ms").isNotNull()).alias("accepted"),
        F.count_if(close).alias("closed"),
        F.count_if(close & F.col("accept_ms").isNull()).alias("refused_by_peer"),
        _sum("data_ab", "data_ba").alias("bytes"),
        _sum("frames_ab", "frames_ba").alias("frames"),
        _sum("acks_ab", "acks_ba").alias("acks"),
    )


def close_day(transports: DataFrame) -> DataFrame:
    """Why did transports end?"""
    return (
        transports.where(F.col("what") == "close")
        .groupBy("server", "dt", "reason", "by")
        .agg(F.count(F.lit(1)).alias("transports"))
    )


def pair_day(transports: DataFrame) -> DataFrame:
    """Who sent how much to whom, over which server?"""
    return (
        transports.where(F.col("what") != "open")
        .groupBy("server", "dt", "src", "dst")
        .agg(
            F.count_if(F.col("what") == "close").alias("transports"),
            _sum("data_ab").alias("bytes_ab"),
            _sum("data_ba").alias("bytes_ba"),
        )
    )


def latency_hour(transports: DataFrame) -> DataFrame:
    """How fast do clients answer over a server, how long does opening take?"""
    keys = ["server", "dt", "hour"]
    answers = (
        transports.where(F.col("rtt").isNotNull())
        .groupBy(*keys)
        .agg(*[F.sum(F.get("rtt", F.lit(index))).alias(f"b{index}") for index in range(BUCKETS)])
        .select(*keys, merged([F.col(f"b{index}") for index in range(BUCKETS)]).alias("rtt"))
    )
    # few groups first, then one row each: cheaper than a sum for each bucket over all rows
    openings = (
        transports.where((F.col("what") == "close") & F.col("accept_ms").isNotNull())
        .groupBy(*keys, bucket_of(F.col("accept_ms")).alias("bucket"))
        .agg(F.count(F.lit(1)).alias("n"))
        .groupBy(*keys)
        .agg(merged([F.sum(F.when(F.col("bucket") == index, F.col("n"))) for index in range(BUCKETS)]).alias("accept"))
    )
    both = answers.join(openings, keys, "full_outer")
    for name in ("rtt", "accept"):
        both = both.withColumn(
            f"{name}_samples", F.coalesce(F.expr(f"aggregate({name}, 0L, (a, x) -> a + x)"), F.lit(0).cast("long"))
        )
        for share in (50, 90, 99):
            both = both.withColumn(f"{name}_p{share}", quantile(name, f"{name}_samples", share / 100))
    return both.select(*DAILY["latency_hour"].schema.fieldNames())


def session_day(sessions: DataFrame) -> DataFrame:
    """How long do clients stay?  Sessions that are open at midnight count on the day they end."""
    return (
        sessions.where(F.col("reason") != "open")
        .groupBy("server", "dt")
        .agg(
            F.count(F.lit(1)).alias("sessions"),
            F.count_distinct("peer").alias("clients"),
            F.count_if(F.col("reason") == "lost").alias("lost"),
            (F.avg("duration_ms") / 1000).alias("mean_seconds"),
            _sum("bytes").alias("bytes"),
        )
    )
