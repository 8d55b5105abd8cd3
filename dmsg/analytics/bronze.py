"""Conversion of the lines of a spool to rows of bronze, in one pass over the text.

Every line becomes a row. The row of an event belongs to the family of the event's type. The row of any other line
belongs to the family ``quarantine``, and names the line's problem.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pyspark.sql import Column, DataFrame

from dmsg.analytics import functions as F
from dmsg.analytics.broadcasts import Hint
from dmsg.analytics.event_rules import (
    COUNTS,
    FUTURE_TOLERANCE_MS,
    KEY,
    LARGEST_BUCKET,
    LARGEST_NUMBER,
    LINES_MISSING,
    NO_END,
    OLDEST_TIMESTAMP,
)
from dmsg.analytics.schemas import CORRUPT, DAY_MS, EVENT, FAMILIES, QUARANTINE
from dmsg.telemetry.schema import BUCKETS, EVENTS, SCHEMA_VERSION

BUCKET_SIZE = 32_768
"""Number of consecutive event numbers in a bucket. It equals the number of bits in a bitmap of Spark, so that one
bitmap represents a bucket."""
PASSED_OVER = r"^\s*(\[\s*\])?\s*$"
"""Regular expression for the lines that Spark's JSON reader skips: blank lines and empty arrays."""
INCOMPLETE = "without a field that its type requires"
UNCHECKED = "a checked receipt in a file of an entity"
LINE_LIMIT = 4096
"""Maximum number of characters that the quarantine stores of a line."""


def problem_column(now_ms: int, *, checked: bool) -> Column:
    """Return a column with the problem of each line; NULL for a valid event.

    :param now_ms: time of the run in ms since 1970. An event that is later than this time by more than
        :data:`~dmsg.analytics.event_rules.FUTURE_TOLERANCE_MS` has a problem.
    :param checked: whether ``dmsg analytics verify`` wrote the files. Only these files may contain checked receipts.
    """
    types = [name for family in FAMILIES.values() for name in family]
    lacking = F.lit(False)
    for one in EVENTS:
        for name in one.required:
            lacking = lacking | ((F.col("type") == one.name) & F.col(name).isNull())
    identity = F.col("producer").isNull() | F.col("boot").isNull() | F.col("seq").isNull() | F.col("mono").isNull()
    return (
        F.when(F.col(CORRUPT).isNotNull(), "not JSON, or a field of a wrong type")
        .when(F.col("v").isNull() | F.col("type").isNull() | F.col("ts").isNull(), "not an event")
        .when(F.col("v") != SCHEMA_VERSION, "a version that is not known")
        .when(~F.col("type").isin(types), "a type that is not known")
        .when((F.col("type") == "receipt_checked") & F.lit(not checked), UNCHECKED)
        .when(identity | (F.col("seq") < 0), "without an identity")
        .when(lacking, INCOMPLETE)
        .when((F.col("role") == "server") & ~F.col("producer").rlike(KEY), "a server whose name is no key")
        .when(F.col("ts") > now_ms + FUTURE_TOLERANCE_MS, "from the future")
        .when(F.col("ts") < OLDEST_TIMESTAMP, "from before 2020")
        .when(F.col("rtt").isNotNull() & (F.size("rtt") != BUCKETS), "a histogram of a wrong size")
        .when((F.least(*COUNTS) < 0) | (F.greatest(*COUNTS) > LARGEST_NUMBER), "a number out of range")
        .when((F.array_min("rtt") < 0) | (F.array_max("rtt") > LARGEST_BUCKET), "a number out of range")
    )


def uri(path: Column) -> Column:
    """Return ``file:`` URIs with a single slash after the colon. Spark's readers return URIs with one to three
    slashes."""
    return F.regexp_replace(path, "^file:/+", "file:/")


def _family() -> Column:
    family = F.when(F.col("problem").isNotNull(), QUARANTINE)
    for name, types in FAMILIES.items():
        family = family.when(F.col("type").isin(list(types)), name)
    return family


def bronze_rows(lines: DataFrame, *, now_ms: int, checked: bool = False) -> DataFrame:
    """Return the rows of bronze for the lines of event files.

    :param lines: a row for each line, with the columns of an event and the column ``file``.
    :param now_ms: as for :func:`problem_column`.
    :param checked: as for :func:`problem_column`.
    """
    fields = [field.name for field in EVENT.fields]
    day = F.when(F.col("problem").isNull(), F.col("ts")).otherwise(F.lit(now_ms))
    line = F.when(
        F.col("problem").isNotNull(),
        # A malformed line may contain bytes that are not UTF-8, and some programs that read Parquet refuse such text.
        # So these bytes are replaced.
        F.make_valid_utf8(F.substring(F.coalesce(F.col(CORRUPT), F.to_json(F.struct(*fields))), 1, LINE_LIMIT)),
    )
    return (
        lines.withColumn("problem", problem_column(now_ms, checked=checked))
        .withColumn("family", _family())
        .select(
            *fields,
            "file",
            "problem",
            line.alias("line"),
            F.lit(None).cast("long").alias("file_bytes"),
            F.lit(None).cast("string").alias("file_sha256"),
            "family",
            # The column is a date and not a text, because formatting a date as text for each line is expensive.
            F.date_from_unix_date(F.floor(day / DAY_MS).cast("int")).alias("dt"),
        )
    )


def file_names(rows: DataFrame) -> DataFrame:
    """Return the names of the files that have lines in ``rows``."""
    return rows.select(uri(F.col("file")).alias("file")).distinct()


LINES = "lines"
"""Value of the column ``origin`` for lines that Spark's JSON reader skipped, and that a second reading of the files
found. For all other lines, the value is the name of a source, and sorts after this one.
"""


