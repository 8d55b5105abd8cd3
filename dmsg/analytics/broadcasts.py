"""Limit of broadcast joins, in which Spark sends all rows of one table to every executor.

Broadcast rows have to fit in the memory of the driver and of each executor. Tables whose size grows with servers, hours
and days always fit. Tables whose size grows with traffic, with damaged files or with the events of a hostile producer
are broadcast only through :func:`bounded`.
"""

from __future__ import annotations

from collections.abc import Callable

from pyspark.sql import DataFrame

from dmsg.analytics import functions as F

FEW_ROWS = 200_000
"""Maximum number of rows to broadcast of a table whose size grows with traffic (about 40 MB)."""
FEW_EVENTS = 5_000_000
"""Maximum number of events of a job whose rows are broadcast without being counted."""

Hint = Callable[[DataFrame], DataFrame]
"""Function that marks rows for a broadcast if they are few."""


def bounded(events: int) -> Hint:
    """Return a function that marks rows for a broadcast unless they are too many.

    :param events: number of events that the job processes.
    """

    def mark(rows: DataFrame) -> DataFrame:
        # Counting stops just above the limit, because the exact number does not matter. Rows that are returned without
        # a broadcast hint are left to Spark, which decides by their size when the query runs.
        if events > FEW_EVENTS and rows.limit(FEW_ROWS + 1).count() > FEW_ROWS:
            return rows
        return F.broadcast(rows)

    return mark
