"""Cache of the entries of other clients, which say through which servers a key can be reached."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from dmsg.discovery.entries.entry import Entry
from dmsg.discovery.lookup.lookups import Lookups
from dmsg.errors import ConnectFailed, DiscoveryError, EntryNotFound, KeyFormatError
from dmsg.keys import PubKey

ENTRY_CACHE_TIME = 10.0
"""Seconds for which a fetched entry is used without a new query. Older entries are used if discovery does not answer.
"""
ENTRY_CACHE_SIZE = 1024
"""Maximum number of entries in the cache."""
MAX_SUCCESSORS = 4
"""Maximum number of steps from a key to its successors."""


class _Query:
    """Query of one entry from discovery. Callers that want the same entry before the answer arrives share the query.

    The query is cancelled when all its callers have cancelled.
    """

    def __init__(self) -> None:
        self._callers: list[Deferred[Entry]] = []
        self._asking: Deferred[Entry] | None = None

    def answer(self) -> Deferred[Entry]:
        """Add a caller, and return its Deferred, which fires with the answer."""
        caller: Deferred[Entry] = Deferred(self._leave)
        self._callers.append(caller)
        return caller

    def start(self, asking: Deferred[Entry]) -> None:
        """Wait for the answer of discovery, and pass it to all callers.

        :param asking: Deferred that fires with the answer.
        """
        self._asking = asking
        asking.addBoth(self._ended)

    def _leave(self, caller: Deferred[Entry]) -> None:
        self._callers.remove(caller)
        if not self._callers and self._asking is not None:
            self._asking.cancel()

    def _ended(self, result: Entry | Failure) -> None:
        # Callers are removed one by one, because a callback may change the list.
        while self._callers:
            self._callers.pop(0).callback(result)


class Entries:
    """Cache of the verified entries of other clients."""

    def __init__(self, reactor: IReactorTime, lookups: Lookups) -> None:
        self._reactor = reactor
        self._lookups = lookups
        self._known: dict[PubKey, tuple[float, Entry]] = {}
        self._queries: dict[PubKey, _Query] = {}
        """Queries under way, by key."""

    def __contains__(self, remote: PubKey) -> bool:
        """Whether an entry of ``remote`` is cached, however old."""
        return remote in self._known

    def is_fresh(self, remote: PubKey) -> bool:
        """Whether :meth:`get` answers from the cache, without a query of discovery."""
        known = self._known.get(remote)
        return known is not None and known[0] > self._reactor.seconds()

    def keep(self, remote: PubKey, entry: Entry, seconds: float) -> None:
        """Cache ``entry``. For ``seconds`` seconds, it is used without a query of discovery."""
        # The entry is removed first so that it moves to the end of the dictionary. The cache evicts the entry at the
        # front, which was fetched longest ago.
        self._known.pop(remote, None)
        self._known[remote] = (self._reactor.seconds() + seconds, entry)
        if len(self._known) > ENTRY_CACHE_SIZE:
            del self._known[next(iter(self._known))]

    def mark_stale(self, remote: PubKey) -> None:
        """Make the next :meth:`get` query discovery. The cached entry is then used only if
        discovery does not answer.
        """
        # Later callers do not share a query that is under way, because its answer may be as outdated as the cached
        # entry.
        self._queries.pop(remote, None)
        if remote in self._known:
            self._known[remote] = (0.0, self._known[remote][1])

    def forget(self) -> None:
        """Remove all entries from the cache."""
        self._known.clear()
        self._queries.clear()

    async def get(self, remote: PubKey) -> Entry:
        """Return the entry of ``remote``, which was fetched at most ``ENTRY_CACHE_TIME`` seconds ago.

        If discovery does not answer, return an older entry from the cache.

        :raises EntryNotFound: discovery has no entry of ``remote``.
        :raises DiscoveryError: discovery does not answer, and no entry is cached.
        """
        known = self._known.get(remote)
        if known is not None and self.is_fresh(remote):
            return known[1]
        try:
            entry = await self._query(remote)
        except EntryNotFound:
            raise
        except DiscoveryError:
            if known is None:
                raise
            return known[1]  # The cached entry is returned, because an outdated entry may still be correct.
        self.keep(remote, entry, ENTRY_CACHE_TIME)
        return entry

    async def _query(self, remote: PubKey) -> Entry:
        """Fetch an entry from discovery. If a query of the same key is under way, share its answer."""
        query = self._queries.get(remote)
        if query is not None:
            return await query.answer()
        query = self._queries[remote] = _Query()
        answer = query.answer()

        def forget(result: Entry | Failure) -> Entry | Failure:
            # ``mark_stale`` may have removed this query, and a newer one may be in its place.
            if self._queries.get(remote) is query:
                del self._queries[remote]
            return result

        query.start(self._lookups.entry(remote).addBoth(forget))
        return await answer

    async def successor(self, remote: PubKey) -> tuple[PubKey, Entry]:
        """Return the current key of ``remote``, itself or its successor, and the entry of that key.

        A successor is valid, because both the old and the new key have signed the succession.

        :raises ConnectFailed: the chain of successors is longer than ``MAX_SUCCESSORS``.
        """
        # The number of steps is limited, because two keys may name each other as successor.
        for _ in range(MAX_SUCCESSORS):
            entry = await self.get(remote)
            if entry.successor is None:
                return remote, entry
            remote = entry.successor.key
        raise ConnectFailed(f"{remote.short}: more than {MAX_SUCCESSORS} keys in a row name a successor")


def delegated_servers(remote: PubKey, entry: Entry) -> list[PubKey]:
    """Return the servers to which ``remote`` is connected, as its entry says.

    :raises ConnectFailed: the entry names no valid server.
    """
    servers = []
    for text in (entry.client.delegated_servers if entry.client is not None else None) or ():
        try:
            servers.append(PubKey.from_hex(text))
        except KeyFormatError:
            continue
    if not servers:
        raise ConnectFailed(f"{remote.short} is not connected to a server: its program is stopped, or just starting")
    return servers
