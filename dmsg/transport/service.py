"""The client entity: it finds servers, stays connected, is found, and connects to others."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random, SystemRandom
from typing import Any

from twisted.application.service import Service
from twisted.internet.defer import Deferred, DeferredList, TimeoutError
from twisted.internet.error import CannotListenError
from twisted.internet.interfaces import IAddress, IDelayedCall, IListeningPort, IProtocol, IProtocolFactory
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.discovery.entry import Entry
from dmsg.discovery.lookup import Lookup, Lookups
from dmsg.errors import ConnectFailed, DiscoveryError, DmsgError, DmsgTimeout, KeyFormatError
from dmsg.keys import PubKey, SecKey
from dmsg.net.noise import TurnFlush
from dmsg.net.stream import DmsgAddress
from dmsg.transport.dial import ServerLink, SessionEndpoint, retry_delay
from dmsg.transport.lifecycle import LifecycleCore, make_lifecycle
from dmsg.transport.protocol import ClientSession
from dmsg.transport.publish import EntryPublisher

MIN_SERVERS = 2
"""Servers that a client stays connected to, by default."""
CONNECT_TIMEOUT = 10.0
"""Seconds for the whole of a connect, by default."""
AWAY_AFTER = 2
"""Failed tries in a row after which another server is looked for."""
AVOID_FOR = 60.0
"""Seconds that a server that stayed away is not chosen again."""
CHECK_INTERVAL = 60.0
"""Seconds between looks at servers and own entry when nothing happens."""
ENTRY_CACHE_TIME = 10.0
"""Seconds that a fetched entry is used again."""
ENTRY_CACHE_SIZE = 1024

_log = Logger()


class Client(Service):
    """A dmsg client.

    Start it as any Twisted service (or call ``startService()``), wait for
    :meth:`when_online`, then :meth:`connect` to public keys or :meth:`listen`.

    :param key: the secret key; its public key is the client's address.
    :param discovery: URLs, or a :class:`~dmsg.discovery.lookup.Lookups`.
    :param min_servers: stay connected to so many, when there are so many.
    """

    name = "dmsg-client"

    def __init__(
        self,
        reactor: Any,
        key: SecKey,
        discovery: Sequence[str] | Lookups,
        *,
        min_servers: int = MIN_SERVERS,
        random: Random | None = None,
    ) -> None:
        if min_servers < 1:
            raise ValueError("min_servers must be at least 1")
        self._reactor = reactor
        self._key = key
        self._lookups = (
            discovery if isinstance(discovery, Lookups) else Lookups([Lookup(reactor, url) for url in discovery])
        )
        self._min_servers = min_servers
        self._random: Random = random or SystemRandom()
        self._turn = TurnFlush(reactor)
        self._factory: IProtocolFactory | None = None
        self._links: dict[PubKey, ServerLink] = {}
        self._visits: dict[PubKey, list[Deferred[ClientSession]]] = {}
        self._visited: dict[PubKey, ClientSession] = {}
        self._idle: set[PubKey] = set()
        self._avoid: dict[PubKey, float] = {}
        self._entries: dict[PubKey, tuple[float, Entry]] = {}
        self._maintaining = False
        self._maintain_again = False
        self._maintain_failures = 0
        self._wake: IDelayedCall | None = None
        self._publisher = EntryPublisher(
            reactor, self._lookups, key, self._delegated, self._publish_failed, self._random
        )
        self._core = LifecycleCore()
        self._lifecycle = make_lifecycle(self._core)
        self.last_error = ""
        """Why there is no server, as far as known."""

    # --- what an application uses ---

    @property
    def public_key(self) -> PubKey:
        """The address of this client."""
        return self._key.public

    @property
    def status(self) -> str:
        """``stopped``, ``searching`` (see :attr:`last_error`) or ``online``."""
        return self._core.state

    @property
    def servers(self) -> list[PubKey]:
        """Keys of the servers it is connected to."""
        return [session.server for session in self._sessions()]

    def when_online(self, timeout: float | None = None) -> Deferred[None]:
        """Fires when a server is connected; with a timeout fails with DmsgTimeout that says why not."""
        online: Deferred[None] = Deferred()
        if self.status == "online":
            online.callback(None)
            return online
        self._core.waiting.append(online)
        return self._limit(online, timeout, "no server")

    def when_published(self, timeout: float | None = None) -> Deferred[None]:
        """Fires when discovery has this client's entry with the servers that it is connected to."""
        return self._limit(self._publisher.when_published(), timeout, "no entry in discovery")

    def _limit(self, waiting: Deferred[None], timeout: float | None, what: str) -> Deferred[None]:
        if timeout is None:
            return waiting

        def too_late(result: object, seconds: float) -> None:
            why = f": {self.last_error}" if self.last_error else ""
            raise DmsgTimeout(f"{what} within {seconds:g} s{why}")

        return waiting.addTimeout(timeout, self._reactor, too_late)

    def connect(
        self,
        remote: PubKey,
        factory: IProtocolFactory,
        timeout: float = CONNECT_TIMEOUT,
        *,
        via: PubKey | None = None,
    ) -> Deferred[IProtocol]:
        """Open a transport to ``remote``; fires with the factory's connected protocol.

        Tries every server of the remote, those first that this client is
        connected to; with ``via`` only that one.  Fails with :class:`~dmsg.errors.ConnectFailed`, which
        says why each failed, :class:`~dmsg.errors.EntryNotFound`,
        :class:`~dmsg.errors.DiscoveryError` or :class:`~dmsg.errors.DmsgTimeout`.
        """
        attempts: list[tuple[str, str]] = []
        connecting = Deferred.fromCoroutine(self._connect(remote, factory, timeout, via, attempts))

        def too_late(result: Any, seconds: float) -> Any:
            if isinstance(result, Failure):
                raise ConnectFailed(f"{remote.short}: not connected within {seconds:g} s", tuple(attempts)) from None
            return result

        return connecting.addTimeout(timeout, self._reactor, too_late)

    def listen(self, factory: IProtocolFactory) -> IListeningPort:
        """Accept transports with ``factory``; one listener at a time.

        :raises CannotListenError: there is one already.
        """
        if self._factory is not None:
            raise CannotListenError(None, None, OSError("a factory is listening on this client already"))
        return _Listening(self, factory)

    # --- service ---

    def startService(self) -> None:
        if not self.running:
            super().startService()  # type: ignore[no-untyped-call]
            self._lifecycle.start()
            self._publisher.start()
            self._maintain_soon(0)

    def stopService(self) -> Deferred[None]:
        super().stopService()  # type: ignore[no-untyped-call]
        self._lifecycle.stop()
        return Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        if self._wake is not None and self._wake.active():
            self._wake.cancel()
        await self._publisher.withdraw()
        ends = [link.stop() for link in self._links.values()]
        self._links.clear()
        for session in list(self._visited.values()):
            session.close()
            ends.append(_done_with(session.lost))
        for visitors in list(self._visits.values()):
            for visitor in visitors:
                visitor.cancel()
        await DeferredList(ends, consumeErrors=True)
        await self._lookups.close()

    # --- servers ---

    def _accept(self) -> IProtocolFactory | None:
        return self._factory

    def _sessions(self) -> list[ClientSession]:
        kept = [link.session for link in self._links.values() if link.session is not None]
        return kept + [session for server, session in self._visited.items() if server not in self._links]

    def _delegated(self) -> tuple[str, ...]:
        return tuple(sorted(link.server.hex() for link in self._links.values() if link.session is not None))

    def _publish_failed(self, error: str) -> None:
        self.last_error = error

    def _maintain_soon(self, delay: float) -> None:
        if not self.running:
            return
        if self._wake is not None and self._wake.active():
            if self._wake.getTime() <= self._reactor.seconds() + delay:
                return
            self._wake.cancel()
        self._wake = self._reactor.callLater(delay, self._maintain)

    def _maintain(self) -> None:
        self._wake = None
        if self._maintaining:
            self._maintain_again = True
            return
        self._maintaining = True

        def done(result: Any) -> None:
            self._maintaining = False
            if isinstance(result, Failure):
                _log.failure("looking for servers failed", result)
            if self._maintain_again:
                self._maintain_again = False
                self._maintain_soon(0)

        Deferred.fromCoroutine(self._look_for_servers()).addBoth(done)

    async def _look_for_servers(self) -> None:
        """One look: have so many links that ``min_servers`` of them are good, if there are so many."""
        delay = CHECK_INTERVAL
        good = [link for link in self._links.values() if link.failures < AWAY_AFTER]
        missing = self._min_servers - len(good)
        if missing > 0:
            now = self._reactor.seconds()
            try:
                entries = await self._lookups.available_servers()
                self._maintain_failures = 0
                if not entries:
                    self.last_error = "discovery lists no server"
            except DiscoveryError as error:
                entries = []
                self.last_error = str(error)
            if not self.running:
                return
            self._random.shuffle(entries)
            self._avoid = {server: until for server, until in self._avoid.items() if until > now}
            for entry in entries:
                if missing > 0 and entry.key not in self._links and entry.key not in self._avoid:
                    missing -= self._add_link(entry)
            if missing > 0:
                self._maintain_failures += 1
                delay = min(delay, retry_delay(self._maintain_failures, self._random))
            self._drop_surplus()
        self._close_idle_visits()
        self._publisher.soon()
        self._maintain_soon(delay)

    def _add_link(self, entry: Entry) -> bool:
        assert entry.server is not None
        try:
            endpoint = SessionEndpoint(
                self._reactor, self._turn, self._key, entry.key, entry.server.address, self._accept
            )
        except DmsgError as error:
            self.last_error = f"server {entry.key.short}: {error}"
            self._avoid[entry.key] = self._reactor.seconds() + AVOID_FOR
            return False
        link = ServerLink(
            self._reactor, entry.key, endpoint, self._random, changed=self._link_changed, away=self._link_away
        )
        self._links[entry.key] = link
        link.start()
        return True

    def _drop_surplus(self) -> None:
        """A server that stayed away goes when another was found in its place."""
        for link in list(self._links.values()):
            if len(self._links) <= self._min_servers:
                return
            if link.failures >= AWAY_AFTER and link.session is None:
                _log.info("server {server} stays away, another takes its place", server=link.server.short)
                del self._links[link.server]
                self._avoid[link.server] = self._reactor.seconds() + AVOID_FOR
                link.stop()

    def _link_changed(self, link: ServerLink) -> None:
        if self._links.get(link.server) is not link:
            return
        if link.session is not None:
            self.last_error = ""
            self._lifecycle.server_up()
        elif not self._sessions():
            self._lifecycle.no_server()
        self._publisher.soon()

    def _link_away(self, link: ServerLink, failures: int) -> None:
        self.last_error = f"server {link.server.short}: {link.last_error}"
        if failures >= AWAY_AFTER and self._links.get(link.server) is link:
            self._maintain_soon(0.1)

    # --- connecting ---

    async def _connect(
        self,
        remote: PubKey,
        factory: IProtocolFactory,
        timeout: float,
        via: PubKey | None,
        attempts: list[tuple[str, str]],
    ) -> IProtocol:
        deadline = self._reactor.seconds() + timeout
        tried: set[PubKey] = set()
        cached = remote in self._entries
        while True:
            servers = [one for one in await self._servers_of(remote) if one not in tried and via in (None, one)]
            for position, server in enumerate(servers):
                tried.add(server)
                left = deadline - self._reactor.seconds()
                share = max(left / (len(servers) - position), 0.01)
                try:
                    session = await self._session(server).addTimeout(share, self._reactor)
                    left = deadline - self._reactor.seconds()
                    return await session.open(remote, factory, max(left / (len(servers) - position), 0.01))
                except TimeoutError as error:
                    attempts.append((server.short, str(error) or f"not connected within {share:.3g} s"))
                except Exception as error:
                    attempts.append((server.short, " ".join(str(error).split())[:200] or type(error).__name__))
            if not cached:
                raise ConnectFailed(f"{remote.short} was reached through none of its servers", tuple(attempts))
            # the entry was from the cache: perhaps the remote has moved
            cached = False
            del self._entries[remote]

    async def _servers_of(self, remote: PubKey) -> list[PubKey]:
        now = self._reactor.seconds()
        known = self._entries.get(remote)
        if known is not None and known[0] > now:
            entry = known[1]
        else:
            entry = await self._lookups.entry(remote)
            self._entries.pop(remote, None)
            self._entries[remote] = (now + ENTRY_CACHE_TIME, entry)
            if len(self._entries) > ENTRY_CACHE_SIZE:
                del self._entries[next(iter(self._entries))]
        if entry.client is None:
            raise ConnectFailed(f"{remote.short} is not a client")
        servers = []
        for text in entry.client.delegated_servers or ():
            try:
                servers.append(PubKey.from_hex(text))
            except KeyFormatError:
                continue
        if not servers:
            raise ConnectFailed(f"{remote.short} is connected to no server")
        connected = {session.server for session in self._sessions()}
        return sorted(servers, key=lambda server: server not in connected)

    def _session(self, server: PubKey) -> Deferred[ClientSession]:
        """The session with ``server``: kept, visited, or a new visit."""
        found: Deferred[ClientSession] = Deferred()
        link = self._links.get(server)
        session = (link.session if link is not None else None) or self._visited.get(server)
        if session is not None:
            found.callback(session)
            return found
        # two connects to one server share one visit
        waiting = self._visits.get(server)
        if waiting is not None:
            waiting.append(found)
            return found
        self._visits[server] = [found]

        def visited(result: Any) -> None:
            for deferred in self._visits.pop(server):
                if not deferred.called:
                    deferred.callback(result)

        Deferred.fromCoroutine(self._visit(server)).addBoth(visited)
        return found

    async def _visit(self, server: PubKey) -> ClientSession:
        """Connect to a server of somebody else, for as long as transports need it."""
        entry = await self._lookups.entry(server)
        if entry.server is None:
            raise DmsgError("entry is of a client instead of a server")
        session = await SessionEndpoint(
            self._reactor, self._turn, self._key, server, entry.server.address, self._accept
        ).open()
        if not self.running:
            session.close()
            raise DmsgError("client is stopped")
        self._visited[server] = session

        def lost(_: None) -> None:
            self._visited.pop(server, None)
            if not self._sessions():
                self._lifecycle.no_server()

        session.lost.addCallback(lost)
        return session

    def _close_idle_visits(self) -> None:
        """End visits that carried nothing at this look and the one before."""
        idle = {server for server, session in self._visited.items() if not session.transports}
        for server in idle & self._idle:
            self._visited[server].close()
        self._idle = idle


def _done_with(deferred: Deferred[None]) -> Deferred[None]:
    done: Deferred[None] = Deferred()

    def fire(result: None) -> None:
        done.callback(None)
        return result

    deferred.addBoth(fire)
    return done


@implementer(IListeningPort)
class _Listening:
    """A factory that accepts a client's transports."""

    def __init__(self, client: Client, factory: IProtocolFactory) -> None:
        self._client = client
        self._factory = factory
        self.startListening()

    def startListening(self) -> None:
        self._factory.doStart()
        self._client._factory = self._factory

    def stopListening(self) -> Deferred[None]:
        if self._client._factory is self._factory:
            self._client._factory = None
            self._factory.doStop()
        stopped: Deferred[None] = Deferred()
        stopped.callback(None)
        return stopped

    def getHost(self) -> IAddress:
        return DmsgAddress(self._client.public_key)
