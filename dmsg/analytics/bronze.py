"""Lines of a spool -> bronze: every line is kept, as an event or in quarantine.

One pass over the text.  Nothing is dropped: what is no event goes, with the
reason, to the family ``quarantine``.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, functions as F
from pyspark.sql.types import LongType

from dmsg.analytics.schemas import CORRUPT, DAY_MS, EVENT, FAMILIES, QUARANTINE
from dmsg.telemetry.schema import BUCKETS, SCHEMA_VERSION

OLDEST = 1_577_836_800_000
"""2020: events before are of a machine without a clock."""
FUTURE_TOLERANCE_MS = 10 * 60 * 1000
"""Clocks may be ahead by that."""
BUCKET_SIZE = 32_768
"""Numbers of events that are looked at together: so many bits have room in Spark's bitmaps."""
LARGEST = 2**50
"""Of any number in an event: sums of so large ones still have room."""
_COUNTS = tuple(
    one.name
    for one in EVENT.fields
    if isinstance(one.dataType, LongType) and one.name not in ("sequence", "available", "clock_ms")
)
"""Numbers that are counted with; those three come from strangers' entries and are not."""
PASSED_OVER = r"^\s*(\[\s*\])?\s*$"
"""Lines of which Spark makes no rows: blank ones, and an array of no events."""
LACKING = "lines are missing"
"""Of a file whose end tells of more lines than there are."""
KEY = "^0[23][0-9a-f]{64}$"
"""Of a server's name: whoever collects spools may find others in them."""
UNCHECKED = "a checked receipt, where entities write"
LINE_LIMIT = 4096
"""Characters of a line that quarantine keeps."""


def problem(now_ms: int, *, checked: bool) -> Column:
    """What is wrong with a line; NULL for an event.

    :param now_ms: the time of the run: later events are of the future.
    :param checked: the files are those that ``dmsg analytics verify`` wrote.
    """
    types = [name for family in FAMILIES.values() for name in family]
    identity = F.col("producer").isNull() | F.col("boot").isNull() | F.col("seq").isNull() | F.col("mono").isNull()
    return (
        F.when(F.col(CORRUPT).isNotNull(), "not JSON, or a field of a wrong type")
        .when(F.col("v").isNull() | F.col("type").isNull() | F.col("ts").isNull(), "not an event")
        .when(F.col("v") != SCHEMA_VERSION, "a version that is not known")
        .when(~F.col("type").isin(types), "a type that is not known")
        .when((F.col("type") == "receipt_checked") & F.lit(not checked), UNCHECKED)
        .when(identity | (F.col("seq") < 0), "without an identity")
        .when((F.col("role") == "server") & ~F.col("producer").rlike(KEY), "a server whose name is no key")
        .when(F.col("ts") > now_ms + FUTURE_TOLERANCE_MS, "from the future")
        .when(F.col("ts") < OLDEST, "from before 2020")
        .when(F.col("rtt").isNotNull() & (F.size("rtt") != BUCKETS), "a histogram of a wrong size")
        .when((F.least(*_COUNTS) < 0) | (F.greatest(*_COUNTS) > LARGEST), "a number out of range")
        .when(F.array_min("rtt") < 0, "a number out of range")
    )


def uri(path: Column) -> Column:
    """Paths of this machine have one to three slashes, as Spark's parts please."""
    return F.regexp_replace(path, "^file:/+", "file:/")


def _family() -> Column:
    family = F.when(F.col("problem").isNotNull(), QUARANTINE)
    for name, types in FAMILIES.items():
        family = family.when(F.col("type").isin(list(types)), name)
    return family


def bronze(lines: DataFrame, *, now_ms: int, checked: bool = False) -> DataFrame:
    """Lines with a column ``file`` -> rows of bronze.  For ``checked`` see :func:`problem`."""
    fields = [field.name for field in EVENT.fields]
    day = F.when(F.col("problem").isNull(), F.col("ts")).otherwise(F.lit(now_ms))
    line = F.when(
        F.col("problem").isNotNull(),
        # not every program that reads Parquet forgives bytes that are no text
        F.make_valid_utf8(F.substring(F.coalesce(F.col(CORRUPT), F.to_json(F.struct(*fields))), 1, LINE_LIMIT)),
    )
    return (
        lines.withColumn("problem", problem(now_ms, checked=checked))
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


def files(rows: DataFrame) -> DataFrame:
    """Of which files there are lines: file."""
    return rows.select(uri(F.col("file")).alias("file")).distinct()


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
        .when(F.col("told") > F.col("arrived") - F.col("ends"), LACKING)
        .alias("problem"),
    )


def sums(rows: DataFrame) -> DataFrame:
    """How many events there are of a process, a day and a bucket of 32,768 numbers, and sums over their numbers.

    Of numbers only, so that it is done in memory and in one pass.
    """
    place = F.col("seq") % BUCKET_SIZE
    return rows.groupBy("producer", "boot", "dt", F.floor(F.col("seq") / BUCKET_SIZE).alias("bucket")).agg(
        F.count(F.lit(1)).alias("events"),
        F.min("seq").alias("first"),
        F.max("seq").alias("last"),
        F.sum(place).alias("total"),
        F.sum(place * place).alias("squares"),
        F.min(F.col("ts") - F.col("mono")).alias("least_start"),
        F.max(F.col("ts") - F.col("mono")).alias("greatest_start"),
        F.min("ts").alias("first_ts"),
        F.max("ts").alias("last_ts"),
    )


def _whole() -> Column:
    """As many numbers as between the first and the last, with the sum and the sum of squares that those have:
    each is there once."""
    low, high = F.col("first") % BUCKET_SIZE, F.col("last") % BUCKET_SIZE

    def squares(number: Column) -> Column:
        """Of 0 to ``number``."""
        return F.floor(number * (number + 1) * (2 * number + 1) / 6)

    return (
        (F.col("events") == F.col("last") - F.col("first") + 1)
        & (2 * F.col("total") == (low + high) * F.col("events"))
        & (F.col("squares") == squares(high) - squares(low) + low * low)
    )


def unsure(sums: DataFrame) -> DataFrame:
    """Those of :func:`sums` in which numbers are missing or came twice, or both."""
    return sums.where(~_whole())


def numbers(sums: DataFrame, rows: DataFrame | None) -> DataFrame:
    """How many different numbers there are in each.

    :param rows: the events, where some are :func:`unsure`: there numbers are bits, and counted one by one.
    """
    if rows is None:
        return sums.withColumn("distinct_events", F.col("events"))
    keys = ["producer", "boot", "dt", "bucket"]
    bucketed = rows.withColumn("bucket", F.floor(F.col("seq") / BUCKET_SIZE))
    counted = (
        bucketed.join(F.broadcast(unsure(sums).select(*keys)), keys, "left_semi")
        .groupBy(*keys)
        .agg(
            F.bitmap_count(F.bitmap_construct_agg(F.bitmap_bit_position(F.col("seq") % BUCKET_SIZE + 1))).alias(
                "distinct_events"
            )
        )
    )
    return sums.join(counted, keys, "left").withColumn("distinct_events", F.coalesce("distinct_events", "events"))


def deduplicate(rows: DataFrame, where: DataFrame) -> DataFrame:
    """Each identity once: of rows that differ, always the same one.

    :param where: producer, boot, bucket in which there are duplicates, few.
    """
    keys = ["producer", "boot", "bucket"]
    bucketed = rows.withColumn("bucket", F.floor(F.col("seq") / BUCKET_SIZE))
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
