"""Content of a status page: facts, charts and tables, and the interface of an entity that supplies them.  No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

GOOD, BAD = "good", "bad"
NEARLY_FULL = 0.9
"""Fraction of a limit in use from which an entity is reported as nearly full."""


@dataclass(frozen=True, slots=True)
class Fact:
    """Fact about the present state of an entity: a label and a value.

    :ivar level: ``good``, ``bad`` or empty. It decides the colour.
    :ivar is_event: whether a change of the value is listed as an event.
    """

    label: str
    value: str
    level: str = ""
    is_event: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """Line of a chart.

    :ivar number: name of the number in :meth:`StatusSource.numbers`.
    :ivar rate: whether to draw the growth of the number per second instead of the number.
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
    """Table with a title. Columns of numbers are aligned right. A cell with a public key in hexadecimal shows the first
    characters of the key as people write it.

    :ivar empty: text shown if there are no rows.
    """

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]] = field(default_factory=list)
    empty: str = "none"


class StatusSource:
    """Interface that an entity implements so that its status page can query it.

    :ivar kind: kind of entity, as in ``dmsg server``.
    :ivar charts: charts of the numbers in :meth:`numbers`.
    :ivar search_key: description of what can be searched for, such as ``a public key``; empty if the page has no
        search.
    """

    kind = ""
    charts: tuple[Chart, ...] = ()
    search_key = ""

    @property
    def key(self) -> str:
        """Name of the entity, such as its public key in hexadecimal; empty if it has none."""
        return ""

    def refresh(self) -> None:
        """Update measurements. The sampler calls this method every :data:`~dmsg.pages.sampler.INTERVAL` seconds, before
        the other methods."""

    def facts(self) -> list[Fact]:
        """Return facts about the present state."""
        raise NotImplementedError

    def problems(self) -> list[str]:
        """Return problems that need the operator's attention, the worst first."""
        raise NotImplementedError

    def numbers(self) -> Mapping[str, float]:
        """Return the numbers for charts, by name. The sampler calls this method every
        :data:`~dmsg.pages.sampler.INTERVAL` seconds."""
        raise NotImplementedError

    def reasons(self) -> Mapping[str, float]:
        """Return the number of refusals, drops and ends since the start, by reason."""
        raise NotImplementedError

    async def tables(self) -> list[Table]:
        """Return the tables. This method is called only while a browser shows the page, and must not wait for I/O."""
        raise NotImplementedError

    async def search(self, text: str) -> Table:
        """Return the results of a search. This method is called only if ``search_key`` is not empty."""
        raise NotImplementedError
