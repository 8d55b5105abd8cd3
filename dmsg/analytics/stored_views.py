"""Storing of rows of views, for days on which events arrived twice.

A view is computed from events when it is read. Its readers do not know which events are copies. So a run that finds
copies stores the rows of the views for the days of these copies.
"""

from __future__ import annotations

from collections.abc import Sequence

from dmsg.analytics.changes import Changes
from dmsg.analytics.copies import Copies
from dmsg.analytics.lake import Lake
from dmsg.analytics.memory_tables import MemoryTables
from dmsg.analytics.runs import State
from dmsg.analytics.views import VIEWS


class StoredViews:
    """Stored rows of the views of one run.

    :param before: state that the newest finished run left.
    :param state: state that the run will leave.
    :ivar days: days for which this run stores the rows of a view, by view. Empty before :meth:`choose_days`.
    :ivar to_extend: views with stored rows, to which only the rows of new events have to be added if no counted event
        was replaced.
    """

    def __init__(self, lake: Lake, number: int, before: State, state: State) -> None:
        self._lake = lake
        self._number = number
        self._before = before
        self._state = state
        self.days: dict[str, tuple[str, ...]] = {}
        self.to_extend: set[str] = set()

    def choose_days(self, copies: Copies, changes: Changes, days: Sequence[str]) -> None:
        """Choose the days for which rows of views have to be stored, and remove the stored rows of all other days.

        :param days: days of the run.
        """
        for name, view in VIEWS.items():
            of_family = copies.days.get(view.family, ())
            # A row of a view with keys may result from events of several days. So its rows are stored for all days.
            own = {day for day in days if day in of_family or (view.keys and of_family)}
            changed, stored = changes.days_of(name), self._lake.stored_days(name, self._state)
            self._lake.clear(name, self._number, [day for day in days if day not in own])
            self.days[name] = tuple(sorted(day for day in own if day in changed or day not in stored))
            if not view.keys and self._lake.stored_days(name, self._before).issuperset(self.days[name]):
                self.to_extend.add(name)

    def is_stored_by_file(self, name: str) -> bool:
        """Whether the rows of a table are computed and stored by :meth:`store`."""
        return name in self.days and not VIEWS[name].keys

    def store(self, name: str, days: Sequence[str], tables: MemoryTables) -> None:
        """Store the rows of a view without keys for some days. They need not fit into memory.

        :param tables: reader of all days.
        :raises NotInMemory: a file of events is too large.
        """
        rows = {day: tables.view_by_file(name, day) for day in days}
        self._lake.put_by_day(rows, "silver", name, self._number)
