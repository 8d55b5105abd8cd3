"""Tables about the load of servers, and about their uptime by their own heartbeats and by the observation of
discoveries.

The 60 minutes of an hour are 60 bits of one number. The bits of several events are combined by bitwise *or*. This needs
no sorting and no window functions, and duplicate events do not change the result.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame

from dmsg.analytics import functions as F
from dmsg.analytics.event_rules import SILENCE_SECONDS
from dmsg.analytics.functions import Window
from dmsg.analytics.gold.totals import bounded_sum, bounded_sums
from dmsg.analytics.schemas import DAILY, OVERALL

MAX_UNSEEN_SHARE = 0.1
"""Maximum share of a server's minutes with heartbeats in which discovery does not see the server. Above it, the day
gets a flag."""
MINUTES_OF_DAY = 1440
CLOCK_LIMIT_MS = 60_000
"""Difference in ms between a server's clock and discovery's. Above it, the day gets a flag."""
FORGOTTEN_DAYS = 28
"""Number of days after a server's last event for which the table still has rows of the server, with the state
*down*."""


def _minute(time: Column) -> Column:
    """Return a column with the time in minutes since 1970."""
    return F.floor(F.unix_seconds(time) / 60)


def _minutes(rows: DataFrame, key: str, first: Column, last: Column, name: str) -> DataFrame:
    """Return a row for each minute from ``first`` to ``last`` that is on the row's day. Its columns are server, dt,
    hour, and a number in which only the bit of this minute of the hour is set.

    :param key: column with the server's key.
    :param name: name of the column with this number.
    """
    midnight = F.unix_date("dt").cast("long") * MINUTES_OF_DAY
    within = F.sequence(F.greatest(first, midnight), F.least(last, midnight + MINUTES_OF_DAY - 1))
    minute = F.col("minute")
    return rows.select(F.col(key).alias("server"), "dt", F.explode(within).alias("minute")).select(
        "server",
        "dt",
        (F.floor(minute / 60) % 24).cast("int").alias("hour"),
        F.shiftleft(F.lit(1).cast("long"), (minute % 60).cast("int")).alias(name),
    )


def minutes_alive(heartbeats: DataFrame, role: str) -> DataFrame:
    """Return a row for each minute in which a process with the role ``role`` was up, according to its own heartbeats.

    The column ``alive`` is a bit mask of the minutes of the hour, in which only the row's minute is set.
    """
    beats = heartbeats.where(F.col("role") == role)
    return _minutes(beats, "producer", _minute(F.col("covers_from")), _minute(F.col("at")), "alive")


def minutes_seen(entries: DataFrame) -> DataFrame:
    """Return a row for each minute in which a discovery had a fresh entry of a server.

    A server posts every 30 s. A post counts for its own minute and for the next one. The column ``seen`` is a number in
    which only the bit of this minute of the hour is set.
    """
    posts = entries.where(F.col("is_server") & F.col("result").isin("first", "next"))
    return _minutes(posts, "subject", _minute(F.col("at")), _minute(F.col("at")) + 1, "seen")


def server_hour(heartbeats: DataFrame, entries: DataFrame) -> DataFrame:
    """Compute for each server and hour the load, and the number of minutes in which the server was up: by its own
    heartbeats, by discovery, and by both."""
    keys = ["server", "dt", "hour"]
    loads = ("sessions", "transports", "capacity", "frames", "bytes", "lag_ms", "cpu_ms", "rss_kb", "lost")
    load = heartbeats.where(F.col("role") == "server").select(
        F.col("producer").alias("server"), "dt", F.hour("at").alias("hour"), *loads
    )
    watched = minutes_alive(heartbeats, "discovery").groupBy("dt", "hour").agg(F.bit_or("alive").alias("watched"))
    # The parts are combined by one union and one aggregation, which need no sorting and no outer joins.
    rows = minutes_alive(heartbeats, "server")
    for part in (minutes_seen(entries), load):
        rows = rows.unionByName(part, allowMissingColumns=True)
    joined = (
        rows.groupBy(*keys)
        .agg(
            F.bit_or("alive").alias("alive"),
            F.bit_or("seen").alias("seen"),
            F.max("sessions").alias("peak_sessions"),
            F.max("transports").alias("peak_transports"),
            F.max("capacity").alias("capacity"),
            *bounded_sums("frames", "bytes", "cpu_ms"),
            F.max("lag_ms").alias("max_lag_ms"),
            F.max("rss_kb").alias("max_rss_kb"),
            bounded_sum("lost").alias("lost_events"),
        )
        .join(F.broadcast(watched), ["dt", "hour"], "left")
    )
    no_minute = F.lit(0).cast("long")
    told, found = F.coalesce("alive", no_minute), F.coalesce("seen", no_minute)
    # If no discovery ran in that hour, the number of minutes in which it saw the server is NULL (unknown), and not 0.
    known = F.col("watched").isNotNull()
    return joined.select(
        *keys,
        F.bit_count(told).alias("alive_minutes"),
        F.when(known, F.bit_count(found)).alias("seen_minutes"),
        F.when(known, F.bit_count(told.bitwiseAND(found))).alias("agreed_minutes"),
        *DAILY["server_hour"].schema.fieldNames()[6:],
    )


def minute_day(hours: DataFrame, window: DataFrame) -> DataFrame:
    """Add up the minutes in which each server was up, by day.

    :param window: for each day ``dt`` the ``observed_minutes``, which is the number of minutes between the day's first
        and last event.
    """
    return (
        hours.groupBy("server", "dt")
        .agg(
            F.sum("alive_minutes").alias("alive_minutes"),
            F.sum("seen_minutes").alias("seen_minutes"),
            F.sum("agreed_minutes").alias("agreed_minutes"),
        )
        .join(F.broadcast(window), ["dt"], "left")
        .select(*DAILY["minute_day"].schema.fieldNames())
    )


def clock_day(entries: DataFrame) -> DataFrame:
    """Compute each server's clock error by day. The maximum difference is the error: the delay of a post only makes the
    difference smaller."""
    posts = entries.where(F.col("is_server") & F.col("clock_ms").isNotNull())
    return posts.groupBy(F.col("subject").alias("server"), "dt").agg(
        F.count(F.lit(1)).alias("posts"),
        F.max("clock_ms").alias("skew_ms"),
        F.min("clock_ms").alias("least_ms"),
        F.count_distinct("producer").alias("witnesses"),
    )


def boot(days: DataFrame) -> DataFrame:
    """Classify how each process ended.

    A process that wrote a stop event has *stopped*. Without a stop event, the process has *crashed* if a later process
    of the same name began. It is *silent* if no other process began, and its last event is more than
    ``SILENCE_SECONDS`` older than the newest event of all. Otherwise it is *running*.

    :param days: processes by day, of all days.
    """
    whole = days.groupBy("producer", "boot").agg(
        F.min("role").alias("role"),
        F.min("first_at").alias("first_at"),
        F.max("last_at").alias("last_at"),
        F.sum("stops").alias("stops"),
    )
    newest = whole.agg(F.max("last_at").alias("newest"))
    in_order = Window.partitionBy("producer").orderBy("first_at", "boot").rowsBetween(1, 1)
    gone = F.unix_seconds("newest") - F.unix_seconds("last_at") > SILENCE_SECONDS
    ended = (
        F.when(F.col("stops") > 0, "stopped")
        # The start of another process alone does not prove a crash, because two programs with the same key may run at
        # the same time. A crash is assumed only if this process has written no event since that start, or has written
        # some but none for the last SILENCE_SECONDS.
        .when(F.col("next_at").isNotNull() & ((F.col("next_at") >= F.col("last_at")) | gone), "crashed")
        .when(gone, "silent")
        .otherwise("running")
    )
    down = F.greatest(F.lit(0.0), (F.unix_millis("next_at") - F.unix_millis("last_at")) / 1000)
    return (
        whole.withColumn("next_at", F.max("first_at").over(in_order))
        .crossJoin(F.broadcast(newest))
        .withColumn("ended", ended)
        .withColumn("down_seconds", F.when(F.col("next_at").isNotNull(), down))
        .select(*OVERALL["boot"].schema.fieldNames()[:8])
    )


def _share(minutes: str) -> Column:
    # If the number of minutes in which the server was up is unknown (NULL), the result is NULL. Without the condition,
    # least() would ignore NULL and return 1.
    share = F.least(F.lit(1.0), F.col(minutes) / F.col("observed_minutes"))
    return F.when(F.col(minutes).isNotNull(), share)


def calendar(minutes: DataFrame) -> DataFrame:
    """Return a row for each server and each day from the server's first event to :data:`FORGOTTEN_DAYS` days after its
    last event."""
    newest = minutes.agg(F.max("dt").alias("newest"))
    return (
        minutes.groupBy("server")
        .agg(F.min("dt").alias("first"), F.max("dt").alias("last"))
        .crossJoin(F.broadcast(newest))
        .select(
            "server",
            F.explode(F.sequence("first", F.least("newest", F.date_add("last", FORGOTTEN_DAYS)), F.one_day())).alias(
                "dt"
            ),
        )
    )


def uptime_day(minutes: DataFrame, boots: DataFrame, boot_days: DataFrame, clocks: DataFrame) -> DataFrame:
    """Compute each server's uptime, availability and state by day.

    The state is *up* if the server wrote heartbeats. It is *unheard* if a discovery saw the server, but no heartbeat
    has arrived. It is *down* if neither is the case, but other events of the day have arrived. It is *unknown* if no
    event of the day has arrived.

    :param minutes: rows of :func:`minute_day` of all days.
    :param boots: rows of :func:`boot`.
    :param boot_days: processes by day.
    :param clocks: rows of :func:`clock_day` of all days.
    """
    watched = minutes.groupBy("dt").agg(
        F.max("observed_minutes").alias("observed"), F.max(F.col("seen_minutes").isNotNull()).alias("watched")
    )
    started = boot_days.where(F.col("role") == "server").select(
        F.col("producer").alias("server"), "dt", "starts", F.col("stops").alias("clean_stops")
    )
    crashed = boots.where((F.col("role") == "server") & (F.col("ended") == "crashed")).select(
        F.col("producer").alias("server"), F.to_date("last_at").alias("dt"), F.lit(1).alias("crashes")
    )
    # The parts are combined by one union and one aggregation. Rows of days outside the calendar are dropped.
    rows = calendar(minutes).withColumn("listed", F.lit(True))
    told_of = ("alive_minutes", "seen_minutes", "agreed_minutes")
    for part in (minutes.select("server", "dt", *told_of), started, crashed, clocks.select("server", "dt", "skew_ms")):
        rows = rows.unionByName(part, allowMissingColumns=True)
    days = (
        rows.groupBy("server", "dt")
        .agg(
            F.max("listed").alias("listed"),
            F.max("skew_ms").alias("skew_ms"),
            *[F.max(name).alias(name) for name in told_of],
            *[F.sum(name).alias(name) for name in ("starts", "clean_stops", "crashes")],
        )
        .where(F.col("listed"))
    )
    alive, seen = F.coalesce("alive_minutes", F.lit(0)), F.coalesce("seen_minutes", F.lit(0))
    state = (
        F.when(F.col("observed").isNull(), "unknown").when(alive > 0, "up").when(seen > 0, "unheard").otherwise("down")
    )
    told = F.col("state").isin("up", "down")
    unseen = F.col("alive_minutes") - F.col("agreed_minutes") > MAX_UNSEEN_SHARE * F.col("alive_minutes")
    flags = F.concat_ws(
        ", ",
        F.when(F.col("state") == "down", "down all day"),
        F.when(F.col("state") == "unheard", "discovery saw it but none of its events arrived"),
        F.when(unseen, "says it was up when discovery did not see it"),
        F.when(F.col("crashes") > 0, "crashed"),
        F.when(F.col("starts") >= 10, "restarts often"),
        F.when(F.col("skew_ms") > CLOCK_LIMIT_MS, "its clock is ahead of discovery's"),
        F.when(F.col("skew_ms") < -CLOCK_LIMIT_MS, "its clock is behind discovery's"),
    )
    return (
        days.join(F.broadcast(watched), "dt", "left")
        .withColumn("state", state)
        .withColumn("alive_minutes", F.when(told, alive))
        # If a discovery ran on the day, it saw a server without an entry in 0 minutes. Otherwise the number is unknown.
        .withColumn("seen_minutes", F.when(F.col("watched"), seen))
        .withColumn("agreed_minutes", F.when(F.col("watched") & told, F.coalesce("agreed_minutes", F.lit(0))))
        .withColumn("observed_minutes", F.col("observed"))
        .fillna(0, ["starts", "clean_stops", "crashes"])
        .withColumn("uptime", _share("alive_minutes"))
        .withColumn("availability", _share("agreed_minutes"))
        .withColumn("flags", flags)
        .select(*OVERALL["uptime_day"].schema.fieldNames())
    )
