"""JSON as Go's ``encoding/json`` reads and writes it, where entries depend on it.

Signatures are over bytes, so every escape counts; and what Go takes that is no
strict JSON, a server of 2019 has signed and posted.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from enum import Enum
from typing import Any

from dmsg.errors import EntryError, KeyFormatError
from dmsg.keys import PUBKEY_SIZE, PubKey

NULL_KEY = "00" * PUBKEY_SIZE
UINT64 = 2**64
INT64 = 2**63
_DIGITS = 20
"""Of the largest number here."""


class Form(Enum):
    """Who speaks: what is tolerated in the posted JSON, and where ``port`` is signed."""

    SEED = "seed"  # strict JSON; signed with or without port
    GO2019 = "go2019"  # as Go decodes it; port is always in the signed JSON


class EntryDecodeError(EntryError):
    """Not JSON of an entry: wrong types, malformed keys, numbers out of range."""


_SPECIAL = re.compile('[\x00-\x1f"\\\\<>&\u2028\u2029]')
_SHORT = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def go_string(text: str) -> str:
    """A JSON string with the escapes of Go before 1.22: ``\\b`` and ``\\f`` are \\u0008, \\u000c."""
    return '"' + _SPECIAL.sub(lambda m: _SHORT.get(m[0]) or f"\\u{ord(m[0]):04x}", text) + '"'


class Members(list[tuple[str, Any]]):
    """The members of a JSON object in order, duplicates kept."""


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(object_pairs_hook=Members, parse_constant=_refuse_constant, parse_float=Decimal)


def parse(body: bytes, form: Form) -> Any:
    try:
        text = body.decode("utf-8", "replace" if form is Form.GO2019 else "strict")
        text = text.lstrip(" \t\r\n")
        value, end = _decoder.raw_decode(text)
        if form is Form.SEED and text[end:].strip(" \t\r\n"):
            raise ValueError("there is something after the JSON value")
    except RecursionError:
        raise EntryDecodeError("JSON is nested too deeply") from None
    except (ValueError, ArithmeticError) as error:
        raise EntryDecodeError(f"not JSON: {error}") from None
    return value


def members_of(value: Any, form: Form, known: frozenset[str], what: str) -> dict[str, Any]:
    """The known members of an object; Go folds the case of names and lets the last win."""
    if not isinstance(value, Members):
        raise EntryDecodeError(f"{what} is not an object")
    members: dict[str, Any] = {}
    for given, member in value:
        name = given.casefold() if form is Form.GO2019 and given not in known else given
        if form is Form.SEED and name in members:
            raise EntryDecodeError(f"{what} has {name[:40]!r} twice")
        if name in known or form is Form.SEED:
            members[name] = member
    return members


def string_of(value: Any, what: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise EntryDecodeError(f"{what} is not a string")
    # a lone surrogate, written as \ud800, is U+FFFD to Go
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def integer_of(value: Any, low: int, high: int, what: str, form: Form) -> int:
    """A whole number within bounds; Go takes no ``1.0``, JSON Schema calls it an integer."""
    if value is None:
        return 0
    if isinstance(value, Decimal) and form is Form.SEED and value.adjusted() < _DIGITS and value == int(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise EntryDecodeError(f"{what} is not an integer")
    if not low <= value < high:
        raise EntryDecodeError(f"{what} is out of range")
    return value


_KEY = re.compile("0[23][0-9a-fA-F]{64}")


def is_key_text(text: str) -> bool:
    """It looks like a public key, whether or not it is a point of the curve."""
    return _KEY.fullmatch(text) is not None


def key_of(value: Any, what: str, form: Form) -> str:
    """Hexadecimal of a public key; zeros of any length are the null key, as in the reference.

    Whether it is a point of the curve is asked at once in the form of 2019,
    and else together with the signature.
    """
    text = string_of(value, what)
    if not text.strip("0"):
        return NULL_KEY
    if form is Form.SEED:
        if not is_key_text(text):
            raise EntryDecodeError(f"{what} is not 66 hexadecimal characters of a public key")
        return text.lower()
    try:
        return PubKey.from_hex(text).hex()
    except KeyFormatError as error:
        raise EntryDecodeError(f"{what}: {error}") from None
