"""Entries of discovery: their content, their signature, and their JSON. No I/O.

The signature of an entry covers the bytes of the entry's JSON without the signature. :class:`Spelling` writes that
JSON. :mod:`dmsg.discovery.entries.dialects` decides which entries are accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, cast

from dmsg.discovery.entries.gojson import NULL_KEY, STRICT, EntryDecodeError, go_string
from dmsg.errors import EntryError, KeyFormatError, SignatureError
from dmsg.keys import PubKey, SecKey, Signature

VERSION = "0.0.1"
MAX_ENTRY_SIZE = 64 * 1024
"""Largest posted entry in bytes; usual entries have a few hundred."""
MAX_VERSION = 256
"""Maximum number of characters of a version that are searched for features."""
SUCCEED_ACT = "succeed"


class EntryInvalid(EntryError):
    """Error: the entry breaks a rule. Its text is that of the reference implementation of
    2019."""

    def __init__(self, text: str) -> None:
        super().__init__(f"entry validation error: {text}")


class EntrySignatureError(EntryError):
    """Error: the signature of an entry was not made with the entry's key, or does not cover the entry's fields."""

    def __init__(self, text: str = "invalid signature") -> None:
        super().__init__(text)


MAX_DELEGATED = 64
"""Maximum number of servers that a client's entry may name."""
REFRESH = "refresh1"
"""Feature of clients that post their entry regularly."""
REFRESHING = frozenset({"relay1", "messaging-seed", "messaging-skywire"})
"""Features of servers that post their entry regularly. A server that names none of them may be of 2019, and then posts
its entry only once.
"""


def features(version: str) -> frozenset[str]:
    """Return the features that a version announces: the words after ``+``.

    ``0.0.1+secure1.relay1`` is a version with build metadata, as defined by semver.org. The service of 2019 ignores the
    version, and the signature covers it.
    """
    words = version[:MAX_VERSION].partition("+")[2]
    # Features that this program does not know are returned, too, because the owner of the entry may run a newer one.
    return frozenset(word for word in words.split(".") if word)


def with_feature(version: str, feature: str, present: bool = True) -> str:
    """Return ``version`` with a feature added, or removed if it is not ``present``."""
    known = features(version) | {feature} if present else features(version) - {feature}
    base = version.partition("+")[0] or VERSION
    return f"{base}+{'.'.join(sorted(known))}" if known else base


@dataclass(frozen=True, slots=True)
class ClientMeta:
    """Client part of an entry.

    :ivar delegated_servers: keys of the client's servers, 66 hexadecimal characters each; None is written ``null``, as
        Go writes nil.
    """

    delegated_servers: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class ServerMeta:
    """Server part of an entry.

    :ivar address: ``host:port``.
    :ivar port: value of the member ``port``; None if the signed JSON does not have this member.
    """

    address: str
    available_connections: int
    port: str | None = ""


@dataclass(frozen=True, slots=True)
class Successor:
    """Successor key named in an entry, with the successor's consent.

    :ivar static: the new key, 66 hexadecimal characters.
    :ivar signature: signature of the new key over :meth:`signing_json`, 130 hexadecimal characters. The entry's own
        signature is the consent of the old key.
    """

    static: str
    signature: str

    @staticmethod
    def signing_json(old: str, new: str) -> bytes:
        """Return the text that the new key signs. It contains both keys, so that the consent is valid for this old key
        only.
        """
        return f'{{"act":"{SUCCEED_ACT}","static":"{old}","successor":"{new}"}}'.encode()

    @classmethod
    def make(cls, old: PubKey, new: SecKey) -> Successor:
        """Return a statement that ``new`` is the successor of ``old``, signed by ``new``."""
        static = new.public.hex()
        return cls(static, new.sign(cls.signing_json(old.hex(), static)).hex())

    @property
    def key(self) -> PubKey:
        """Public key of the successor.

        :raises KeyFormatError: the text is not a public key.
        """
        return PubKey.from_hex(self.static)

    def verify(self, old: str) -> None:
        """Check the consent of the new key.

        :raises EntrySignatureError: the new key has not signed that it succeeds ``old``.
        """
        try:
            self.key.verify(self.signing_json(old, self.static), Signature.from_hex(self.signature))
        except (KeyFormatError, SignatureError) as error:
            raise EntrySignatureError("successor has not signed") from error


@dataclass(frozen=True, slots=True)
class Spelling:
    """Names and order of an entry's JSON members, as one generation of programs writes them.

    There is an instance for each generation. An entry refers to the instance with which it was signed
    (``Entry.spelling``).

    :ivar delegated_servers: name of the member of ``client``.
    :ivar server: names of the three members of ``server``: the address, the port, and the number of free connections.
    :ivar string: function that encodes a string as JSON, with quotes and escapes.
    """

    delegated_servers: str
    server: tuple[str, str, str]
    string: Callable[[str], str]

    def write(self, entry: Entry) -> bytes:
        """Return the JSON of an entry without its signature and without white space: the text to sign."""
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
        parts.append("}")
        return "".join(parts).encode()

    def _client(self, client: ClientMeta) -> str:
        servers = client.delegated_servers
        listed = "null" if servers is None else "[" + ",".join(f'"{key}"' for key in servers) + "]"
        return f',"client":{{"{self.delegated_servers}":{listed}}}'

    def _server(self, server: ServerMeta) -> str:
        address, port, connections = self.server
        # A field that is None is not written, because a program that omits the field also signs the JSON without it.
        optional = "" if server.port is None else f'"{port}":{self.string(server.port)},'
        return (
            f',"server":{{"{address}":{self.string(server.address)},{optional}'
            f'"{connections}":{server.available_connections}}}'
        )

    def _successor(self, successor: Successor) -> str:
        return f',"successor":{{"static":"{successor.static}","signature":"{successor.signature}"}}'


