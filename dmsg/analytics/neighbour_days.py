"""Check whether new events of one day change verdicts of the day before or after. That day is then computed again, too.

A verdict compares the counts of one transport in events and receipts, some of which may be from the day before or
after. So new events of one day can change verdicts of a neighbouring day. A neighbouring day is computed again only if
it has an event or a receipt of a transport that also occurs in the new events near midnight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import date

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from dmsg.analytics.data_files import File
from dmsg.analytics.delta import Delta
from dmsg.analytics.event_rules import MIDNIGHT_MS
from dmsg.analytics.schemas import DAY_MS

FEW_EVENTS = 1_000_000
"""Maximum number of new events and receipts, on the days before and after a day, to compare with that day. With more,
the day is computed again without a comparison.
"""
ROWS_AT_ONCE = 65_536
"""Number of rows that are read into memory at once."""
WORDS = ("transport", "receipt")
"""Families of events with the byte counts of transports."""


def affected_days(bronze: Delta, new: Sequence[File], days: Iterable[str]) -> set[str]:
    """Return those of ``days`` whose verdicts the new events can change.

    :param new: files of bronze with the new events.
    :param days: days before and after those of the new events. They have no new events themselves.
    """
    files, storage = bronze.files(), bronze.reading_storage()
    return {day for day in days if _is_affected(storage, day, files, new)}


def _is_affected(storage: pafs.FileSystem, day: str, files: Sequence[File], new: Sequence[File]) -> bool:
    neighbours = {
        file.path: distance
        for file in new
        if file.values["family"] in WORDS
        and abs(distance := (date.fromisoformat(file.values["dt"]) - date.fromisoformat(day)).days) == 1
    }
    if (
        any(file.rows is None for file in new)
        or sum(file.rows or 0 for file in new if file.path in neighbours) > FEW_EVENTS
    ):
        return True
    named = [_transports_near_midnight(storage, path, after=distance > 0) for path, distance in neighbours.items()]
    wanted = pc.unique(pa.chunked_array(named, pa.string()))
    if not len(wanted):
        return False
    for file in files:
        if file.values["dt"] == day and file.values["family"] in WORDS:
            with storage.open_input_file(file.path) as opened:
                for batch in pq.ParquetFile(opened).iter_batches(ROWS_AT_ONCE, columns=["transport"]):
                    if pc.any(pc.is_in(batch.column(0), wanted)).as_py():
                        return True
    return False


def _transports_near_midnight(storage: pafs.FileSystem, path: str, *, after: bool) -> pa.Array:
    """Return the names of those transports in a file that may also have events on the neighbouring day. These are the
    transports with an event near midnight, or with a receipt that was sent after a restart of the server.

    :param after: whether the file's day is after the neighbouring day, and not before.
    """
    with storage.open_input_file(path) as opened:
        file = pq.ParquetFile(opened)
        names = [name for name in ("transport", "ts", "former") if name in file.schema_arrow.names]
        rows = file.read(names)
    times = rows["ts"].combine_chunks()
    rows_of_day = pc.subtract(times, pc.multiply(pc.divide(times, DAY_MS), DAY_MS))
    counts = pc.less(rows_of_day, MIDNIGHT_MS) if after else pc.greater_equal(rows_of_day, DAY_MS - MIDNIGHT_MS)
    if "former" in names:
        # A receipt that was sent after a restart of the server may belong to any transport of the neighbouring day.
        counts = pc.or_(counts, pc.fill_null(rows["former"].combine_chunks(), False))
    return rows["transport"].combine_chunks().filter(counts).drop_null().cast(pa.string())
