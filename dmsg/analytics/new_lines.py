"""Lines in bronze that no run has refined yet, and the days that a run refines because of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import date, timedelta

from dmsg.analytics.data_files import File
from dmsg.analytics.event_rules import MIDNIGHT_MS
from dmsg.analytics.lake import Lake
from dmsg.analytics.neighbour_days import affected_days
from dmsg.analytics.runs import State
from dmsg.analytics.schemas import DAY_MS, FAMILIES, OF_TRANSPORTS, QUARANTINE
from dmsg.analytics.store import batch_of


@dataclass(frozen=True)
class NewLines:
    """Summary of the lines in bronze that no run has refined yet.

    :ivar batches: number of the last batch of each source.
    :ivar days: days to refine, in order; empty if there are no events.
    :ivar events: number of lines that are events.
    :ivar quarantined: number of lines that are no events.
    :ivar torn_files: number of files with a problem.
    :ivar changed: days that have new events, by family of events.
    """

    batches: dict[str, int]
    days: list[str]
    events: int
    quarantined: int
    torn_files: int = 0
    changed: dict[str, set[str]] = field(default_factory=dict)


def summarise(fresh: Iterable[File], before: State) -> NewLines:
    """Summarise new files of bronze: their batches, days and numbers of lines.

    :param fresh: the files, as the log of bronze describes them.
    """
    batches = dict(before.batches)
    changed: dict[str, set[str]] = {}
    near: set[str] = set()
    lines = quarantined = 0
    for file in fresh:
        for origin, number in batch_of(file):
            batches[origin] = max(batches.get(origin, -1), number)
        family, rows = file.values["family"], file.rows or 0
        if family == QUARANTINE:
            quarantined += rows
        elif family in FAMILIES:
            lines += rows
            day = date.fromisoformat(file.values["dt"])
            changed.setdefault(family, set()).add(str(day))
            if family in OF_TRANSPORTS:
                first, last = (None if time is None else time % DAY_MS for time in (file.first, file.last))
                near |= {str(day - timedelta(1))} if first is None or first < MIDNIGHT_MS else set()
                near |= {str(day + timedelta(1))} if last is None or last >= DAY_MS - MIDNIGHT_MS else set()
    days = {day for some in changed.values() for day in some} | (near & set(before.days))
    return NewLines(batches, sorted(days), lines, quarantined, changed=changed)


def with_day_over(lake: Lake, new_lines: NewLines, before: State) -> NewLines:
    """Add the last day of the earlier runs to the days to refine, if this run has events of a later day and that last
    day has sessions. Sessions that counted as open on that day may now count as lost, because this
    run has the events after midnight.
    """
    own = {day for some in new_lines.changed.values() for day in some}
    last = max(before.days, default=None)
    if last is None or max(own, default=last) <= last:
        return new_lines
    files = lake.table("", "bronze").files()
    if not any(file.values["family"] == "session" and file.values["dt"] == last for file in files):
        return new_lines
    sessions = {*new_lines.changed.get("session", ()), last}
    return replace(new_lines, days=sorted({*new_lines.days, last}), changed={**new_lines.changed, "session": sessions})


def days_to_refine(lake: Lake, new_lines: NewLines, before: State) -> list[str]:
    """Return the days to refine: those with new events, and those of their neighbouring days that the new events
    can change."""
    own = {day for some in new_lines.changed.values() for day in some}
    neighbours = [day for day in new_lines.days if day not in own]
    if not neighbours:
        return new_lines.days
    return sorted(own | affected_days(lake.table("", "bronze"), lake.fresh_files(before.batches), neighbours))
