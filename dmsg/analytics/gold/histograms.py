"""Percentiles from counts in buckets: sums of counts are exact and take any order.

Of several hours, days or servers the counts are added, and the percentile is read from the sum: an average of
percentiles is none (it was 21 % off).
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame, functions as F

from dmsg.telemetry.schema import BUCKETS, FIRST_BOUND

FIRST_MS = FIRST_BOUND * 1000
SHARES = (50, 90, 99)
"""Percentiles of the tables."""


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
    less on real times (docs/pipeline/tables.md).

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


def percentile(counts: Sequence[int], share: float) -> float | None:
    """The same of counts that are here."""
    target = share * sum(counts)
    seen = 0
    for index, count in enumerate(counts):
        if count and seen + count >= target:
            lower = 0.0 if index == 0 else FIRST_MS * 2.0 ** ((index - 1) / 2)
            upper = lower if index == BUCKETS - 1 else FIRST_MS * 2.0 ** (index / 2)
            return lower + (upper - lower) * (target - seen) / count
        seen += count
    return None


def summed(rows: DataFrame, keys: Sequence[str], name: str) -> DataFrame:
    """keys and the counts of all rows with that key, added bucket by bucket.

    :param name: of an array column; rows without it count nothing.
    """
    sums = [F.sum(F.get(name, F.lit(index))).alias(f"b{index}") for index in range(BUCKETS)]
    counted = rows.where(F.col(name).isNotNull()).groupBy(*keys).agg(*sums)
    return counted.select(*keys, merged([F.col(f"b{index}") for index in range(BUCKETS)]).alias(name))


def added(name: str) -> Column:
    """The counts of a group's rows, added bucket by bucket; NULL if no row has any.

    A group's rows are held together, so they have to be few (those of hours and servers, not of transports);
    to plan it takes a tenth of what the sums of :func:`summed` take.
    """
    counts = F.collect_list(name)
    nothing = F.array_repeat(F.lit(0).cast("long"), BUCKETS)
    total = F.aggregate(counts, nothing, lambda one, other: F.zip_with(one, other, lambda a, b: a + b))
    return F.when(F.size(counts) > 0, total).alias(name)


def latency(rows: DataFrame, keys: Sequence[str]) -> DataFrame:
    """The columns of latency, of all rows with that key.  :param rows: with the counts ``rtt`` and ``accept``."""
    both = rows.groupBy(*keys).agg(added("rtt"), added("accept"))
    return with_percentiles(with_percentiles(both, "rtt"), "accept")


def with_percentiles(rows: DataFrame, name: str) -> DataFrame:
    """With the number of samples and :data:`SHARES` of them: ``rtt_samples``, ``rtt_p50`` and so on."""
    nothing = F.lit(0).cast("long")
    rows = rows.withColumn(f"{name}_samples", F.coalesce(F.expr(f"aggregate({name}, 0L, (a, x) -> a + x)"), nothing))
    for share in SHARES:
        rows = rows.withColumn(f"{name}_p{share}", quantile(name, f"{name}_samples", share / 100))
    return rows
