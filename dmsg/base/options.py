"""Declarations of options: each setting of an entity is declared once, with its help text, kind and bounds.

A field of a settings class becomes an option by a call of :func:`option`::

    max_streams: int = option(64, "streams of one connection", Number(1, 1000, "streams"), reloads=True)

The plugins of ``twistd`` (``dmsg.tap``) derive everything else from this declaration: the usage line, the validation
with its error message, the value of the field, the name in the configuration file, and whether SIGHUP changes the
value.  The tables of options in the documentation are generated from it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SIZES = {"MiB": 1 << 20, "GiB": 1 << 30, "days": 86400}
"""Factors, by unit, that convert a value on the command line to the bytes or seconds of the setting. Other units have
the factor 1."""
NETWORK, KEY, ACCESS, LIMITS = "Network", "Key", "Who may connect", "Limits"
STORAGE, TELEMETRY, LOGS, OTHER = "Storage", "Telemetry", "Logs and metrics", "Other"
GROUPS = (NETWORK, KEY, ACCESS, LIMITS, STORAGE, TELEMETRY, LOGS, OTHER)
"""Groups of options, in the order in which the usage text shows them."""
_ROW = "option"
"""Key under which the metadata of a dataclass field contain its :class:`Option`."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Text:
    """Kind of an option whose value is a text.

    :ivar accepted_text: description of the accepted values, for the documentation.
    :ivar convert: function that converts the text to the value. It may raise ValueError, DmsgError or OSError.
    """

    accepted_text: str = "text"
    convert: Callable[[str], object] = str

    def read(self, text: str) -> object:
        """Convert ``text`` to the value of the setting.

        :raises ValueError: the text is invalid. ``convert`` may also raise DmsgError or OSError for this. The message
            is one line.
        """
        return self.convert(text)

    def write(self, value: object) -> str:
        """Return ``value`` as the text that a user would type."""
        return str(value)


@dataclass(frozen=True, slots=True)
class Number:
    """Kind of an option whose value is a number within bounds.

    :ivar low: minimum value.
    :ivar high: maximum value.
    :ivar unit: unit as a plural noun; the value is multiplied by the unit's factor in :data:`SIZES`.  Empty if the
        number has no unit.
    :ivar is_integer: whether only whole numbers are allowed.
    """

    low: int
    high: int
    unit: str
    is_integer: bool = True

    @property
    def accepted_text(self) -> str:
        """Description of the accepted values, for the documentation."""
        return f"{self.low} to {self.high} {self.unit}".rstrip()

    def read(self, text: str) -> float:
        """Convert ``text`` to the value of the setting.

        :raises ValueError: the text is not a number, or the number is out of bounds.
        """
        try:
            number = int(text) if self.is_integer else float(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a number{'' if self.is_integer else f' of {self.unit}'}") from None
        if not self.low <= number <= self.high:
            raise ValueError(f"{text} is not between {self.low} and {self.high} {self.unit}".rstrip())
        return number * SIZES.get(self.unit, 1)

    def write(self, value: object) -> str:
        """Return ``value`` as the text that a user would type."""
        assert isinstance(value, int | float)
        number = value / SIZES.get(self.unit, 1)
        return str(int(number) if self.is_integer else number)


def _alternatives(words: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


@dataclass(frozen=True, slots=True)
class Choice:
    """Kind of an option that accepts one of a few words.

    :ivar values: value of the setting for each word.
    """

    values: Mapping[str, object]

    @property
    def accepted_text(self) -> str:
        """Description of the accepted values, for the documentation."""
        return _alternatives([f"`{word}`" for word in self.values])

    def read(self, text: str) -> object:
        """Return the value of the setting for the word ``text``.

        :raises ValueError: ``text`` is none of the words.
        """
        if text not in self.values:
            raise ValueError(f"the value must be {_alternatives([*self.values])}, not {text!r}")
        return self.values[text]

    def write(self, value: object) -> str:
        """Return the word for ``value``."""
        return next(word for word, meaning in self.values.items() if meaning == value)


@dataclass(frozen=True, slots=True)
class Flag:
    """Kind of an option without a value. It turns a setting on, or off if the setting is on by default."""

    accepted_text: str = ""


Kind = Text | Number | Choice | Flag
TEXT = Text()
FLAG = Flag()
SECONDS = Number(0, 3600, "seconds", is_integer=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Declaration of one option.

    :ivar name: name on the command line, without dashes. If empty, the name of the field is used, with dashes for
        underscores.
    :ivar help: text for the usage and the documentation, without the default.
    :ivar kind: kind of value, which parses and checks the text.
    :ivar default: default value, in the unit of the setting.
    :ivar default_text: description of the default, if the value alone would not explain it.
    :ivar short: one-letter name.
    :ivar repeated: whether the option may be given several times; its value is then a list.
    :ivar reloads: whether SIGHUP changes the value in a running process.
    :ivar secret: whether the option names a file that contains a secret; ``repr`` of the settings then omits the field.
    :ivar in_file: whether the configuration file may contain the option.
    :ivar group: one of :data:`GROUPS`.
    :ivar field: name of the field in the settings class; empty if the plugin defines the option without a field.
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
    def default_in_words(self) -> str:
        """Description of the default; empty if there is no default."""
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
    """Return a dataclass field for a settings class that declares an option. See :class:`Option` for the arguments."""
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
    """Return the dataclass field for the option ``--rate-limit`` of an HTTP service."""
    return option(
        default,
        "Requests per second that one address may send; 0 disables the limit",
        Number(0, 10**6, "requests a second"),
        name="rate-limit",
        group=LIMITS,
    )


def burst_option(default: float) -> float:
    """Return the dataclass field for the option ``--burst``, which belongs to ``--rate-limit``."""
    return option(default, "Requests that one address may send in a burst", Number(1, 10**6, "requests"), group=LIMITS)


def proxied_option() -> bool:
    """Return the dataclass field for the option ``--proxied``."""
    return option(
        False,
        "Take client addresses from X-Forwarded-For; use this only behind a reverse proxy of your own",
        FLAG,
        group=NETWORK,
    )


def required_field(row: Option) -> dict[str, Option]:
    """Return the metadata for a dataclass field that declares an option without a default."""
    return {_ROW: row}


def rows_of(settings: Callable[..., object]) -> tuple[Option, ...]:
    """Return the options that the fields of a settings class declare."""
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
    """Return a function that calls ``check`` with a text, and returns the text unchanged if ``check`` accepts it."""

    def checked(text: str) -> str:
        check(text)
        return text

    return checked
