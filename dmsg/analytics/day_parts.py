"""Division of days into parts that a run computes in memory together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

PART_ROWS = 1_000_000
"""Number of events of successive days that are computed in memory together. A run over more events computes the days
in parts, so that its memory does not grow with the number of days."""
BASE_BYTES = 256 * 1024 * 1024
"""Bytes of memory of a run without events."""
EVENT_BYTES = 1024
"""Bytes of memory for each event of a part."""
USED_SHARE = 0.8
"""Share of the memory of a process that a run may use. The rest is for differences between events."""


def part_rows(memory: int) -> int:
    """Return the number of events in a part for a process that may use ``memory`` bytes."""
    room = int(memory * USED_SHARE) - BASE_BYTES
    return max(1, min(PART_ROWS, room // EVENT_BYTES))


def day_parts(days: Iterable[str], events: Mapping[str, int], rows: int) -> list[tuple[str, ...]]:
    """Divide days into parts of about ``rows`` events, of at least one day each."""
    parts: list[list[str]] = []
    count = 0
    for day in sorted(days):
        if not parts or count + events.get(day, 0) > rows:
            parts.append([])
            count = 0
        parts[-1].append(day)
        count += events.get(day, 0)
    return [tuple(part) for part in parts]
