"""Base class of the clients of all protocol families: finds servers, stays connected to them, posts the client's entry,
and connects to other clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random, SystemRandom
from typing import Any, Generic, TypeAlias

from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred, TimeoutError
from twisted.internet.error import CannotListenError
from twisted.internet.interfaces import IAddress, IListeningPort, IProtocol, IProtocolFactory
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.base.printable import shorten
from dmsg.clients.dial import SessionOpener, SessionT
from dmsg.clients.entries import Entries, delegated_servers
from dmsg.clients.lifecycle import LifecycleCore, make_lifecycle
from dmsg.clients.publish import EntryPublisher
from dmsg.clients.server_choice import ServerChoice
from dmsg.clients.servers import ServerSet, ServerUses
from dmsg.discovery.entries.entry import Entry, features as entry_features
from dmsg.discovery.lookup.lookup import Lookup
from dmsg.discovery.lookup.lookups import Lookups
from dmsg.discovery.lookup.nameplates import Nameplate, claim, find
from dmsg.errors import (
    CloseReason,
    ConnectFailed,
    ConnectTimeout,
    DiscoveryError,
    DmsgError,
    DmsgTimeout,
    WrongDiscovery,
)
from dmsg.keys import PubKey, SecKey
from dmsg.net.flush import TurnFlush
from dmsg.net.links.race import CarrierMemory
from dmsg.net.own_pauses import TimeLeft, add_fair_timeout
from dmsg.net.reactor import Reactor
from dmsg.net.retry import retry_delay
from dmsg.net.streams.address import DmsgAddress
from dmsg.net.streams.stream import StreamTransport
from dmsg.net.wake import WakeWatch

MAX_WARNINGS = 64
"""Maximum number of different warnings that a client reports in its lifetime."""

_log = Logger()


def log_warning(text: str) -> None:
    """Log a warning for the person who runs a client."""
    _log.warn("{text}", text=text)


Opening: TypeAlias = Callable[[SessionT, float], Deferred[IProtocol]]
"""Function that opens a stream through a session. Its second argument is a timeout in seconds."""


class DelegatedClient(Service, Generic[SessionT]):
    """Base class of clients, which handles servers and discovery. Each protocol family adds its sessions with servers.

    :param choice: servers that the client may use.
    :param features: features that are added to this client's entry (True) or removed from it (False).
    :param advertise_visits: see :class:`~dmsg.clients.servers.ServerUses`.
    :param server_feature: feature that marks the entries of suitable servers. A server whose entry has no features at
        all may be of 2019, and is suitable, too.
    """

    def __init__(
        self,
        reactor: Reactor,
        key: SecKey,
        discovery: Sequence[str] | Lookups,
        choice: ServerChoice,
        *,
        features: Mapping[str, bool],
        server_feature: str,
        advertise_visits: bool = False,
        random: Random | None = None,
        on_warning: Callable[[str], None] = log_warning,
    ) -> None:
        """:param on_warning: called with each warning for the person who runs this client; the same text is reported
        only once.
        """
        self._reactor = reactor
        self._key = key
        self._server_feature = server_feature
        self._lookups = (
            discovery if isinstance(discovery, Lookups) else Lookups([Lookup(reactor, url) for url in discovery])
        )
        self._random: Random = random or SystemRandom()
        self._turn = TurnFlush(reactor)
        self._carriers = CarrierMemory()
        self._wake_watch = WakeWatch(reactor, self._has_woken)
        self.factories: dict[int, IProtocolFactory] = {}
        """Factories that accept streams, by port."""
        self._entries = Entries(reactor, self._lookups)
        uses = ServerUses(
            opener=self._session_opener,
            suits=self._is_suitable,
            carries=self._can_carry,
            key_shared=self._key_shared,
            migrate=self._migrate,
            advertise_visits=advertise_visits,
            on_failure=self._discovery_failed,
            on_change=self._servers_changed,
        )
        self._set = ServerSet(reactor, self._lookups, self._random, choice, uses)
        self._publisher = EntryPublisher(
            reactor,
            self._lookups,
            key,
            self._set.delegated,
            self._discovery_failed,
            self._random,
            features=features,
            on_warning=self._warn,
        )
        self._on_warning = on_warning
        self._warnings: set[str] = set()
        self._waiting: dict[Deferred[None], None] = {}
        """Unfired Deferreds of :meth:`when_online` and :meth:`when_published` that have a timeout."""
        self._core = LifecycleCore()
        self._lifecycle = make_lifecycle(self._core)

    # --- hooks for a protocol family ---

    def _session_opener(self, entry: Entry) -> SessionOpener[SessionT]:
        """Return the object that opens sessions with the server of an entry.

        :raises DmsgError: the address of the server is malformed.
        """
        raise NotImplementedError

    def _is_suitable(self, entry: Entry) -> bool:
        """Whether a listed server speaks this client's protocol, as far as its entry shows."""
        # Servers of 2019 name no features in their entries. So a server whose entry has no features may be suitable.
        offered = entry_features(entry.version)
        return not offered or self._server_feature in offered

    def _can_carry(self, entry: Entry) -> bool:
        """Whether a server can carry every kind of stream that this client may open."""
        return True

    def _migrate(self, stream: StreamTransport) -> None:
        """Move a stream to another server, because its present server is slow or shuts down."""

    # --- interface for applications ---

    @property
    def public_key(self) -> PubKey:
        """Public key of this client, which is its address."""
        return self._key.public

    @property
    def status(self) -> str:
        """State of the client: ``stopped``, ``searching`` for a server, ``unreachable`` or ``online``.

        An unreachable client can open streams, but its servers send it no requests of other clients.
        :attr:`last_error` says why a client is searching or unreachable.
        """
        return self._core.state

    @property
    def last_error(self) -> str:
        """Reason why the client is not online; empty if unknown."""
        return self._set.last_error

    @property
    def waiting_for(self) -> str:
        """Text that names what the client is waiting for before it is online or its entry is published."""
        if self.last_error:
            return self.last_error
        if self.status == "online":
            return f"{self._lookups} to accept this client's entry"
        links = [link.server.short for link in self._set.links.values()]
        return f"server {', '.join(links)}" if links else f"an answer of {self._lookups}"

    @property
    def servers(self) -> list[PubKey]:
        """Keys of the connected servers."""
        return [session.server for session in self._set.sessions()]

    @property
    def round_trips(self) -> dict[PubKey, float | None]:
        """Round trip in seconds to each connected server; None while not measured."""
        return {session.server: session.round_trip for session in self._set.sessions()}

    def sessions(self) -> list[SessionT]:
        """Return the sessions with servers."""
        return self._set.sessions()

    def entry(self, remote: PubKey) -> Deferred[Entry]:
        """Return the verified entry of ``remote``. It was fetched at most a few seconds ago. If discovery does not
        answer, it may be older.
        """
        return Deferred.fromCoroutine(self._entries.get(remote))

    def resolve(self, remote: PubKey) -> Deferred[tuple[PubKey, Entry]]:
        """Return the current key of ``remote`` (``remote`` itself or its successor) and the entry of that key."""
        return Deferred.fromCoroutine(self._entries.successor(remote))

    def expect(self, remote: PubKey) -> None:
        """Prepare for a connection to ``remote``: fetch its entry, and prefer its servers in the search for servers.

        Call this right after the client is started. An early call saves one to five round trips.
        """
        self._set.expect(Deferred.fromCoroutine(self._find_servers(remote)))

    async def _find_servers(self, remote: PubKey) -> list[PubKey]:
        try:
            return delegated_servers(*await self._entries.successor(remote))
        except (DmsgError, CancelledError):
            return []  # The error is ignored here, because the later connection attempt reports it.

    async def claim_nameplate(self) -> Nameplate:
        """Claim a nameplate: a short number that discovery maps to this client's key.

        :raises DiscoveryError: no nameplate is available.
        """
        return await claim(self._lookups, self._key)

    async def find_nameplate(self, number: int) -> PubKey:
        """Return the key of a nameplate. Nothing proves that this key is the right one.

        :raises ~dmsg.discovery.lookup.nameplates.NoSuchNameplate: there is no such nameplate.
        :raises DiscoveryError: a discovery failed to answer, and no other has the nameplate.
        """
        return await find(self._lookups, number)

    def when_online(self, timeout: float | None = None) -> Deferred[None]:
        """Return a Deferred that fires when :attr:`status` is ``online``.

        After ``timeout`` seconds it fails with DmsgTimeout, whose text says why.
        """
        online: Deferred[None] = Deferred()
        if self.status == "online":
            online.callback(None)
            return online
        self._core.waiting.append(online)
        problem = "no server sends it requests" if self.status == "unreachable" else "no server is connected"
        return self._limit(online, timeout, problem)

    def when_published(self, timeout: float | None = None) -> Deferred[None]:
        """Return a Deferred that fires when discovery has this client's entry with its current servers.

        After ``timeout`` seconds it fails with DmsgTimeout, whose text says why.
        """
        return self._limit(self._publisher.when_published(), timeout, "discovery does not have its entry")

    def _limit(self, waiting: Deferred[None], timeout: float | None, problem: str) -> Deferred[None]:
        if timeout is None:
            return waiting

        def too_late(result: object, seconds: float) -> None:
            why = f": {self.last_error}" if self.last_error else ""
            raise DmsgTimeout(f"the client waited for {seconds:g} s, but {problem}{why}")

        self._waiting[waiting] = None

        def over(result: Failure | None) -> Failure | None:
            self._waiting.pop(waiting, None)
            return result

        return add_fair_timeout(waiting.addBoth(over), timeout, self._reactor, too_late)

    def listen(self, factory: IProtocolFactory, port: int = 0) -> IListeningPort:
        """Accept streams at ``port``; ``factory`` builds their protocols. A port has at most one listener.

        :raises CannotListenError: the port already has a listener.
        :raises ValueError: ``port`` is not 0 to 65535.
        """
        if not 0 <= port < 65536:
            raise ValueError("port must be from 0 to 65535")
        if port in self.factories:
            raise CannotListenError(None, port, OSError(f"a factory is listening on port {port} already"))
        return _ListeningPort(self, factory, port)

    # --- service ---

    def startService(self) -> None:
        if not self.running:
            super().startService()  # type: ignore[no-untyped-call]
            self._lifecycle.start()
            self._wake_watch.start()
            self._publisher.start()
            self._set.start()

    def stopService(self) -> Deferred[None]:
        super().stopService()  # type: ignore[no-untyped-call]
        self._lifecycle.stop()
        self._wake_watch.stop()
        return Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        # The entry is withdrawn before the servers are disconnected. Otherwise other clients would try servers that can
        # no longer reach this client.
        await self._publisher.withdraw()
        await self._set.stop()
        await self._lookups.close()

    def _has_woken(self, seconds: float) -> None:
        _log.info("this machine was suspended for about {seconds:.0f} s: servers are checked", seconds=seconds)
        for session in self._set.sessions():
            session.check_after_wake()

    def _servers_changed(self) -> None:
        if self._set.unreachable:
            self._lifecycle.unreachable()
        elif self._set.sessions():
            self._lifecycle.server_up()
        else:
            self._lifecycle.no_server()
        self._publisher.changed()

    def _discovery_failed(self, error: DiscoveryError) -> None:
        """Record a failure of discovery. If trying again is pointless, also fail the waiting Deferreds that have a
        timeout.
        """
        self._set.last_error = str(error)
        # Deferreds without a timeout do not fail, because their callers want to wait for any length of time.
        if isinstance(error, WrongDiscovery):
            for waiting in list(self._waiting):
                if not waiting.called:
                    waiting.errback(error)

    def _key_shared(self, address: str) -> None:
        self._warn(
            f"another program{f' at {address}' if address else ''} is connected with this key: "
            "only the newest is reached; stop one of them, or give it a key of its own"
        )
        self._publisher.soon()

    def _warn(self, text: str) -> None:
        # The number of different warnings is limited, because their texts may come from servers or other programs.
        if text not in self._warnings and len(self._warnings) < MAX_WARNINGS:
            self._warnings.add(text)
            self._on_warning(text)

    # --- connecting ---

    def _reach(
        self,
        remote: PubKey,
        prepare: Callable[[PubKey, Entry], Opening[SessionT]],
        timeout: float,
        via: PubKey | None,
    ) -> Deferred[IProtocol]:
        """Connect to ``remote`` through the servers in its entry. Servers to which this client is connected are tried
        first.

        :param prepare: function that returns the opening function for the key and the entry of the remote.
        :param via: only server to use; None for all.
        """
        attempts: list[tuple[str, str]] = []
        time_left = TimeLeft(self._reactor, timeout)
        # The coroutine adds to ``attempts`` while it runs, so that the error after a timeout can list the servers that
        # were tried.
        connecting = Deferred.fromCoroutine(self._try_servers(remote, prepare, time_left, via, attempts))
        connecting.addBoth(time_left.stop)

        def too_late(result: IProtocol | Failure, seconds: float) -> IProtocol:
            if isinstance(result, Failure):
                text = f"{remote.short}: not connected within {seconds:g} s"
                raise ConnectTimeout(text, tuple(attempts), str(remote)) from None
            return result

        return add_fair_timeout(connecting, timeout, self._reactor, too_late)

    async def _try_servers(
        self,
        remote: PubKey,
        prepare: Callable[[PubKey, Entry], Opening[SessionT]],
        time_left: TimeLeft,
        via: PubKey | None,
        attempts: list[tuple[str, str]],
    ) -> IProtocol:
        tried: set[PubKey] = set()
        reasons: dict[PubKey, object] = {}
        rounds = 0
        cached = remote in self._entries
        while True:
            # The successor is used without asking the user, because the old key has signed the succession. So nobody
            # has to trust discovery.
            remote, entry = await self._entries.successor(remote)
            if entry.client is None:
                raise ConnectFailed(
                    f"{remote.short} is a server, not a client: connect to the key of a client", key=str(remote)
                )
            opening = prepare(remote, entry)
            servers = [one for one in self._servers_of(remote, entry) if one not in tried and via in (None, one)]
            for position, server in enumerate(servers):
                tried.add(server)
                # Each server gets an equal share of the time left, so that a dead server cannot use up the whole
                # timeout. The share is computed again once the session is open, because opening it took some of the
                # time.
                share = time_left.share(len(servers) - position)
                try:
                    session: SessionT = await add_fair_timeout(self._set.session(server), share, self._reactor)
                    return await opening(session, time_left.share(len(servers) - position))
                except CancelledError:
                    raise
                except TimeoutError as error:
                    reasons[server] = CloseReason.TIMEOUT
                    attempts.append((server.short, str(error)))
                except Exception as error:
                    reasons[server] = getattr(error, "reason", None)
                    attempts.append((server.short, shorten(str(error)) or type(error).__name__))
            if cached:
                # The cached entry may be outdated: the remote may now be connected to other servers. So the entry is
                # fetched once more.
                cached = False
                self._entries.mark_stale(remote)
                continue
            # If the remote itself refused, another attempt would be refused, too. After a rate limit, another attempt
            # may succeed.
            limited = {server for server, reason in reasons.items() if reason == CloseReason.RATE_LIMITED}
            delay = retry_delay(rounds, self._random)
            if not limited or CloseReason.REFUSED in reasons.values() or delay >= time_left.seconds:
                raise _not_reached(remote, attempts, reasons.values())
            # Servers that refused the attempt because of a rate limit are tried again. Other clients may have used up
            # the limit, and it allows new attempts after a short time.
            await deferLater(self._reactor, delay)
            rounds += 1
            tried -= limited
            names = {server.short for server in limited}
            attempts[:] = [one for one in attempts if one[0] not in names]

    def _servers_of(self, remote: PubKey, entry: Entry) -> list[PubKey]:
        # Connected servers come first, because they need no handshake; among them, the one with the shortest round
        # trip.
        def order(server: PubKey) -> tuple[bool, bool, float]:
            session = self._set.find_session(server)
            if session is None:
                return True, False, 0.0
            return False, session.leaving, session.round_trip or 0.0

        return sorted(delegated_servers(remote, entry), key=order)


