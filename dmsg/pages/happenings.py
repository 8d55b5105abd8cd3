"""What happened lately, in words: told from what an entity counts, so that no stranger can fill it.  No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from dmsg.base.units import human_time
from dmsg.pages.model import BAD, Fact

KEPT = 50
"""Changes of facts that are kept; of each reason its newest event."""
QUIET = 30.0
"""Seconds without more of it after which the same reason is another event."""


class Happenings:
    """Changes of facts; what was refused, dropped or ended: each reason once, or strangers would push out the rest."""

    def __init__(self) -> None:
        self._changes: deque[tuple[float, str]] = deque(maxlen=KEPT)
        self._facts: dict[str, str] | None = None
        self._reasons: dict[str, float] = {}
        self._bursts: dict[str, tuple[float, float, float]] = {}
        """By reason: when it began, when it was seen last, how many."""

    @property
    def events(self) -> list[tuple[float, str]]:
        """(Unix time, text), the newest last; of what came again and again the time is that of the last."""
        bursts = [
            (last, f"{reason.replace('_', ' ')}: {number:.0f}{_within(last - began)}")
            for reason, (began, last, number) in self._bursts.items()
        ]
        return sorted([*self._changes, *bursts])

    def look(self, now: float, facts: Sequence[Fact], reasons: Mapping[str, float]) -> None:
        """Compare with the look before."""
        told = {fact.label: fact.value for fact in facts if fact.told}
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
                if now - last > QUIET:
                    began, number = now, 0.0
                self._bursts[reason] = began, now, number + grown


def _within(seconds: float) -> str:
    return f" in {human_time(seconds)}" if seconds > 0 else ""


def worst_first(facts: Sequence[Fact]) -> list[Fact]:
    """Bad ones before others."""
    return sorted(facts, key=lambda fact: fact.level != BAD)
