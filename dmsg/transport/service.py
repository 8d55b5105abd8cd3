"""The client entity: it finds servers, stays connected, is found, and connects to others."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random, SystemRandom
from typing import Any

from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred, TimeoutError
from twisted.internet.error import CannotListenError
from twisted.internet.interfaces import IAddress, IListeningPort, IProtocol, IProtocolFactory
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.discovery.entry import Entry
from dmsg.discovery.lookup import Lookup, Lookups
from dmsg.errors import (
    CloseReason,
    ConnectFailed,
    DiscoveryError,
    DmsgError,
    DmsgTimeout,
    EncryptionUnavailable,
    EntryNotFound,
    KeyFormatError,
    TransportRefused,
)
from dmsg.keys import PubKey, SecKey
from dmsg.net.link import TurnFlush
from dmsg.net.stream import DmsgAddress, StreamTransport
from dmsg.transport.agreement import FEATURE
from dmsg.transport.lifecycle import LifecycleCore, make_lifecycle
from dmsg.transport.publish import EntryPublisher
from dmsg.transport.servers import ServerSet
from dmsg.transport.session import REQUEST_TIMEOUT, ClientSession
from dmsg.transport.streams import RESUME_TIMEOUT, Encryption, Streams

MIN_SERVERS = 2
"""Servers that a client stays connected to, by default."""
CONNECT_TIMEOUT = 10.0
"""Seconds for the whole of a connect, by default."""
ENTRY_CACHE_TIME = 10.0
"""Seconds that a fetched entry is used again without asking; it is kept for when discovery is away."""
ENTRY_CACHE_SIZE = 1024
SECURE_SEEN_SIZE = 65536
"""Clients of which is remembered that they offer secure transports."""
SUCCESSORS = 4
"""Steps from a key to its successors that are followed."""
RESUME_ATTEMPT = 5.0
"""Seconds for one try to let a stream go on through one server."""
RESUME_DELAY = 0.1
"""Seconds between the first rounds of tries; grows to ``RESUME_MAX_DELAY``."""
RESUME_MAX_DELAY = 2.0
RESUME_BACK_OFF = 0.25
"""Seconds that all resumptions wait when a server finds them too many."""
RESUME_RATE = 200.0
"""REQUESTs a second with which the streams of a client go on: when a server is lost all of
them look for another way at once, and the next server polices them."""

_log = Logger()


class Client(Service):
    """A dmsg client.

    Start it as any Twisted service (or call ``startService()``), wait for
    :meth:`when_online`, then :meth:`connect` to public keys or :meth:`listen`.

    :param key: the secret key; its public key is the client's address.
    :param discovery: URLs, or a :class:`~dmsg.discovery.lookup.Lookups`.
    :param min_servers: stay connected to so many, when there are so many.
    :param encryption: ``require``, ``prefer`` or ``off``, see :class:`~dmsg.transport.streams.Encryption`.
    :param resume_timeout: seconds that a stream waits for another way to the
        remote when its server is lost; 0 lets it end with its server.
    :param prefer: servers to take before others.
    :param only: take no servers but these.
    :param receipts: sign for servers that ask for it how much they delivered (docs/pipeline/receipts.md).
    """

    name = "dmsg-client"

    def __init__(
        self,
        reactor: Any,
        key: SecKey,
        discovery: Sequence[str] | Lookups,
        *,
        min_servers: int = MIN_SERVERS,
        encryption: str | Encryption = Encryption.REQUIRE,
        resume_timeout: float = RESUME_TIMEOUT,
        prefer: Sequence[PubKey] = (),
        only: Sequence[PubKey] = (),
        receipts: bool = False,
        random: Random | None = None,
    ) -> None:
        """:raises ValueError: min_servers or encryption cannot be that."""
        if min_servers < 1:
            raise ValueError("min_servers must be at least 1")
        self._reactor = reactor
        self._key = key
        self._lookups = (
            discovery if isinstance(discovery, Lookups) else Lookups([Lookup(reactor, url) for url in discovery])
        )
        self._random: Random = random or SystemRandom()
        self.encryption = Encryption(encryption)
        turn = TurnFlush(reactor)
        self._factories: dict[int, IProtocolFactory] = {}
        self._entries: dict[PubKey, tuple[float, Entry]] = {}
        self._secure_seen: dict[PubKey, None] = {}
        self._next_resume = 0.0
        self.streams = Streams(
            reactor,
            key,
            self._factories.get,
            turn.add_stream,
            encryption=self.encryption,
            resume_timeout=resume_timeout,
            receipts=receipts,
        )
        self.streams.reconnect = lambda stream: Deferred.fromCoroutine(self._reconnect(stream))
        self.streams.speaks_secure = lambda remote: Deferred.fromCoroutine(self._speaks_secure(remote))
        self._set = ServerSet(
            reactor,
            key,
            self._lookups,
            self.streams,
            turn,
            self._random,
            min_servers=min_servers,
            prefer=prefer,
            only=only,
            changed=self._servers_changed,
        )
        self._publisher = EntryPublisher(
            reactor,
            self._lookups,
            key,
            self._set.delegated,
            self._publish_failed,
            self._random,
            secure=self.encryption is not Encryption.OFF,
        )
        self._core = LifecycleCore()
        self._lifecycle = make_lifecycle(self._core)

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
    def last_error(self) -> str:
        """Why there is no server, as far as known."""
        return self._set.last_error

    @property
    def servers(self) -> list[PubKey]:
        """Keys of the servers it is connected to."""
        return [session.server for session in self._set.sessions()]

    @property
    def round_trips(self) -> dict[PubKey, float | None]:
        """Seconds to each connected server and back, as far as measured."""
        return {session.server: session.round_trip for session in self._set.sessions()}

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
        remote: PubKey | DmsgAddress,
        factory: IProtocolFactory,
        timeout: float = CONNECT_TIMEOUT,
        *,
        port: int = 0,
        via: PubKey | None = None,
        resumable: bool = True,
    ) -> Deferred[IProtocol]:
        """Open a stream to ``remote``; fires with the factory's connected protocol.

        Tries every server of the remote, those first that this client is
        connected to; with ``via`` only that one.  Fails with :class:`~dmsg.errors.ConnectFailed`, which
        says why each failed, :class:`~dmsg.errors.EntryNotFound`,
        :class:`~dmsg.errors.DiscoveryError`, :class:`~dmsg.errors.EncryptionUnavailable`
        or :class:`~dmsg.errors.DmsgTimeout`.

        :param port: whom there: 0 to 65535.
        :param resumable: the stream goes on over another server when its own is lost.
        """
        address = remote if isinstance(remote, DmsgAddress) else DmsgAddress(remote, port)
        key = address.public_key
        attempts: list[tuple[str, str]] = []
        connecting = Deferred.fromCoroutine(
            self._connect(key, address.port, factory, timeout, via, resumable, attempts)
        )

        def too_late(result: Any, seconds: float) -> Any:
            if isinstance(result, Failure):
                raise ConnectFailed(f"{key.short}: not connected within {seconds:g} s", tuple(attempts)) from None
            return result

        return connecting.addTimeout(timeout, self._reactor, too_late)

    def listen(self, factory: IProtocolFactory, port: int = 0) -> IListeningPort:
        """Accept streams with ``factory``; one listener on each port.

        Port 0 is asked for by those who name none.

        :raises CannotListenError: there is one already.
        :raises ValueError: not a port.
        """
        if not 0 <= port < 65536:
            raise ValueError("port is 0 to 65535")
        if port in self._factories:
            raise CannotListenError(None, port, OSError(f"a factory is listening on port {port} already"))
        if port and self.encryption is Encryption.OFF:
            raise CannotListenError(None, port, OSError("ports need secure transports"))
        return _Listening(self, factory, port)

    def server_session(self, server: PubKey) -> Deferred[ClientSession]:
        """The connection to ``server``, for measuring: the present one, or one made now."""
        return self._set.session(server)

    def entry(self, remote: PubKey) -> Deferred[Entry]:
        """The entry of ``remote``, verified; not older than ``ENTRY_CACHE_TIME`` unless discovery is away."""
        return Deferred.fromCoroutine(self._entry_of(remote))

    def sessions(self) -> list[ClientSession]:
        """The connections to servers."""
        return self._set.sessions()

    # --- service ---

    def startService(self) -> None:
        if not self.running:
            super().startService()  # type: ignore[no-untyped-call]
            self._lifecycle.start()
            self._publisher.start()
            self._set.start()

    def stopService(self) -> Deferred[None]:
        super().stopService()  # type: ignore[no-untyped-call]
        self._lifecycle.stop()
        return Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        self.streams.stop()
        await self._publisher.withdraw()
        await self._set.stop()
        await self._lookups.close()

    def _servers_changed(self) -> None:
        if self._set.sessions():
            self._lifecycle.server_up()
        else:
            self._lifecycle.no_server()
        self._publisher.soon()

    def _publish_failed(self, error: str) -> None:
        self._set.last_error = error

    # --- connecting ---

    async def _connect(
        self,
        remote: PubKey,
        port: int,
        factory: IProtocolFactory,
        timeout: float,
        via: PubKey | None,
        resumable: bool,
        attempts: list[tuple[str, str]],
    ) -> IProtocol:
        deadline = self._reactor.seconds() + timeout
        tried: set[PubKey] = set()
        cached = remote in self._entries
        while True:
            remote, entry = await self._successor(remote)
            if entry.client is None:
                raise ConnectFailed(f"{remote.short} is not a client")
            secure = self._agree(remote, entry, port)
            servers = [one for one in self._servers_of(remote, entry) if one not in tried and via in (None, one)]
            for position, server in enumerate(servers):
                tried.add(server)
                left = deadline - self._reactor.seconds()
                share = max(left / (len(servers) - position), 0.01)
                try:
                    session = await self._set.session(server).addTimeout(share, self._reactor)
                    left = deadline - self._reactor.seconds()
                    share = max(left / (len(servers) - position), 0.01)
                    return await session.open(remote, factory, share, port=port, secure=secure, resumable=resumable)
                except CancelledError:
                    raise
                except TimeoutError as error:
                    attempts.append((server.short, str(error) or f"not connected within {share:.3g} s"))
                except Exception as error:
                    attempts.append((server.short, " ".join(str(error).split())[:200] or type(error).__name__))
            if not cached:
                raise ConnectFailed(f"{remote.short} was reached through none of its servers", tuple(attempts))
            # the entry was from the cache: perhaps the remote has moved
            cached = False
            if remote in self._entries:
                self._entries[remote] = (0.0, self._entries[remote][1])

    async def _successor(self, remote: PubKey) -> tuple[PubKey, Entry]:
        """The entry of ``remote``, or of the key that it named, signed by both, to follow it."""
        for _ in range(SUCCESSORS):
            entry = await self._entry_of(remote)
            if entry.successor is None:
                return remote, entry
            remote = entry.successor.key
        raise ConnectFailed(f"{remote.short}: more than {SUCCESSORS} keys follow each other")

    def _agree(self, remote: PubKey, entry: Entry, port: int) -> bool:
        """Whether the transport is to be a secure one.

        :raises EncryptionUnavailable: the policy or the port asks for one and the remote has none.
        """
        if self.encryption is Encryption.OFF:
            if port:
                raise EncryptionUnavailable("ports need secure transports, and encryption is off")
            return False
        if self._offers(remote, entry):
            return True
        if self.encryption is Encryption.REQUIRE:
            raise EncryptionUnavailable(
                f"{remote.short} does not offer secure transports, and this client requires them (see --encryption)"
            )
        if port:
            raise EncryptionUnavailable(f"{remote.short} does not offer secure transports, which ports need")
        return False

    def _offers(self, remote: PubKey, entry: Entry) -> bool:
        """What the signed entry says; who has offered it once is believed to offer it on."""
        if entry.offers(FEATURE):
            self._secure_seen[remote] = None
            if len(self._secure_seen) > SECURE_SEEN_SIZE:
                del self._secure_seen[next(iter(self._secure_seen))]
            return True
        # an old entry that is shown again must not make us speak in the clear
        return remote in self._secure_seen

    async def _speaks_secure(self, remote: PubKey) -> bool:
        try:
            return self._offers(remote, await self._entry_of(remote))
        except EntryNotFound:
            return remote in self._secure_seen

    async def _entry_of(self, remote: PubKey) -> Entry:
        now = self._reactor.seconds()
        known = self._entries.get(remote)
        if known is not None and known[0] > now:
            return known[1]
        try:
            entry = await self._lookups.entry(remote)
        except EntryNotFound:
            raise
        except DiscoveryError:
            if known is None:
                raise
            return known[1]  # discovery is away: what was true lately is better than nothing
        self._entries.pop(remote, None)
        self._entries[remote] = (now + ENTRY_CACHE_TIME, entry)
        if len(self._entries) > ENTRY_CACHE_SIZE:
            del self._entries[next(iter(self._entries))]
        return entry

    def _servers_of(self, remote: PubKey, entry: Entry) -> list[PubKey]:
        servers = []
        for text in (entry.client.delegated_servers if entry.client is not None else None) or ():
            try:
                servers.append(PubKey.from_hex(text))
            except KeyFormatError:
                continue
        if not servers:
            raise ConnectFailed(f"{remote.short} is connected to no server")

        def order(server: PubKey) -> tuple[bool, bool, float]:
            session = self._set.existing(server)
            if session is None:
                return True, False, 0.0
            return False, session.leaving, session.round_trip or 0.0

        return sorted(servers, key=order)

    # --- resuming ---

    async def _reconnect(self, stream: StreamTransport) -> None:
        """Let a stream go on over whatever server is common to both ends, for as long as it may take.

        A stream that still has its transport keeps it until the remote is found elsewhere.
        """
        peer = stream.getPeer()
        assert isinstance(peer, DmsgAddress)
        remote = peer.public_key
        left_behind = stream.server
        deadline = self._reactor.seconds() + self.streams.resume_timeout
        rounds = 0
        while self._reactor.seconds() < deadline:
            moving = stream.end.transport is not None
            for server in await self._ways(remote, left_behind, moving=moving, fresh=rounds > 0):
                try:
                    await self._turn_to_resume()
                    session = await self._set.session(server).addTimeout(RESUME_ATTEMPT, self._reactor)
                    await session.reopen(stream, min(RESUME_ATTEMPT, REQUEST_TIMEOUT))
                except TransportRefused as error:
                    if error.final:
                        raise
                    if error.reason == CloseReason.RATE_LIMITED:
                        self._next_resume = max(self._next_resume, self._reactor.seconds()) + RESUME_BACK_OFF
                except CancelledError:
                    raise
                except Exception as error:  # Twisted's connect errors have no common class
                    _log.debug("not resumed through {server}: {error}", server=server.short, error=str(error))
                else:
                    return
            rounds += 1
            delay = min(RESUME_MAX_DELAY, RESUME_DELAY * 1.5**rounds)
            await deferLater(self._reactor, delay * (0.7 + 0.6 * self._random.random()))

    async def _turn_to_resume(self) -> None:
        now = self._reactor.seconds()
        at = self._next_resume = max(now, self._next_resume + 1 / RESUME_RATE)
        if at > now:
            await deferLater(self._reactor, at - now)

    async def _ways(self, remote: PubKey, left_behind: PubKey | None, *, moving: bool, fresh: bool) -> list[PubKey]:
        """Servers by which to reach ``remote``, other ones than that left behind first."""
        if fresh and remote in self._entries:
            self._entries[remote] = (0.0, self._entries[remote][1])
        try:
            servers = self._servers_of(remote, await self._entry_of(remote))
        except DmsgError:
            servers = []
        others = [server for server in servers if server != left_behind]
        if moving or left_behind is None:
            return others
        # the entry may be late: the remote may still be, or be again, where it was
        return [*others, left_behind]


@implementer(IListeningPort)
class _Listening:
    """A factory that accepts a client's streams on one port."""

    def __init__(self, client: Client, factory: IProtocolFactory, port: int) -> None:
        self._client = client
        self._factory = factory
        self._port = port
        self.startListening()

    def startListening(self) -> None:
        self._factory.doStart()
        self._client._factories[self._port] = self._factory

    def stopListening(self) -> Deferred[None]:
        if self._client._factories.get(self._port) is self._factory:
            del self._client._factories[self._port]
            self._factory.doStop()
        stopped: Deferred[None] = Deferred()
        stopped.callback(None)
        return stopped

    def getHost(self) -> IAddress:
        return DmsgAddress(self._client.public_key, self._port)
