"""Tables of the load of servers relative to their capacity, and of the weights by which clients should be
distributed."""

from __future__ import annotations

from datetime import date

from pyspark.sql import DataFrame

from dmsg.analytics import functions as F
from dmsg.analytics.functions import Window
from dmsg.analytics.gold.histograms import sum_aggregate, with_percentiles
from dmsg.analytics.gold.totals import bounded_sum
from dmsg.analytics.schemas import DAILY, LIES, OVERALL

BUSY_LOAD = 0.8
"""Share of a server's capacity at which an hour counts as busy."""
FORECAST_DAYS = 28
"""Number of past days from which a forecast is computed."""
FORECAST_LEAST = 3
"""Minimum number of days of data that a forecast needs."""
FORECAST_HORIZON = 3650
"""Number of days into the future beyond which a forecast gives no date."""
PLACEMENT_DAYS = 7
"""Number of past days from which the weights of servers are computed."""
MIN_WEIGHT = 0.001
LATENCY_FLOOR = 0.2
"""Lower bound of the latency factor, which a very slow server gets."""
LATENCY_UNKNOWN = 0.5
"""Latency factor of a server without measurements."""
HEADROOM_UNKNOWN = 0.5
"""Headroom factor of a server that does not report its capacity."""
DISHONEST_FACTOR = 0.1
"""Honesty factor of a server that claims more traffic than it delivered."""


def capacity_day(hours: DataFrame, refusals: DataFrame) -> DataFrame:
    """Compute each server's peak load relative to its capacity, by day."""
    full = (
        refusals.where((F.col("what") == "drop") & (F.col("reason") == "too_many_connections"))
        .groupBy(F.col("producer").alias("server"), "dt")
        .agg(bounded_sum("n").alias("refused_full"))
    )
    return (
        hours.where(F.col("capacity").isNotNull())
        .groupBy("server", "dt")
        .agg(
            F.max("peak_sessions").alias("peak_sessions"),
            F.max("capacity").alias("capacity"),
            F.max(F.col("peak_sessions") / F.col("capacity")).alias("peak_share"),
            F.count_if(F.col("peak_sessions") >= BUSY_LOAD * F.col("capacity")).alias("busy_hours"),
            F.coalesce(bounded_sum("bytes"), F.lit(0)).alias("bytes"),
        )
        .join(F.broadcast(full), ["server", "dt"], "left")
        .fillna(0, ["refused_full"])
        .select(*DAILY["capacity_day"].schema.fieldNames())
    )


def capacity_forecast(days: DataFrame, *, today: date) -> DataFrame:
    """Predict the day on which each server reaches its capacity, by linear regression over its daily peaks before
    ``today``."""
    since = F.date_sub(F.lit(today), FORECAST_DAYS)
    number = F.unix_date("dt").cast("double")
    last = (
        Window.partitionBy("server")
        .orderBy(F.col("dt").desc())
        .rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
    )
    return (
        days.where((F.col("dt") >= since) & (F.col("dt") < F.lit(today)))
        .withColumn("latest_capacity", F.first("capacity").over(last))
        .groupBy("server")
        .agg(
            F.count(F.lit(1)).alias("days"),
            F.max("peak_sessions").alias("peak_sessions"),
            F.max("latest_capacity").alias("capacity"),
            F.regr_slope(F.col("peak_sessions").cast("double"), number).alias("slope"),
            F.regr_intercept(F.col("peak_sessions").cast("double"), number).alias("intercept"),
            F.regr_r2(F.col("peak_sessions").cast("double"), number).alias("r2"),
            F.max(number).alias("newest"),
        )
        .withColumn("enough", F.col("days") >= FORECAST_LEAST)
        .withColumn("growth_per_day", F.when(F.col("enough"), F.round("slope", 3)))
        .withColumn("fit", F.when(F.col("enough"), F.round("r2", 3)))
        .withColumn(
            "days_left",
            F.when(
                F.col("enough") & (F.col("growth_per_day") > 0),
                F.greatest(
                    F.lit(0.0),
                    F.round((F.col("capacity") - F.col("intercept")) / F.col("slope") - F.col("newest"), 1),
                ),
            ),
        )
        .withColumn(
            "full_on",
            F.when(
                F.col("days_left") <= FORECAST_HORIZON,
                F.date_from_unix_date((F.col("newest") + F.ceil("days_left")).cast("int")),
            ),
        )
        .select(*OVERALL["capacity_forecast"].schema.fieldNames())
    )


