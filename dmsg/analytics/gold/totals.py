"""Sums of numbers that servers report, bounded so that they cannot overflow.

A server chooses its numbers freely, up to a limit for each event. Spark's sums of 64-bit numbers wrap silently, so with
enough events a server could choose any sum, even a negative one. The sums of this module stop at a limit instead.
"""

from __future__ import annotations

from pyspark.sql import Column, functions as F

SUM_LIMIT = 2**53
"""Largest sum (9 PB); larger sums count as this number. Up to it, floating-point numbers hold integers exactly."""


def bounded_sum(numbers: Column | str) -> Column:
    """Return an aggregate: the sum of integers that are not negative, exact, and at most :data:`SUM_LIMIT`.

    NULL if all numbers are NULL. Sums of such sums are bounded in the same way.
    """
    # A sum of floating-point numbers does not wrap, and costs as much as Spark's sum of integers. try_sum() with a
    # count, which distinguishes overflow from NULL, took 3.5 times as long for 8 columns.
    number = F.col(numbers) if isinstance(numbers, str) else numbers
    total = F.sum(number.cast("double"))
    return F.when(total < SUM_LIMIT, total.cast("long")).when(total >= SUM_LIMIT, F.lit(SUM_LIMIT))


def bounded_sums(*names: str) -> list[Column]:
    """Return :func:`bounded_sum` of each column, under the column's name."""
    return [bounded_sum(name).alias(name) for name in names]