def _not_reached(remote: PubKey, attempts: list[tuple[str, str]], reasons: Iterable[object]) -> ConnectFailed:
    """Return the error for a remote that could not be reached through any server. If all attempts failed for the same
    reason, the text of the error says what this means for the remote.
    """
    said = set(reasons)
    if said == {CloseReason.REFUSED}:
        text = attempts[-1][1]
    elif said == {CloseReason.NO_SUCH_PEER}:
        text = f"{remote.short} is offline: none of the servers in its entry is connected to it"
        attempts = [(server, text) for server, _ in attempts]
    elif said == {CloseReason.RATE_LIMITED}:
        text = f"{remote.short} gets too many requests, from this key or from others; try again in a few seconds"
    else:
        text = f"{remote.short} could not be reached through any of its servers"
    return ConnectFailed(text, tuple(attempts), str(remote))


AnyClient: TypeAlias = DelegatedClient[Any]
"""Type of a client of any protocol family, for code that does not depend on the type of its sessions."""


@implementer(IListeningPort)
class _ListeningPort:
    """Port of a client on which a factory accepts streams, as Twisted's ``listen`` methods return it."""

    def __init__(self, client: AnyClient, factory: IProtocolFactory, port: int) -> None:
        self._client = client
        self._factory = factory
        self._port = port
        self.startListening()

    def startListening(self) -> None:
        self._factory.doStart()
        self._client.factories[self._port] = self._factory

    def stopListening(self) -> Deferred[None]:
        if self._client.factories.get(self._port) is self._factory:
            del self._client.factories[self._port]
            self._factory.doStop()
        stopped: Deferred[None] = Deferred()
        stopped.callback(None)
        return stopped

    def getHost(self) -> IAddress:
        return DmsgAddress(self._client.public_key, self._port)
