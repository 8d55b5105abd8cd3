"""Cache of the entries of other clients, which say where a key can be reached."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from dmsg.discovery.entries.entry import Entry
from dmsg.discovery.lookup.lookups import Lookups
from dmsg.errors import ConnectFailed, DiscoveryError, EntryNotFound, KeyFormatError
from dmsg.keys import PubKey

ENTRY_CACHE_TIME = 10.0
"""Seconds for which a fetched entry is used without asking again. Older entries are kept for the case that discovery
does not answer.
"""
ENTRY_CACHE_SIZE = 1024
"""Maximum number of entries in the cache."""
SUCCESSORS = 4
"""Maximum number of steps from a key to its successors."""


class _Query:
    """Query of discovery for one entry, whose answer is shared by all callers that ask before it arrives.

    The query is cancelled when its last caller cancels.
    """

    def __init__(self) -> None:
        self._callers: list[Deferred[Entry]] = []
        self._asking: Deferred[Entry] | None = None

    def answer(self) -> Deferred[Entry]:
        """Return a Deferred of the answer for one more caller."""
        caller: Deferred[Entry] = Deferred(self._leave)
        self._callers.append(caller)
        return caller

    def start(self, asking: Deferred[Entry]) -> None:
        """Pass the answer of ``asking`` to all callers."""
        self._asking = asking
        asking.addBoth(self._ended)

    def _leave(self, caller: Deferred[Entry]) -> None:
        self._callers.remove(caller)
        if not self._callers and self._asking is not None:
            self._asking.cancel()

    def _ended(self, result: Entry | Failure) -> None:
        # A callback may add or cancel callers, so the list is read again before each call.
        while self._callers:
            self._callers.pop(0).callback(result)


class Entries:
    """Cache of the verified entries of other clients."""

    def __init__(self, reactor: IReactorTime, lookups: Lookups) -> None:
        self._reactor = reactor
        self._lookups = lookups
        self._known: dict[PubKey, tuple[float, Entry]] = {}
        self._queries: dict[PubKey, _Query] = {}
        """Queries under way; each has a caller that waits."""

    def __contains__(self, remote: PubKey) -> bool:
        """Whether an entry of ``remote`` is cached, fresh or not."""
        return remote in self._known

    def is_fresh(self, remote: PubKey) -> bool:
        """Whether :meth:`get` answers without asking discovery."""
        known = self._known.get(remote)
        return known is not None and known[0] > self._reactor.seconds()

    def keep(self, remote: PubKey, entry: Entry, seconds: float) -> None:
        """Cache ``entry``, and use it like an answer of discovery for ``seconds``."""
        # The pop makes the refreshed entry the newest one of the dictionary, so the cache evicts the entry that was
        # fetched longest ago.
        self._known.pop(remote, None)
        self._known[remote] = (self._reactor.seconds() + seconds, entry)
        if len(self._known) > ENTRY_CACHE_SIZE:
            del self._known[next(iter(self._known))]

    def mark_stale(self, remote: PubKey) -> None:
        """Make the next :meth:`get` ask discovery.  The cached entry is then used only if discovery does not answer."""
        # A query under way is not shared with later callers, because its answer may be as old as the stale entry.
        self._queries.pop(remote, None)
        if remote in self._known:
            self._known[remote] = (0.0, self._known[remote][1])

    def forget(self) -> None:
        """Remove all entries from the cache."""
        self._known.clear()
        self._queries.clear()

    async def get(self, remote: PubKey) -> Entry:
        """Return the entry of ``remote``, at most ``ENTRY_CACHE_TIME`` old unless discovery does not answer.

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
            return known[1]  # The cached entry is returned, because an outdated entry is better than none.
        self.keep(remote, entry, ENTRY_CACHE_TIME)
        return entry

    async def _query(self, remote: PubKey) -> Entry:
        """Return the answer of discovery.  A query for the same key that is under way is shared; otherwise a new one is
        started."""
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
        """Return the current key of ``remote`` and its entry. A successor is named in an entry signed by both keys.

        :raises ConnectFailed: the chain of successors is longer than ``SUCCESSORS``.
        """
        # The number of steps is limited, because two keys may name each other as successors.
        for _ in range(SUCCESSORS):
            entry = await self.get(remote)
            if entry.successor is None:
                return remote, entry
            remote = entry.successor.key
        raise ConnectFailed(f"{remote.short}: its key was replaced more than {SUCCESSORS} times in a row")


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
