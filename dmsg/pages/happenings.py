"""What happened lately, in words: told from what an entity counts, so that no stranger can fill it.  No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from dmsg.pages.model import BAD, Fact

KEPT = 50
"""Events that are kept."""
QUIET = 30.0
"""Seconds in which the same reason is one event, with the sum."""


class Happenings:
    """The newest last.

    :ivar events: (Unix time, text).
    """

    def __init__(self) -> None:
        self.events: deque[tuple[float, str]] = deque(maxlen=KEPT)
        self._facts: dict[str, str] | None = None
        self._reasons: dict[str, float] = {}
        self._told: dict[str, tuple[float, float]] = {}

    def look(self, now: float, facts: Sequence[Fact], reasons: Mapping[str, float]) -> None:
        """Compare with the look before."""
        told = {fact.label: fact.value for fact in facts if fact.told}
        first = self._facts is None
        for label, value in told.items():
            before = (self._facts or {}).get(label)
            if not first and before is not None and before != value:
                self.events.append((now, f"{label}: {value} (was {before})"))
        self._facts = told
        for reason, count in reasons.items():
            grown = count - self._reasons.get(reason, 0.0)
            self._reasons[reason] = count
            if grown > 0 and not first:
                self._tell(now, reason, grown)

    def _tell(self, now: float, reason: str, number: float) -> None:
        began, so_far = self._told.get(reason, (-QUIET, 0.0))
        text = reason.replace("_", " ")
        if now - began < QUIET:
            # the event that there is says the sum
            before = (began, _counted(text, so_far))
            number += so_far
            if before in self.events:
                self.events.remove(before)
            now = began
        self._told[reason] = (now, number)
        self.events.append((now, _counted(text, number)))


def _counted(text: str, number: float) -> str:
    return f"{text}: {number:.0f}"


def worst_first(facts: Sequence[Fact]) -> list[Fact]:
    """Bad ones before others."""
    return sorted(facts, key=lambda fact: fact.level != BAD)
