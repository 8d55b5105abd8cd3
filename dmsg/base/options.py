"""Rows of options: what an operator may choose of an entity, each option said once.

A field of a settings class is an option when :func:`option` makes it::

    max_streams: int = option(64, "streams of one connection", Number(1, 1000, "streams"), reloads=True)

The plugins of ``twistd`` (``dmsg.tap``) take everything else from this row: the line of the usage, the check and its
message, the value of the field, the name in the configuration file, and whether SIGHUP changes it.  The tables of
options in the documentation are made from it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SIZES = {"MiB": 1 << 20, "GiB": 1 << 30, "days": 86400}
"""Factor between a unit in which people say a value and the unit of the settings, bytes or seconds; others have 1."""
NETWORK, KEY, ACCESS, LIMITS = "Network", "Key", "Who may connect", "Limits"
STORAGE, TELEMETRY, LOGS, OTHER = "Storage", "Telemetry", "Logs and metrics", "Other"
GROUPS = (NETWORK, KEY, ACCESS, LIMITS, STORAGE, TELEMETRY, LOGS, OTHER)
"""Groups in which the usage shows options, in its order."""
_ROW = "option"
"""Key of a row in the metadata of a field."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Text:
    """Kind of an option whose value is a text.

    :ivar takes: what the text is, for the documentation.
    :ivar convert: makes the value of the text; raises ValueError, DmsgError or OSError.
    """

    takes: str = "text"
    convert: Callable[[str], object] = str

    def read(self, text: str) -> object:
        """Return the value that ``text`` stands for.

        :raises ValueError: it stands for none, as do DmsgError and OSError; the message is one line.
        """
        return self.convert(text)

    def write(self, value: object) -> str:
        """Return the text for a value, as people write it."""
        return str(value)


@dataclass(frozen=True, slots=True)
class Number:
    """Kind of an option whose value is a number within bounds.

    :ivar low: smallest number that is allowed; ``high`` is the largest.
    :ivar unit: plural noun; the value of the setting is a multiple, see :data:`SIZES`.  Empty: a number that only
        names something.
    :ivar whole: no fractions.
    """

    low: int
    high: int
    unit: str
    whole: bool = True

    @property
    def takes(self) -> str:
        """Description of the accepted text, for the documentation."""
        return f"{self.low} to {self.high} {self.unit}".rstrip()

    def read(self, text: str) -> float:
        """Return the value that ``text`` stands for.

        :raises ValueError: it is no number, or not within the bounds.
        """
        try:
            number = int(text) if self.whole else float(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a number{'' if self.whole else f' of {self.unit}'}") from None
        if not self.low <= number <= self.high:
            raise ValueError(f"{text} is not between {self.low} and {self.high} {self.unit}".rstrip())
        return number * SIZES.get(self.unit, 1)

    def write(self, value: object) -> str:
        """Return the text for a value, as people write it."""
        assert isinstance(value, int | float)
        number = value / SIZES.get(self.unit, 1)
        return str(int(number) if self.whole else number)


def _alternatives(words: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


@dataclass(frozen=True, slots=True)
class Choice:
    """Kind of an option whose value is one of a few words.

    :ivar values: the value of each word.
    """

    values: Mapping[str, object]

    @property
    def takes(self) -> str:
        """Description of the accepted text, for the documentation."""
        return _alternatives([f"`{word}`" for word in self.values])

    def read(self, text: str) -> object:
        """Return the value that ``text`` stands for.

        :raises ValueError: it is none of the words.
        """
        if text not in self.values:
            raise ValueError(f"{text!r} is not {_alternatives([*self.values])}")
        return self.values[text]

    def write(self, value: object) -> str:
        """Return the text for a value, as people write it."""
        return next(word for word, meaning in self.values.items() if meaning == value)


@dataclass(frozen=True, slots=True)
class Flag:
    """Kind of an option without a value: saying it turns a setting on, or off if the setting is on by default."""

    takes: str = ""


Kind = Text | Number | Choice | Flag
TEXT = Text()
FLAG = Flag()
SECONDS = Number(0, 3600, "seconds", whole=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A row: everything that is said of one option.

    :ivar name: as on the command line, without dashes; empty: that of the field.
    :ivar help: for the usage and the documentation, without the default.
    :ivar kind: how its text is read, with unit and bounds.
    :ivar default: value when nobody says one, in the unit of the settings.
    :ivar default_text: for people, where the value alone would not tell them.
    :ivar short: letter.
    :ivar repeated: it may be said several times; its value is a list.
    :ivar reloads: SIGHUP changes it in a process that runs.
    :ivar secret: the file that it names holds a secret.  The field is in no ``repr``.
    :ivar in_file: it may stand in the configuration file.
    :ivar group: one of :data:`GROUPS`.
    :ivar field: of the settings class; empty: the option belongs to the plugin.
    """

    name: str = ""
    help: str
    kind: Kind = TEXT
    default: Any = None
    default_text: str = ""
    short: str | None = None
    repeated: bool = False
    reloads: bool = False
    secret: bool = False
    in_file: bool = True
    group: str = OTHER
    field: str = ""

    @property
    def said_default(self) -> str:
        """The default, for people; empty: there is none."""
        if self.default_text or self.default is None or isinstance(self.kind, Flag):
            return self.default_text
        return ", ".join(map(self.kind.write, self.default)) if self.repeated else self.kind.write(self.default)


def option(
    default: _T,
    help: str,
    kind: Kind = TEXT,
    *,
    name: str = "",
    default_text: str = "",
    short: str | None = None,
    repeated: bool = False,
    reloads: bool = False,
    secret: bool = False,
    group: str = OTHER,
) -> _T:
    """Make a field of a settings class that is an option; see :class:`Option`."""
    row = Option(
        name=name,
        help=help,
        kind=kind,
        default_text=default_text,
        short=short,
        repeated=repeated,
        reloads=reloads,
        secret=secret,
        group=group,
    )
    return field(default=default, metadata={_ROW: row}, repr=not secret)


def rate_option(default: float) -> float:
    """Make the field of ``--rate-limit``, of a service that answers over HTTP."""
    return option(
        default,
        "Requests per second that one address may send; 0 disables the limit",
        Number(0, 10**6, "requests a second"),
        name="rate-limit",
        group=LIMITS,
    )


def burst_option(default: float) -> float:
    """Make the field of ``--burst``, which goes with ``--rate-limit``."""
    return option(default, "Requests that one address may send in a burst", Number(1, 10**6, "requests"), group=LIMITS)


def proxied_option() -> bool:
    """Make the field of ``--proxied``."""
    return option(
        False,
        "Take client addresses from X-Forwarded-For; use this only behind a reverse proxy of your own",
        FLAG,
        group=NETWORK,
    )


def required_field(row: Option) -> dict[str, Option]:
    """Return the metadata of a field that has no default."""
    return {_ROW: row}


def rows_of(settings: Callable[..., object]) -> tuple[Option, ...]:
    """Return the rows of the options that a settings class has."""
    return tuple(
        replace(
            row,
            name=row.name or one.name.replace("_", "-"),
            default=None if one.default is MISSING else one.default,
            field=one.name,
        )
        for one in fields(cast("type[DataclassInstance]", settings))
        if (row := one.metadata.get(_ROW)) is not None
    )


def checked_by(check: Callable[[str], object]) -> Callable[[str], str]:
    """Return a function that calls ``check`` with a text and returns the text."""

    def checked(text: str) -> str:
        check(text)
        return text

    return checked
