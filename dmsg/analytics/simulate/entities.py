"""Simulated events of servers and of a discovery, apart from transports: start and stop, heartbeats, sessions, entries
and refusals."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, functions as F

from dmsg.analytics.schemas import DAY_MS
from dmsg.analytics.simulate.ground_truth import (
    FULL,
    FULL_FROM,
    FULL_MINUTES,
    LOSER,
    LOST_FROM,
    LOST_MINUTES,
    SCANNERS,
    SILENT,
    SILENT_FROM,
    SKEW_MS,
    SKEWED,
)
from dmsg.analytics.simulate.network import MINUTE_MS, MINUTES, TURN, Scenario, draw_normal, draw_uniform, name, union

CAPACITY = 1000
DISCOVERY = "discovery-1"
_KEY = ("server", "day", "i")


def server_lines(stage: Scenario) -> DataFrame:
    """Return lines of server events: starts, stops, heartbeats, sessions, refusals, failed handshakes, and drops."""
    return union([*_life(stage), *_sessions(stage), *_refusal_events(stage)])


def _is_silent(stage: Scenario, minute: Column) -> Column:
    """Return a column that says whether the server has stopped writing events at that minute."""
    return stage.on_last_day(SILENT) & (minute >= SILENT_FROM)


def _life(stage: Scenario) -> list[DataFrame]:
    seed = stage.network.seed
    minute = F.col("minute")
    wave = 0.5 + 0.4 * F.sin(TURN * (minute / MINUTES - 0.35))
    most = float(max(stage.network.shares()))
    full = stage.on_last_day(FULL) & minute.between(FULL_FROM, FULL_FROM + FULL_MINUTES - 1)
    load = 5 + 700 * F.col("n") / most * wave * (1 + F.col("day") * 0.03)
    # The load is capped below the capacity, because the simulated network grows from day to day.
    busy = F.when(full, CAPACITY - 1).otherwise(F.least(F.lit(0.75 * CAPACITY), load))
    lives = stage.processes(stage.plan())
    lost = stage.on_last_day(LOSER) & minute.between(LOST_FROM, LOST_FROM + LOST_MINUTES - 1)
    beats = (
        lives.withColumn("i", F.explode(F.sequence(F.lit(1), F.col("minutes"))))
        .withColumn("minute", F.col("first") + F.col("i") - 1)
        .where(~_is_silent(stage, minute) & ~lost)
    )
    return [
        stage.events(
            beats.withColumn("at", minute * MINUTE_MS + 30_000),
            "heartbeat",
            5,
            F.lit(MINUTE_MS).alias("interval_ms"),
            busy.cast("long").alias("sessions"),
            (busy * 2).cast("long").alias("transports"),
            F.lit(CAPACITY).alias("capacity"),
            (busy * 900).cast("long").alias("frames"),
            (busy * 700_000).cast("long").alias("bytes"),
            (5 + 20 * draw_uniform(seed, 50, *_KEY)).cast("long").alias("lag_ms"),
            (busy * 20).cast("long").alias("cpu_ms"),
            F.lit(80_000).alias("rss_kb"),
            F.lit(True).alias("registered"),
            F.lit(0).alias("lost"),
        ),
        stage.events(
            lives.withColumn("i", F.lit(0)).withColumn("at", F.col("first") * MINUTE_MS + 1),
            "start",
            5,
            F.lit("0.1.0").alias("version"),
            F.substring(F.md5(stage.pseudonym_scope), 1, 8).alias("names"),
            F.lit(CAPACITY).alias("capacity"),
        ),
        stage.events(
            lives.where((~F.col("crashed") | (F.col("life") > 0)) & ~stage.on_last_day(SILENT))
            .withColumn("i", F.col("minutes") + 1)
            .withColumn("at", (F.col("first") + F.col("minutes")) * MINUTE_MS - 2),
            "stop",
            5,
        ),
    ]


def _sessions(stage: Scenario) -> list[DataFrame]:
    seed = stage.network.seed
    lasted = F.least(F.lit(DAY_MS / 20), 600_000 * F.exp(draw_normal(seed, 52, *_KEY)))
    who = F.floor(stage.network.clients * F.pow(draw_uniform(seed, 54, *_KEY), F.lit(2.0))).cast("int")
    sessions = (
        stage.plan()
        .withColumn("i", F.explode(F.sequence(F.lit(0), F.ceil(F.col("n") / 4).cast("int"))))
        .withColumn("key", F.col("i"))
        .withColumn("start", (stage.until * draw_uniform(seed, 51, *_KEY) * 0.95).cast("long"))
        .withColumn("lasted", F.least(lasted, stage.until - 1 - F.col("start")).cast("long"))
        .withColumn("who", name(F.lit("client"), stage.pseudonym_scope, who))
    )
    peer, session = F.col("who").alias("peer"), F.col("key").cast("long").alias("session")
    # A process numbers its events without gaps. Here, the two events of session k get the numbers 2k (opening) and
    # 2k + 1 (end).
    return [
        stage.events(
            sessions.withColumn("at", F.col("start")).withColumn("i", 2 * F.col("key")),
            "session_open",
            8,
            peer,
            session,
            F.lit(4).alias("handshake_ms"),
        ),
        stage.events(
            sessions.withColumn("at", F.col("start") + F.col("lasted")).withColumn("i", 2 * F.col("key") + 1),
            "session_close",
            8,
            peer,
            session,
            F.lit("connection_lost").alias("reason"),
            F.col("lasted").alias("duration_ms"),
            (F.col("lasted") / 100).cast("long").alias("frames"),
            F.col("lasted").alias("bytes"),
        ),
    ]


def _refusal_events(stage: Scenario) -> list[DataFrame]:
    hours = (
        stage.plan()
        .withColumn("i", F.explode(F.sequence(F.lit(0), F.lit(23))))
        .withColumn("at", F.col("i") * 3_600_000 + 1_800_000)
        .where(~_is_silent(stage, F.col("i") * 60))
    )
    few = (1 + 5 * draw_uniform(stage.network.seed, 60, *_KEY)).cast("long")
    hour = F.col("i") * 60
    full = stage.on_last_day(FULL) & hour.between(FULL_FROM, FULL_FROM + FULL_MINUTES - 1)
    lines = [
        stage.events(
            hours.withColumn("i", F.col("i") * SCANNERS + scanner),
            "transport_refuse",
            9,
            name(F.lit("scanner"), stage.pseudonym_scope, F.lit(scanner)).alias("src"),
            F.lit("no_such_peer").alias("reason"),
            (few * (40 if scanner == 0 else 1)).alias("n"),
            (few * (30 if scanner == 0 else 1)).alias("targets"),
        )
        for scanner in range(SCANNERS)
    ]
    return [
        *lines,
        stage.events(
            hours,
            "transport_refuse",
            10,
            name(F.lit("flooder"), stage.pseudonym_scope).alias("src"),
            F.lit("rate_limited").alias("reason"),
            (few * 100).alias("n"),
            F.lit(1).alias("targets"),
        ),
        stage.events(
            hours,
            "handshake_fail",
            11,
            F.lit("handshake_failed").alias("reason"),
            name(F.lit("network"), stage.pseudonym_scope, "day").alias("source"),
            (few * 10).alias("n"),
        ),
        stage.events(
            hours.where(full).withColumn("i", F.col("i") - FULL_FROM // 60),
            "drop",
            12,
            F.lit("too_many_connections").alias("reason"),
            (few * 100).alias("n"),
        ),
    ]


def discovery_lines(stage: Scenario) -> DataFrame:
    """Return the lines of discovery's events: start, stop, entry, entry_refuse, lookup_fail and heartbeat."""
    seed, clients = stage.network.seed, stage.network.clients
    days = stage.plan().where("server = 0").withColumn("role", F.lit("discovery"))
    days = days.withColumn("producer", F.lit(DISCOVERY)).withColumn("boot", F.md5(F.concat("producer", "boot")))
    minutes = days.withColumn("i", F.explode(F.sequence(F.lit(1), F.lit(MINUTES)))).withColumn(
        "at", F.col("i") * MINUTE_MS - 40_000
    )
    posts = (
        stage.minutes_present(stage.plan())
        .where(~_is_silent(stage, F.col("minute")))
        .withColumn("at", F.col("minute") * MINUTE_MS + 10_000)
        .withColumn("subject", F.col("producer"))
        .withColumn("producer", F.lit(DISCOVERY))
        .withColumn("role", F.lit("discovery"))
        .withColumn("boot", F.md5(F.concat_ws("/", F.lit("posts"), F.lit(seed), "day", "server")))
        .drop("skew")
    )
    of_clients = (
        days.withColumn("i", F.explode(F.sequence(F.lit(0), F.lit(4 * clients - 1))))
        .withColumn("at", (DAY_MS * draw_uniform(seed, 70, "day", "i")).cast("long"))
        .withColumn("subject", name(F.lit("entry"), (F.col("i") % clients).cast("string")))
    )
    at_midnight = days.withColumns({"i": F.lit(0), "at": F.lit(1)})
    on_its_way = 200 * draw_uniform(seed, 72, "subject", "day", "i")
    return union(
        [
            stage.events(at_midnight, "start", 20, F.lit("0.1.0").alias("version")),
            stage.events(
                minutes,
                "heartbeat",
                20,
                F.lit(MINUTE_MS).alias("interval_ms"),
                F.lit(clients).alias("entries"),
                F.lit(500).alias("requests"),
            ),
            stage.events(days.withColumns({"i": F.lit(MINUTES + 1), "at": F.lit(DAY_MS - 2)}), "stop", 20),
            stage.events(
                posts,
                "entry",
                21,
                "subject",
                F.lit(True).alias("is_server"),
                F.lit("next").alias("result"),
                F.col("minute").cast("long").alias("sequence"),
                F.lit(100).alias("available"),
                (F.when(F.col("server") == SKEWED, SKEW_MS).otherwise(0) - on_its_way).cast("long").alias("clock_ms"),
            ),
            stage.events(
                of_clients,
                "entry",
                22,
                "subject",
                F.lit(False).alias("is_server"),
                F.lit("next").alias("result"),
                F.col("i").cast("long").alias("sequence"),
                F.lit(2).alias("delegated"),
            ),
            stage.events(
                minutes.where("i % 10 = 0").withColumn("i", (F.col("i") / 10 - 1).cast("int")),
                "entry_refuse",
                23,
                F.lit("invalid").alias("reason"),
                name(F.lit("poster"), "day").alias("source"),
                (1 + 9 * draw_uniform(seed, 71, "day", "i")).cast("long").alias("n"),
            ),
            stage.events(
                minutes.where("i % 10 = 0").withColumn("i", (F.col("i") / 10 - 1).cast("int")),
                "lookup_fail",
                24,
                name(F.lit("asker"), "day").alias("source"),
                (20 + 9 * draw_uniform(seed, 73, "day", "i")).cast("long").alias("n"),
                (10 + 9 * draw_uniform(seed, 74, "day", "i")).cast("long").alias("targets"),
            ),
        ]
    )
