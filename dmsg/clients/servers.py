"""Set of the servers of one client: connects to servers, and replaces a server that is slow, unreachable or shuts down.

A client stays connected to ``min_servers`` servers. They are chosen by a race: the client connects to more servers than
needed, and keeps those that answer first, because both a short round trip and a low load make a server answer early.
Later, the client compares round trips measured by PING. The streams of a server that is replaced move to another server
before the client disconnects from it.

A *visit* is a temporary connection to a server of a remote, opened to connect to that remote.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Generic

from twisted.internet.defer import CancelledError, Deferred, DeferredList
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.clients.dial import ServerLink, SessionOpener, SessionT
from dmsg.clients.server_choice import ServerChoice
from dmsg.clients.session import Session
from dmsg.discovery.entries.entry import Entry
from dmsg.discovery.lookup.lookups import Lookups
from dmsg.errors import DiscoveryError, DmsgError
from dmsg.keys import PubKey
from dmsg.net.isolate import call_isolated
from dmsg.net.own_pauses import add_fair_timeout
from dmsg.net.retry import JITTER, retry_delay
from dmsg.net.retry_loop import RetryLoop
from dmsg.net.streams.stream import StreamTransport

EXTRA_SERVERS = 2
"""Number of servers, in addition to the needed ones, to which a client connects at the same time. The servers that
answer first are kept."""
AWAY_AFTER = 2
"""Number of consecutive failed attempts after which a server counts as unreachable, and another one is searched for."""
MAX_AWAY = 16
"""Maximum number of links to unreachable servers to which the client was never connected. Above it, the oldest of these
links is dropped. Searches are delayed once more servers than this have become unreachable since the last connection to
any server. Otherwise a discovery that lists invented servers could make its clients connect to ever more addresses.
"""
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
CHECK_INTERVAL = 60.0
"""Seconds between two checks of the servers if no event requires an earlier one; jitter is added."""
LISTED_TIME = 10.0
"""Maximum age in seconds of discovery's list of servers for use by visits. If the list is older, a visit queries
discovery for the server's entry."""
EXPECT_TIMEOUT = 0.5
"""Seconds for which a search waits for the servers of the expected remote, after discovery has listed the servers. The
expected remote is the one to which the client will soon connect, as ``expect`` has announced.
"""
MAX_EXPECTED = 2
"""Maximum number of servers of the expected remote to which the client connects in advance."""
SLOW_FACTOR = 4.0
"""Factor for slow servers. A server is slow if its round trip exceeds the shortest one both by this factor and by
``SLOW_SECONDS``.
"""
SLOW_SECONDS = 0.05
"""Seconds by which the round trip of a slow server exceeds the shortest one, see ``SLOW_FACTOR``."""

_log = Logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerUses(Generic[SessionT]):
    """Callbacks and settings of a client for its set of servers.

    :ivar opener: returns the object that opens sessions with the server of an entry; raises DmsgError for a malformed
        entry.
    :ivar suits: returns whether a listed server speaks the client's protocol, as far as its entry shows.
    :ivar carries: returns whether a server can carry every kind of stream that the client may open. Servers that cannot
        are used only if there are no others.
    :ivar key_shared: called with the address of another program that is connected with this client's key.
    :ivar migrate: called with each stream that should move to another server.
    :ivar advertise_visits: whether the client's entry names visited servers, too, so that others can reach the client
        through them.
    :ivar on_failure: called with the error when the servers could not be fetched from discovery.
    :ivar on_change: called when the sessions may have changed.
    """

    opener: Callable[[Entry], SessionOpener[SessionT]]
    suits: Callable[[Entry], bool] = lambda entry: True
    carries: Callable[[Entry], bool] = lambda entry: True
    key_shared: Callable[[str], None] = lambda address: None
    migrate: Callable[[StreamTransport], None] = lambda stream: None
    advertise_visits: bool = False
    on_failure: Callable[[DiscoveryError], None] = lambda error: None
    on_change: Callable[[], None] = lambda: None


