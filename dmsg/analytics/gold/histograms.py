"""Percentiles from histograms (counts in buckets).

For several hours, days or servers, the counts of each bucket are added, and the percentile is computed from the sums.
The sums are exact in any order of addition. Percentiles are never averaged, because an average of percentiles is not a
percentile: in a measurement, such an average was wrong by 21 %.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame

from dmsg.analytics import functions as F
from dmsg.analytics.memory_groups import map_lists
from dmsg.telemetry.schema import BUCKETS, FIRST_BOUND

FIRST_MS = FIRST_BOUND * 1000
_BOUNDS = [FIRST_MS * 2.0 ** (index / 2) for index in range(BUCKETS - 1)]
"""Upper bounds of all buckets but the last, in ms."""
SHARES = (50, 90, 99)
"""Percentiles that the tables contain."""


def bucket_of(milliseconds: Column) -> Column:
    """Return a column with the index, from 0, of the bucket to which a time in ms belongs."""
    # The time is compared with each bound. The index could also be computed by a logarithm, but the last digit of a
    # logarithm may differ between Spark and Arrow.
    found = F.when(milliseconds <= _BOUNDS[0], 0)
    for index, bound in enumerate(_BOUNDS[1:], 1):
        found = found.when(milliseconds <= bound, index)
    return found.otherwise(BUCKETS - 1)


def _array_sql(counts: Iterable[str]) -> str:
    """Return the SQL text of an array of counts, from the text of each bucket's count."""
    return f"array({', '.join(f'CAST(coalesce({count}, 0) AS BIGINT)' for count in counts)})"


def count_buckets(bucket: str, counts: str) -> Column:
    """Return an aggregate: an array with the number of samples in each bucket.

    :param bucket: name of the column with the index of a row's bucket.
    :param counts: name of the column with the number of samples that a row adds to its bucket.
    """
    each = _array_sql(f"sum(CASE WHEN {bucket} = {index} THEN {counts} END)" for index in range(BUCKETS))
    return F.expr(each, "count_buckets", bucket, counts)


def quantile(histogram: str, total: str, share: float) -> Column:
    """Return a column with a quantile in ms, by linear interpolation within its bucket; NULL if there are no samples.

    The last bucket has no upper bound, so its lower bound is returned. The error is at most the width of the bucket,
    which is 41 % of its lower bound (docs/pipeline/tables.md has the errors for several spreads).

    :param histogram: name of an array column.
    :param total: name of the column with the sum of the array.
    :param share: share of the samples below the quantile, from 0 to 1.
    """
    # The SQL text contains each bound as a literal, because Spark and Arrow may differ in the last digit of a computed
    # power.
    lower, upper = (
        f"get(array({', '.join(f'{one!r}D' for one in bounds)}), s.i)"
        for bounds in ([0.0, *_BOUNDS], [*_BOUNDS, _BOUNDS[-1]])
    )
    target = f"{share}D * {total}"
    return F.expr(
        f"""aggregate({histogram},
            named_struct('i', 0, 'seen', 0L, 'value', CAST(NULL AS DOUBLE)),
            (s, x) -> named_struct('i', s.i + 1, 'seen', s.seen + x, 'value',
                CASE WHEN s.value IS NULL AND x > 0 AND s.seen + x >= {target}
                     THEN {lower} + ({upper} - {lower}) * ({target} - s.seen) / x ELSE s.value END),
            s -> s.value)""",
        lambda counts: map_lists(counts, partial(percentile, share=share), pa.float64()),
        histogram,
    )


def percentile(counts: Sequence[int], share: float) -> float | None:
    """Return a quantile in ms of counts in memory, by the rules of :func:`quantile`; None if there are no samples."""
    target = share * sum(counts)
    seen = 0
    for index, count in enumerate(counts):
        if count and seen + count >= target:
            lower = 0.0 if index == 0 else _BOUNDS[index - 1]
            upper = lower if index == BUCKETS - 1 else _BOUNDS[index]
            return lower + (upper - lower) * (target - seen) / count
        seen += count
    return None


def _totals(counts: pa.Array) -> pa.Array:
    """Return the sum of each array in memory; 0 for NULL."""
    return pc.fill_null(map_lists(counts, sum, pa.int64()), 0)


def sum_counts(rows: DataFrame, keys: Sequence[str], name: str) -> DataFrame:
    """Add the counts of all rows with the same keys, bucket by bucket.

    :param name: name of the array column with the counts. Rows in which it is NULL are ignored.
    """
    sums = F.expr(_array_sql(f"sum(get({name}, {index}))" for index in range(BUCKETS)), "sum_histograms", name)
    return rows.where(F.col(name).isNotNull()).groupBy(*keys).agg(sums.alias(name))


def sum_aggregate(name: str) -> Column:
    """Return an aggregate that adds the counts of a group's rows bucket by bucket; NULL if no row has counts.

    All rows of a group are in memory at the same time, so a group must be small (hours and servers, not transports).
    Spark plans the aggregate in a tenth of the time that it needs to plan :func:`sum_counts`.
    """
    total = f"""CASE WHEN size(collect_list({name})) > 0 THEN aggregate(collect_list({name}),
        array_repeat(CAST(0 AS BIGINT), {BUCKETS}), (one, other) -> zip_with(one, other, (a, b) -> a + b)) END"""
    return F.expr(total, "sum_histograms", name).alias(name)


def latency(rows: DataFrame, keys: Sequence[str]) -> DataFrame:
    """Return the sums and percentiles of ``rtt`` and ``accept`` for each key.

    :param rows: rows with the counts ``rtt`` and ``accept``.
    """
    both = rows.groupBy(*keys).agg(sum_aggregate("rtt"), sum_aggregate("accept"))
    return with_percentiles(both, "rtt", "accept")


def with_percentiles(rows: DataFrame, *names: str) -> DataFrame:
    """Add columns for the number of samples and the percentiles :data:`SHARES` of each array column: ``rtt_samples``,
    ``rtt_p50`` and so on."""
    samples: dict[str, Column] = {
        f"{name}_samples": F.expr(f"coalesce(aggregate({name}, 0L, (a, x) -> a + x), 0L)", _totals, name)
        for name in names
    }
    percentiles: dict[str, Column] = {
        f"{name}_p{share}": quantile(name, f"{name}_samples", share / 100) for name in names for share in SHARES
    }
    # Spark analyses the whole query again at each call of withColumns(), so there are only two calls.
    return rows.withColumns(samples).withColumns(percentiles)
