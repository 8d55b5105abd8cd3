"""Percentiles from histograms (counts in buckets).

For several hours, days or servers, the counts of each bucket are added, and the percentile is computed from the sums.
The sums are exact in any order of addition. Percentiles are never averaged, because an average of percentiles is not a
percentile: in a measurement, such an average was wrong by 21 %.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pyspark.sql import Column, DataFrame, functions as F

from dmsg.telemetry.schema import BUCKETS, FIRST_BOUND

FIRST_MS = FIRST_BOUND * 1000
SHARES = (50, 90, 99)
"""Percentiles that the tables contain."""


def bucket_of(milliseconds: Column) -> Column:
    """Return a column with the index, from 0, of the bucket to which a time in ms belongs."""
    index = F.ceil(F.log2(milliseconds / F.lit(FIRST_MS)) * 2)
    return F.when(milliseconds <= FIRST_MS, 0).otherwise(F.least(index, F.lit(BUCKETS - 1))).cast("int")


def merge_buckets(counts: Iterable[str]) -> Column:
    """Return a column with an array of counts.

    :param counts: an SQL expression for each bucket.
    """
    # One SQL text needs one call to Java. A column for each bucket would need hundreds of calls.
    return F.expr(f"array({', '.join(f'CAST(coalesce({count}, 0) AS BIGINT)' for count in counts)})")


def quantile(histogram: str, total: str, share: float) -> Column:
    """Return a column with a quantile in ms, by linear interpolation within its bucket; NULL if there are no samples.

    The last bucket has no upper bound, so its lower bound is returned. The error is at most the width of the bucket,
    which is 41 % of its lower bound (docs/pipeline/tables.md has the errors for several spreads).

    :param histogram: name of an array column.
    :param total: name of the column with the sum of the array.
    :param share: share of the samples below the quantile, from 0 to 1.
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
    """Return a quantile in ms of counts in memory, by the rules of :func:`quantile`; None if there are no samples."""
    target = share * sum(counts)
    seen = 0
    for index, count in enumerate(counts):
        if count and seen + count >= target:
            lower = 0.0 if index == 0 else FIRST_MS * 2.0 ** ((index - 1) / 2)
            upper = lower if index == BUCKETS - 1 else FIRST_MS * 2.0 ** (index / 2)
            return lower + (upper - lower) * (target - seen) / count
        seen += count
    return None


def sum_counts(rows: DataFrame, keys: Sequence[str], name: str) -> DataFrame:
    """Add the counts of all rows with the same keys, bucket by bucket.

    :param name: name of the array column with the counts. Rows in which it is NULL are ignored.
    """
    sums = [F.expr(f"sum(get({name}, {index})) AS b{index}") for index in range(BUCKETS)]
    counted = rows.where(F.col(name).isNotNull()).groupBy(*keys).agg(*sums)
    return counted.select(*keys, merge_buckets(f"b{index}" for index in range(BUCKETS)).alias(name))


def sum_aggregate(name: str) -> Column:
    """Return an aggregate that adds the counts of a group's rows bucket by bucket; NULL if no row has any.

    All rows of a group are in memory at the same time, so a group must be small (hours and servers, not transports).
    Spark plans the aggregate in a tenth of the time that it needs to plan :func:`sum_counts`.
    """
    counts = F.collect_list(name)
    nothing = F.array_repeat(F.lit(0).cast("long"), BUCKETS)
    total = F.aggregate(counts, nothing, lambda one, other: F.zip_with(one, other, lambda a, b: a + b))
    return F.when(F.size(counts) > 0, total).alias(name)


def latency(rows: DataFrame, keys: Sequence[str]) -> DataFrame:
    """Return the sums and percentiles of ``rtt`` and ``accept`` for each key.

    :param rows: rows with the counts ``rtt`` and ``accept``.
    """
    both = rows.groupBy(*keys).agg(sum_aggregate("rtt"), sum_aggregate("accept"))
    return with_percentiles(both, "rtt", "accept")


def with_percentiles(rows: DataFrame, *names: str) -> DataFrame:
    """Add columns for the number of samples and the percentiles :data:`SHARES` of each array column: ``rtt_samples``,
    ``rtt_p50`` and so on."""
    samples = {f"{name}_samples": F.expr(f"coalesce(aggregate({name}, 0L, (a, x) -> a + x), 0L)") for name in names}
    percentiles = {
        f"{name}_p{share}": quantile(name, f"{name}_samples", share / 100) for name in names for share in SHARES
    }
    # Spark analyses the whole query again at each call of withColumns(), so there are only two calls.
    return rows.withColumns(samples).withColumns(percentiles)
