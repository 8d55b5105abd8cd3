"""Entries of discovery: form, signature and iteration rules.  Pure.

An entry is signed over its JSON without the signature, exactly as Go's
``encoding/json`` writes it: no white space, fixed key order, Go's escapes.
Two forms exist for servers: the 2019 service always writes a ``port`` field
(``""`` by default) between address and available_connections, the seed
documents have none.  :class:`Form` says which are accepted; an entry is kept
and served in the form that it was signed in.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from decimal import Decimal
from enum import Enum
from typing import Any

from dmsg.errors import EntryError, KeyFormatError, SignatureError
from dmsg.keys import PUBKEY_SIZE, PubKey, SecKey, Signature

VERSION = "0.0.1"
MAX_ENTRY_SIZE = 64 * 1024
"""Bytes of a posted entry; a few hundred are usual."""
MAX_VERSION = 256
"""Characters of a version in which features are looked for."""
NULL_KEY = "00" * PUBKEY_SIZE
DELETE_ACT = "delete"
SUCCEED_ACT = "succeed"

_UINT64 = 2**64
_INT64 = 2**63
_DIGITS = 20
"""Of the largest number here."""
_UNIX_TO_YEAR_1 = 62135596800
"""What Go's ``time.Unix`` adds before it compares, and which overflows."""


class EntryDecodeError(EntryError):
    """Not JSON of an entry: wrong types, malformed keys, numbers out of range."""


class EntryInvalid(EntryError):
    """An entry that breaks a rule; the text is the reference's."""

    def __init__(self, text: str) -> None:
        super().__init__(f"entry validation error: {text}")


class EntrySignatureError(EntryError):
    """The signature is not that of the entry's key over its fields."""

    def __init__(self, text: str = "invalid signature") -> None:
        super().__init__(text)


WRONG_FIRST_SEQUENCE = "new entry has non-zero sequence"
WRONG_SEQUENCE = "sequence field of new entry is not sequence of old entry + 1"
WRONG_TIME = "previous entry timestamp is not set before current entry timestamp"
WRONG_DELETE_SEQUENCE = "sequence field of the deletion is not sequence of the entry"


MAX_DELEGATED = 64
"""Servers that a client's entry names."""
REFRESH = "refresh1"
"""What versions say of clients that post their entry again and again."""
REFRESHING = frozenset({"relay1", "messaging-seed", "messaging-skywire"})
"""What versions say of servers that post their entry again and again; others may be of 2019, which post it once."""


def features(version: str) -> frozenset[str]:
    """What the version of an entry says that its owner can do: the words after ``+``.

    As in ``0.0.1+secure1.relay1``, which is a version with build metadata of
    semver.org.  The 2019 service looks at no version, and the signature covers it.
    """
    words = version[:MAX_VERSION].partition("+")[2]
    return frozenset(word for word in words.split(".") if word)


def with_feature(version: str, feature: str, present: bool = True) -> str:
    """``version`` with one feature more, or, if it is not ``present``, without it."""
    known = features(version) | {feature} if present else features(version) - {feature}
    base = version.partition("+")[0] or VERSION
    return f"{base}+{'.'.join(sorted(known))}" if known else base


class Form(Enum):
    """Who speaks: what is tolerated in the posted JSON, and where ``port`` is signed."""

    SEED = "seed"  # strict JSON; signed with or without port
    GO2019 = "go2019"  # as Go decodes it; port is always in the signed JSON


@dataclass(frozen=True, slots=True)
class ClientMeta:
    """:ivar delegated_servers: 66 hexadecimal characters each; None is Go's nil, written ``null``."""

    delegated_servers: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class ServerMeta:
    """:ivar address: ``host:port``.  :ivar port: None when the field is not in the signed form."""

    address: str
    available_connections: int
    port: str | None = ""


@dataclass(frozen=True, slots=True)
class Successor:
    """The key that follows another, which says that it agrees.

    :ivar static: 66 hexadecimal characters, of the new key.
    :ivar signature: 130 hexadecimal characters, by the new key over
        :meth:`signing_json`; the entry's own signature is the old key's word.
    """

    static: str
    signature: str

    @staticmethod
    def signing_json(old: str, new: str) -> bytes:
        """What the new key signs: which key it follows."""
        return f'{{"act":"{SUCCEED_ACT}","static":"{old}","successor":"{new}"}}'.encode()

    @classmethod
    def make(cls, old: PubKey, new: SecKey) -> Successor:
        """``new`` follows ``old``."""
        static = new.public.hex()
        return cls(static, new.sign(cls.signing_json(old.hex(), static)).hex())

    @property
    def key(self) -> PubKey:
        """:raises KeyFormatError: it is none."""
        return PubKey.from_hex(self.static)

    def verify(self, old: str) -> None:
        """:raises EntrySignatureError: the new key did not sign that it follows ``old``."""
        try:
            self.key.verify(self.signing_json(old, self.static), Signature.from_hex(self.signature))
        except (KeyFormatError, SignatureError) as error:
            raise EntrySignatureError("successor has not signed") from error


