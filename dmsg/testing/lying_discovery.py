"""Discovery that lies: it answers with entries that are old, of other keys, missing, late, very long or changed, or
with servers that do not exist.

The discovery is the real one. Its store is replaced by one that returns wrong entries. The store does not know the
secret keys of servers and clients, so a wrong entry is an old one or has an invalid signature. Invented servers have
new keys.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.task import deferLater

from dmsg.discovery.entries.entry import Entry, ServerMeta
from dmsg.discovery.service.service import Discovery
from dmsg.errors import EntryNotFound
from dmsg.keys import SecKey
from dmsg.testing.network import Host

LATE_ANSWER = 9.0
"""Seconds after which a slow discovery answers."""
ENDLESS_SIZE = 4 * 1024 * 1024
"""Number of bytes that the lie adds to an answer. The client must stop reading before the end."""
MAX_INVENTED_SERVERS = 6
"""Maximum number of invented servers in an answer."""
ADDRESS = "10.9.9.9:8080"
"""Address of the invented servers. There is no host at this address."""


class LyingDiscovery:
    """Discovery that tells one kind of lie at a time, or none.

    :ivar kind: name of the present kind of lie; empty while discovery is honest.
    """

    def __init__(self, host: Host, discovery: Discovery) -> None:
        assert discovery._running is not None  # noqa: SLF001  # No public name leads to the store.
        store = discovery._running.store  # noqa: SLF001
        self._host = host
        self._get = store.get
        self._available = store.available
        self._first: dict[str, bytes] = {}
        self._random = Random(0)
        self.kind = ""
        store.get = self.get  # type: ignore[method-assign]
        store.available = self.available  # type: ignore[method-assign]

    def lie(self, kind: str, random: Random) -> None:
        """Tell lies of this kind from now on. With an empty ``kind``, be honest."""
        self.kind = kind
        self._random = random

    def get(self, static: str) -> Deferred[bytes]:
        """Return the JSON of the entry of a key, altered or replaced if this discovery now lies about entries."""

        def got(body: bytes) -> bytes | Deferred[bytes]:
            self._first.setdefault(static, body)
            lie = _LIES.get(self.kind)
            return body if lie is None else lie(self, static, body)

        return self._get(static).addCallback(got)

    def available(self, limit: int, since: float) -> Deferred[list[bytes]]:
        """Return the JSON of the listed servers or, as a lie, of invented servers or of none."""
        if self.kind == "wrong servers":
            return succeed([self._invented() for _ in range(min(limit, MAX_INVENTED_SERVERS))])
        if self.kind == "no entries":
            return succeed([])
        if self.kind == "slow":
            return deferLater(self._host.reactor, LATE_ANSWER).addCallback(lambda _: self._available(limit, since))
        return self._available(limit, since)

    def _invented(self) -> bytes:
        key = SecKey.from_seed(self._random.randbytes(32))
        server = ServerMeta(ADDRESS, 1000)
        return Entry("0.0.1+relay1", 0, time.time_ns(), key.public.hex(), server=server).sign(key).to_json()

    # --- lies about one entry ---

    def _old(self, static: str, body: bytes) -> bytes:
        return self._first[static]

    def _another(self, static: str, body: bytes) -> bytes:
        return self._random.choice(list(self._first.values()))

    def _none(self, static: str, body: bytes) -> Deferred[bytes]:
        return fail(EntryNotFound())

    def _slow(self, static: str, body: bytes) -> Deferred[bytes]:
        return deferLater(self._host.reactor, LATE_ANSWER, lambda: body)

    def _endless(self, static: str, body: bytes) -> bytes:
        return body[:-1] + b" " * ENDLESS_SIZE + b"}"

    def _changed(self, static: str, body: bytes) -> bytes:
        changed = bytearray(body)
        changed[self._random.randrange(len(changed))] ^= 1 << self._random.randrange(8)
        return bytes(changed)


_LIES: dict[str, Callable[[LyingDiscovery, str, bytes], bytes | Deferred[bytes]]] = {
    "old entries": LyingDiscovery._old,  # noqa: SLF001
    "entries of others": LyingDiscovery._another,  # noqa: SLF001
    "no entries": LyingDiscovery._none,  # noqa: SLF001
    "slow": LyingDiscovery._slow,  # noqa: SLF001
    "endless entries": LyingDiscovery._endless,  # noqa: SLF001
    "changed entries": LyingDiscovery._changed,  # noqa: SLF001
}
KINDS = (*_LIES, "wrong servers")
"""Names of the kinds of lies of discovery."""
