"""Limit of broadcasts in joins: Spark sends all rows of a table to every executor only if they fit in the memory of the
executors and of the driver.

Tables whose rows grow with servers, hours and days are always broadcast.  Rows whose number grows with traffic, with
damaged files or with the events of a hostile producer go through :func:`bounded`.
"""

from __future__ import annotations

from collections.abc import Callable

from pyspark.sql import DataFrame, functions as F

FEW_ROWS = 200_000
"""Maximum number of rows that are broadcast, if their number grows with traffic (about 40 MB)."""
FEW_EVENTS = 5_000_000
"""Number of events of a job up to which the rows made from these events are broadcast without being counted."""

Hint = Callable[[DataFrame], DataFrame]
"""Function that marks rows for a broadcast if they are few."""


def bounded(events: int) -> Hint:
    """Return the function that marks rows for a broadcast, for a job over that many events."""

    def mark(rows: DataFrame) -> DataFrame:
        # The count stops at the limit, because the exact number does not matter.  If the rows are not marked, Spark
        # decides by their size when the query runs.
        if events > FEW_EVENTS and rows.limit(FEW_ROWS + 1).count() > FEW_ROWS:
            return rows
        return F.broadcast(rows)

    return mark
