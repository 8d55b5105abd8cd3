"""What a page is made of.  No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

GOOD, BAD = "good", "bad"


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of what an entity is now.

    :ivar level: ``good``, ``bad`` or empty.
    :ivar told: that it changes is an event.
    """

    label: str
    value: str
    level: str = ""
    told: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart.

    :ivar number: its name in what ``numbers`` gives.
    :ivar rate: how much it grows in a second; else what it is.
    """

    label: str
    number: str
    rate: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """The last minutes of some numbers.

    :ivar unit: ``bytes``, ``bytes/s``, ``ms``, ``/s`` or empty.
    """

    title: str
    unit: str
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a title; numbers stand at the right.

    :ivar empty: what is said where there is no row.
    """

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]] = field(default_factory=list)
    empty: str = "none"


class Shown:
    """An entity, as its page asks it.

    :ivar kind: what it is, as in ``dmsg server``.
    :ivar charts: what is drawn of ``numbers``.
    :ivar asks: what may be searched for, as in ``a public key``; empty: nothing.
    """

    kind = ""
    charts: tuple[Chart, ...] = ()
    asks = ""

    @property
    def key(self) -> str:
        """What it is called; empty: it has no name."""
        return ""

    def look(self) -> None:
        """Called every :data:`~dmsg.pages.sampling.INTERVAL` seconds, before anything else is asked."""

    def facts(self) -> list[Fact]:
        """What it is now."""
        raise NotImplementedError

    def problems(self) -> list[str]:
        """What its operator ought to look at, the worst first."""
        raise NotImplementedError

    def numbers(self) -> Mapping[str, float]:
        """What charts are drawn of; asked every :data:`~dmsg.pages.sampling.INTERVAL` seconds."""
        raise NotImplementedError

    def reasons(self) -> Mapping[str, float]:
        """What was refused, dropped or ended, by reason, since it started."""
        raise NotImplementedError

    async def tables(self) -> list[Table]:
        """Asked while somebody looks; waits for nobody."""
        raise NotImplementedError

    async def search(self, text: str) -> Table:
        """What is found; asked where ``asks`` says something."""
        raise NotImplementedError