@dataclass(frozen=True, slots=True)
class Entry:
    """What discovery stores of a key.

    :ivar sequence: uint64.  :ivar timestamp: int64, nanoseconds since 1970.
    :ivar static: 66 hexadecimal characters, lower case.
    :ivar signature: 130 hexadecimal characters, or empty.
    """

    version: str
    sequence: int
    timestamp: int
    static: str
    client: ClientMeta | None = None
    server: ServerMeta | None = None
    signature: str = ""
    successor: Successor | None = None

    @property
    def key(self) -> PubKey:
        """:raises KeyFormatError: the null key."""
        return PubKey.from_hex(self.static)

    def offers(self, feature: str) -> bool:
        """Whether its owner says, in the signed version, that it speaks this."""
        return feature in features(self.version)

    def signing_json(self) -> bytes:
        """What is signed."""
        return _encode(self, with_signature=False).encode()

    def to_json(self) -> bytes:
        """The entry on the wire."""
        return _encode(self, with_signature=True).encode()

    def sign(self, key: SecKey) -> Entry:
        """This entry with the signature of ``key``, which must be its own."""
        return replace(self, signature=key.sign(self.signing_json()).hex())

    def validate(self) -> None:
        """The reference's ``Validate``: version, signature, client or server, key; in that order.

        :raises EntryInvalid: one is missing.
        """
        if not self.version:
            raise EntryInvalid("entry has no version")
        if not self.signature:
            raise EntryInvalid("entry has no signature")
        if self.client is None and self.server is None:
            raise EntryInvalid("entry has neither client or server field")
        if self.static == NULL_KEY:
            raise EntryInvalid("entry Keys is nil")

    def verify(self) -> None:
        """:raises EntrySignatureError: not signed by its own key."""
        try:
            self.key.verify(self.signing_json(), Signature.from_hex(self.signature))
        except (KeyFormatError, SignatureError) as error:
            raise EntrySignatureError from error
        if self.successor is not None:
            self.successor.verify(self.static)


def verified(entry: Entry, form: Form, *, port_given: bool) -> Entry:
    """The entry in the form that its signature covers.

    :param port_given: the posted JSON had the field.
    :raises EntrySignatureError: it covers none of the accepted forms.
    """
    try:
        entry.verify()
    except EntrySignatureError:
        if form is Form.GO2019 or entry.server is None or port_given:
            raise
        entry = replace(entry, server=replace(entry.server, port=None))
        entry.verify()
    return entry


# --- JSON as Go writes it ---------------------------------------------------

_SPECIAL = re.compile('[\x00-\x1f"\\\\<>&\u2028\u2029]')
_SHORT = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def _go_string(text: str) -> str:
    """A JSON string with the escapes of Go before 1.22: ``\\b`` and ``\\f`` are \\u0008, \\u000c."""
    return '"' + _SPECIAL.sub(lambda m: _SHORT.get(m[0]) or f"\\u{ord(m[0]):04x}", text) + '"'


def _encode(entry: Entry, *, with_signature: bool) -> str:
    parts = [
        f'{{"version":{_go_string(entry.version)},"sequence":{entry.sequence}'
        f',"timestamp":{entry.timestamp},"static":"{entry.static}"'
    ]
    if entry.client is not None:
        servers = entry.client.delegated_servers
        listed = "null" if servers is None else "[" + ",".join(f'"{key}"' for key in servers) + "]"
        parts.append(f',"client":{{"delegated_servers":{listed}}}')
    if (server := entry.server) is not None:
        port = "" if server.port is None else f'"port":{_go_string(server.port)},'
        parts.append(
            f',"server":{{"address":{_go_string(server.address)},{port}'
            f'"available_connections":{server.available_connections}}}'
        )
    if (successor := entry.successor) is not None:
        parts.append(f',"successor":{{"static":"{successor.static}","signature":"{successor.signature}"}}')
    if with_signature and entry.signature:
        parts.append(f',"signature":"{entry.signature}"')
    parts.append("}")
    return "".join(parts)


