"""Percentiles from counts in buckets: sums of counts are exact and take any order."""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F

from dmsg.telemetry.schema import BUCKETS, FIRST_BOUND

FIRST_MS = FIRST_BOUND * 1000


def bucket_of(milliseconds: Column) -> Column:
    """The bucket, from 0, of a time in ms."""
    index = F.ceil(F.log2(milliseconds / F.lit(FIRST_MS)) * 2)
    return F.when(milliseconds <= FIRST_MS, 0).otherwise(F.least(index, F.lit(BUCKETS - 1))).cast("int")


def merged(counts: list[Column]) -> Column:
    """One count for each bucket as an array."""
    return F.array(*[F.coalesce(count, F.lit(0)).cast("long") for count in counts])


def quantile(histogram: str, total: str, share: float) -> Column:
    """In ms: the value below which that share lies, evenly spread within its bucket.

    The last bucket has no end: its beginning stands for it.  NULL without
    samples.  The error is at most a bucket's width, 41 % of its lower bound;
    6 % on log-normal times (docs/pipeline/tables.md).

    :param histogram: name of an array column.  :param total: name of the column with its sum.
    """
    lower = f"CASE WHEN s.i = 0 THEN 0D ELSE {FIRST_MS}D * power(2D, (s.i - 1) / 2D) END"
    upper = f"CASE WHEN s.i = {BUCKETS - 1} THEN {lower} ELSE {FIRST_MS}D * power(2D, s.i / 2D) END"
    target = f"{share}D * {total}"
    return F.expr(
        f"""aggregate({histogram},
            named_struct('i', 0, 'seen', 0L, 'value', CAST(NULL AS DOUBLE)),
            (s, x) -> named_struct('i', s.i + 1, 'seen', s.seen + x, 'value',
                CASE WHEN s.value IS NULL AND x > 0 AND s.seen + x >= {target}
                     THEN ({lower}) + (({upper}) - ({lower})) * ({target} - s.seen) / x ELSE s.value END),
            s -> s.value)"""
    )
