"""Coverage of random walks: in which states of streams each fault and each lie has happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from dmsg.streams.carrier import ClientStream
from dmsg.testing.promise import Talker

STATES = ("opening", "idle", "in flight", "paused", "moving", "suspended", "closing")
"""States of a stream's end, in the order of the table's columns."""
FIRST_COLUMN = 32
"""Width of the column with the names of faults and lies, in characters."""
COLUMN = 11
"""Width of each other column, in characters."""


def state_of(talker: Talker) -> str | None:
    """Return the state of one end of a stream, one of :data:`STATES`; None if the end has no stream any more."""
    stream = talker.transport
    if stream is None:
        return "opening"
    if not isinstance(stream, ClientStream) or stream.has_ended or stream.end is None:
        return None
    end = stream.end
    states = {
        "closing": stream.disconnecting,
        "moving": end.unproven is not None or end.answers,
        "suspended": end.transport is None,
        "paused": stream._paused,  # noqa: SLF001  # Only the stream itself knows whether its application reads.
        "in flight": end.in_flight,
    }
    return next((state for state, present in states.items() if present), "idle")


class WalkCoverage:
    """Counts of faults and lies, by the states of the streams in which they happened.

    :param kinds: names of all faults and lies that can happen.
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        self._kinds = tuple(dict.fromkeys(kinds))
        self._counts: Counter[tuple[str, str]] = Counter()

    def note(self, kind: str, talkers: Iterable[Talker]) -> None:
        """Count a fault or lie once for each state that is present among these ends of streams."""
        for state in {state_of(talker) for talker in talkers}:
            if state is not None:
                self._counts[kind, state] += 1

    def add(self, other: WalkCoverage) -> None:
        """Add the counts of another walk."""
        self._counts += other._counts

    @property
    def missing(self) -> list[tuple[str, str]]:
        """Pairs of a fault or lie and a state that have not happened together."""
        return [(kind, state) for kind in self._kinds for state in STATES if not self._counts[kind, state]]

    def table(self) -> str:
        """Return the counts as a table: a line for each fault and lie, and a column for each state."""
        lines = [" " * FIRST_COLUMN + "".join(f"{state:>{COLUMN}}" for state in STATES)]
        for kind in self._kinds:
            counts = "".join(f"{self._counts[kind, state] or '-':>{COLUMN}}" for state in STATES)
            lines.append(f"{kind:{FIRST_COLUMN}}{counts}")
        return "\n".join(lines) + "\n"
