"""Entries of discovery: what they say, and who signed it.  No I/O.

An entry is signed over its JSON without the signature, byte for byte;
:class:`Spelling` writes that JSON.  :mod:`dmsg.discovery.entries.dialects`
decides which entries are accepted from whom.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from dmsg.discovery.entries.gojson import NULL_KEY, go_string
from dmsg.errors import EntryError, KeyFormatError, SignatureError
from dmsg.keys import PubKey, SecKey, Signature

VERSION = "0.0.1"
MAX_ENTRY_SIZE = 64 * 1024
"""Bytes of a posted entry; a few hundred are usual."""
MAX_VERSION = 256
"""Characters of a version; features are looked for in no more of it."""
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
class Spelling:
    """The members of entries as one generation of programs calls them, in their order on the wire.

    What another generation calls otherwise is another instance; entries carry
    the one that they were signed in (``Entry.spelling``).

    :ivar delegated_servers: the member of ``client``.
    :ivar server: the members of ``server``: address, port, free connections.
    :ivar string: a string with its quotes and escapes.
    """

    delegated_servers: str
    server: tuple[str, str, str]
    string: Callable[[str], str]

    def write(self, entry: Entry, *, signed: bool) -> bytes:
        """The JSON of an entry without white space.

        :param signed: with its signature; without, it is what is signed.
        """
        parts = [
            f'{{"version":{self.string(entry.version)},"sequence":{entry.sequence}'
            f',"timestamp":{entry.timestamp},"static":"{entry.static}"'
        ]
        if entry.client is not None:
            parts.append(self._client(entry.client))
        if entry.server is not None:
            parts.append(self._server(entry.server))
        if entry.successor is not None:
            parts.append(self._successor(entry.successor))
        if signed and entry.signature:
            parts.append(f',"signature":"{entry.signature}"')
        parts.append("}")
        return "".join(parts).encode()

    def _client(self, client: ClientMeta) -> str:
        servers = client.delegated_servers
        listed = "null" if servers is None else "[" + ",".join(f'"{key}"' for key in servers) + "]"
        return f',"client":{{"{self.delegated_servers}":{listed}}}'

    def _server(self, server: ServerMeta) -> str:
        address, port, connections = self.server
        # who leaves the field out signs without it
        optional = "" if server.port is None else f'"{port}":{self.string(server.port)},'
        return (
            f',"server":{{"{address}":{self.string(server.address)},{optional}'
            f'"{connections}":{server.available_connections}}}'
        )

    def _successor(self, successor: Successor) -> str:
        return f',"successor":{{"static":"{successor.static}","signature":"{successor.signature}"}}'


SPELLING = Spelling("delegated_servers", ("address", "port", "available_connections"), go_string)
"""That of the seed documents and of 2019."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What discovery stores of a key.

    :ivar sequence: uint64.  :ivar timestamp: int64, nanoseconds since 1970.
    :ivar static: 66 hexadecimal characters, lower case.
    :ivar signature: 130 hexadecimal characters, or empty.
    :ivar spelling: how it was written when it was signed; it is kept and served like that.
    """

    version: str
    sequence: int
    timestamp: int
    static: str
    client: ClientMeta | None = None
    server: ServerMeta | None = None
    signature: str = ""
    successor: Successor | None = None
    spelling: Spelling = SPELLING

    @property
    def key(self) -> PubKey:
        """:raises KeyFormatError: the null key."""
        return PubKey.from_hex(self.static)

    def offers(self, feature: str) -> bool:
        """Whether its owner says, in the signed version, that it speaks this."""
        return feature in features(self.version)

    def signing_json(self) -> bytes:
        """What is signed."""
        return self.spelling.write(self, signed=False)

    def to_json(self) -> bytes:
        """The entry on the wire."""
        return self.spelling.write(self, signed=True)

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
            signer = Signature.from_hex(self.signature).recover(self.signing_json())
        except (KeyFormatError, SignatureError) as error:
            raise EntrySignatureError from error
        # what is recovered is a point of the curve: that of the entry need not be looked at
        if signer.hex() != self.static:
            raise EntrySignatureError
        if self.successor is not None:
            self.successor.verify(self.static)
