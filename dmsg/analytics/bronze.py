"""Lines of a spool -> bronze: every line is kept, as an event or in quarantine.

One pass over the text.  Nothing is dropped: what is no event goes, with the
reason, to the family ``quarantine``.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from dmsg.analytics.schemas import CORRUPT, EVENT, FAMILIES, QUARANTINE
from dmsg.telemetry.schema import BUCKETS, SCHEMA_VERSION

OLDEST = 1_577_836_800_000
"""2020: events before are of a machine without a clock."""
FUTURE_TOLERANCE_MS = 10 * 60 * 1000
"""Clocks may be ahead by that."""
DAY_MS = 86_400_000
LINE_LIMIT = 4096
"""Characters of a line that quarantine keeps."""


def problem(now_ms: int) -> Column:
    """What is wrong with a line; NULL for an event.

    :param now_ms: the time of the run: later events are of the future.
    """
    types = [name for family in FAMILIES.values() for name in family]
    identity = F.col("producer").isNull() | F.col("boot").isNull() | F.col("seq").isNull() | F.col("mono").isNull()
    return (
        F.when(F.col(CORRUPT).isNotNull(), "not JSON, or a field of a wrong type")
        .when(F.col("v").isNull() | F.col("type").isNull() | F.col("ts").isNull(), "not an event")
        .when(F.col("v") != SCHEMA_VERSION, "a version that is not known")
        .when(~F.col("type").isin(types), "a type that is not known")
        .when(identity | (F.col("seq") < 0), "without an identity")
        .when(F.col("ts") > now_ms + FUTURE_TOLERANCE_MS, "from the future")
        .when(F.col("ts") < OLDEST, "from before 2020")
        .when(F.col("rtt").isNotNull() & (F.size("rtt") != BUCKETS), "a histogram of a wrong size")
    )


def uri(path: Column) -> Column:
    """Paths of this machine have one to three slashes, as Spark's parts please."""
    return F.regexp_replace(path, "^file:/+", "file:/")


def _family() -> Column:
    family = F.when(F.col("problem").isNotNull(), QUARANTINE)
    for name, types in FAMILIES.items():
        family = family.when(F.col("type").isin(list(types)), name)
    return family


def bronze(lines: DataFrame, *, now_ms: int) -> DataFrame:
    """Lines with a column ``file`` -> rows of bronze."""
    fields = [field.name for field in EVENT.fields]
    day = F.when(F.col("problem").isNull(), F.col("ts")).otherwise(F.lit(now_ms))
    line = F.when(
        F.col("problem").isNotNull(),
        F.substring(F.coalesce(F.col(CORRUPT), F.to_json(F.struct(*fields))), 1, LINE_LIMIT),
    )
    return (
        lines.withColumn("problem", problem(now_ms))
        .withColumn("family", _family())
        .select(
            *fields,
            "file",
            "problem",
            line.alias("line"),
            "family",
            # a date, not its text: formatting one for each line is dear
            F.date_from_unix_date(F.floor(day / DAY_MS).cast("int")).alias("dt"),
        )
    )


def file_report(rows: DataFrame) -> DataFrame:
    """What arrived of each file: file, lines, and the problem if there is one.

    The end may be missing, because the file was cut: then so is its last line, or it tells of more lines.
    """
    per_file = rows.groupBy("file").agg(
        F.count(F.lit(1)).alias("arrived"),
        F.max("lines").alias("told"),
        F.count_if(F.col("type") == "segment_end").alias("ends"),
    )
    return per_file.select(
        uri(F.col("file")).alias("file"),
        F.col("arrived").alias("lines"),
        F.when(F.col("ends") == 0, "the end is missing")
        .when(F.col("told") > F.col("arrived") - F.col("ends"), "lines are missing")
        .alias("problem"),
    )


def numbers(rows: DataFrame) -> DataFrame:
    """How many events of a process and a bucket of numbers there are, and how many different ones.

    Exact, and without a group for each event: numbers of a bucket of 32,768 are bits.
    """
    return rows.groupBy("producer", "boot", "dt", F.bitmap_bucket_number("seq").alias("bucket")).agg(
        F.count(F.lit(1)).alias("events"),
        F.bitmap_count(F.bitmap_construct_agg(F.bitmap_bit_position("seq"))).alias("distinct_events"),
        F.min("seq").alias("first"),
        F.max("seq").alias("last"),
        F.min(F.col("ts") - F.col("mono")).alias("least_start"),
        F.max(F.col("ts") - F.col("mono")).alias("greatest_start"),
        F.min("ts").alias("first_ts"),
        F.max("ts").alias("last_ts"),
    )


def deduplicate(rows: DataFrame, where: DataFrame) -> DataFrame:
    """Each identity once: of rows that differ, always the same one.

    :param where: producer, boot, bucket in which there are duplicates, few.
    """
    keys = ["producer", "boot", "bucket"]
    bucketed = rows.withColumn("bucket", F.bitmap_bucket_number("seq"))
    few = F.broadcast(where.select(*keys).distinct())
    clean = bucketed.join(few, keys, "left_anti").drop("bucket")
    fields = [field.name for field in EVENT.fields]
    chosen = (
        bucketed.join(few, keys, "left_semi")
        .drop("bucket")
        .groupBy("producer", "boot", "seq")
        .agg(F.min_by(F.struct(*rows.columns), F.to_json(F.struct(*fields))).alias("row"))
        .select("row.*")
    )
    return clean.unionByName(chosen.select(*clean.columns))