def file_report(rows: DataFrame) -> DataFrame:
    """Return a row for each file: its name, the number of lines, and a problem or NULL.

    The last line of a file states the number of lines. If this line is missing, or states more lines than the file has,
    the file is truncated or damaged.
    """
    per_file = rows.groupBy("file").agg(
        F.max("origin").alias("origin"),
        F.max(F.when(F.col("origin") != LINES, F.col("batch"))).alias("batch"),
        F.count(F.lit(1)).alias("arrived"),
        F.max("lines").alias("told"),
        F.count_if(F.col("type") == "segment_end").alias("ends"),
    )
    return per_file.select(
        uri(F.col("file")).alias("file"),
        F.col("arrived").alias("lines"),
        F.when(F.col("ends") == 0, NO_END)
        .when(F.col("told") > F.col("arrived") - F.col("ends"), LINES_MISSING)
        .alias("problem"),
        "origin",
        "batch",
    )


def sums(rows: DataFrame) -> DataFrame:
    """Return for each process, day and bucket the count of event numbers, their sums and their range.

    A bucket has :data:`BUCKET_SIZE` numbers. All aggregates are numeric, so that Spark aggregates in memory by hashing,
    in one pass.
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


def add_sums(stored: DataFrame, added: DataFrame) -> DataFrame:
    """Combine the rows of :func:`sums` for two sets of events; return the rows for all these events."""
    return (
        stored.unionByName(added)
        .groupBy("producer", "boot", "dt", "bucket")
        .agg(
            *[F.sum(name).alias(name) for name in ("events", "total", "squares")],
            *[F.min(name).alias(name) for name in ("first", "least_start", "first_ts")],
            *[F.max(name).alias(name) for name in ("last", "greatest_start", "last_ts")],
        )
    )


def _is_whole() -> Column:
    """Return a column: whether a bucket contains every number from its first to its last exactly once.

    A bucket is whole if the count, the sum and the sum of squares are those of the complete range. If one number is
    missing and another occurs twice, the count is right, but one of the two sums is not.
    """
    low, high = F.col("first") % BUCKET_SIZE, F.col("last") % BUCKET_SIZE

    def squares(number: Column) -> Column:
        """Return the sum of the squares of the integers 0 to ``number``."""
        return F.floor(number * (number + 1) * (2 * number + 1) / 6)

    return (
        (F.col("events") == F.col("last") - F.col("first") + 1)
        & (2 * F.col("total") == (low + high) * F.col("events"))
        & (F.col("squares") == squares(high) - squares(low) + low * low)
    )


def incomplete_sums(sums: DataFrame) -> DataFrame:
    """Return those rows of :func:`sums` in which numbers are missing, duplicated, or both."""
    return sums.where(~_is_whole())


def numbers(sums: DataFrame, rows: DataFrame | None, hint: Hint = F.broadcast) -> DataFrame:
    """Add the number of distinct event numbers (``distinct_events``) to each row of :func:`sums`.

    :param rows: the events, to count the numbers in a bitmap for each bucket of :func:`incomplete_sums`. None if no
        bucket is incomplete.
    :param hint: function that marks rows for a broadcast join if there are few of them.
    """
    if rows is None:
        return sums.withColumn("distinct_events", F.col("events"))
    keys = ["producer", "boot", "dt", "bucket"]
    bucketed = rows.withColumn("bucket", F.floor(F.col("seq") / BUCKET_SIZE))
    counted = (
        bucketed.join(hint(incomplete_sums(sums).select(*keys)), keys, "left_semi")
        .groupBy(*keys)
        .agg(
            F.bitmap_count(F.bitmap_construct_agg(F.bitmap_bit_position(F.col("seq") % BUCKET_SIZE + 1))).alias(
                "distinct_events"
            )
        )
    )
    return sums.join(counted, keys, "left").withColumn("distinct_events", F.coalesce("distinct_events", "events"))


_ESCAPES = re.compile(r"\\\\|\\u[0-9a-f]{4}")
"""Regular expression for the escapes in JSON text that Spark and Python may write differently. An escaped backslash
is matched, too, so that the text after it does not count as an escape."""


def text_of_copy(event: Mapping[str, Any]) -> bytes:
    """Return the text of an event by which one of several copies is chosen: the smallest is kept. The text is that of
    Spark's function ``to_json``, by which :func:`deduplicate` chooses.

    :param event: values by column; absent columns are NULL.
    """
    fields = {one.name: value for one in EVENT.fields if (value := event.get(one.name)) is not None}
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    # Spark writes the digits of a control character in upper case.
    found = _ESCAPES.sub(lambda one: one[0][:2] + one[0][2:].upper(), text)
    return found.encode()


def deduplicate(rows: DataFrame, where: DataFrame, hint: Hint = F.broadcast) -> DataFrame:
    """Remove duplicate events: return one row for each process and event number.

    If rows with the same number differ, always the same one of them is returned: the one with the smallest
    :func:`text_of_copy`.

    :param where: buckets that contain duplicates (producer, boot, bucket).
    :param hint: function that marks rows for a broadcast join if there are few of them.
    """
    keys = ["producer", "boot", "bucket"]
    bucketed = rows.withColumn("bucket", F.floor(F.col("seq") / BUCKET_SIZE))
    doubled = hint(where.select(*keys).distinct())
    clean = bucketed.join(doubled, keys, "left_anti").drop("bucket")
    fields = [field.name for field in EVENT.fields]
    chosen = (
        bucketed.join(doubled, keys, "left_semi")
        .drop("bucket")
        .groupBy("producer", "boot", "seq")
        .agg(F.min_by(F.struct(*rows.columns), F.to_json(F.struct(*fields))).alias("row"))
        .select("row.*")
    )
    return clean.unionByName(chosen.select(*clean.columns))
