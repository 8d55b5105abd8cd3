"""Dialects of discovery: the JSON of entries as two generations of programs post it. No I/O.

The seed documents require strict JSON, and do not say whether ``port`` is signed. The service of 2019 decodes JSON as
Go does. It always writes ``port`` (``""`` by default) between ``address`` and ``available_connections``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from dmsg.discovery.entries.entry import (
    MAX_DELEGATED,
    SPELLING,
    ClientMeta,
    Entry,
    EntryInvalid,
    EntrySignatureError,
    ServerMeta,
    Spelling,
    Successor,
    features,
)
from dmsg.discovery.entries.gojson import (
    AS_GO,
    INT64,
    NULL_KEY,
    STRICT,
    UINT64,
    EntryDecodeError,
    Members,
    Reader,
    string_of,
)
from dmsg.errors import KeyFormatError
from dmsg.keys import PubKey

_ENTRY = frozenset({"version", "sequence", "timestamp", "static", "client", "server", "successor", "signature"})
_SUCCESSOR = frozenset({"static", "signature"})


@dataclass(frozen=True, slots=True)
class Dialect:
    """Dialect of one generation of programs.

    :cvar SEED: dialect of the seed documents and of this implementation.
    :cvar GO2019: dialect of the service of 2019.
    :ivar entries: URL paths of entries.
    :ivar available: URL paths of the available servers.
    :ivar reader: parser for the JSON of this dialect.
    :ivar spelling: spelling of the JSON members.
    :ivar port_optional: whether a server's entry may be signed without ``port``.
    :ivar successors: whether entries may name a successor key.
    :ivar marks: whether the words after ``+`` in a version count as features of the entry's owner. In the dialect of
        2019 they do not count: a program of 2019 may have copied them from an entry that a newer program with the same
        key had posted.
    :ivar null_is_empty: whether the JSON value ``null`` is decoded as an entry without members.
    """

    SEED: ClassVar[Dialect]
    GO2019: ClassVar[Dialect]

    entries: tuple[str, ...]
    available: tuple[str, ...]
    reader: Reader
    spelling: Spelling
    port_optional: bool
    successors: bool
    marks: bool
    null_is_empty: bool

    def decode(self, body: bytes) -> Sequence[Entry]:
        """Parse posted JSON into entries that are not validated yet, one for each form that may have been signed.

        :returns: one entry, or two that differ in whether ``port`` is written.
        :raises EntryDecodeError: the JSON is malformed.
        """
        reader = self.reader
        value = reader.parse(body)
        # As in Go, null is decoded as an entry without members. Validation then refuses that entry for its missing
        # version.
        members = {} if value is None and self.null_is_empty else reader.members(value, _ENTRY, "entry")
        client = server = successor = None
        port_given = True
        if members.get("client") is not None:
            client = self._client(members["client"])
        if members.get("server") is not None:
            server, port_given = self._server(members["server"])
        if self.successors and members.get("successor") is not None:
            fields = reader.members(members["successor"], _SUCCESSOR, "successor")
            successor = Successor(
                reader.key(fields.get("static"), "successor"), string_of(fields.get("signature"), "signature").lower()
            )
        entry = Entry(
            version=string_of(members.get("version"), "version"),
            sequence=reader.integer(members.get("sequence"), 0, UINT64, "sequence"),
            timestamp=reader.integer(members.get("timestamp"), -INT64, INT64, "timestamp"),
            static=reader.key(members.get("static"), "static"),
            client=client,
            server=server,
            signature=string_of(members.get("signature"), "signature").lower(),
            successor=successor,
            spelling=self.spelling,
        )
        # If the posted JSON has no port, the entry may have been signed without a port or with an empty one. The
        # signature shows which.
        if server is None or port_given or not self.port_optional:
            return (entry,)
        return (entry, replace(entry, server=replace(server, port=None)))

    def _client(self, value: object) -> ClientMeta:
        name = self.spelling.delegated_servers
        listed = self.reader.members(value, frozenset({name}), "client").get(name)
        if listed is None:
            return ClientMeta(None)
        if not isinstance(listed, list) or isinstance(listed, Members):
            raise EntryDecodeError("delegated_servers is not a list")
        if len(listed) > MAX_DELEGATED:
            # The number of delegated keys is limited first, because all of them are parsed before the signature is
            # verified.
            raise EntryInvalid(f"entry has more than {MAX_DELEGATED} delegated servers")
        return ClientMeta(tuple(self.reader.key(one, "delegated server") for one in listed))

    def _server(self, value: object) -> tuple[ServerMeta, bool]:
        address, port, connections = self.spelling.server
        fields = self.reader.members(value, frozenset(self.spelling.server), "server")
        meta = ServerMeta(
            address=string_of(fields.get(address), address),
            port=string_of(fields.get(port), port),
            available_connections=self.reader.integer(fields.get(connections), -INT64, INT64, connections),
        )
        return meta, port in fields

    def decode_signed(self, body: bytes) -> Entry:
        """Parse an entry, validate it and verify its signature. Return the entry in the form that was signed.

        :raises EntryDecodeError, EntryInvalid, EntrySignatureError: the first check that failed, in the order of the
            reference.
        """
        ways = self.decode(body)
        ways[0].validate()
        return find_signed_form(ways)

    def decode_verified(self, body: bytes) -> Entry:
        """Parse and verify an entry like :meth:`decode_signed`. Also check that the delegated servers are public keys,
        which is required of a posted entry.

        :raises EntryDecodeError, EntryInvalid, EntrySignatureError: as :meth:`decode_signed`.
        """
        entry = self.decode_signed(body)
        for server in (entry.client.delegated_servers if entry.client is not None else None) or ():
            try:
                if server != NULL_KEY:
                    PubKey.from_hex(server)
            except KeyFormatError:
                raise EntryInvalid("delegated server is not a public key") from None
        return entry

    def features(self, entry: Entry) -> frozenset[str]:
        """Return the features that the owner of an entry announces; none in a dialect without :attr:`marks`."""
        return features(entry.version) if self.marks else frozenset()


def find_signed_form(forms: Sequence[Entry]) -> Entry:
    """Return the form of the entry that the signature covers.

    :raises EntrySignatureError: the signature matches none of the forms.
    """
    # If all forms fail, the verification of the last one raises the error, as for an entry with only one form.
    for entry in forms[:-1]:
        try:
            entry.verify()
        except EntrySignatureError:
            continue
        return entry
    forms[-1].verify()
    return forms[-1]


Dialect.SEED = Dialect(
    entries=("/discovery/entries",),
    available=("/discovery/available_servers",),
    reader=STRICT,
    spelling=SPELLING,
    port_optional=True,
    successors=True,
    marks=True,
    null_is_empty=False,
)
Dialect.GO2019 = Dialect(
    entries=("/messaging-discovery/entry", "/dmsg-discovery/entry"),
    available=("/messaging-discovery/available_servers", "/dmsg-discovery/available_servers"),
    reader=AS_GO,
    spelling=SPELLING,
    port_optional=False,
    successors=False,
    marks=False,
    null_is_empty=True,
)
DIALECTS = (Dialect.SEED, Dialect.GO2019)


def decode(body: bytes, dialect: Dialect = Dialect.SEED) -> Entry:
    """Parse posted JSON into an entry that is neither validated nor verified.

    :raises EntryDecodeError: the JSON is malformed.
    """
    return dialect.decode(body)[0]


def decode_verified(body: bytes, dialect: Dialect = Dialect.SEED) -> Entry:
    """Parse and check an entry, see :meth:`Dialect.decode_verified`."""
    return dialect.decode_verified(body)
