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

from dmsg.analytics.affected_rows import Groups, WholeDays
from dmsg.analytics.data_files import File
from dmsg.analytics.delta import Delta
from dmsg.analytics.event_rules import MIDNIGHT_MS
from dmsg.analytics.file_texts import server_column
from dmsg.analytics.schemas import DAY_MS, OF_TRANSPORTS

FEW_EVENTS = 1_000_000
"""Maximum number of new events and receipts, on the days before and after a day, to compare with that day. With more,
the day is computed again without a comparison.
"""
ROWS_AT_ONCE = 65_536
"""Number of rows that are read into memory at once."""
_NAMES = pa.schema([("server", pa.string()), ("transport", pa.string())])


def affected_days(bronze: Delta, new: Sequence[File], days: Iterable[str]) -> set[str]:
    """Return those of ``days`` whose verdicts the new events can change.

    :param new: files of bronze with the new events.
    :param days: days before and after those of the new events. They have no new events themselves.
    """
    return {day for day in days if _is_affected(bronze, day, new)}


def _is_affected(bronze: Delta, day: str, new: Sequence[File]) -> bool:
    neighbours = [
        (file, distance)
        for file in new
        if file.values["family"] in OF_TRANSPORTS
        and abs(distance := (date.fromisoformat(file.values["dt"]) - date.fromisoformat(day)).days) == 1
    ]
    if any(file.rows is None for file in new) or sum(file.rows or 0 for file, _ in neighbours) > FEW_EVENTS:
        return True
    storage = bronze.reading_storage()
    named = [_transports_near_midnight(storage, file, after=distance > 0) for file, distance in neighbours]
    wanted = pa.concat_tables([_NAMES.empty_table(), *named])
    if not wanted.num_rows:
        return False
    try:
        groups = Groups(_NAMES.names, [wanted])
    except WholeDays:
        # A receipt does not name its server.
        return True
    for file in bronze.files():
        family = file.values["family"]
        if file.values["dt"] == day and family in OF_TRANSPORTS:
            of_family = groups.renamed((server_column(family), "transport"))
            if of_family.is_in_file(bronze, file.path):
                with storage.open_input_file(file.path) as opened:
                    if _has_event(opened, of_family):
                        return True
    return False


def _has_event(file: pa.NativeFile, groups: Groups) -> bool:
    footer = pq.read_metadata(file)
    if not set(footer.schema.names).issuperset(groups.columns):
        return False
    source = pq.ParquetFile(file, metadata=footer, read_dictionary=groups.columns[:1])
    batches = source.iter_batches(ROWS_AT_ONCE, columns=groups.columns)
    return any(pc.any(groups.contains(pa.Table.from_batches([batch]))).as_py() for batch in batches)


def _transports_near_midnight(storage: pafs.FileSystem, file: File, *, after: bool) -> pa.Table:
    """Return the servers and names of those transports in a file that may also have events on the neighbouring day.
    These are the transports with an event near midnight, or with a receipt that was sent after a restart of the server.

    :param after: whether the file's day is after the neighbouring day, and not before.
    """
    server = server_column(file.values["family"])
    with storage.open_input_file(file.path) as opened:
        source = pq.ParquetFile(opened)
        names = [name for name in (server, "transport", "ts", "former") if name in source.schema_arrow.names]
        rows = source.read(names)
    if "transport" not in names:
        # The file has only requests that were refused, or only rejected receipts.
        return _NAMES.empty_table()
    times = rows["ts"].combine_chunks()
    rows_of_day = pc.subtract(times, pc.multiply(pc.divide(times, DAY_MS), DAY_MS))
    counts = pc.less(rows_of_day, MIDNIGHT_MS) if after else pc.greater_equal(rows_of_day, DAY_MS - MIDNIGHT_MS)
    if "former" in names:
        # A receipt that was sent after a restart of the server may belong to any transport of the neighbouring day.
        counts = pc.or_(counts, pc.fill_null(rows["former"].combine_chunks(), False))
    named = pa.table({name: rows[name] if name in names else pa.nulls(rows.num_rows) for name in (server, "transport")})
    chosen = named.filter(pc.and_(counts, pc.is_valid(named["transport"].combine_chunks())))
    return chosen.rename_columns(_NAMES.names).cast(_NAMES)
