"""Two JSON parsers for entries, one that behaves like Go's ``encoding/json`` and a strict one, and Go's encoding of
strings.

Signatures cover bytes, so every escape sequence matters. Go accepts some text that is not strict JSON, and programs of
2019 have signed and posted such text.
"""

from __future__ import annotations

import json
import re
from typing import NoReturn

from dmsg.errors import EntryError, KeyFormatError
from dmsg.keys import PUBKEY_SIZE, PubKey

NULL_KEY = "00" * PUBKEY_SIZE
UINT64 = 2**64
INT64 = 2**63
_DIGITS = 20
"""Number of decimal digits of the largest integer (64 bits)."""


class EntryDecodeError(EntryError):
    """Error: the text is not the JSON of an entry. The JSON is malformed, a member has a wrong type, a key is invalid,
    or a number is out of range.
    """


_SPECIAL = re.compile('[\x00-\x1f"\\\\<>&\u2028\u2029]')
_SHORT = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def go_string(text: str) -> str:
    """Encode a JSON string with the escapes of Go before 1.22, which writes backspace and form feed as \\u0008 and
    \\u000c.
    """
    return '"' + _SPECIAL.sub(lambda m: _SHORT.get(m[0]) or f"\\u{ord(m[0]):04x}", text) + '"'


class Members(list[tuple[str, object]]):
    """List of the members of a JSON object: pairs of name and value in their order, including duplicates."""


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _parse_fraction(text: str) -> object:
    # The import is here, because valid entries have no fractions. The first fraction that a client sends costs the
    # process some milliseconds.
    from decimal import Decimal

    return Decimal(text)


_decoder = json.JSONDecoder(object_pairs_hook=Members, parse_constant=_refuse_constant, parse_float=_parse_fraction)


_KEY = re.compile("0[23][0-9a-fA-F]{64}")


def is_key_text(text: str) -> bool:
    """Whether a text looks like a public key; whether it is a point of the curve is not checked."""
    return _KEY.fullmatch(text) is not None


def string_of(value: object, field: str) -> str:
    """Return ``value``, which must be a string; return ``""`` for None.

    :raises EntryDecodeError: the value is not a string.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        raise EntryDecodeError(f"{field} is not a string")
    if value.isascii():
        return value
    # A lone surrogate such as \ud800 is replaced by U+FFFD, as in Go.
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class Reader:
    """Base class of the two parsers of posted JSON. Their instances are ``STRICT`` and ``AS_GO``.

    All methods raise :class:`EntryDecodeError` for a value that they reject; its text names the ``field``.
    """

    encoding_errors = "strict"
    """Error handler of :meth:`bytes.decode` for bytes that are not UTF-8."""

    def parse(self, body: bytes) -> object:
        """Return the JSON value. Objects become :class:`Members`; numbers with a fraction or exponent become
        ``Decimal``.
        """
        try:
            text = body.decode("utf-8", self.encoding_errors).lstrip(" \t\r\n")
            value: object
            value, end = _decoder.raw_decode(text)
            self.check_rest(text[end:])
        except RecursionError:
            raise EntryDecodeError("JSON is nested too deeply") from None
        except (ValueError, ArithmeticError) as error:
            raise EntryDecodeError(f"the text is not JSON: {error}") from None
        return value

    def check_rest(self, rest: str) -> None:
        """Check the text that follows the JSON value in the body.

        :raises ValueError: the dialect does not allow this text.
        """
        raise NotImplementedError

    def members(self, value: object, known: frozenset[str], field: str) -> dict[str, object]:
        """Return the members of an object by name."""
        raise NotImplementedError

    def integer(self, value: object, low: int, high: int, field: str) -> int:
        """Return ``value`` as an integer with ``low <= integer < high``; return 0 for None."""
        if value is None:
            return 0
        # The type bool is excluded: in Python a bool is an int, but JSON's true is not a number.
        if isinstance(value, bool) or not isinstance(value, int):
            raise EntryDecodeError(f"{field} is not an integer")
        if not low <= value < high:
            raise EntryDecodeError(f"{field} is out of range")
        return value

    def key(self, value: object, field: str) -> str:
        """Return a public key as 66 hexadecimal characters. Zeros of any length stand for the null key, as in the
        reference.
        """
        text = string_of(value, field)
        return self.key_of_text(text, field) if text.strip("0") else NULL_KEY

    def key_of_text(self, text: str, field: str) -> str:
        """Check the text of a key that is not the null key, and return the text in lower case."""
        raise NotImplementedError


class _Strict(Reader):
    """Parser of RFC 8259 JSON, with the choices that this standard leaves open: only UTF-8, no duplicate members, no
    text after the value."""

    def check_rest(self, rest: str) -> None:
        if rest.strip(" \t\r\n"):
            raise ValueError("more data follows the JSON value")

    def members(self, value: object, known: frozenset[str], field: str) -> dict[str, object]:
        """Return all members of a JSON object, known or not."""
        members: dict[str, object] = {}
        for name, member in _object(value, field):
            if name in members:
                raise EntryDecodeError(f"{field} has the member {name[:40]!r} twice")
            members[name] = member
        return members

    def integer(self, value: object, low: int, high: int, field: str) -> int:
        """Return ``value`` as an integer. ``1.0`` is accepted as 1, as in JSON Schema."""
        if not isinstance(value, int | str | list | None):
            from decimal import Decimal

            # The number of digits is checked first: converting 1e999999999 to an integer would use up the memory.
            if isinstance(value, Decimal) and value.adjusted() < _DIGITS and value == int(value):
                value = int(value)
        return super().integer(value, low, high, field)

    def key_of_text(self, text: str, field: str) -> str:
        """Return the key in lower case. The later check of the signature also checks that the key is a point of the
        curve.
        """
        if not is_key_text(text):
            raise EntryDecodeError(f"{field} is not 66 hexadecimal characters of a public key")
        return text.lower()


class _AsGo(Reader):
    """Parser with the behaviour of Go's decoder: invalid UTF-8 becomes U+FFFD, and text after the value is ignored."""

    encoding_errors = "replace"

    def check_rest(self, rest: str) -> None:
        pass

    def members(self, value: object, known: frozenset[str], field: str) -> dict[str, object]:
        """Return the members of a JSON object whose names are known. As in Go's decoder, the case of names is ignored,
        and of several members with one name the last is returned.
        """
        members: dict[str, object] = {}
        for given, member in _object(value, field):
            # Each name is matched as in Go: exactly, and otherwise without regard to case.
            name = given if given in known else given.casefold()
            if name in known:
                members[name] = member
        return members

    def key_of_text(self, text: str, field: str) -> str:
        """Return the key in lower case. As in the reference, a key that is not a point of the curve is an error already
        here.
        """
        try:
            return PubKey.from_hex(text).hex()
        except KeyFormatError as error:
            raise EntryDecodeError(f"{field}: {error}") from None


def _object(value: object, field: str) -> Members:
    if not isinstance(value, Members):
        raise EntryDecodeError(f"{field} is not an object")
    return value


STRICT = _Strict()
AS_GO = _AsGo()
