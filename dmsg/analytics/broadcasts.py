"""Bound of broadcasts: rows are sent whole to every executor only if they fit in its memory, and in the driver's.

Tables whose rows grow with servers, hours and days are broadcast without a question. Rows that grow with traffic, with
damage or with what a hostile producer writes go through :func:`bounded`.
"""

from __future__ import annotations

from collections.abc import Callable

from pyspark.sql import DataFrame, functions as F

FEW_ROWS = 200_000
"""Number of rows up to which rows that grow with traffic are broadcast (about 40 MB)."""
FEW_EVENTS = 5_000_000
"""Number of events of a job up to which the rows made from them are broadcast without being counted."""

Hint = Callable[[DataFrame], DataFrame]
"""Function that marks rows for a broadcast if they are few."""


def bounded(events: int) -> Hint:
    """Return the hint for a job over that many events."""

    def mark(rows: DataFrame) -> DataFrame:
        # The limit stops the count early. Without a mark, Spark decides by the size that it finds when it runs.
        if events > FEW_EVENTS and rows.limit(FEW_ROWS + 1).count() > FEW_ROWS:
            return rows
        return F.broadcast(rows)

    return mark