SPELLING = Spelling("delegated_servers", ("address", "port", "available_connections"), go_string)
"""Spelling of the seed documents, which programs of 2019 use, too."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Entry: signed record that discovery stores for a key.

    :ivar sequence: uint64.
    :ivar timestamp: int64, nanoseconds since 1970.
    :ivar static: public key, 66 hexadecimal characters in lower case.
    :ivar signature: 130 hexadecimal characters, or empty.
    :ivar spelling: JSON form in which the entry was signed; discovery stores and returns the entry in this form.
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
    _unsigned: bytes = field(default=b"", init=False, repr=False, compare=False)
    """Cached JSON without the signature; empty until it is first needed. A POST needs this JSON three times: for the
    signature, the size and the store.
    """

    @property
    def key(self) -> PubKey:
        """Public key of the entry.

        :raises KeyFormatError: the entry has the null key.
        """
        return PubKey.from_hex(self.static)

    def offers(self, feature: str) -> bool:
        """Whether the owner announces this feature in the entry's field ``version``, which is signed."""
        return feature in features(self.version)

    def signing_json(self) -> bytes:
        """Return the JSON that the entry's signature covers: the entry without the signature."""
        if not self._unsigned:
            object.__setattr__(self, "_unsigned", self.spelling.write(self))
        return self._unsigned

    def to_json(self) -> bytes:
        """Return the JSON with the signature."""
        text = self.signing_json()
        return b'%b,"signature":"%b"}' % (text[:-1], self.signature.encode()) if self.signature else text

    def sign(self, key: SecKey) -> Entry:
        """Return the entry signed with ``key``, which must be the entry's own."""
        return replace(self, signature=key.sign(self.signing_json()).hex())

    def validate(self) -> None:
        """Check that the entry has a version, a signature, a client or server part, and a key, in the order of the
        reference.

        :raises EntryInvalid: one of these is missing.
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
        """Verify the signature, and the successor's if there is one.

        :raises EntrySignatureError: the entry was not signed by its own key.
        """
        try:
            signer = Signature.from_hex(self.signature).recover(self.signing_json())
        except (KeyFormatError, SignatureError) as error:
            raise EntrySignatureError from error
        # A recovered key is always a point of the curve, so the comparison also proves that the entry's key is a point.
        if signer.hex() != self.static:
            raise EntrySignatureError
        if self.successor is not None:
            self.successor.verify(self.static)


class SignedRequest:
    """Base of requests that a key signs: to delete its entry, and to release its nameplate.

    The JSON of a request has a member ``act`` that names the operation. So no text that the key signed for another
    purpose is a valid request. The signature is the last member, and covers the JSON without it.

    :ivar static: public key that signs, as 66 lower-case hexadecimal characters.
    :ivar signature: signature as hexadecimal characters; empty before :meth:`sign`.
    """

    __slots__ = ()
    static: str
    signature: str

    def signing_json(self) -> bytes:
        """Return the JSON that the signature covers."""
        raise NotImplementedError

    def to_json(self) -> bytes:
        """Return the body of the DELETE request."""
        return self.signing_json()[:-1] + f',"signature":"{self.signature}"}}'.encode()

    def sign(self, key: SecKey) -> Self:
        """Return a copy of the request with the signature of ``key``."""
        return cast(Self, replace(cast(Any, self), signature=key.sign(self.signing_json()).hex()))

    def verify(self) -> None:
        """Verify the signature.

        :raises EntrySignatureError: the request is not signed by its key.
        """
        try:
            PubKey.from_hex(self.static).verify(self.signing_json(), Signature.from_hex(self.signature))
        except (KeyFormatError, SignatureError) as error:
            raise EntrySignatureError from error


def parse_request(body: bytes, kind: str, act: str, purpose: str, names: Sequence[str]) -> Mapping[str, Any]:
    """Return the members of the JSON of a request.

    :param kind: word for the request in errors.
    :param act: value of the member ``act``.
    :param purpose: text that says in errors what the request asks for.
    :param names: names of the other members, besides ``static`` and ``signature``. All are required.
    :raises EntryDecodeError: the JSON is malformed.
    """
    wanted = ("act", "static", *names, "signature")
    members = STRICT.members(STRICT.parse(body), frozenset(wanted), kind)
    for name in wanted:
        if members.get(name) is None:
            raise EntryDecodeError(f"request to {purpose} has no {name}")
    if members["act"] != act:
        raise EntryDecodeError(f'act is not "{act}"')
    return members
