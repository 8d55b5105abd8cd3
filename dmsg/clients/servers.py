"""Set of the servers of one client: connects to servers, and replaces a server that is slow, unreachable or shuts down.

A client stays connected to ``min_servers`` servers. They are chosen by a race: the client connects to more servers than
needed, and keeps those that answer first, because both a short round trip and a low load make a server answer early.
Later, the client compares round trips measured by PING. The streams of a server that is replaced move to another server
before the client disconnects from it.

A *visit* is a temporary connection to a server of a remote, opened to connect to that remote; see
:mod:`dmsg.clients.visits`. :mod:`dmsg.clients.candidates` has the servers that a client may choose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Generic

from twisted.internet.defer import Deferred, DeferredList, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from dmsg.clients.candidates import CandidateRules, Candidates
from dmsg.clients.dial import ServerLink, SessionOpener, SessionT
from dmsg.clients.server_choice import ServerChoice
from dmsg.clients.session import Session
from dmsg.clients.visits import Visits
from dmsg.discovery.entries.entry import Entry
from dmsg.discovery.lookup.lookups import Lookups
from dmsg.errors import DmsgError
from dmsg.keys import PubKey
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
CHECK_INTERVAL = 60.0
"""Seconds between two checks of the servers if no event requires an earlier one; jitter is added."""
SLOW_FACTOR = 4.0
"""Factor for slow servers. A server is slow if its round trip exceeds the shortest one both by this factor and by
``SLOW_SECONDS``.
"""
SLOW_SECONDS = 0.05
"""Seconds by which the round trip of a slow server exceeds the shortest one, see ``SLOW_FACTOR``."""

_log = Logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerUses(CandidateRules, Generic[SessionT]):
    """Callbacks and settings of a client for its set of servers.

    :ivar opener: returns the object that opens sessions with the server of an entry; raises DmsgError for a malformed
        entry.
    :ivar key_shared: called with the address of another program that is connected with this client's key.
    :ivar migrate: called with each stream that should move to another server.
    :ivar advertise_visits: whether the client's entry names visited servers, too, so that others can reach the client
        through them.
    :ivar on_change: called when the sessions may have changed.
    """

    opener: Callable[[Entry], SessionOpener[SessionT]]
    key_shared: Callable[[str], None] = lambda address: None
    migrate: Callable[[StreamTransport], None] = lambda stream: None
    advertise_visits: bool = False
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
        self._random = random
        self._uses = uses
        self.links: dict[PubKey, ServerLink[SessionT]] = {}
        self._candidates = Candidates(reactor, lookups, random, choice, uses, self._note_error)
        only = self._candidates.only
        self._min_servers = min(choice.min_servers, len(only)) if only else choice.min_servers
        self._visits = Visits(
            self,
            uses.opener,
            self._candidates.entry,
            is_connecting=self._is_connecting,
            on_open=self._visit_began,
            on_lost=self._visit_ended,
        )
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
        return kept + [session for server, session in self._visits.sessions.items() if server not in self.links]

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
            servers.update(self._visits.sessions)
        return tuple(sorted(server.hex() for server in servers))

    def find_session(self, server: PubKey) -> SessionT | None:
        """Return the session with ``server``, or None."""
        link = self.links.get(server)
        session = (link.session if link is not None else None) or self._visits.sessions.get(server)
        # A session that is being closed is not returned, because it accepts no streams.
        return session if session is not None and session.connected else None

    def session(self, server: PubKey) -> Deferred[SessionT]:
        """Return a Deferred that fires with the session with ``server``. If there is none, a visit begins.

        If a lasting connection to the server is just being made, it is used instead. A visit would be a second
        connection with the same key, and the server would close one of them.
        """
        session = self.find_session(server)
        return succeed(session) if session is not None else self._visits.session(server)

    def _is_connecting(self, server: PubKey) -> bool:
        """Whether the first attempt at a lasting connection to ``server`` is under way."""
        link = self.links.get(server)
        return link is not None and link.session is None and not link.failures and not link.leaving

    def expect(self, servers: Deferred[list[PubKey]]) -> None:
        """Prefer the servers of a remote in the next search, because a connection to the remote will be needed.

        :param servers: Deferred that fires with the keys of its servers; with an empty list if they are unknown, or if
            it is cancelled.
        """
        self._candidates.expect(servers)

    # --- start and stop ---

    def start(self) -> None:
        """Start to find servers, and stay connected to them."""
        self._running = True
        self._visits.start()
        self._search_loop.start()
        self.search_soon(0)

    async def stop(self) -> None:
        """Close all sessions."""
        self._running = False
        self._visits.refuse_new()
        self._search_loop.stop()
        ends = [link.stop() for link in self.links.values()]
        self.links.clear()
        ends += self._visits.stop()
        self._candidates.stop()
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
        if missing <= 0 and not self._candidates.only and not any(link.carries for link in good):
            # None of the present servers can carry every kind of stream, so the client searches for another server, one
            # that can.
            missing = 1
        if missing > 0:
            candidates = await self._candidates.find()
            if not self._running:
                return None
            # The client connects to more servers than it needs. Once enough of them are connected, _drop_surplus drops
            # the others.
            wanted = missing + (0 if self._candidates.only else EXTRA_SERVERS)
            added = 0
            if len(good) >= self._min_servers:
                candidates = [entry for entry in candidates if self._uses.carries(entry)]
            for entry in candidates:
                self._drop_moved(entry)
                if added < wanted and entry.key not in self.links and not self._candidates.is_avoided(entry.key):
                    added += self._add_link(entry)
            if added < missing and len(good) < self._min_servers:
                self._failures += 1
                delay = min(delay, retry_delay(self._failures, self._random))
            else:
                self._failures = 0
        self._drop_surplus()
        self._limit_away()
        self._visits.close_idle()
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
        self._visits.begin_if_awaited(link.server)

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
            if session is not None and session.round_trip is not None and link.server not in self._candidates.prefer:
                slow = session.round_trip > best * SLOW_FACTOR and session.round_trip > best + SLOW_SECONDS
                if slow and self._min_servers > 1:
                    link.slow = True
                    continue
            link.slow = False
            good.append(link)
        return good

    def _add_link(self, entry: Entry) -> bool:
        try:
            endpoint = self._uses.opener(entry)
        except DmsgError as error:
            self.last_error = f"server {entry.key.short}: {error}"
            self._candidates.avoid(entry.key)
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
        self._candidates.avoid(link.server)
        if link.slow:
            self._candidates.forget(link.server)
        self._discard(link)

    def _drop_surplus(self) -> None:
        """If enough servers are connected, end the race: drop the links that are not needed, and those to bad servers.

        Bad servers are those that are unreachable, slow or shutting down. A link that still carries streams is kept
        until the streams have moved to other servers.
        """
        here = [link for link in self._good_links() if link.session is not None]
        if len(here) < self._min_servers:
            return
        preferred = self._candidates.preferred()
        order = sorted(here, key=lambda link: (link.server not in preferred, not link.carries, link.short))
        kept = order[: self._min_servers]
        awaited = self._visits.awaited()
        carried = any(link.carries for link in kept)
        for link in list(self.links.values()):
            if link in kept or (link.server in preferred and link.failures < AWAY_AFTER and not link.leaving):
                continue
            if link.session is None:
                if link.server in awaited:
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
            link.session.keeper = self
            link.session.check_reachability()
            self.last_error = link.session.unreachable
            self._away = 0
            if link.entry is not None:
                self._candidates.remember(link.entry)
            self._visits.use_instead(link.session)
            self._drop_surplus()
        else:
            self.search_soon(0.1)
        self._uses.on_change()

    def _link_away(self, link: ServerLink[SessionT], failures: int) -> None:
        self.last_error = f"server {link.server.short}: {link.last_error or 'connection lost'}"
        self._visits.begin_if_awaited(link.server)
        # A search begins only when the server becomes unreachable, and not at each further failure. The search loop
        # already repeats a search that has found too few servers.
        if failures == AWAY_AFTER and self.links.get(link.server) is link:
            self._away += 1
            excess = self._away - MAX_AWAY
            self.search_soon(0.1 if excess <= 0 else retry_delay(excess, self._random))

    def _limit_away(self) -> None:
        """Drop the oldest links to unreachable servers, if there are too many."""
        kept = self._candidates.preferred() | self._candidates.worked() | self._visits.awaited()
        away = [
            link
            for link in self.links.values()
            if link.session is None and link.failures >= AWAY_AFTER and link.server not in kept
        ]
        for link in away[:-MAX_AWAY]:
            self._remove(link, "cannot be reached")

    # --- announcements of servers: reachability, shared key, shutdown ---

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
        self._candidates.avoid(session.server)
        link = self.links.get(session.server)
        if link is not None and link.session is session:
            link.leaving = True
            # Suggestions of other servers are accepted only from a server with a lasting connection, which has to be
            # replaced, and not from a visited server.
            self._candidates.suggest([server for server in servers if server != session.server])
        self.search_soon(0)
        self._uses.on_change()
        for stream in session.streams:
            self._uses.migrate(stream)

    # --- callbacks of candidates and visits ---

    def _note_error(self, text: str) -> None:
        self.last_error = text

    def _visit_began(self) -> None:
        if self._uses.advertise_visits:
            self._uses.on_change()

    def _visit_ended(self, server: PubKey) -> None:
        link = self.links.get(server)
        if link is not None and link.session is not None:
            # A server of 2019 sends no requests over a connection after another one of the same key has ended.
            link.session.check_reachability()
        self._uses.on_change()
