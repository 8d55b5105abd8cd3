"""Coverage of random walks: in which states of streams or entries each fault and each lie has happened, and to whom.

A cell of the table is a kind of fault or lie, a *party* (the role of the host to which it happened), and a state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from typing import NamedTuple, Protocol

from dmsg.testing.plan import Aim

NO_PARTY = ""
"""Name of the party for a fault that happens to no particular host."""
FIRST_COLUMN = 48
"""Width of the column with the names of faults and lies and the parties, in characters."""
COLUMN = 11
"""Width of each column after the first, in characters."""


class Cell(NamedTuple):
    """Cell of the coverage table of walks."""

    kind: str
    party: str
    state: str

    def __str__(self) -> str:
        return f"{self.kind}{f' of {self.party}' if self.party else ''} while {self.state}"


class Place(Protocol):
    """Interface of what has a state at the time of a fault, for example an end of a stream."""

    @property
    def state(self) -> str:
        """State at that time."""

    def party_of(self, host: str) -> str:
        """Return the role of a host."""


def pairs(places: Iterable[Place], hosts: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of a party and a state under which a fault or lie is counted.

    :param hosts: names of the hosts to which it happens; empty if it happens to no particular host.
    """
    for place in places:
        for host in hosts:
            yield place.party_of(host), place.state
        if not hosts:
            yield NO_PARTY, place.state


def hosts_in_role(places: Iterable[Place], state: str, party: str, hosts: Iterable[str]) -> set[str]:
    """Return the names of those of the hosts that have a role at a place in this state.

    :param party: the role; empty for none.
    """
    there = [place for place in places if place.state == state] if party else []
    return {host for host in hosts if any(place.party_of(host) == party for place in there)}


Obstacle = Callable[[str, str, str], str]
"""Function that returns the reason for which a fault or lie can never happen to a party in a state, or an empty string.
Its arguments are the kind of the fault or lie, the party and the state."""


def _anybody(kind: str) -> Sequence[str]:
    return (NO_PARTY,)


def _no_obstacle(kind: str, party: str, state: str) -> str:
    return ""


class WalkCoverage:
    """Counts of faults and lies, by parties, and by the states in which they happened.

    :param kinds: names of all faults and lies that can happen.
    :param states: names of the states, in the order of the table's columns.
    :param parties: function that returns the possible parties of a kind.
    :param obstacle: function that returns why a fault or lie can never happen to a party in a state.
    """

    def __init__(
        self,
        kinds: Sequence[str],
        states: Sequence[str],
        parties: Callable[[str], Sequence[str]] = _anybody,
        obstacle: Obstacle = _no_obstacle,
    ) -> None:
        self._states = tuple(states)
        self._rows = [(kind, party) for kind in dict.fromkeys(kinds) for party in parties(kind)]
        self._obstacle = obstacle
        self._counts: Counter[Cell] = Counter()

    def note_states(self, kind: str, states: Iterable[str]) -> None:
        """Count a fault or lie that happens to no particular host, once for each of these states."""
        self.note(kind, ((NO_PARTY, state) for state in states))

    def note(self, kind: str, places: Iterable[tuple[str, str]]) -> None:
        """Count a fault or lie once for each of ``places``. A fault that needs a host and happened to none is not
        counted.

        :param places: pairs of the party to which the fault or lie happens, and of the state in which it happens.
        """
        for party, state in set(places):
            if not party and (kind, party) not in self._rows:
                continue
            self._counts[Cell(kind, party, state)] += 1

    def add(self, other: WalkCoverage) -> None:
        """Add the counts of another walk."""
        self._counts += other._counts

    @property
    def kinds(self) -> set[str]:
        """Names of the faults and lies that have happened."""
        return {cell.kind for cell in self._counts}

    @property
    def reached(self) -> set[Cell]:
        """Cells of the coverage table whose fault or lie has happened in their state."""
        return set(self._counts)

    @property
    def cells(self) -> list[Cell]:
        """All possible cells of the coverage table: combinations of a fault or lie, a party and a state."""
        return [
            Cell(kind, party, state)
            for kind, party in self._rows
            for state in self._states
            if not self._obstacle(kind, party, state)
        ]

    @property
    def impossible(self) -> dict[str, list[str]]:
        """Cells that no walk can reach, by reason, as texts. If a reason holds for all kinds of a party, the text names
        no kind."""
        found: dict[str, dict[tuple[str, str], list[str]]] = {}
        for kind, party in self._rows:
            for state in self._states:
                if reason := self._obstacle(kind, party, state):
                    found.setdefault(reason, {}).setdefault((party, state), []).append(kind)
        return {
            reason: [
                text
                for (party, state), kinds in places.items()
                for text in (
                    [str(Cell("anything", party, state))]
                    if len(kinds) == sum(other == party for _, other in self._rows)
                    else [str(Cell(kind, party, state)) for kind in kinds]
                )
            ]
            for reason, places in found.items()
        }

    @property
    def missing(self) -> list[Cell]:
        """Possible cells that no walk has reached."""
        return [cell for cell in self.cells if not self._counts[cell]]

    def table(self) -> str:
        """Return the counts as a table: a line for each fault or lie and party, and a column for each state. A cell
        that is not possible is empty."""
        lines = [" " * FIRST_COLUMN + "".join(f"{state:>{COLUMN}}" for state in self._states)]
        possible = set(self.cells)
        for kind, party in self._rows:
            cells = [Cell(kind, party, state) for state in self._states]
            counts = "".join(f"{(self._counts[cell] or '-') if cell in possible else '':>{COLUMN}}" for cell in cells)
            lines.append(f"{f'{kind}, {party}' if party else kind:{FIRST_COLUMN}}{counts}".rstrip())
        return "\n".join(lines) + "\n"

    def aims(self, random: Random, count: int) -> list[Aim]:
        """Draw faults and lies, each with a state in which a walk should let it happen, and the party to which it
        should happen. The more rarely a cell was reached, the more often the cell is drawn.

        :param count: number of aims.
        """
        aims = [Aim(cell.kind, cell.state, cell.party) for cell in self.cells]
        weights = [1 / (1 + self._counts[cell]) for cell in self.cells]
        return random.choices(aims, weights, k=count)
