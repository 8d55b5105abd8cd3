"""Choice of the days for which a run computes each table again.

A run computes a table for a day only if an input of the table has changed. Inputs are families of events and other
tables. The run knows for which days each family has new events. It also compares the rows of each small table that it
has computed with the stored rows. If they are equal, tables that are made from this small table need not be computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import date, timedelta

import pyarrow as pa
import pyarrow.compute as pc

ENDS = "ends"
"""Name of an input in ``_INPUTS``: the times of the first and last event of each process."""
OBSERVED = "observed"
"""Name of an input in ``_INPUTS``: the first and last minute with events of each day."""
COMPARED_ROWS = 20_000
"""Maximum number of rows of one table and day to compare with the stored rows. More rows count as changed."""
_INPUTS: dict[str, tuple[str, ...]] = {
    "transports": ("transport",),
    "heartbeats": ("beat",),
    "refusals": ("refusal",),
    "entries": ("entry",),
    "receipts": ("receipt",),
    "sessions": ("session", "life", ENDS),
    "boots": ("life", "beat", ENDS),
    "unfinished": ("transport", "receipt", "verdicts"),
    **dict.fromkeys(("traffic_hour", "close_day", "pair_day", "latency_hour"), ("transport",)),
    "latency_day": ("latency_hour",),
    "session_day": ("sessions",),
    "server_hour": ("beat", "entry"),
    "minute_day": ("server_hour", OBSERVED),
    "settlement_day": ("verdicts",),
    "settlement_conflict_day": ("verdicts",),
    "refusal_hour": ("refusal",),
    "refusal_day": ("refusal",),
    "abuse_day": ("refusal", "transport", "entry"),
    "clock_day": ("entry",),
    "discovery_hour": ("entry", "refusal"),
    "capacity_day": ("server_hour", "refusal"),
    "network_day": ("traffic_hour", "session_day", "sessions", "refusal_hour", "settlement_day", "latency_hour"),
    "boot": ("boots", "lost_transport"),
    "uptime_day": ("minute_day", "boots", "clock_day"),
    "lost_transport": ("unfinished", "boots"),
    "actor": ("abuse_day", "boots"),
    "quality_day": ("numbers",),
    "capacity_forecast": ("capacity_day",),
    "placement": ("uptime_day", "capacity_day", "latency_day", "settlement_day"),
    "public_day": ("network_day",),
}
"""Inputs from which a table's rows of a day are computed, by table. An input is a family of events, another table,
:data:`ENDS` or :data:`OBSERVED`."""
_INPUTS_AROUND: dict[str, tuple[str, ...]] = {
    "verdicts": ("transport", "receipt"),
    "settlement_conflict_day": ("receipt",),
}
"""Inputs of which a table's rows of a day use the data of three days: the day before, the day itself and the day after.
By table."""


class Changes:
    """Days on which each family of events and each table has changed.

    :param days: days that the run refines.
    :param families: days that have new events, by family of events.
    """

    def __init__(self, days: Iterable[str], families: Mapping[str, Iterable[str]]) -> None:
        self._days = set(days)
        self._changed = {family: set(some) for family, some in families.items()}

    def note(self, name: str, days: Iterable[str]) -> None:
        """Record that a table, or another input, has changed on these days."""
        self._changed[name] = set(days)

    def note_everything(self) -> None:
        """Record that the following inputs have changed on every day of the run: each family of events, :data:`ENDS`,
        :data:`OBSERVED`, and each table whose own inputs are not in ``_INPUTS``."""
        for inputs in (*_INPUTS.values(), *_INPUTS_AROUND.values()):
            self._changed |= {name: set(self._days) for name in inputs if name not in _INPUTS}

    def days_of(self, name: str) -> tuple[str, ...]:
        """Return the days for which a table has to be computed again."""
        found: set[str] = set()
        for one in _INPUTS.get(name, ()):
            found |= self._changed.get(one, set())
        for one in _INPUTS_AROUND.get(name, ()):
            found |= set(days_around(self._changed.get(one, ())))
        return tuple(sorted(found & self._days))

    def has_changed(self, name: str) -> bool:
        """Whether an input of a table has changed on any day."""
        return any(self._changed.get(one) for one in _INPUTS[name])


def days_around(days: Iterable[str]) -> list[str]:
    """Return these days, and for each of them the day before and the day after."""
    return sorted({str(date.fromisoformat(day) + timedelta(step)) for day in days for step in (-1, 0, 1)})


def rows_of_day(rows: pa.Table, day: str) -> pa.Table:
    """Return the rows of a day."""
    return rows.filter(pc.equal(rows["dt"].cast(pa.date32()), pa.scalar(date.fromisoformat(day), pa.date32())))


def are_equal(one: pa.Table, other: pa.Table) -> bool:
    """Whether two tables contain the same rows, in any order. Tables of more than :data:`COMPARED_ROWS` rows count as
    different."""
    if one.num_rows != other.num_rows or one.num_rows > COMPARED_ROWS:
        return False
    return sorted(map(repr, one.to_pylist())) == sorted(map(repr, other.to_pylist()))


def changed_ends(before: pa.Table, after: pa.Table, last_day: str) -> tuple[set[str], set[str]]:
    """Compare old and new rows of the table ``numbers``. Return two sets of days: those on which :data:`ENDS` has
    changed, and those on which :data:`OBSERVED` has changed.

    If a process has no stored rows for a day, :data:`ENDS` does not count as changed on that day because of this
    process. All events of the process on that day are new, and new events cause the tables of the day to be computed
    again anyway.

    :param before: stored rows.
    :param after: rows that replace the stored rows.
    :param last_day: last day that has events. If its newest event has changed, it is a day on which :data:`ENDS` has
        changed. The reason is that the time of the newest event decides which processes count as ended.
    """
    old, new = (_ends(rows) for rows in (before, after))
    ends = {str(key[2]) for key, found in old.items() if new.get(key) != found}
    old, new = (_by_keys(rows, ["dt"]) for rows in (before, after))
    observed = set()
    for key in old.keys() | new.keys():
        one, other = old.get(key), new.get(key)
        if one is None or other is None or [time // 60_000 for time in one] != [time // 60_000 for time in other]:
            observed.add(str(key[0]))
        if str(key[0]) == last_day and one != other:
            ends.add(last_day)
    return ends, observed


def producers_with_changed_ends(before: pa.Table, after: pa.Table) -> list[str]:
    """Return the producers with a process whose first or last event of a day has another time than before.

    :param before: stored rows of the table ``numbers``.
    :param after: rows that replace the stored rows.
    """
    old, new = (_ends(rows) for rows in (before, after))
    return sorted({str(key[0]) for key in old.keys() | new.keys() if old.get(key) != new.get(key)})


def newest_event(numbers: pa.Table, day: str) -> int | None:
    """Return the time of the newest event of a day, in ms since 1970; None if the day has no events.

    :param numbers: rows of the table ``numbers``.
    """
    found: int | None = pc.max(rows_of_day(numbers, day)["last_ts"]).as_py()
    return found


def _ends(numbers: pa.Table) -> dict[tuple[object, ...], list[int]]:
    return _by_keys(numbers, ["producer", "boot", "dt"])


def _by_keys(rows: pa.Table, keys: list[str]) -> dict[tuple[object, ...], list[int]]:
    """Return the times of the first and last event of each combination of keys."""
    times = [("first_ts", "min"), ("last_ts", "max")]
    found = rows.group_by(keys).aggregate(times)
    columns = [found[name].to_pylist() for name in (*keys, *(f"{name}_{what}" for name, what in times))]
    return {row[: len(keys)]: list(row[len(keys) :]) for row in zip(*columns, strict=True)}
