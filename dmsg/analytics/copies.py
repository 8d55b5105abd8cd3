"""Search for events that arrived twice, and choice of the copies to leave out. Needs no Spark.

The table ``numbers`` names the buckets in which event numbers occur twice. Only in these buckets, the numbers of the
events are compared. Of several events of one family with the same number, the one stays that
:func:`dmsg.analytics.bronze.deduplicate` chooses.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs

from dmsg.analytics import bronze, functions as F
from dmsg.analytics.changes import days_around, rows_of_day
from dmsg.analytics.data_files import File
from dmsg.analytics.file_columns import Dropped
from dmsg.analytics.lake import Lake
from dmsg.analytics.memory_columns import FALSE, NotInMemory, plain
from dmsg.analytics.memory_groups import Groups, key_numbers
from dmsg.analytics.memory_rows import MemoryRows
from dmsg.analytics.memory_tables import MEMORY_BYTES, as_frame, as_rows
from dmsg.analytics.runs import State
from dmsg.analytics.schemas import EVENT, FAMILIES
from dmsg.analytics.shard_tasks import read_columns, rows_as_read
from dmsg.analytics.store import NUMBERS, unrefined
from dmsg.analytics.views import VIEWS

MAX_COMPARED_EVENTS = 5_000_000
"""Maximum number of events of a family and day whose numbers are compared (about 150 MB). With more, Spark chooses
among the copies."""
MAX_COPIES = 300_000
"""Maximum number of events of a family and day of which several have the same number (about 100 MB). With more, Spark
chooses among them."""
_BUCKET = ("producer", "boot", "bucket")
_IDENTITY = ("producer", "boot", "seq")


@dataclass(frozen=True)
class Copies:
    """Copies of events, which no table counts.

    :ivar dropped: the copies, as rows of files of bronze.
    :ivar days: days with copies, by family of events.
    :ivar replace_counted: whether an event that no run has counted yet replaces one that a run has counted.
    """

    dropped: Dropped = field(default_factory=dict)
    days: Mapping[str, Container[str]] = field(default_factory=dict)
    replace_counted: bool = False


def find_copies(lake: Lake, before: State, state: State, days: Iterable[str]) -> Copies:
    """Search for copies among the events of some days, the day before each and the day after each.

    :param before: state that the newest finished run left.
    :param state: state that the run will leave.
    :raises NotInMemory: only Spark can choose among the copies. There are too many, or a process has given a number to
        events of different days. Or a file is damaged, and Spark's error names it.
    """
    try:
        return _find_copies(lake, before, state, set(days_around(days)))
    except (pa.ArrowInvalid, OSError):
        raise NotInMemory("a file of events cannot be read") from None


def _find_copies(lake: Lake, before: State, state: State, near: set[str]) -> Copies:
    if not _may_have_copies(lake, state, near):
        return Copies()
    numbers = lake.stored("silver", NUMBERS.name, state)
    doubled = numbers.filter(_is_doubled(numbers))
    # Buckets of these days are checked that have copies on any day, because an earlier run may have chosen among events
    # of other days.
    of_days = numbers.filter(pc.is_in(numbers["dt"].cast(pa.string()), pa.array(sorted(near))))
    checked = MemoryRows.of(numbers)
    for buckets in (_buckets(doubled), _buckets(of_days)):
        checked = checked.join(buckets, _BUCKET, "left_semi")
    search = _Search(lake, before)
    search.check_days(checked.table(NUMBERS.schema))
    dropped: dict[str, pa.Array] = {}
    with_copies: dict[str, set[str]] = {}
    replace_counted = False
    for day in sorted(near):
        buckets = _buckets(rows_of_day(doubled, day))
        for family in FAMILIES if buckets.count_rows else ():
            found, replaces = search.copies(family, day, buckets)
            if found:
                dropped |= found
                with_copies.setdefault(family, set()).add(day)
                replace_counted |= replaces
    return Copies(dropped, with_copies, replace_counted)


def _may_have_copies(lake: Lake, state: State, days: Iterable[str]) -> bool:
    some = set(days)
    numbers = lake.stored("silver", NUMBERS.name, state, some)
    if pc.any(_is_doubled(numbers)).as_py():
        return True
    # Rows of a view may be stored for a day because of copies on another day.
    return any(not lake.stored_days(name, state).isdisjoint(some) for name in VIEWS)


def _is_doubled(numbers: pa.Table) -> pa.Array:
    return pc.greater(numbers["events"], numbers["distinct_events"])


def _buckets(numbers: pa.Table) -> MemoryRows:
    return MemoryRows.of(numbers.select(_BUCKET)).distinct()


@dataclass(frozen=True)
class _Numbered:
    """Events of some buckets.

    :ivar files: files that contain the events. Files whose events were counted by a run come first.
    :ivar rows: identity of each event, the place of its file in ``files``, and the number of its row in this file.
    """

    files: Sequence[File]
    rows: pa.Table


class _Search:
    """Search in the files of bronze."""

    def __init__(self, lake: Lake, before: State) -> None:
        self._before = before
        self._bronze = lake.table("", "bronze")
        self._storage: pafs.FileSystem = self._bronze.reading_storage()

    def check_days(self, numbers: pa.Table) -> None:
        """Check that no number of the buckets belongs to events of different days.

        :param numbers: rows of the table ``numbers`` of these buckets.
        :raises NotInMemory: a number does.
        """
        ranges: dict[tuple[str, ...], list[tuple[int, int, str]]] = {}
        for row in numbers.to_pylist():
            bucket = tuple(row[name] for name in _BUCKET)
            ranges.setdefault(bucket, []).append((row["first"], row["last"], str(row["dt"])))
        overlapping: dict[str, list[tuple[str, ...]]] = {}
        for bucket, found in ranges.items():
            found.sort()
            # A process numbers its events in the order of time. So the ranges of successive days usually do not
            # overlap, and the numbers need not be read.
            overlap = any(one[1] >= other[0] for one, other in pairwise(found))
            if overlap:
                for _, _, day in found:
                    overlapping.setdefault(day, []).append(bucket)
        for family in FAMILIES if overlapping else ():
            of_days = [
                self._numbered(family, day, _of_tuples(some)).rows.select(_IDENTITY)
                for day, some in overlapping.items()
            ]
            distinct = [rows.take(Groups.of(_columns(rows), rows.num_rows).first) for rows in of_days]
            every = pa.concat_tables(distinct).unify_dictionaries()
            if every.num_rows and len(Groups.of(_columns(every), every.num_rows).first) < every.num_rows:
                raise NotInMemory("only Spark chooses among events of different days that have the same number")

    def copies(self, family: str, day: str, buckets: MemoryRows) -> tuple[dict[str, pa.Array], bool]:
        """Return the copies of a family and day to leave out, and whether an event that no run has counted replaces
        one that a run has counted.

        :param buckets: buckets with copies.
        """
        numbered = self._numbered(family, day, buckets)
        rows = numbered.rows
        if not rows.num_rows:
            return {}, False
        number = key_numbers(_columns(rows.select(_IDENTITY)), nulls=True)
        counts = pc.value_counts(number).field("counts")
        is_several = pc.greater(counts.take(number), 1)
        rows, number = rows.filter(is_several), number.filter(is_several)
        if not rows.num_rows:
            return {}, False
        if rows.num_rows > MAX_COPIES:
            raise NotInMemory("only Spark chooses among so many copies")
        groups = Groups.of([number], rows.num_rows)
        dropped = choose(self._contents(numbered.files, rows), groups)
        place = rows["place"].combine_chunks()
        found = {}
        for one in pc.unique(place.filter(dropped)).to_pylist():
            own = pc.and_(dropped, pc.equal(place, one))
            found[numbered.files[one].path] = rows["row"].combine_chunks().filter(own)
        is_new = pa.array([bool(unrefined(file, self._before.batches)) for file in numbered.files]).take(place)
        groups_of_new = groups.number.filter(pc.and_(is_new, pc.invert(dropped)))
        is_replaced = pc.and_(pc.and_(dropped, pc.invert(is_new)), pc.is_in(groups.number, groups_of_new))
        return found, bool(pc.any(is_replaced).as_py())

    def _numbered(self, family: str, day: str, buckets: MemoryRows) -> _Numbered:
        """Return the events of some buckets."""
        producers = pc.unique(buckets.column("producer"))
        files = [
            file
            for file in self._bronze.files()
            if file.values["family"] == family
            and file.values["dt"] == day
            and self._bronze.search.texts.can_contain(file.path, "producer", producers)
        ]
        files.sort(key=lambda file: bool(unrefined(file, self._before.batches)))
        found = [_NUMBERED.empty_table()]
        count = 0
        for place, file in enumerate(files):
            end = 0
            for rows in read_columns(self._storage, file, _IDENTITY, MEMORY_BYTES):
                start, end = end, end + rows.num_rows
                events = as_frame(rows_as_read(rows.append_column("row", pa.arange(start, end))))
                events = events.withColumn("bucket", F.floor(F.col("seq") / bronze.BUCKET_SIZE))
                own = as_rows(events.join(as_frame(buckets), list(_BUCKET), "left_semi"))
                if not own.count_rows:
                    continue
                count += own.count_rows
                if count > MAX_COMPARED_EVENTS:
                    raise NotInMemory("only Spark compares the numbers of so many events")
                columns = {name: own.getters[name].encoded() for name in (*_IDENTITY, "row")}
                columns["place"] = pa.repeat(pa.scalar(place, pa.int64()), own.count_rows)
                texts = {
                    name: values if pa.types.is_dictionary(values.type) else values.dictionary_encode()
                    for name, values in columns.items()
                    if name in ("producer", "boot")
                }
                found.append(pa.table(columns | texts).select(_NUMBERED.names).cast(_NUMBERED))
        return _Numbered(files, pa.concat_tables(found).unify_dictionaries().combine_chunks())

    def _contents(self, files: Sequence[File], rows: pa.Table) -> pa.Table:
        """Return the events themselves.

        :param rows: as in :class:`_Numbered`.
        """
        names = EVENT.fieldNames()
        found = []
        for place in pc.unique(rows["place"]).to_pylist():
            own = rows["row"].combine_chunks().filter(pc.equal(rows["place"].combine_chunks(), place))
            end = 0
            for part in read_columns(self._storage, files[place], names, MEMORY_BYTES):
                start, end = end, end + part.num_rows
                is_here = pc.and_(pc.greater_equal(own, start), pc.less(own, end))
                chosen = part.take(pc.subtract(own.filter(is_here), start))
                found.append(pa.table({name: plain(chosen[name].combine_chunks()) for name in chosen.column_names}))
        return pa.concat_tables(found, promote_options="default").combine_chunks()


_TEXT = pa.dictionary(pa.int32(), pa.string())
_NUMBERED = pa.schema(
    [("producer", _TEXT), ("boot", _TEXT), ("seq", pa.int64()), ("row", pa.int64()), ("place", pa.int64())]
)


def _columns(rows: pa.Table) -> list[pa.Array]:
    return [rows[name].combine_chunks() for name in rows.column_names]


def _of_tuples(buckets: Iterable[tuple[str, ...]]) -> MemoryRows:
    columns = zip(*buckets, strict=True)
    return MemoryRows.of(pa.table(dict(zip(_BUCKET, (pa.array(one) for one in columns), strict=True))))


def choose(events: pa.Table, groups: Groups) -> pa.Array:
    """Return for each event whether it is left out. One event of each group stays. Of equal events, the first stays.

    :param events: events with columns of ``schemas.EVENT``.
    """
    count = events.num_rows
    first = groups.first.take(groups.number)
    alike = pa.repeat(pa.scalar(True, pa.bool_()), count)
    for name in events.column_names:
        alike = pc.and_(alike, _are_alike(events[name].combine_chunks(), first))
    dropped = pc.not_equal(pa.arange(0, count), first)
    if pc.all(alike).as_py():
        return dropped
    differing = pc.unique(groups.number.filter(pc.invert(alike)))
    places = pc.indices_nonzero(pc.is_in(groups.number, differing))
    best: dict[int, tuple[bytes, int]] = {}
    for place, group, event in zip(
        places.to_pylist(), groups.number.take(places).to_pylist(), events.take(places).to_pylist(), strict=True
    ):
        one = (bronze.text_of_copy(event), place)
        best[group] = min(best.get(group, one), one)
    stay = pa.array([place for _, place in best.values()], pa.int64())
    return pc.if_else(pc.is_in(groups.number, differing), pc.invert(pc.is_in(pa.arange(0, count), stay)), dropped)


def _are_alike(values: pa.Array, first: pa.Array) -> pa.Array:
    """Return for each value whether it equals the value in the row that ``first`` states for it. NULL equals NULL."""
    others = values.take(first)
    if pa.types.is_list(values.type):
        return pa.array([one == other for one, other in zip(values.to_pylist(), others.to_pylist(), strict=True)])
    both_null = pc.and_(pc.is_null(values), pc.is_null(others))
    return pc.or_(pc.fill_null(pc.equal(values, others), FALSE), both_null)