# --- JSON as Go reads it ----------------------------------------------------


class _Object(list[tuple[str, Any]]):
    """The members of a JSON object in order, duplicates kept."""


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(object_pairs_hook=_Object, parse_constant=_refuse_constant, parse_float=Decimal)


def _parse(body: bytes, form: Form) -> Any:
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


def _members(value: Any, form: Form, known: frozenset[str], what: str) -> dict[str, Any]:
    """The known members of an object; Go folds the case of names and lets the last win."""
    if not isinstance(value, _Object):
        raise EntryDecodeError(f"{what} is not an object")
    members: dict[str, Any] = {}
    for given, member in value:
        name = given.casefold() if form is Form.GO2019 and given not in known else given
        if form is Form.SEED and name in members:
            raise EntryDecodeError(f"{what} has {name[:40]!r} twice")
        if name in known or form is Form.SEED:
            members[name] = member
    return members


def _string(value: Any, what: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise EntryDecodeError(f"{what} is not a string")
    # a lone surrogate, written as \ud800, is U+FFFD to Go
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _integer(value: Any, low: int, high: int, what: str, form: Form) -> int:
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


def _key(value: Any, what: str, form: Form) -> str:
    """Hexadecimal of a public key; zeros of any length are the null key, as in the reference.

    Whether it is a point of the curve is asked at once in the form of 2019,
    and else together with the signature.
    """
    text = _string(value, what)
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


_ENTRY = frozenset({"version", "sequence", "timestamp", "static", "client", "server", "successor", "signature"})
_SUCCESSOR = frozenset({"static", "signature"})
_CLIENT = frozenset({"delegated_servers"})
_SERVER = frozenset({"address", "port", "available_connections"})


def decode(body: bytes, form: Form = Form.SEED) -> tuple[Entry, bool]:
    """An entry from posted JSON, not yet validated.

    :returns: the entry, and whether the server's ``port`` was given.
    :raises EntryDecodeError: malformed.
    """
    value = _parse(body, form)
    members = {} if value is None and form is Form.GO2019 else _members(value, form, _ENTRY, "entry")
    client = server = successor = None
    port_given = False
    if members.get("client") is not None:
        fields = _members(members["client"], form, _CLIENT, "client")
        listed = fields.get("delegated_servers")
        if listed is not None and (not isinstance(listed, list) or isinstance(listed, _Object)):
            raise EntryDecodeError("delegated_servers is not a list")
        if listed is not None and len(listed) > MAX_DELEGATED:
            # each is a key that would be looked at before the signature
            raise EntryInvalid(f"entry has more than {MAX_DELEGATED} delegated servers")
        client = ClientMeta(None if listed is None else tuple(_key(one, "delegated server", form) for one in listed))
    if members.get("server") is not None:
        fields = _members(members["server"], form, _SERVER, "server")
        port_given = "port" in fields
        server = ServerMeta(
            address=_string(fields.get("address"), "address"),
            port=_string(fields.get("port"), "port"),
            available_connections=_integer(
                fields.get("available_connections"), -_INT64, _INT64, "available_connections", form
            ),
        )
    # the form of 2019 has no such member, and decodes none
    if form is Form.SEED and members.get("successor") is not None:
        fields = _members(members["successor"], form, _SUCCESSOR, "successor")
        successor = Successor(
            _key(fields.get("static"), "successor", form), _string(fields.get("signature"), "signature").lower()
        )
    entry = Entry(
        version=_string(members.get("version"), "version"),
        sequence=_integer(members.get("sequence"), 0, _UINT64, "sequence", form),
        timestamp=_integer(members.get("timestamp"), -_INT64, _INT64, "timestamp", form),
        static=_key(members.get("static"), "static", form),
        client=client,
        server=server,
        signature=_string(members.get("signature"), "signature").lower(),
        successor=successor,
    )
    return entry, port_given


def decode_verified(body: bytes, form: Form = Form.SEED) -> Entry:
    """An entry from JSON whose rules and signature hold.

    :raises EntryDecodeError, EntryInvalid, EntrySignatureError: in the
        reference's order of checks.
    """
    entry, port_given = decode(body, form)
    entry.validate()
    entry = verified(entry, form, port_given=port_given)
    for server in (entry.client.delegated_servers if entry.client is not None else None) or ():
        try:
            if server != NULL_KEY:
                PubKey.from_hex(server)
        except KeyFormatError:
            raise EntryInvalid("delegated server is not a public key") from None
    return entry


# --- iteration --------------------------------------------------------------


def time_order(timestamp: int) -> str:
    """20 digits that compare as the reference compares timestamps.

    It compares ``time.Unix(ts, 0)``, which adds the seconds from year 1 to
    1970 in 64 bits: values above 9223371974719179007 wrap and count as older
    than any present one.  Fixed width, so that a database can compare it.
    """
    return f"{(timestamp + _UNIX_TO_YEAR_1 + _INT64) % _UINT64:020d}"


def next_sequence(sequence: int) -> int:
    """uint64, wraps."""
    return (sequence + 1) % _UINT64


@dataclass(frozen=True, slots=True)
class Head:
    """What is known of a key's newest entry, also after it was deleted.

    A deletion leaves it behind, so that an old first entry, which anybody may
    have kept, cannot be posted again.
    """

    sequence: int
    order: str
    deleted: bool = False


def check_iteration(head: Head | None, entry: Entry) -> bool:
    """The iteration rules (seed document, "Iteration rules").

    :returns: True for the first entry of a key.
    :raises EntryInvalid: sequence or timestamp do not follow.
    """
    if head is None or head.deleted:
        if entry.sequence != 0:
            raise EntryInvalid(WRONG_FIRST_SEQUENCE)
        if head is not None and time_order(entry.timestamp) <= head.order:
            raise EntryInvalid(WRONG_TIME)
        return True
    if entry.sequence != next_sequence(head.sequence):
        raise EntryInvalid(WRONG_SEQUENCE)
    if time_order(entry.timestamp) <= head.order:
        raise EntryInvalid(WRONG_TIME)
    return False


# --- deletion ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Deletion:
    """A signed statement that the entry with this sequence is to go.

    It names the act, so that no entry can pass for it, and its timestamp must
    be later than the entry's, so that it works once.
    """

    static: str
    sequence: int
    timestamp: int
    signature: str = ""

    def signing_json(self) -> bytes:
        """What is signed."""
        return (
            f'{{"act":"{DELETE_ACT}","static":"{self.static}","sequence":{self.sequence},"timestamp":{self.timestamp}}}'
        ).encode()

    def to_json(self) -> bytes:
        """The body of the DELETE request."""
        return self.signing_json()[:-1] + f',"signature":"{self.signature}"}}'.encode()

    def sign(self, key: SecKey) -> Deletion:
        """This deletion with the signature of ``key``."""
        return replace(self, signature=key.sign(self.signing_json()).hex())


def decode_deletion(body: bytes) -> Deletion:
    """A deletion whose signature holds.

    :raises EntryDecodeError, EntryInvalid, EntrySignatureError: it does not.
    """
    known = frozenset({"act", "static", "sequence", "timestamp", "signature"})
    members = _members(_parse(body, Form.SEED), Form.SEED, known, "deletion")
    for name in ("act", "static", "sequence", "timestamp", "signature"):
        if members.get(name) is None:
            raise EntryDecodeError(f"deletion has no {name}")
    if members["act"] != DELETE_ACT:
        raise EntryDecodeError(f'act is not "{DELETE_ACT}"')
    deletion = Deletion(
        static=_key(members["static"], "static", Form.SEED),
        sequence=_integer(members["sequence"], 0, _UINT64, "sequence", Form.SEED),
        timestamp=_integer(members["timestamp"], -_INT64, _INT64, "timestamp", Form.SEED),
        signature=_string(members["signature"], "signature").lower(),
    )
    if deletion.static == NULL_KEY:
        raise EntryInvalid("entry Keys is nil")
    try:
        PubKey.from_hex(deletion.static).verify(deletion.signing_json(), Signature.from_hex(deletion.signature))
    except (KeyFormatError, SignatureError) as error:
        raise EntrySignatureError from error
    return deletion


def check_deletion(head: Head | None, deletion: Deletion) -> None:
    """:raises EntryInvalid: it names another entry, or is not later than it.

    :raises KeyError: there is nothing to delete.
    """
    if head is None or head.deleted:
        raise KeyError(deletion.static)
    if deletion.sequence != head.sequence:
        raise EntryInvalid(WRONG_DELETE_SEQUENCE)
    if time_order(deletion.timestamp) <= head.order:
        raise EntryInvalid(WRONG_TIME)
