"""Content of a status page: facts, charts and tables, and the interface of an entity that supplies them.  No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

GOOD, BAD = "good", "bad"


@dataclass(frozen=True, slots=True)
class Fact:
    """Fact about the present state of an entity: a label and a value.

    :ivar level: ``good``, ``bad`` or empty.
    :ivar is_event: whether a change is listed as an event.
    """

    label: str
    value: str
    level: str = ""
    is_event: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """Line of a chart.

    :ivar number: name of the number in ``numbers()``.
    :ivar rate: whether to draw the growth per second instead of the value.
    """

    label: str
    number: str
    rate: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """Chart of numbers over the last minutes.

    :ivar unit: ``bytes``, ``bytes/s``, ``ms``, ``/s`` or empty.
    """

    title: str
    unit: str
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Table with a title. Columns of numbers are aligned right.

    :ivar empty: text shown if there are no rows.
    """

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]] = field(default_factory=list)
    empty: str = "none"


class StatusSource:
    """Interface that an entity implements so that its status page can query it.

    :ivar kind: kind of entity, as in ``dmsg server``.
    :ivar charts: charts of numbers in ``numbers()``.
    :ivar search_key: description of the things that can be searched for, such as ``a public key``; empty without a
        search.
    """

    kind = ""
    charts: tuple[Chart, ...] = ()
    search_key = ""

    @property
    def key(self) -> str:
        """Name of the entity, such as its public key; empty if it has none."""
        return ""

    def refresh(self) -> None:
        """Update measurements; called every :data:`~dmsg.pages.sampler.INTERVAL` seconds before the other methods."""

    def facts(self) -> list[Fact]:
        """Return facts about the present state."""
        raise NotImplementedError

    def problems(self) -> list[str]:
        """Return problems that the operator should look at, the worst first."""
        raise NotImplementedError

    def numbers(self) -> Mapping[str, float]:
        """Return the numbers for charts, by name; called every :data:`~dmsg.pages.sampler.INTERVAL` seconds."""
        raise NotImplementedError

    def reasons(self) -> Mapping[str, float]:
        """Return the number of refusals, drops and ends by reason, since the start."""
        raise NotImplementedError

    async def tables(self) -> list[Table]:
        """Return the tables. Called only while somebody watches; must not wait for I/O."""
        raise NotImplementedError

    async def search(self, text: str) -> Table:
        """Return the results of a search. Called only if ``search_key`` is not empty."""
        raise NotImplementedError
