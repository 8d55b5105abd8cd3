"""Recent events of an entity as text, for its status page. They are derived from the entity's facts and counters. No
I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from dmsg.base.units import human_time
from dmsg.pages.model import BAD, Fact

MAX_CHANGES = 50
"""Maximum number of events that report a changed fact. In addition, there is at most one event for each reason."""
BURST_GAP = 30.0
"""Seconds after the last occurrence of a reason, after which the next occurrence begins a new burst."""


class RecentEvents:
    """Recent events: changes of facts, and bursts of refusals, drops and ends.

    Each reason has at most one event. Otherwise a stranger could displace all other events by causing the same one
    repeatedly.
    """

    def __init__(self) -> None:
        self._changes: deque[tuple[float, str]] = deque(maxlen=MAX_CHANGES)
        self._facts: dict[str, str] | None = None
        self._reasons: dict[str, float] = {}
        self._bursts: dict[str, tuple[float, float, float]] = {}
        """Last burst of each reason: time of its first and of its last occurrence, and the number of occurrences."""

    @property
    def events(self) -> list[tuple[float, str]]:
        """Events as (Unix time, text), the newest last. The time of a burst is that of its last occurrence."""
        bursts = [
            (last, f"{reason.replace('_', ' ')}: {number:.0f}{_within(last - began)}")
            for reason, (began, last, number) in self._bursts.items()
        ]
        return sorted([*self._changes, *bursts])

    def update(self, now: float, facts: Sequence[Fact], reasons: Mapping[str, float]) -> None:
        """Compare facts and reasons with those of the previous call, and record the changes as events.

        :param now: Unix time.
        :param reasons: number of occurrences of each reason since the start.
        """
        told = {fact.label: fact.value for fact in facts if fact.is_event}
        first = self._facts is None
        for label, value in told.items():
            before = (self._facts or {}).get(label)
            if before is not None and before != value:
                self._changes.append((now, f"{label}: {value} (was {before})"))
        self._facts = told
        for reason, count in reasons.items():
            grown = count - self._reasons.get(reason, 0.0)
            self._reasons[reason] = count
            if grown > 0 and not first:
                began, last, number = self._bursts.get(reason, (now, now, 0.0))
                if now - last > BURST_GAP:
                    began, number = now, 0.0
                self._bursts[reason] = began, now, number + grown


def _within(seconds: float) -> str:
    return f" in {human_time(seconds)}" if seconds > 0 else ""


def worst_first(facts: Sequence[Fact]) -> list[Fact]:
    """Return the facts in an order with the bad facts first."""
    return sorted(facts, key=lambda fact: fact.level != BAD)
