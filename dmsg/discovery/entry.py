"""Entries of discovery: their form and signature.  No I/O.

An entry is signed over its JSON without the signature, exactly as Go's
``encoding/json`` writes it: no white space, fixed key order, Go's escapes.
Two forms exist for servers: the 2019 service always writes a ``port`` field
(``""`` by default) between address and available_connections, the seed
documents have none.  :class:`Form` says which are accepted; an entry is kept
and served in the form that it was signed in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dmsg.discovery.gojson import (
    INT64,
    NULL_KEY,
    UINT64,
    EntryDecodeError,
    Form,
    Members,
    go_string,
    integer_of,
    key_of,
    members_of,
    parse,
    string_of,
)
from dmsg.errors import EntryError, KeyFormatError, SignatureError
from dmsg.keys import PubKey, SecKey, Signature
from dmsg.moved import forwarded

VERSION = "0.0.1"
MAX_ENTRY_SIZE = 64 * 1024
"""Bytes of a posted entry; a few hundred are usual."""
MAX_VERSION = 256
"""Characters of a version in which features are looked for."""
SUCCEED_ACT = "succeed"


class EntryInvalid(EntryError):
    """An entry that breaks a rule; the text is the reference's."""

    def __init__(self, text: str) -> None:
        super().__init__(f"entry validation error: {text}")


class EntrySignatureError(EntryError):
    """The signature is not that of the entry's key over its fields."""

    def __init__(self, text: str = "invalid signature") -> None:
        super().__init__(text)


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


def _encode(entry: Entry, *, with_signature: bool) -> str:
    parts = [
        f'{{"version":{go_string(entry.version)},"sequence":{entry.sequence}'
        f',"timestamp":{entry.timestamp},"static":"{entry.static}"'
    ]
    if entry.client is not None:
        servers = entry.client.delegated_servers
        listed = "null" if servers is None else "[" + ",".join(f'"{key}"' for key in servers) + "]"
        parts.append(f',"client":{{"delegated_servers":{listed}}}')
    if (server := entry.server) is not None:
        port = "" if server.port is None else f'"port":{go_string(server.port)},'
        parts.append(
            f',"server":{{"address":{go_string(server.address)},{port}'
            f'"available_connections":{server.available_connections}}}'
        )
    if (successor := entry.successor) is not None:
        parts.append(f',"successor":{{"static":"{successor.static}","signature":"{successor.signature}"}}')
    if with_signature and entry.signature:
        parts.append(f',"signature":"{entry.signature}"')
    parts.append("}")
    return "".join(parts)


_ENTRY = frozenset({"version", "sequence", "timestamp", "static", "client", "server", "successor", "signature"})
_SUCCESSOR = frozenset({"static", "signature"})
_CLIENT = frozenset({"delegated_servers"})
_SERVER = frozenset({"address", "port", "available_connections"})


def decode(body: bytes, form: Form = Form.SEED) -> tuple[Entry, bool]:
    """An entry from posted JSON, not yet validated.

    :returns: the entry, and whether the server's ``port`` was given.
    :raises EntryDecodeError: malformed.
    """
    value = parse(body, form)
    members = {} if value is None and form is Form.GO2019 else members_of(value, form, _ENTRY, "entry")
    client = server = successor = None
    port_given = False
    if members.get("client") is not None:
        fields = members_of(members["client"], form, _CLIENT, "client")
        listed = fields.get("delegated_servers")
        if listed is not None and (not isinstance(listed, list) or isinstance(listed, Members)):
            raise EntryDecodeError("delegated_servers is not a list")
        if listed is not None and len(listed) > MAX_DELEGATED:
            # each is a key that would be looked at before the signature
            raise EntryInvalid(f"entry has more than {MAX_DELEGATED} delegated servers")
        client = ClientMeta(None if listed is None else tuple(key_of(one, "delegated server", form) for one in listed))
    if members.get("server") is not None:
        fields = members_of(members["server"], form, _SERVER, "server")
        port_given = "port" in fields
        server = ServerMeta(
            address=string_of(fields.get("address"), "address"),
            port=string_of(fields.get("port"), "port"),
            available_connections=integer_of(
                fields.get("available_connections"), -INT64, INT64, "available_connections", form
            ),
        )
    # the form of 2019 has no such member, and decodes none
    if form is Form.SEED and members.get("successor") is not None:
        fields = members_of(members["successor"], form, _SUCCESSOR, "successor")
        successor = Successor(
            key_of(fields.get("static"), "successor", form), string_of(fields.get("signature"), "signature").lower()
        )
    entry = Entry(
        version=string_of(members.get("version"), "version"),
        sequence=integer_of(members.get("sequence"), 0, UINT64, "sequence", form),
        timestamp=integer_of(members.get("timestamp"), -INT64, INT64, "timestamp", form),
        static=key_of(members.get("static"), "static", form),
        client=client,
        server=server,
        signature=string_of(members.get("signature"), "signature").lower(),
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


if not TYPE_CHECKING:
    # until 0.1 these were one module
    __getattr__ = forwarded(__name__, ["dmsg.discovery.rules", "dmsg.discovery.gojson"])
