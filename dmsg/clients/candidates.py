"""Candidates: servers to which a client may connect, in the order in which to try them, and servers to avoid.

The order is made from the user's choice, suggestions of servers that shut down, the servers of an expected remote, the
servers to which the client was connected before, and discovery's list.
"""

from __future__ import annotations

from collections.abc import Callable, Set as AbstractSet
from dataclasses import dataclass
from random import Random

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime

from dmsg.clients.server_choice import ServerChoice
from dmsg.discovery.entries.entry import Entry
from dmsg.discovery.lookup.lookups import Lookups
from dmsg.errors import DiscoveryError, DmsgError
from dmsg.keys import PubKey
from dmsg.net.own_pauses import add_fair_timeout

MAX_WORKED = 16
"""Maximum number of remembered servers to which the client was connected. They are tried before others that discovery
lists.
"""
MAX_HINTS, HINTS_FOR = 8, 60.0
"""Maximum number of suggestions that are accepted from a server that shuts down, and seconds for which the suggested
servers are preferred.
"""
AVOID_FOR = 60.0
"""Seconds for which a server is not chosen again after it was unreachable, was slow or announced a shutdown."""
LISTED_TIME = 10.0
"""Maximum age in seconds of discovery's list of servers for use by visits. If the list is older, a visit queries
discovery for the server's entry."""
EXPECT_TIMEOUT = 0.5
"""Seconds for which a search waits for the servers of the expected remote, after discovery has listed the servers. The
expected remote is the one to which the client will soon connect, as ``expect`` has announced.
"""
MAX_EXPECTED = 2
"""Maximum number of servers of the expected remote to which the client connects in advance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateRules:
    """Rules of a client for the servers that it may use.

    :ivar suits: returns whether a listed server speaks the client's protocol, as far as its entry shows.
    :ivar carries: returns whether a server can carry every kind of stream that the client may open. Servers that cannot
        are used only if there are no others.
    :ivar on_failure: called with the error when the servers could not be fetched from discovery.
    """

    suits: Callable[[Entry], bool] = lambda entry: True
    carries: Callable[[Entry], bool] = lambda entry: True
    on_failure: Callable[[DiscoveryError], None] = lambda error: None


class Candidates:
    """Servers to which one client may connect.

    :param on_error: called with the reason why candidates are missing.
    :ivar only: the only servers that the client uses; empty for any.
    :ivar prefer: servers that the user prefers.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        lookups: Lookups,
        random: Random,
        choice: ServerChoice,
        rules: CandidateRules,
        on_error: Callable[[str], None],
    ) -> None:
        self._reactor = reactor
        self._lookups = lookups
        self._random = random
        self._rules = rules
        self._on_error = on_error
        self.only = tuple(dict.fromkeys(choice.only))
        self.prefer = tuple(dict.fromkeys(choice.prefer))
        self._avoid: dict[PubKey, float] = {}
        """Times until which servers are avoided."""
        self._worked: dict[PubKey, Entry] = {}
        """Entries of servers to which the client was connected; the latest is last."""
        self._expected: Deferred[list[PubKey]] | None = None
        """Deferred that fires with the servers of a remote to which a connection will soon be needed."""
        self._expected_servers: list[PubKey] = []
        """Servers of the remote to which a connection will soon be needed. They are preferred like those of
        ``ServerChoice.prefer``."""
        self._listed: tuple[float, dict[PubKey, Entry]] = (0.0, {})
        """Entries of servers in the last answer of discovery, and the time until which visits may use them."""
        self._hints: list[PubKey] = []
        self._hints_until = 0.0

    # --- reasons to prefer or to avoid a server ---

    def preferred(self) -> set[PubKey]:
        """Return the servers that the client uses before all others."""
        return {*self.only, *self.prefer, *self._expected_servers}

    def worked(self) -> AbstractSet[PubKey]:
        """Return the remembered servers to which the client was connected."""
        return self._worked.keys()

    def avoid(self, server: PubKey) -> None:
        """Do not choose ``server`` for some time."""
        self._avoid[server] = self._reactor.seconds() + AVOID_FOR

    def is_avoided(self, server: PubKey) -> bool:
        """Whether ``server`` was to be avoided when :meth:`find` was last called."""
        return server in self._avoid

    def remember(self, entry: Entry) -> None:
        """Prefer a server from now on, because the client has connected to it."""
        self._worked.pop(entry.key, None)
        self._worked[entry.key] = entry
        if len(self._worked) > MAX_WORKED:
            del self._worked[next(iter(self._worked))]

    def forget(self, server: PubKey) -> None:
        """Do not prefer a server any more, because it is slow."""
        self._worked.pop(server, None)

    def suggest(self, servers: list[PubKey]) -> None:
        """Prefer servers for some time, because a server that shuts down suggests them."""
        self._hints = servers[:MAX_HINTS]
        self._hints_until = self._reactor.seconds() + HINTS_FOR

    def expect(self, servers: Deferred[list[PubKey]]) -> None:
        """Prefer the servers of a remote in the next search, because a connection to the remote will be needed.

        :param servers: Deferred that fires with the keys of its servers; with an empty list if they are unknown, or if
            it is cancelled.
        """
        self._expected = servers

    def stop(self) -> None:
        """Cancel the search for the servers of the expected remote."""
        if self._expected is not None:
            self._expected.cancel()

    # --- entries ---

    async def entry(self, server: PubKey) -> Entry:
        """Return the entry of ``server``: from discovery's last list if it is recent, otherwise from a new query."""
        until, listed = self._listed
        entry = listed.get(server) if self._reactor.seconds() < until else None
        return entry if entry is not None else await self._lookups.entry(server)

    async def find(self) -> list[Entry]:
        """Return the entries of servers, in the order in which to try them."""
        now = self._reactor.seconds()
        self._avoid = {server: until for server, until in self._avoid.items() if until > now}
        entries = [] if self.only else await self._find_listed()
        known = {entry.key: entry for entry in entries}
        hints = self._hints if self._reactor.seconds() < self._hints_until and not self.only else []
        self._expected_servers = [server for server in self._expected_servers if server in known][:MAX_EXPECTED]
        first = list(dict.fromkeys((*self.only, *self.prefer, *hints, *self._expected_servers)))
        if not self.only:
            # Servers to which this client was connected come first, the latest at the front. So nobody can attract this
            # client to new servers by posting them to discovery.
            worked = [server for server in reversed(self._worked) if server not in first]
            entries = [known.get(server, self._worked[server]) for server in worked] + [
                entry for entry in entries if entry.key not in self._worked
            ]
            # Servers without free connections come last.
            entries.sort(key=lambda entry: (_is_full(entry), not self._rules.carries(entry)))
        for server in first:
            if server not in known:
                try:
                    known[server] = await self._lookups.entry(server)
                except DmsgError as error:
                    self._on_error(f"server {server.short}: {error}")
        ordered = [known[server] for server in first if server in known]
        ordered += [entry for entry in entries if entry.key not in first]
        return [entry for entry in ordered if entry.server is not None]

    async def _find_listed(self) -> list[Entry]:
        """Return the suitable servers that discovery lists, in random order."""
        entries: list[Entry] = []
        try:
            listed = await self._lookups.available_servers()
            self._listed = (self._reactor.seconds() + LISTED_TIME, {entry.key: entry for entry in listed})
            await self._learn_expected()
            entries = [entry for entry in listed if self._rules.suits(entry)]
            if not entries:
                protocol = " that speaks this protocol" if listed else ""
                self._on_error(listed.refusal or f"discovery lists no server{protocol}")
        except DiscoveryError as error:
            # The search continues with known servers, so that clients survive an outage of discovery.
            self._on_error(str(error))
            self._rules.on_failure(error)
        # The list is shuffled, because clients that follow the order of discovery's list would all choose the same
        # servers.
        self._random.shuffle(entries)
        return entries

    async def _learn_expected(self) -> None:
        """Wait for the servers of the expected remote, if there is one."""
        expected, self._expected = self._expected, None
        if expected is not None:
            self._expected_servers = await add_fair_timeout(expected, EXPECT_TIMEOUT, self._reactor)


def _is_full(entry: Entry) -> bool:
    return entry.server is not None and entry.server.available_connections <= 0
