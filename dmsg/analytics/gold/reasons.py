"""Bound for the reasons that producers write into events, so that no producer can make a table grow without limit.

A producer may write any text as a reason. On a day on which it writes more than :data:`MAX_REASONS` different ones,
all of them count as :data:`MANY`. The rule depends neither on the order of the events nor on how runs divide them: once
there are too many reasons, further events change nothing.
"""

from __future__ import annotations

from pyspark.sql import DataFrame

from dmsg.analytics import functions as F
from dmsg.analytics.functions import Window

MAX_REASONS = 100
"""Maximum number of different reasons that a producer may write on one day. With more, all count as :data:`MANY`."""
MANY = "more than 100 reasons"
"""Reason that replaces all reasons of a producer and day if there are more than :data:`MAX_REASONS`."""


def bound_counts(rows: DataFrame) -> DataFrame:
    """Limit the number of rows of the table ``close_day`` for each server and day. The table has a row for each server,
    day, reason and closing end; on a day with too many rows, one row with the reason :data:`MANY` replaces them.
    """
    of_day = Window.partitionBy("server", "dt")
    bounded = rows.withColumns(
        {
            "many": (F.count(F.lit(1)).over(of_day) > MAX_REASONS)
            | (F.max(F.when(F.col("reason") == MANY, 1).otherwise(0)).over(of_day) == 1)
        }
    )
    return (
        bounded.select(
            *("server", "dt", "transports"),
            F.when(F.col("many"), MANY).otherwise(F.col("reason")).alias("reason"),
            F.when(F.col("many"), F.lit(None).cast("string")).otherwise(F.col("by")).alias("by"),
        )
        .groupBy("server", "dt", "reason", "by")
        .agg(F.sum("transports").alias("transports"))
    )


def bound_reasons(refusals: DataFrame) -> DataFrame:
    """Replace all reasons of a producer by :data:`MANY` on each day on which it wrote too many different reasons."""
    keys = ["producer", "dt"]
    many = refusals.groupBy(*keys).agg((F.count_distinct("reason") > MAX_REASONS).alias("many")).where(F.col("many"))
    reason = F.when(F.coalesce("many", F.lit(False)), MANY).otherwise(F.col("reason"))
    return refusals.join(F.broadcast(many), keys, "left").withColumn("reason", reason)
