"""Entries of others: where a key can be reached."""

from __future__ import annotations

from twisted.internet.interfaces import IReactorTime

from dmsg.discovery.entries.entry import Entry
from dmsg.discovery.lookup.lookups import Lookups
from dmsg.errors import ConnectFailed, DiscoveryError, EntryNotFound, KeyFormatError
from dmsg.keys import PubKey

ENTRY_CACHE_TIME = 10.0
"""Seconds that a fetched entry is used again without asking; it is kept for when discovery is away."""
ENTRY_CACHE_SIZE = 1024
SUCCESSORS = 4
"""Steps from a key to its successors that are followed."""


class Entries:
    """Entries that were looked up, verified."""

    def __init__(self, reactor: IReactorTime, lookups: Lookups) -> None:
        self._reactor = reactor
        self._lookups = lookups
        self._known: dict[PubKey, tuple[float, Entry]] = {}

    def __contains__(self, remote: PubKey) -> bool:
        """Whether one is kept, fresh or not."""
        return remote in self._known

    def is_fresh(self, remote: PubKey) -> bool:
        """Whether :meth:`of` answers without asking discovery."""
        known = self._known.get(remote)
        return known is not None and known[0] > self._reactor.seconds()

    def keep(self, remote: PubKey, entry: Entry, seconds: float) -> None:
        """Take ``entry`` for what discovery says, for so long."""
        self._known.pop(remote, None)
        self._known[remote] = (self._reactor.seconds() + seconds, entry)
        if len(self._known) > ENTRY_CACHE_SIZE:
            del self._known[next(iter(self._known))]

    def doubt(self, remote: PubKey) -> None:
        """Ask discovery again next time; what is kept is for when it is away."""
        if remote in self._known:
            self._known[remote] = (0.0, self._known[remote][1])

    def forget(self) -> None:
        """Keep nothing."""
        self._known.clear()

    async def of(self, remote: PubKey) -> Entry:
        """The entry of ``remote``, not older than ``ENTRY_CACHE_TIME`` unless discovery is away.

        :raises EntryNotFound: there is none.
        :raises DiscoveryError: discovery is away, and nothing is known.
        """
        known = self._known.get(remote)
        if known is not None and self.is_fresh(remote):
            return known[1]
        try:
            entry = await self._lookups.entry(remote)
        except EntryNotFound:
            raise
        except DiscoveryError:
            if known is None:
                raise
            return known[1]  # discovery is away: what was true lately is better than nothing
        self.keep(remote, entry, ENTRY_CACHE_TIME)
        return entry

    async def successor(self, remote: PubKey) -> tuple[PubKey, Entry]:
        """The entry of ``remote``, or of the key that it named, signed by both, to follow it.

        :raises ConnectFailed: more than ``SUCCESSORS`` keys follow each other.
        """
        for _ in range(SUCCESSORS):
            entry = await self.of(remote)
            if entry.successor is None:
                return remote, entry
            remote = entry.successor.key
        raise ConnectFailed(f"{remote.short}: more than {SUCCESSORS} keys follow each other")


def delegated_servers(remote: PubKey, entry: Entry) -> list[PubKey]:
    """The servers at which ``remote`` is found, as its entry says.

    :raises ConnectFailed: there are none.
    """
    servers = []
    for text in (entry.client.delegated_servers if entry.client is not None else None) or ():
        try:
            servers.append(PubKey.from_hex(text))
        except KeyFormatError:
            continue
    if not servers:
        raise ConnectFailed(f"{remote.short} is connected to no server")
    return servers
