"""Computation of the tables in which a run replaces only the rows that its new events affect.

Each table is computed by one of three methods, with the rules of :mod:`dmsg.analytics.table_plans`:

* *by groups*: a row depends on one group of events. The rows of the groups that have new events are computed again,
  from all events of these groups;
* *by verdicts*: as by groups, but the group of a stored row is unknown, because a stored verdict does not name its
  transport. So the former verdicts on the affected transports are computed from the old events. Stored rows that equal
  these former verdicts are removed;
* *by sums*: numbers computed from the new events alone are added to the numbers of the stored rows of the same
  servers.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache, cached_property

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from dmsg.analytics import bronze, functions as F, silver
from dmsg.analytics.affected_rows import (
    MAX_NEW_EVENTS,
    MAX_STORED_ROWS,
    Groups,
    Subtraction,
    WholeDays,
    event_schema,
    find_events,
    find_rows,
    read_events,
)
from dmsg.analytics.changes import days_around, newest_event, producers_with_changed_ends
from dmsg.analytics.data_files import File
from dmsg.analytics.file_columns import Budget, Dropped
from dmsg.analytics.file_texts import server_column
from dmsg.analytics.gold import abuse, traffic
from dmsg.analytics.lake import Lake
from dmsg.analytics.memory_tables import (
    MEMORY_BYTES,
    MEMORY_ROWS,
    OF_EVENTS,
    all_events,
    as_frame,
    as_rows,
    rows_of_table,
)
from dmsg.analytics.parquet import arrow_schema
from dmsg.analytics.rewrites import Rewrite, find_groups, find_rewrites
from dmsg.analytics.runs import State
from dmsg.analytics.schemas import BRONZE, FAMILIES, OF_TRANSPORTS, SILVER
from dmsg.analytics.store import NUMBERS, SUMS, unrefined
from dmsg.analytics.table_plans import Tables, daily_tables, silver_tables
from dmsg.analytics.views import VIEWS

IDENTITY = ("producer", "boot", "seq", "ts", "mono", "dt")
"""Columns that identify and number an event."""
VERDICTS_AT_ONCE = 500_000
"""Average number of verdicts that are read into memory at once. Arrow groups the rows of small parts faster."""
_PAIR = ("producer", "src", "dst")
_PAIR_SCHEMA = StructType([one for one in BRONZE.fields if one.name in _PAIR])
_TRANSPORT = ("server", "transport")
_BY_GROUPS = {"pair_day": ("server", "src", "dst")}
_SUMS_OF: dict[str, Callable[[DataFrame, DataFrame], DataFrame]] = {
    "traffic_hour": traffic.add_traffic_hour,
    "close_day": traffic.add_close_day,
    "latency_hour": traffic.add_latency_hour,
}
"""Functions that add the numbers of new transport events to stored rows, by table."""
TABLES = (
    "sessions",
    "verdicts",
    "unfinished",
    "settlement_day",
    "settlement_conflict_day",
    "abuse_day",
    *_BY_GROUPS,
    *_SUMS_OF,
)
"""Tables that this module computes."""


@dataclass(frozen=True)
class Rows:
    """Rows of a table to write.

    :ivar rewrites: files that contain stored rows which the new rows replace; None if the new rows replace all stored
        rows of the days.
    """

    rows: pa.Table
    rewrites: Sequence[Rewrite] | None = None


@dataclass(frozen=True)
class _Words:
    """Events and receipts of the transports whose rows the new events change.

    :ivar old: events and receipts that earlier runs have read, by family of events.
    :ivar all: the old and the new events and receipts together, by family of events.
    """

    old: Mapping[str, DataFrame]
    all: Mapping[str, DataFrame]


class AffectedTables:
    """Computes the rows of tables in which the new events of a run affect few rows.

    A method raises :class:`~dmsg.analytics.affected_rows.WholeDays` if the table has to be computed for whole days.

    :param before: state that the newest finished run left; the tables still have this state.
    :param state: state that the run will leave.
    """

    def __init__(self, lake: Lake, before: State, state: State) -> None:
        self._lake = lake
        self._before = before
        self._state = state
        self._last_day = date.fromisoformat(max(state.days))
        self._bronze = lake.table("", "bronze")
        self._dropped: Dropped | None = None
        self._verdict_days: tuple[str, ...] | None = None
        self._words = cache(self._read_words)
        self._client_events = cache(self._read_client_events)
        self._verdicts = cache(self._compute_verdicts)

    def leave_out(self, dropped: Dropped) -> None:
        """Leave out copies of events when tables are computed. The numbers of events must have been counted before,
        because they include the copies.

        :param dropped: the copies on the days of the run and on the days around them.
        """
        self._dropped = dropped
        for family in FAMILIES:
            files = self._files(family, self._state.days, new=True)
            if any(file.path in dropped for file in files):
                self._new_events[family] = read_events(self._bronze, files, family, dropped)

    # --- events ---

    def _files(self, family: str, days: Iterable[str], *, new: bool | None = None) -> list[File]:
        """Return the files of bronze with events of one family on these days.

        :param new: True for the files that no run has refined yet, False for the others, None for both.
        """
        chosen = set(days)
        return [
            file
            for file in self._bronze.files()
            if file.values["family"] == family
            and file.values["dt"] in chosen
            and new in (None, bool(unrefined(file, self._before.batches)))
        ]

    def _events(
        self,
        family: str,
        days: Iterable[str],
        groups: Groups | None = None,
        *,
        new: bool | None = None,
        partial_days: Container[str] = (),
    ) -> DataFrame:
        """Return the events of one family on these days.

        :param groups: return only events of these groups; None for all events.
        :param new: as for :meth:`_files`.
        :param partial_days: as for :func:`~dmsg.analytics.affected_rows.find_events`.
        """
        files = self._files(family, days, new=new)
        budget = Budget(MEMORY_BYTES)
        return as_frame(find_events(self._bronze, files, family, groups, budget, partial_days, self._dropped))

    @property
    def has_few_events(self) -> bool:
        """Whether the new events are so few that only the affected rows can be computed."""
        try:
            return bool(self._new_events)
        except WholeDays:
            return False

    @cached_property
    def _new_events(self) -> dict[str, pa.Table]:
        """Events that no run has refined yet, by family of events."""
        files = {family: self._files(family, self._state.days, new=True) for family in FAMILIES}
        counts = [file.rows for some in files.values() for file in some]
        if sum(MAX_NEW_EVENTS + 1 if count is None else count for count in counts) > MAX_NEW_EVENTS:
            raise WholeDays
        return {family: read_events(self._bronze, some, family, {}) for family, some in files.items()}

    def _stored_rows(self, layer: str, name: str, days: Iterable[str]) -> pa.Table:
        chosen = set(days)
        files = self._lake.table(layer, name).files(self._before.versions.get(f"{layer}/{name}"))
        if (
            sum(MAX_STORED_ROWS if one.rows is None else one.rows for one in files if one.values["dt"] in chosen)
            > MAX_STORED_ROWS
        ):
            raise WholeDays
        return self._lake.stored(layer, name, self._before, days)

    # --- numbers of events ---

    def sums(self, days: Iterable[str]) -> pa.Table:
        """Return the rows of the table ``sums`` for these days."""
        schema = SUMS.schema
        added = bronze.add_sums(
            rows_of_table(self._stored_rows("silver", SUMS.name, days), schema),
            bronze.sums(self._new_identities()),
        )
        return as_rows(added).table(schema)

    def _new_identities(self) -> DataFrame:
        """Return the columns that identify and number the new events of all families."""
        parts = [rows_of_table(rows, event_schema(family)) for family, rows in self._new_events.items()]
        return all_events(parts, IDENTITY)

    def numbers(self, sums: pa.Table, days: Iterable[str]) -> pa.Table:
        """Return the rows of the table ``numbers`` for these days.

        :param sums: rows of the table ``sums`` for the same days.
        """
        keys = ["producer", "boot", "bucket", "dt"]
        stored = self._stored_rows("silver", NUMBERS.name, days)
        # The rows of a process and day that have new events are computed again. All other rows stay.
        groups = Groups(("producer", "boot", "dt"), self._new_events.values())
        affected = sums.filter(groups.contains(sums))
        frame = rows_of_table(affected, SUMS.schema)
        incomplete = _rows_of(bronze.incomplete_sums(frame), SUMS.schema)
        events = None
        if incomplete.num_rows:
            known = {tuple(row.values()) for row in stored.select(keys).to_pylist()}
            if any(tuple(row.values()) in known for row in incomplete.select(keys).to_pylist()):
                of_processes = Groups(("producer", "boot"), [incomplete])
                events = all_events([self._events(family, days, of_processes) for family in FAMILIES], IDENTITY)
            else:
                events = self._new_identities()
        counted = _rows_of(bronze.numbers(frame, events), NUMBERS.schema)
        return pa.concat_tables([stored.filter(pc.invert(groups.contains(stored))), counted])

    # --- tables ---

    def rows(self, name: str, days: tuple[str, ...]) -> Rows:
        """Return the new rows of a table for these days.

        :param name: one of :data:`TABLES`, or a view without keys whose rows are stored for these days.
        """
        if name in VIEWS:
            return self._view(name, days)
        of_table = {
            "sessions": self._sessions,
            "verdicts": self._replaced_verdicts,
            "settlement_day": self._settlement_day,
            "abuse_day": self._abuse_day,
        }
        if name in of_table:
            return of_table[name](days)
        if name in _SUMS_OF:
            return self._by_sums(name, days)
        if name in _BY_GROUPS:
            return self._by_groups(name, days)
        if self._verdict_days is None:
            raise WholeDays
        verdicts = self._verdicts(self._verdict_days)
        chosen = pc.is_in(verdicts["dt"].cast(pa.string()), pa.array(days))
        tables = self._tables(days, self._words(days).all, verdicts.filter(chosen))
        layer = "gold" if name == "settlement_conflict_day" else "silver"
        return self._replace_rows(layer, name, days, tables[name])

    def _view(self, name: str, days: tuple[str, ...]) -> Rows:
        """Return the rows of new events to add to the stored rows of a view."""
        family, table = VIEWS[name].family, self._lake.table("silver", name)
        rows = OF_EVENTS[name](rows_of_table(self._new_events[family], event_schema(family)))
        own = rows.where(F.col("dt").cast("string").isin(list(days)))
        return Rows(_rows_of(own, table.schema), find_rewrites(table, days, None))

    def _sessions(self, days: tuple[str, ...]) -> Rows:
        """Return the sessions of those servers of which a session, a start, or the first or last event of a process
        is new.

        :raises WholeDays: the end of the last day has changed, by which all sessions of this day are judged.
        """
        before, now = (self._lake.stored("silver", NUMBERS.name, one, days) for one in (self._before, self._state))
        last, former_last = str(self._last_day), max(self._before.days)
        if (last != former_last and former_last in days) or newest_event(before, last) != newest_event(now, last):
            raise WholeDays
        changed = pa.table({"producer": pa.array(producers_with_changed_ends(before, now), pa.string())})
        starts = self._new_events["life"].filter(pc.equal(self._new_events["life"]["type"], "start"))
        groups = Groups(("producer",), [changed, starts, self._new_events["session"]])
        events = {family: self._events(family, days, groups) for family in ("session", "life")}
        read = {NUMBERS.name: rows_of_table(now, NUMBERS.schema)}.__getitem__
        plans = silver_tables(events.__getitem__, read, read, days, last_day=self._last_day)
        table = self._lake.table("silver", "sessions")
        return Rows(_rows_of(plans["sessions"](), table.schema), find_groups(table, days, groups.renamed(("server",))))

    def _check_views(self, days: Iterable[str]) -> None:
        """Check that no rows of the views are stored for these days. This class does not read stored rows of views, but
        computes them from the events. Rows are stored only for days on which events arrived twice.

        :raises WholeDays: a view has stored rows, and the copies to leave out are not known.
        """
        if self._dropped is not None:
            return
        for name in VIEWS:
            if not self._lake.stored_days(name, self._state).isdisjoint(days):
                raise WholeDays

    def _read_words(self, days: tuple[str, ...]) -> _Words:
        around = days_around(days)
        partial_days = set(around).difference(days)
        self._check_views(around)
        old, every = {}, {}
        for family in OF_TRANSPORTS:
            groups = self._transports.renamed((server_column(family), "transport"))
            old[family] = self._events(family, around, groups, new=False, partial_days=partial_days)
            new = self._events(family, around, groups, new=True, partial_days=partial_days)
            every[family] = old[family].unionByName(new)
        return _Words(old, every)

    @cached_property
    def _transports(self) -> Groups:
        """Transports with new events or accepted receipts, by server."""
        events = self._new_events["transport"]
        receipts = self._new_events["receipt"]
        receipts = receipts.filter(pc.is_null(receipts["reason"]))
        named = [
            rows.select([server_column(family), "transport"])
            .rename_columns(_TRANSPORT)
            .filter(pc.is_valid(rows["transport"]))
            for family, rows in zip(OF_TRANSPORTS, (events, receipts), strict=True)
        ]
        return Groups(_TRANSPORT, named)

    def _tables(self, days: Sequence[str], events: Mapping[str, DataFrame], verdicts: pa.Table | None = None) -> Tables:
        """Return the plans by which the tables are computed for the affected transports.

        :param events: events and receipts of the affected transports, by family of events.
        :param verdicts: verdicts on these transports, for the tables that are made from verdicts.
        """
        around = {"transports": silver.transports(events["transport"]), "receipts": silver.receipts(events["receipt"])}
        wanted = F.col("dt").cast("string").isin(list(days))
        read = {name: rows.where(wanted) for name, rows in around.items()}
        if verdicts is not None:
            read["verdicts"] = rows_of_table(verdicts, SILVER["verdicts"].schema)
        return {
            **silver_tables(
                events.__getitem__,
                read.__getitem__,
                around.__getitem__,
                days,
                lambda: silver.accepted_receipts(events["receipt"]),
                last_day=self._last_day,
            ),
            **daily_tables(read.__getitem__, around.__getitem__),
        }

    def _compute_verdicts(self, days: tuple[str, ...]) -> pa.Table:
        """Return the verdicts on the affected transports."""
        return _rows_of(self._tables(days, self._words(days).all)["verdicts"](), SILVER["verdicts"].schema)

    def _replaced_verdicts(self, days: tuple[str, ...]) -> Rows:
        schema, old = SILVER["verdicts"].schema, self._words(days).old
        fresh = self._verdicts(days)
        former = arrow_schema(schema).empty_table()
        if not all(rows.isEmpty() for rows in old.values()):
            former = _rows_of(self._tables(days, old)["verdicts"](), schema)
        former_rows = Subtraction(former)
        table = self._lake.table("silver", "verdicts")
        servers = ("server", pc.unique(former["server"]))
        rewrites = find_rewrites(table, days, former_rows.find if former.num_rows else None, among=servers)
        if not former_rows.is_complete:
            # Some of the verdicts that were computed again from the old events are not in the table, because the stored
            # verdicts also depend on events of days that this run does not read. So the rows to remove cannot be found.
            raise WholeDays
        self._verdict_days = days
        return Rows(fresh, rewrites)

    def _settlement_day(self, days: tuple[str, ...]) -> Rows:
        """Return the rows of the servers with new verdicts, computed from all verdicts on these servers."""
        if self._verdict_days is None:
            raise WholeDays
        verdicts, table = self._lake.table("silver", "verdicts"), self._lake.table("gold", "settlement_day")
        files = [file for file in verdicts.files() if file.values["dt"] in days]
        servers = self._transports.first_texts
        # Many verdicts are read in parts, each with those on some of the servers.
        parts = max(1, sum(file.rows or 0 for file in files) // VERDICTS_AT_ONCE)
        found = [arrow_schema(table.schema).empty_table()]
        for part in range(min(parts, len(servers))):
            groups = Groups(("server",), [pa.table({"server": servers[part::parts]})])
            rows = find_rows(verdicts, files, verdicts.schema, groups, Budget(MEMORY_BYTES), MEMORY_ROWS)
            read = {"verdicts": as_frame(rows)}.__getitem__
            found.append(_rows_of(daily_tables(read, read)["settlement_day"](), table.schema))
        groups = Groups(("server",), [pa.table({"server": servers})])
        return Rows(pa.concat_tables(found), find_groups(table, days, groups))

    def _replace_rows(self, layer: str, name: str, days: Sequence[str], plan: Callable[[], DataFrame]) -> Rows:
        """Return new rows that replace the stored rows of the affected transports.

        :param plan: computes the new rows.
        """
        table = self._lake.table(layer, name)
        return Rows(_rows_of(plan(), table.schema), find_groups(table, days, self._transports))

    @cached_property
    def _clients(self) -> Groups:
        """Clients with new requests, by server."""
        return Groups(("producer", "src"), [self._new_events["transport"]])

    def _read_client_events(self, days: tuple[str, ...]) -> DataFrame:
        """Return the transport events of the clients with new requests."""
        return self._events("transport", days, self._clients)

    def _by_groups(self, name: str, days: tuple[str, ...]) -> Rows:
        self._check_views(days)
        groups = Groups(_PAIR, [self._new_events["transport"]])
        try:
            clients = as_rows(self._client_events(days))
            rows = as_frame(clients.chosen(groups.contains(clients.table(_PAIR_SCHEMA))))
        except WholeDays:
            # The clients have too many events, but the pairs have fewer.
            rows = self._events("transport", days, groups)
        events = silver.transports(rows)
        read = {"transports": events}.__getitem__
        tables = daily_tables(read, read)
        table = self._lake.table("gold", name)
        rewrites = find_groups(table, days, groups.renamed(_BY_GROUPS[name]))
        return Rows(_rows_of(tables[name](), table.schema), rewrites)

    def _abuse_day(self, days: tuple[str, ...]) -> Rows:
        """Return the rows of ``abuse_day``. Scores of refusals or of entries are computed again only if there are new
        refusals or entries, and scores of unanswered requests only for the clients of new requests.
        """
        self._check_views(days)
        groups = self._clients
        stored = self._stored_rows("gold", "abuse_day", days)
        former = pc.and_(
            pc.equal(stored["kind"], abuse.UNANSWERED), groups.renamed(("producer", "who")).contains(stored)
        )
        events = {"transport": self._client_events(days)}
        is_churn = pc.equal(stored["kind"], abuse.CHURN)
        of_refusals = pc.invert(pc.or_(is_churn, pc.equal(stored["kind"], abuse.UNANSWERED)))
        for family, scores in (("refusal", of_refusals), ("entry", is_churn)):
            events[family] = rows_of_table(self._new_events[family], event_schema(family))
            if not events[family].isEmpty():
                events[family] = self._events(family, days)
                former = pc.or_(former, scores)
        rows = abuse.abuse_day(
            silver.refusals(events["refusal"]), silver.transports(events["transport"]), silver.entries(events["entry"])
        )
        computed = _rows_of(rows, self._lake.table("gold", "abuse_day").schema)
        return Rows(pa.concat_tables([stored.filter(pc.invert(former)), computed]))

    def _by_sums(self, name: str, days: tuple[str, ...]) -> Rows:
        """Return the rows of the servers with new events."""
        self._check_views(days)
        table = self._lake.table("gold", name)
        schema = table.schema
        groups = Groups(("producer",), [self._new_events["transport"]])
        rewrites = find_groups(table, days, groups.renamed(("server",)))
        stored = pa.concat_tables([arrow_schema(schema).empty_table(), *(one.former for one in rewrites)])
        if (
            name == "traffic_hour"
            and pc.any(pc.and_(pc.equal(stored["bytes"], 0), pc.greater(stored["dropped_bytes"], 0))).as_py()
        ):
            # A server reported more bytes dropped than received. The row's ``bytes`` is stored as 0, because the
            # difference is negative. Adding the new events' bytes to this 0 would give a wrong sum.
            raise WholeDays
        events = rows_of_table(self._new_events["transport"], event_schema("transport"))
        wanted = F.col("dt").cast("string").isin(list(days))
        added = _SUMS_OF[name](rows_of_table(stored, schema), silver.transports(events).where(wanted))
        return Rows(_rows_of(added, schema), rewrites)


def _rows_of(rows: DataFrame, schema: StructType) -> pa.Table:
    return as_rows(rows).table(schema)
