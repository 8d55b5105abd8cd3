"""Was a server up, by its own word and by that of a witness, and how loaded was it?

Minutes are bits: the 60 minutes of an hour are one number, and what several
events say of the same minute is joined by *or*.  No order, no windows, and
what comes twice counts once.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from dmsg.analytics.schemas import DAILY

DISTRUST = 0.1
"""Share of a server's minutes that discovery did not see from which on a flag says so."""
MINUTES_OF_DAY = 1440


def _minute(time: Column) -> Column:
    """Minutes since 1970."""
    return F.floor(F.unix_seconds(time) / 60)


def _minutes(rows: DataFrame, key: str, first: Column, last: Column, name: str) -> DataFrame:
    """key, dt, hour -> the minutes from ``first`` to ``last`` as bits, within the row's day."""
    midnight = F.unix_date("dt").cast("long") * MINUTES_OF_DAY
    within = F.sequence(F.greatest(first, midnight), F.least(last, midnight + MINUTES_OF_DAY - 1))
    return (
        rows.select(F.col(key).alias("server"), "dt", F.explode(within).alias("minute"))
        .groupBy("server", "dt", (F.floor(F.col("minute") / 60) % 24).cast("int").alias("hour"))
        .agg(
            F.bit_or(F.call_function("shiftleft", F.lit(1).cast("long"), (F.col("minute") % 60).cast("int"))).alias(
                name
            )
        )
    )


def alive(heartbeats: DataFrame, role: str) -> DataFrame:
    """server, dt, hour -> minutes of which the process tells that it was there."""
    beats = heartbeats.where(F.col("role") == role)
    return _minutes(beats, "producer", _minute(F.col("covers_from")), _minute(F.col("at")), "alive")


def seen(entries: DataFrame) -> DataFrame:
    """server, dt, hour -> minutes in which a discovery had its fresh entry.

    A server posts every 30 s; a post stands for its minute and the next.
    """
    posts = entries.where(F.col("is_server") & F.col("result").isin("first", "next"))
    return _minutes(posts, "subject", _minute(F.col("at")), _minute(F.col("at")) + 1, "seen")


def server_hour(heartbeats: DataFrame, entries: DataFrame) -> DataFrame:
    """Was it up, by its own word and by discovery's, and how loaded?"""
    keys = ["server", "dt", "hour"]
    load = (
        heartbeats.where(F.col("role") == "server")
        .groupBy(F.col("producer").alias("server"), "dt", F.hour("at").alias("hour"))
        .agg(
            F.max("sessions").alias("peak_sessions"),
            F.max("transports").alias("peak_transports"),
            F.max("capacity").alias("capacity"),
            F.sum("frames").alias("frames"),
            F.sum("bytes").alias("bytes"),
            F.max("lag_ms").alias("max_lag_ms"),
            F.sum("cpu_ms").alias("cpu_ms"),
            F.max("rss_kb").alias("max_rss_kb"),
            F.sum("lost").alias("lost_events"),
        )
    )
    watched = alive(heartbeats, "discovery").groupBy("dt", "hour").agg(F.bit_or("alive").alias("watched"))
    joined = (
        alive(heartbeats, "server")
        .join(seen(entries), keys, "full_outer")
        .join(load, keys, "left")
        .join(F.broadcast(watched), ["dt", "hour"], "left")
    )
    no_minute = F.lit(0).cast("long")
    told, found = F.coalesce("alive", no_minute), F.coalesce("seen", no_minute)
    # without a discovery that watched, nothing is known of what it would have seen: that is not 0
    known = F.col("watched").isNotNull()
    return joined.select(
        *keys,
        F.bit_count(told).alias("alive_minutes"),
        F.when(known, F.bit_count(found)).alias("seen_minutes"),
        F.when(known, F.bit_count(told.bitwiseAND(found))).alias("agreed_minutes"),
        *DAILY["server_hour"].schema.fieldNames()[6:],
    )


def uptime_day(hours: DataFrame, lives: DataFrame, window: DataFrame) -> DataFrame:
    """What share of the day was it up?

    :param window: dt, observed_minutes: of how much of the day anything is known.
    """
    minutes = hours.groupBy("server", "dt").agg(
        F.sum("alive_minutes").alias("alive_minutes"),
        F.sum("seen_minutes").alias("seen_minutes"),
        F.sum("agreed_minutes").alias("agreed_minutes"),
    )
    ends = (
        lives.where(F.col("role") == "server")
        .groupBy(F.col("producer").alias("server"), "dt")
        .agg(
            F.count_if(F.col("what") == "start").alias("starts"),
            F.count_if(F.col("what") == "stop").alias("clean_stops"),
        )
    )
    crashes = F.greatest(F.lit(0), F.col("starts") - F.col("clean_stops") - 1)
    unseen = F.col("alive_minutes") - F.col("agreed_minutes") > DISTRUST * F.col("alive_minutes")
    flags = F.concat_ws(
        ", ",
        F.when(unseen, "says it was up when discovery did not see it"),
        F.when(F.col("crashes") > 0, "ended without a word"),
        F.when(F.col("starts") >= 10, "starts again and again"),
    )
    return (
        minutes.join(ends, ["server", "dt"], "left")
        .join(F.broadcast(window), ["dt"], "left")
        .fillna(0, ["starts", "clean_stops"])
        .withColumn("crashes", crashes)
        .withColumn("uptime", F.least(F.lit(1.0), F.col("alive_minutes") / F.col("observed_minutes")))
        .withColumn(
            "availability",
            # least() would pass over the NULL of a server that nobody could have seen
            F.when(
                F.col("agreed_minutes").isNotNull(),
                F.least(F.lit(1.0), F.col("agreed_minutes") / F.col("observed_minutes")),
            ),
        )
        .withColumn("flags", flags)
        .select(*DAILY["uptime_day"].schema.fieldNames())
    )
