"""Rules and limits that all readers of events share: which events are valid, and how long a living process can be
silent."""

from __future__ import annotations

from pyspark.sql.types import LongType

from dmsg.analytics.schemas import EVENT

OLDEST = 1_577_836_800_000
"""Start of 2020 in ms since 1970. Events before it come from a machine whose clock is not set."""
FUTURE_TOLERANCE_MS = 10 * 60 * 1000
"""Time in ms by which the clock of an entity may be ahead."""
SILENCE_SECONDS = 15 * 60
"""Seconds without an event after which a process is taken to have ended. Processes write an event every minute, and
files are sealed every five minutes.
"""
LARGEST = 2**50
"""Largest number allowed in an event.  Sums of such numbers could overflow, so they are bounded (``gold.totals``)."""
LARGEST_BUCKET = 2**31
"""Largest count allowed in a bucket of a histogram, so that sums of histograms do not overflow."""
COUNTS = tuple(
    one.name
    for one in EVENT.fields
    if isinstance(one.dataType, LongType) and one.name not in ("sequence", "available", "clock_ms")
)
"""Fields with numbers that are added up.  Three other numeric fields are left out, because servers copy them from
entries of strangers."""
KEY = "^0[23][0-9a-f]{64}$"
"""Regular expression of a server's public key; names of servers are checked with it, because a collected spool may
contain any text."""
LACKING = "lines are missing"
"""Problem of a file whose last line announces more lines than were read."""
NO_END = "the end of the file is missing"
"""Problem of a file without a last line that says how many lines there are."""
