"""Rules and limits for all code that reads events: which events are valid, and how long a running process can be
silent."""

from __future__ import annotations

from pyspark.sql.types import LongType

from dmsg.analytics.schemas import EVENT
from dmsg.telemetry.schema import MAX_NUMBER

OLDEST_TIMESTAMP = 1_577_836_800_000
"""Start of 2020, in ms since 1970. An earlier event comes from a machine whose clock is not set."""
FUTURE_TOLERANCE_MS = 10 * 60 * 1000
"""Milliseconds by which the clock of an entity may be ahead. An event of a later time is invalid."""
MIDNIGHT_MS = 10 * 60 * 1000
"""Maximum time in ms between a server's event about the end of a transport and the receipts of that transport. So only
events and receipts within this time of midnight can belong to transports of the neighbouring day.
"""
SILENCE_SECONDS = 15 * 60
"""Seconds without an event after which a process counts as ended. Processes write an event every minute, and files are
sealed every five minutes.
"""
LARGEST_NUMBER = MAX_NUMBER
"""Largest number allowed in an event.  Sums of such numbers could overflow, so ``gold.totals`` bounds the sums."""
LARGEST_BUCKET = 2**31
"""Largest count allowed in a bucket of a histogram, so that sums of histograms do not overflow."""
COUNTS = tuple(
    one.name
    for one in EVENT.fields
    if isinstance(one.dataType, LongType) and one.name not in ("sequence", "available", "clock_ms")
)
"""Fields whose numbers are added up and therefore have to be in range. Three other numeric fields may have any value,
because discoveries copy them from the entries of strangers."""
KEY = "^0[23][0-9a-f]{64}$"
"""Regular expression for the public key of a server. The names of servers in events have to match it, because a
collected spool may contain any text."""
LINES_MISSING = "lines are missing"
"""Problem of a file whose last line states more lines than were read."""
NO_END = "the end of the file is missing"
"""Problem of a file that lacks its last line, which states the number of lines."""