class ServerSet(Generic[SessionT]):
    """Set of the sessions of one client with its servers.

    :ivar last_error: reason why no server is connected; empty if unknown.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        lookups: Lookups,
        random: Random,
        choice: ServerChoice,
        uses: ServerUses[SessionT],
    ) -> None:
        self._reactor = reactor
        self._lookups = lookups
        self._random = random
        self._uses = uses
        self._only = tuple(dict.fromkeys(choice.only))
        self._prefer = tuple(dict.fromkeys(choice.prefer))
        self._min_servers = min(choice.min_servers, len(self._only)) if self._only else choice.min_servers
        self.links: dict[PubKey, ServerLink[SessionT]] = {}
        self._visits: dict[PubKey, list[Deferred[SessionT]]] = {}
        self._visiting: dict[PubKey, Deferred[SessionT]] = {}
        self._visited: dict[PubKey, SessionT] = {}
        self._idle: dict[SessionT, None] = {}
        """Visits without transports at the last check."""
        self._avoid: dict[PubKey, float] = {}
        self._worked: dict[PubKey, Entry] = {}
        self._expected: Deferred[list[PubKey]] | None = None
        """Deferred that fires with the servers of a remote to which a connection will soon be needed."""
        self._expected_servers: list[PubKey] = []
        """Servers of the remote to which a connection will soon be needed. They are preferred like those of
        ``ServerChoice.prefer``."""
        self._listed: tuple[float, dict[PubKey, Entry]] = (0.0, {})
        """Entries of servers in the last answer of discovery, and the time until which visits may use them."""
        self._hints: list[PubKey] = []
        self._hints_until = 0.0
        self._running = False
        self._failures = 0
        self._away = 0
        """Number of servers that became unreachable since the last connection to a server."""
        self._search_loop = RetryLoop(reactor, self._search_servers, self._after_failure, "looking for servers")
        self.last_error = ""

    # --- sessions ---

    def sessions(self) -> list[SessionT]:
        """Return all sessions, including those of visits (temporary connections to the servers of a remote)."""
        kept = [link.session for link in self.links.values() if link.session is not None]
        return kept + [session for server, session in self._visited.items() if server not in self.links]

    @property
    def unreachable(self) -> str:
        """Reason why the requests of other clients reach this client over none of its lasting connections; empty if
        they do over one of them, as far as known, or if there is no such connection.
        """
        reasons = [link.session.unreachable for link in self.links.values() if link.session is not None]
        return reasons[0] if reasons and all(reasons) else ""

    def delegated(self) -> tuple[str, ...]:
        """Return the keys of the servers for this client's entry, sorted. Servers that shut down, or that do not send
        requests to this client, are included only if there are no others.
        """
        here = [link for link in self.links.values() if link.session is not None]
        staying = [link for link in here if (s := link.session) and not s.leaving and not s.unreachable]
        servers = {link.server for link in staying or here}
        if self._uses.advertise_visits:
            servers.update(self._visited)
        return tuple(sorted(server.hex() for server in servers))

    def find_session(self, server: PubKey) -> SessionT | None:
        """Return the session with ``server``, or None."""
        link = self.links.get(server)
        session = (link.session if link is not None else None) or self._visited.get(server)
        # A session that is being closed is not returned, because it accepts no streams.
        return session if session is not None and session.connected else None

    def session(self, server: PubKey) -> Deferred[SessionT]:
        """Return a Deferred that fires with the session with ``server``. If there is none, a visit begins.

        If a lasting connection to the server is just being made, it is used instead. A visit would be a second
        connection with the same key, and the server would close one of them.
        """
        found: Deferred[SessionT] = Deferred()
        session = self.find_session(server)
        if session is not None:
            found.callback(session)
            return found
        # Further calls wait for a visit that has already begun.
        waiting = self._visits.get(server)
        if waiting is not None:
            waiting.append(found)
            return found
        self._visits[server] = [found]
        if not self._is_connecting(server):
            self._begin_visit(server)
        return found

    def _is_connecting(self, server: PubKey) -> bool:
        """Whether the first attempt at a lasting connection to ``server`` is under way."""
        link = self.links.get(server)
        return link is not None and link.session is None and not link.failures and not link.leaving

    def _begin_visit(self, server: PubKey) -> None:
        """Visit a server, because callers of :meth:`session` wait for it."""

        def visited(result: SessionT | Failure) -> None:
            self._visiting.pop(server, None)
            if isinstance(result, Failure) and result.check(CancelledError):
                # Only ``stop`` cancels a visit. The callers that wait for the visit have not cancelled anything, so
                # they get the error of a stopped client instead of CancelledError.
                try:
                    self._check_running()
                except DmsgError:
                    result = Failure()
            for deferred in self._visits.pop(server, ()):
                if not deferred.called:
                    deferred.callback(result)

        visiting = self._visiting[server] = Deferred.fromCoroutine(self._visit(server))
        visiting.addBoth(visited)

    def _visit_instead(self, server: PubKey) -> None:
        """Begin a visit (a temporary connection) to ``server`` if callers wait for a session with it. Do nothing
        while the client makes its first attempt at a permanent connection to ``server``."""
        if server not in self._visits or server in self._visiting or self._is_connecting(server):
            return
        if all(waiting.called for waiting in self._visits[server]):
            del self._visits[server]
        else:
            self._begin_visit(server)

    def expect(self, servers: Deferred[list[PubKey]]) -> None:
        """Prefer the servers of a remote in the next search, because a connection to the remote will be needed.

        :param servers: Deferred that fires with the keys of its servers; with an empty list if they are unknown, or if
            it is cancelled.
        """
        self._expected = servers

    # --- start and stop ---

    def start(self) -> None:
        """Start to find servers, and stay connected to them."""
        self._running = True
        self._search_loop.start()
        self.search_soon(0)

    async def stop(self) -> None:
        """Close all sessions."""
        self._running = False
        self._search_loop.stop()
        ends = [link.stop() for link in self.links.values()]
        self.links.clear()
        for session in list(self._visited.values()):
            call_isolated(session.close)
            ends.append(_fire_after(session.lost))
        for visiting in list(self._visiting.values()):
            visiting.cancel()
        for server in list(self._visits):
            # The visit fails at once, because the client is stopped.
            self._visit_instead(server)
        if self._expected is not None:
            self._expected.cancel()
        await DeferredList(ends, consumeErrors=True)

    def search_soon(self, delay: float) -> None:
        """Schedule a check of the servers within ``delay`` seconds."""
        self._search_loop.soon(delay)

    def _after_failure(self, failures: int) -> float:
        return retry_delay(failures, self._random)

    # --- search for servers ---

    async def _search_servers(self) -> float | None:
        """Check the servers, and open links until ``min_servers`` links are good or no candidate is left.

        :returns: seconds until the next check.
        """
        # The interval has jitter. Without it, clients that have lost the same server would query discovery at the same
        # times.
        delay = CHECK_INTERVAL * self._random.uniform(1 - JITTER, 1 + JITTER)
        good = self._good_links()
        missing = self._min_servers - len(good)
        if missing <= 0 and not self._only and not any(link.carries for link in good):
            # None of the present servers can carry every kind of stream, so the client searches for another server, one
            # that can.
            missing = 1
        if missing > 0:
            now = self._reactor.seconds()
            self._avoid = {server: until for server, until in self._avoid.items() if until > now}
            candidates = await self._candidates()
            if not self._running:
                return None
            # The client connects to more servers than it needs. Once enough of them are connected, _drop_surplus drops
            # the others.
            wanted = missing + (0 if self._only else EXTRA_SERVERS)
            added = 0
            if len(good) >= self._min_servers:
                candidates = [entry for entry in candidates if self._uses.carries(entry)]
            for entry in candidates:
                self._drop_moved(entry)
                if added < wanted and entry.key not in self.links and entry.key not in self._avoid:
                    added += self._add_link(entry)
            if added < missing and len(good) < self._min_servers:
                self._failures += 1
                delay = min(delay, retry_delay(self._failures, self._random))
            else:
                self._failures = 0
        self._drop_surplus()
        self._limit_away()
        self._close_idle_visits()
        self._uses.on_change()
        return delay

    def _drop_moved(self, entry: Entry) -> None:
        """Drop the link to an unreachable server if its entry has a new address, so that a new link to that address is
        opened.
        """
        link = self.links.get(entry.key)
        if link is None or link.session is not None or link.failures < AWAY_AFTER:
            return
        if link.entry is not None and link.entry.server is not None and entry.server is not None:
            before, now = link.entry.server.address, entry.server.address
            if before != now:
                _log.info(
                    "server {server} has moved from {before} to {now}", server=entry.key.short, before=before, now=now
                )
                self._discard(link)

    def _discard(self, link: ServerLink[SessionT]) -> None:
        del self.links[link.server]
        link.stop()
        self._visit_instead(link.server)

    def _good_links(self) -> list[ServerLink[SessionT]]:
        """Return the links whose servers are neither unreachable, nor slow, nor shutting down, and send the requests of
        other clients to this one. Some may not be connected yet.
        """
        measured = [s.round_trip for link in self.links.values() if (s := link.session) and s.round_trip is not None]
        # A server counts as slow only in comparison with the best one, because on a slow network all round trips are
        # long.
        best = min(measured, default=0.0)
        good = []
        for link in self.links.values():
            if link.failures >= AWAY_AFTER or link.leaving:
                continue
            session = link.session
            if session is not None and session.unreachable:
                continue
            if session is not None and session.round_trip is not None and link.server not in self._prefer:
                slow = session.round_trip > best * SLOW_FACTOR and session.round_trip > best + SLOW_SECONDS
                if slow and self._min_servers > 1:
                    link.slow = True
                    continue
            link.slow = False
            good.append(link)
        return good

    async def _candidates(self) -> list[Entry]:
        """Return the entries of servers, in the order in which to try them."""
        entries: list[Entry] = []
        if not self._only:
            try:
                listed = await self._lookups.available_servers()
                self._listed = (self._reactor.seconds() + LISTED_TIME, {entry.key: entry for entry in listed})
                await self._learn_expected()
                entries = [entry for entry in listed if self._uses.suits(entry)]
                if not entries:
                    protocol = " that speaks this protocol" if listed else ""
                    self.last_error = listed.refusal or f"discovery lists no server{protocol}"
            except DiscoveryError as error:
                # The search continues with known servers, so that clients survive an outage of discovery.
                self.last_error = str(error)
                self._uses.on_failure(error)
            # The list is shuffled, because clients that follow the order of discovery's list would all choose the same
            # servers.
            self._random.shuffle(entries)
        known = {entry.key: entry for entry in entries}
        hints = self._hints if self._reactor.seconds() < self._hints_until and not self._only else []
        self._expected_servers = [server for server in self._expected_servers if server in known][:MAX_EXPECTED]
        first = list(dict.fromkeys((*self._only, *self._prefer, *hints, *self._expected_servers)))
        if not self._only:
            # Servers to which this client was connected come first, the latest at the front. So nobody can attract this
            # client to new servers by posting them to discovery.
            worked = [server for server in reversed(self._worked) if server not in first]
            entries = [known.get(server, self._worked[server]) for server in worked] + [
                entry for entry in entries if entry.key not in self._worked
            ]
            # Servers without free connections come last.
            entries.sort(key=lambda entry: (_is_full(entry), not self._uses.carries(entry)))
        for server in first:
            if server not in known:
                try:
                    known[server] = await self._lookups.entry(server)
                except DmsgError as error:
                    self.last_error = f"server {server.short}: {error}"
        ordered = [known[server] for server in first if server in known]
        ordered += [entry for entry in entries if entry.key not in first]
        return [entry for entry in ordered if entry.server is not None]

    async def _learn_expected(self) -> None:
        """Wait for the servers of the expected remote, if there is one."""
        expected, self._expected = self._expected, None
        if expected is not None:
            self._expected_servers = await add_fair_timeout(expected, EXPECT_TIMEOUT, self._reactor)

    def _add_link(self, entry: Entry) -> bool:
        try:
            endpoint = self._uses.opener(entry)
        except DmsgError as error:
            self.last_error = f"server {entry.key.short}: {error}"
            self._avoid[entry.key] = self._reactor.seconds() + AVOID_FOR
            return False
        link = ServerLink(
            self._reactor, entry.key, endpoint, self._random, on_change=self._link_changed, on_lost=self._link_away
        )
        link.carries = self._uses.carries(entry)
        link.entry = entry
        self.links[entry.key] = link
        link.start()
        return True

    def _remove(self, link: ServerLink[SessionT], reason: str) -> None:
        _log.info(
            "server {server} is replaced by another server, because it {why}", server=link.server.short, why=reason
        )
        self._avoid[link.server] = self._reactor.seconds() + AVOID_FOR
        if link.slow:
            self._worked.pop(link.server, None)
        self._discard(link)

    def _drop_surplus(self) -> None:
        """If enough servers are connected, end the race: drop the links that are not needed, and those to bad servers.

        Bad servers are those that are unreachable, slow or shutting down. A link that still carries streams is kept
        until the streams have moved to other servers.
        """
        here = [link for link in self._good_links() if link.session is not None]
        if len(here) < self._min_servers:
            return
        preferred = {*self._only, *self._prefer, *self._expected_servers}
        order = sorted(here, key=lambda link: (link.server not in preferred, not link.carries, link.short))
        kept = order[: self._min_servers]
        carried = any(link.carries for link in kept)
        for link in list(self.links.values()):
            if link in kept or (link.server in preferred and link.failures < AWAY_AFTER and not link.leaving):
                continue
            if link.session is None:
                if link.server in self._visits:
                    continue  # The link is kept, because a caller of ``session`` waits for it.
                if link.failures >= AWAY_AFTER:
                    self._remove(link, "cannot be reached")
                # A link that is still connecting is kept if only its server can carry every kind of stream.
                elif carried or not link.carries:
                    self._discard(link)
            elif not link.session.transports:
                if link.leaving or link.slow:
                    self._remove(link, "shuts down" if link.leaving else "is slow")
                else:
                    self._discard(link)
            elif link.leaving or link.slow:
                for stream in link.session.streams:
                    self._uses.migrate(stream)

    def _link_changed(self, link: ServerLink[SessionT]) -> None:
        if self.links.get(link.server) is not link:
            return
        if link.session is not None:
            self._adopt_session(link.session)
            link.session.check_reachability()
            self.last_error = link.session.unreachable
            self._away = 0
            self._remember(link)
            waiting = self._visits.pop(link.server, [])
            visiting = self._visiting.pop(link.server, None)
            if visiting is not None:
                # Callers do not wait for the visit any more. It could still fail, or take long.
                visiting.cancel()
            for deferred in waiting:
                if not deferred.called:
                    deferred.callback(link.session)
            self._drop_surplus()
        else:
            self.search_soon(0.1)
        self._uses.on_change()

    def _remember(self, link: ServerLink[SessionT]) -> None:
        if link.entry is not None:
            self._worked.pop(link.server, None)
            self._worked[link.server] = link.entry
            if len(self._worked) > MAX_WORKED:
                del self._worked[next(iter(self._worked))]

    def _link_away(self, link: ServerLink[SessionT], failures: int) -> None:
        self.last_error = f"server {link.server.short}: {link.last_error or 'connection lost'}"
        self._visit_instead(link.server)
        # A search begins only when the server becomes unreachable, and not at each further failure. The search loop
        # already repeats a search that has found too few servers.
        if failures == AWAY_AFTER and self.links.get(link.server) is link:
            self._away += 1
            excess = self._away - MAX_AWAY
            self.search_soon(0.1 if excess <= 0 else retry_delay(excess, self._random))

    def _limit_away(self) -> None:
        """Drop the oldest links to unreachable servers, if there are too many."""
        kept = {*self._only, *self._prefer, *self._expected_servers, *self._worked, *self._visits}
        away = [
            link
            for link in self.links.values()
            if link.session is None and link.failures >= AWAY_AFTER and link.server not in kept
        ]
        for link in away[:-MAX_AWAY]:
            self._remove(link, "cannot be reached")

    # --- announcements of servers: reachability, shared key, shutdown ---

    def _adopt_session(self, session: SessionT) -> None:
        session.keeper = self

    def reachability_changed(self, session: Session) -> None:
        """Search for another server if a server does not send requests to this client any more; see
        :class:`~dmsg.clients.session.SessionKeeper`.
        """
        self.last_error = session.unreachable
        self.search_soon(0)
        self._uses.on_change()

    def key_shared(self, address: str) -> None:
        """Warn that another program uses the same key; see :class:`~dmsg.clients.session.SessionKeeper`."""
        self._uses.key_shared(address)

    def server_leaves(self, session: Session, seconds: int, servers: list[PubKey]) -> None:
        """Replace a server that shuts down; see :class:`~dmsg.clients.session.SessionKeeper`."""
        _log.info(
            "server {server} announced that it will shut down in {seconds} s",
            server=session.server.short,
            seconds=seconds,
        )
        now = self._reactor.seconds()
        self._avoid[session.server] = now + AVOID_FOR
        link = self.links.get(session.server)
        if link is not None and link.session is session:
            link.leaving = True
            # Suggestions of other servers are accepted only from a server with a lasting connection, which has to be
            # replaced, and not from a visited server.
            self._hints = [server for server in servers if server != session.server][:MAX_HINTS]
            self._hints_until = now + HINTS_FOR
        self.search_soon(0)
        self._uses.on_change()
        for stream in session.streams:
            self._uses.migrate(stream)

    # --- visits ---

    async def _visit(self, server: PubKey) -> SessionT:
        """Connect to a server temporarily; :meth:`_close_idle_visits` ends the visit."""
        self._check_running()
        until, listed = self._listed
        entry = listed.get(server) if self._reactor.seconds() < until else None
        if entry is None:
            entry = await self._lookups.entry(server)
        if entry.server is None:
            raise DmsgError("the entry belongs to a client, not to a server")
        session = await self._uses.opener(entry).open()
        if not self._running:
            session.close()
            self._check_running()
        self._visited[server] = session
        self._adopt_session(session)

        def lost(_: None) -> None:
            # While this session was closing, another visit of the same server may have begun.
            if self._visited.get(server) is session:
                del self._visited[server]
            link = self.links.get(server)
            if link is not None and link.session is not None:
                # A server of 2019 sends no requests over a connection after another one of the same key has ended.
                link.session.check_reachability()
            self._uses.on_change()

        session.lost.addCallback(lost)
        if self._uses.advertise_visits:
            self._uses.on_change()
        return session

    def _check_running(self) -> None:
        """Raise an error if the client is stopped, for callers that wait for a session with a server."""
        if not self._running:
            raise DmsgError("the client is stopped")

    def _close_idle_visits(self) -> None:
        """Close each visit that has no transport now and had none at the previous check."""
        # A visit that was idle at only one check may be so new that its first transport is not requested yet.
        before, self._idle = self._idle, {session: None for session in self._visited.values() if not session.transports}
        for session in [session for session in self._idle if session in before]:
            session.close()


def _is_full(entry: Entry) -> bool:
    return entry.server is not None and entry.server.available_connections <= 0


def _fire_after(deferred: Deferred[None]) -> Deferred[None]:
    done: Deferred[None] = Deferred()

    def fire(result: None) -> None:
        done.callback(None)
        return result

    deferred.addBoth(fire)
    return done
