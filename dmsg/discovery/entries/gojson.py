"""JSON as Go's ``encoding/json`` reads and writes it, where entries depend on it; and strict JSON.

Signatures are over bytes, so every escape counts; and what Go takes that is no
strict JSON, a server of 2019 has signed and posted.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import NoReturn

from dmsg.errors import EntryError, KeyFormatError
from dmsg.keys import PUBKEY_SIZE, PubKey

NULL_KEY = "00" * PUBKEY_SIZE
UINT64 = 2**64
INT64 = 2**63
_DIGITS = 20
"""Of the largest number here."""


class EntryDecodeError(EntryError):
    """Not JSON of an entry: wrong types, malformed keys, numbers out of range."""


_SPECIAL = re.compile('[\x00-\x1f"\\\\<>&\u2028\u2029]')
_SHORT = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def go_string(text: str) -> str:
    """A JSON string with the escapes of Go before 1.22: ``\\b`` and ``\\f`` are \\u0008, \\u000c."""
    return '"' + _SPECIAL.sub(lambda m: _SHORT.get(m[0]) or f"\\u{ord(m[0]):04x}", text) + '"'


class Members(list[tuple[str, object]]):
    """The members of a JSON object in order, duplicates kept."""


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(object_pairs_hook=Members, parse_constant=_refuse_constant, parse_float=Decimal)


_KEY = re.compile("0[23][0-9a-fA-F]{64}")


def is_key_text(text: str) -> bool:
    """It looks like a public key, whether or not it is a point of the curve."""
    return _KEY.fullmatch(text) is not None


def string_of(value: object, what: str) -> str:
    """A string, ``""`` where there is none.

    :raises EntryDecodeError: it is something else.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        raise EntryDecodeError(f"{what} is not a string")
    # a lone surrogate, written as \ud800, is U+FFFD to Go
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class Reader:
    """How posted JSON is taken: ``STRICT`` or ``AS_GO``.

    What both do is here.  All methods raise :class:`EntryDecodeError`, with
    ``what`` in its text, for what they do not take.
    """

    encoding_errors = "strict"
    """What becomes of bytes that are no UTF-8, as :meth:`bytes.decode` calls it."""

    def parse(self, body: bytes) -> object:
        """The JSON value; objects are :class:`Members`, numbers with a fraction or exponent are decimals."""
        try:
            text = body.decode("utf-8", self.encoding_errors).lstrip(" \t\r\n")
            value: object
            value, end = _decoder.raw_decode(text)
            self.check_rest(text[end:])
        except RecursionError:
            raise EntryDecodeError("JSON is nested too deeply") from None
        except (ValueError, ArithmeticError) as error:
            raise EntryDecodeError(f"not JSON: {error}") from None
        return value

    def check_rest(self, rest: str) -> None:
        """:raises ValueError: this must not stand behind the value."""
        raise NotImplementedError

    def members(self, value: object, known: frozenset[str], what: str) -> dict[str, object]:
        """The members of an object by their names."""
        raise NotImplementedError

    def integer(self, value: object, low: int, high: int, what: str) -> int:
        """A whole number, ``low <= number < high``; 0 where there is none."""
        if value is None:
            return 0
        if isinstance(value, bool) or not isinstance(value, int):
            raise EntryDecodeError(f"{what} is not an integer")
        if not low <= value < high:
            raise EntryDecodeError(f"{what} is out of range")
        return value

    def key(self, value: object, what: str) -> str:
        """66 hexadecimal characters of a public key; zeros of any length are the null key, as in the reference."""
        text = string_of(value, what)
        return self.key_of_text(text, what) if text.strip("0") else NULL_KEY

    def key_of_text(self, text: str, what: str) -> str:
        """A key that is not null, in lower case."""
        raise NotImplementedError


class _Strict(Reader):
    """RFC 8259 without what it leaves open: UTF-8, each member once, nothing behind the value."""

    def check_rest(self, rest: str) -> None:
        if rest.strip(" \t\r\n"):
            raise ValueError("there is something after the JSON value")

    def members(self, value: object, known: frozenset[str], what: str) -> dict[str, object]:
        """All of them, known or not."""
        members: dict[str, object] = {}
        for name, member in _object(value, what):
            if name in members:
                raise EntryDecodeError(f"{what} has {name[:40]!r} twice")
            members[name] = member
        return members

    def integer(self, value: object, low: int, high: int, what: str) -> int:
        """``1.0`` is one: JSON Schema calls it an integer."""
        if isinstance(value, Decimal) and value.adjusted() < _DIGITS and value == int(value):
            value = int(value)
        return super().integer(value, low, high, what)

    def key_of_text(self, text: str, what: str) -> str:
        """Whether it is a point of the curve is asked together with the signature."""
        if not is_key_text(text):
            raise EntryDecodeError(f"{what} is not 66 hexadecimal characters of a public key")
        return text.lower()


class _AsGo(Reader):
    """As Go's decoder: bytes that are no UTF-8 become U+FFFD, and what stands behind the value is not looked at."""

    encoding_errors = "replace"

    def check_rest(self, rest: str) -> None:
        pass

    def members(self, value: object, known: frozenset[str], what: str) -> dict[str, object]:
        """The known ones: Go folds the case of names, and lets the last of a name win."""
        members: dict[str, object] = {}
        for given, member in _object(value, what):
            name = given if given in known else given.casefold()
            if name in known:
                members[name] = member
        return members

    def key_of_text(self, text: str, what: str) -> str:
        """The reference's type is a point of the curve, so it is asked at once."""
        try:
            return PubKey.from_hex(text).hex()
        except KeyFormatError as error:
            raise EntryDecodeError(f"{what}: {error}") from None


def _object(value: object, what: str) -> Members:
    if not isinstance(value, Members):
        raise EntryDecodeError(f"{what} is not an object")
    return value


STRICT = _Strict()
AS_GO = _AsGo()
