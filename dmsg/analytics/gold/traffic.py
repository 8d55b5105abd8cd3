"""Tables about the traffic that servers carried, its latency, and the reasons why transports ended."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame

from dmsg.analytics import functions as F
from dmsg.analytics.gold.histograms import bucket_of, count_buckets, latency, sum_counts, with_percentiles
from dmsg.analytics.gold.reasons import bound_counts
from dmsg.analytics.gold.totals import bounded_sum, bounded_sums
from dmsg.analytics.schemas import DAILY


def _sum(*names: str) -> Column:
    """Return an aggregate: the bounded sum of all numbers in these columns, with NULL counted as 0."""
    nothing = F.lit(0).cast("long")
    in_row = nothing
    for name in names:
        in_row = in_row + F.coalesce(name, nothing)
    return F.coalesce(bounded_sum(in_row), nothing)


def _forwarded(*ways: str) -> Column:
    """Return an aggregate: the bytes forwarded in these directions, which are the bytes received minus those dropped,
    at least 0.

    Dropped bytes are reported at the end of a transport, so a period can have more dropped bytes than received ones. A
    server may also report wrong numbers.
    """
    data, dropped = (_sum(*[f"{kind}_{way}" for way in ways]) for kind in ("data", "dropped"))
    return F.greatest(F.lit(0), data - dropped)


_HOUR = ("server", "dt", "hour")
_OF_HOUR = ("opened", "accepted", "closed", "refused_by_peer", "data", "dropped_bytes", "frames", "acks")


def _hour_sums(transports: DataFrame) -> DataFrame:
    """Sum the events by server and hour. The sum ``data`` is the number of bytes received from senders."""
    close = F.col("what") == "close"
    return transports.groupBy(*_HOUR).agg(
        F.count_if(F.col("what") == "open").alias("opened"),
        F.count_if(close & F.col("accept_ms").isNotNull()).alias("accepted"),
        F.count_if(close).alias("closed"),
        F.count_if(close & F.col("accept_ms").isNull()).alias("refused_by_peer"),
        _sum("data_ab", "data_ba").alias("data"),
        _sum("dropped_ab", "dropped_ba").alias("dropped_bytes"),
        _sum("frames_ab", "frames_ba").alias("frames"),
        _sum("acks_ab", "acks_ba").alias("acks"),
    )


def _finish_hours(sums: DataFrame) -> DataFrame:
    handed_on = F.greatest(F.lit(0), F.col("data") - F.col("dropped_bytes"))
    return sums.withColumn("bytes", handed_on).select(*DAILY["traffic_hour"].schema.fieldNames())


def traffic_hour(transports: DataFrame) -> DataFrame:
    """Compute each server's traffic by hour. Bytes and frames belong to the hour of the event that reports them.

    ``bytes`` counts the bytes forwarded to receivers, ``dropped_bytes`` the bytes received from senders and dropped.
    """
    return _finish_hours(_hour_sums(transports))


def add_traffic_hour(hours: DataFrame, transports: DataFrame) -> DataFrame:
    """Add further events to rows of :func:`traffic_hour`.

    :param hours: rows for earlier events. A row in which more bytes were dropped than received is not allowed, because
        its ``bytes`` is 0 in place of the negative difference.
    :param transports: events that are not counted in ``hours``.
    """
    stored = hours.withColumn("data", F.col("bytes") + F.col("dropped_bytes")).select(*_HOUR, *_OF_HOUR)
    both = stored.unionByName(_hour_sums(transports)).groupBy(*_HOUR).agg(*bounded_sums(*_OF_HOUR))
    return _finish_hours(both)


def close_day(transports: DataFrame) -> DataFrame:
    """Count the ends of transports by reason."""
    counts = (
        transports.where(F.col("what") == "close")
        .groupBy("server", "dt", "reason", "by")
        .agg(F.count(F.lit(1)).alias("transports"))
    )
    return bound_counts(counts)


def add_close_day(days: DataFrame, transports: DataFrame) -> DataFrame:
    """Add further events to rows of :func:`close_day`.

    :param days: rows for earlier events.
    :param transports: events that are not counted in ``days``.
    """
    both = days.unionByName(close_day(transports))
    return bound_counts(both.groupBy("server", "dt", "reason", "by").agg(F.sum("transports").alias("transports")))


def pair_day(transports: DataFrame) -> DataFrame:
    """Compute the bytes that each pair of clients exchanged, by server and day."""
    return (
        transports.where(F.col("what") != "open")
        .groupBy("server", "dt", "src", "dst")
        .agg(
            F.count_if(F.col("what") == "close").alias("transports"),
            _forwarded("ab").alias("bytes_ab"),
            _forwarded("ba").alias("bytes_ba"),
        )
    )


def latency_hour(transports: DataFrame) -> DataFrame:
    """Compute percentiles of the round-trip times and of the times to open a transport, by server and hour."""
    keys = ["server", "dt", "hour"]
    answers = sum_counts(transports, keys, "rtt")
    took = F.coalesce(F.col("accept_us") / 1000, F.col("accept_ms"))
    # Grouping by bucket first leaves few rows to convert to arrays. A sum for each bucket over all rows would be
    # slower.
    openings = (
        transports.where((F.col("what") == "close") & F.col("accept_ms").isNotNull())
        .groupBy(*keys, bucket_of(took).alias("bucket"))
        .agg(F.count(F.lit(1)).alias("n"))
        .groupBy(*keys)
        .agg(count_buckets("bucket", "n").alias("accept"))
    )
    both = answers.join(openings, keys, "full_outer")
    both = with_percentiles(both, "rtt", "accept")
    return both.select(*DAILY["latency_hour"].schema.fieldNames())


def add_latency_hour(hours: DataFrame, transports: DataFrame) -> DataFrame:
    """Add further events to rows of :func:`latency_hour`.

    :param hours: rows for earlier events.
    :param transports: events that are not counted in ``hours``.
    """
    both = hours.unionByName(latency_hour(transports))
    return latency(both, ["server", "dt", "hour"]).select(*DAILY["latency_hour"].schema.fieldNames())


def latency_day(hours: DataFrame) -> DataFrame:
    """Compute the same percentiles as :func:`latency_hour`, by server and day."""
    return latency(hours, ["server", "dt"]).select(*DAILY["latency_day"].schema.fieldNames())


def session_day(sessions: DataFrame) -> DataFrame:
    """Compute the number and mean duration of clients' sessions, by server and day. A session counts on the day on
    which it ends."""
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