def placement(
    uptime: DataFrame, capacity: DataFrame, latency: DataFrame, settlement: DataFrame, *, today: date
) -> DataFrame:
    """Compute the weights by which clients should be distributed over servers.

    A weight is the squared availability times three factors. The headroom factor is the server's number of free places,
    divided by the highest such number of any server. The latency factor is the lowest median round trip of any
    server, divided by the server's own. The honesty factor is :data:`DISHONEST_FACTOR` if the server claims more than
    it delivered, otherwise 1.
    """
    since = F.date_sub(F.lit(today), PLACEMENT_DAYS)

    def recent(table: DataFrame) -> DataFrame:
        return table.where((F.col("dt") > since) & (F.col("dt") <= F.lit(today)))

    # ``availability`` is preferred, because it counts only minutes that both the server and a discovery report. A post
    # to discovery also counts for the next minute. That minute may be after the last observed one, so the share is
    # capped at 1.
    seen = F.least(F.lit(1.0), F.col("seen_minutes") / F.col("observed_minutes"))
    there = F.coalesce("availability", "uptime", F.when(F.col("seen_minutes").isNotNull(), seen))
    free = F.greatest(F.lit(0), F.col("capacity") - F.col("peak_sessions"))
    # One union and one aggregation are cheaper than a join for each part, as in ``network_day``.
    rows = recent(uptime).select("server", there.alias("availability"), F.lit(1).alias("days"))
    for part in (
        recent(capacity).select("server", free.alias("free"), "peak_share"),
        recent(latency).select("server", "rtt"),
        recent(settlement).select("server", (F.col("verdict") == LIES).alias("lies")),
    ):
        rows = rows.unionByName(part, allowMissingColumns=True)
    rows = rows.groupBy("server").agg(
        F.avg("availability").alias("availability"),
        F.sum("days").alias("days"),
        F.avg("free").alias("free"),
        F.max("peak_share").alias("peak_share"),
        F.bool_or("lies").alias("lies"),
        sum_aggregate("rtt"),
    )
    everyone = Window.partitionBy(F.lit(0))
    servers = (
        with_percentiles(rows, "rtt")
        .withColumnRenamed("rtt_p50", "latency_ms")
        .withColumns({"most": F.max("free").over(everyone), "best": F.min("latency_ms").over(everyone)})
        .where(F.col("days") > 0)
    )
    # A server without measurements gets the factor LATENCY_UNKNOWN. Without this case, greatest() would ignore the NULL
    # and return LATENCY_FLOOR, the factor of the slowest servers.
    factor = F.when(
        F.col("latency_ms").isNotNull(),
        F.greatest(F.lit(LATENCY_FLOOR), F.col("best") / F.greatest("latency_ms", "best")),
    ).otherwise(LATENCY_UNKNOWN)
    share = F.coalesce(F.col("free") / F.nullif(F.col("most"), F.lit(0)), F.lit(0.0))
    headroom = F.when(F.col("free").isNull(), HEADROOM_UNKNOWN).otherwise(share)
    honesty = F.when(F.coalesce("lies", F.lit(False)), DISHONEST_FACTOR).otherwise(1.0)
    reasons = F.concat_ws(
        ", ",
        F.when(F.col("availability") < 0.99, F.format_string("up %.1f %% of the time", F.col("availability") * 100)),
        F.when(
            F.col("peak_share") >= BUSY_LOAD, F.format_string("%.0f %% full at its peak", F.col("peak_share") * 100)
        ),
        F.when(F.col("latency_factor") < 0.5, F.format_string("answers in %.1f ms", F.col("latency_ms"))),
        F.when(F.col("honesty") < 1, F.lit("claims more than it delivered")),
        F.when(F.col("free").isNull(), F.lit("does not report its capacity")),
    )
    weight = F.pow("availability", F.lit(2.0)) * F.col("headroom") * F.col("latency_factor") * F.col("honesty")
    return (
        servers.withColumn("headroom", F.round(headroom, 4))
        .withColumn("availability", F.round("availability", 4))
        .withColumn("latency_factor", F.round(factor, 4))
        .withColumn("latency_ms", F.round("latency_ms", 3))
        .withColumn("honesty", honesty)
        .withColumn("weight", F.greatest(F.lit(MIN_WEIGHT), F.round(weight, 4)))
        .withColumn("reasons", F.coalesce(F.nullif(reasons, F.lit("")), F.lit("good")))
        .select(*OVERALL["placement"].schema.fieldNames())
    )
