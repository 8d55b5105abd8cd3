"""The client entity: streams to others, secure and resumable."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Unpack

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.error import CannotListenError
from twisted.internet.interfaces import IListeningPort, IProtocol, IProtocolFactory
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.base.bounded_tables import remember
from dmsg.base.memory import CLIENTS, Memory
from dmsg.clients.client import CONNECT_TIMEOUT, DelegatedClient, Opening, log_warning
from dmsg.clients.server_choice import ANY, ServerChoice, ServerChoiceOptions
from dmsg.discovery.entries.entry import Entry
from dmsg.discovery.lookup.lookups import Lookups
from dmsg.errors import (
    CloseReason,
    ConnectFailed,
    DmsgError,
    EncryptionUnavailable,
    PingUnavailable,
    TransportRefused,
)
from dmsg.keys import PubKey, SecKey
from dmsg.net.pacing import Pace
from dmsg.net.reactor import Reactor
from dmsg.net.streams.address import DmsgAddress
from dmsg.net.streams.stream import UNREAD, StreamTransport
from dmsg.streams.carrier import ClientStream
from dmsg.streams.core.agreement import FEATURE, PING_FEATURE, UPGRADE_FEATURE
from dmsg.streams.holdings import StreamHoldings
from dmsg.streams.timeouts import RESUME_TIMEOUT
from dmsg.v2019.core.wire import RECEIPT_FEATURE, RELAY_FEATURE
from dmsg.v2019.dial import SessionEndpoint
from dmsg.v2019.outgoing import PLAIN_ONLY, REQUEST_TIMEOUT
from dmsg.v2019.session import ClientSession
from dmsg.v2019.transport_streams import Encryption, TransportStreams

SECURE_SEEN_SIZE = 65536
"""Pairs of a client and a feature (secure transports or upgrades) that are remembered once the client showed it."""
PLAIN_SERVERS = 1024
"""Servers of which is remembered that they do not know PING, whatever their entries say."""
PLAIN_TIME = 3600.0
"""Seconds that this is remembered."""
RESUME_ATTEMPT = 5.0
"""Seconds for one try to let a stream go on through one server."""
RESUME_DELAY = 0.1
"""Seconds between the first rounds of tries; grows to ``RESUME_MAX_DELAY``."""
RESUME_MAX_DELAY = 2.0
RESUME_BACK_OFF = 0.25
"""Seconds by which the streams of one peer go on later, through a server from which comes that they are too many; up
to ``RESUME_MAX_DELAY``.  The peer may have said it, or the server in its name: the streams of others do not wait."""
RESUME_RATE = 200.0
"""REQUESTs a second with which the streams of a client go on, each peer's in turn: when a server is lost all of
them look for another way at once, and the next server polices them."""
CLOSING = 2.0
"""Seconds in which streams that are being closed when the client stops say what was written to them."""
CLOSING_LOOK = 0.02
"""Seconds between looks whether they have."""
REFUSED_SIZE = 1024
"""Servers and peers of which is remembered that they were too many."""

_log = Logger()


class Client(DelegatedClient[ClientSession]):
    """A dmsg client.

    Start it as any Twisted service (or call ``startService()``), wait for
    :meth:`~dmsg.Client.when_online`, then :meth:`~dmsg.Client.connect` to public keys or :meth:`~dmsg.Client.listen`.

    :param key: the secret key; its public key is the client's address.
    :param discovery: URLs, or a :class:`~dmsg.discovery.lookup.lookups.Lookups`.
    :param choice: which servers it takes; ``min_servers``, ``prefer`` and ``only`` may be given as keywords.
    :param encryption: ``require``, ``prefer`` or ``off``, see :class:`~dmsg.v2019.transport_streams.Encryption`.
    :param resume_timeout: seconds that a stream waits for another way to the
        remote when its server is lost; 0 lets it end with its server.
    :param receipts: sign for servers that ask for it how much they delivered (docs/pipeline/receipts.md).
    """

    name = "dmsg-client"

    def __init__(
        self,
        reactor: Reactor,
        key: SecKey,
        discovery: Sequence[str] | Lookups,
        choice: ServerChoice = ANY,
        *,
        encryption: str | Encryption = Encryption.REQUIRE,
        resume_timeout: float = RESUME_TIMEOUT,
        receipts: bool = False,
        random: Random | None = None,
        warned: Callable[[str], None] = log_warning,
        memory: Memory | None = None,
        **options: Unpack[ServerChoiceOptions],
    ) -> None:
        """:param warned: told, each text once, what the person who runs this client ought to know; by default the log.

        :param memory: the account to which its streams are booked; None: the one of all clients of this process.

        :raises ValueError: min_servers or encryption cannot be that.
        """
        self.encryption = Encryption(encryption)
        super().__init__(
            reactor,
            key,
            discovery,
            replace(choice, **options),
            features=dict.fromkeys((FEATURE, PING_FEATURE, UPGRADE_FEATURE), self.encryption is not Encryption.OFF),
            server_feature=RELAY_FEATURE,
            random=random,
            warned=warned,
        )
        self._seen: dict[tuple[PubKey, str], None] = {}
        self._plain_servers: dict[PubKey, tuple[str, float]] = {}
        self._resumed = Pace(reactor, lambda: RESUME_RATE)
        self._resume_after: OrderedDict[tuple[PubKey, PubKey], float] = OrderedDict()
        self.streams = TransportStreams(
            reactor,
            key,
            self.factories.get,
            self._turn.add_stream,
            encryption=self.encryption,
            resume_timeout=resume_timeout,
            receipts=receipts,
            factories=self.factories.values,
            reconnect=lambda stream: Deferred.fromCoroutine(self._reconnect(stream)),
            features_of=lambda remote: Deferred.fromCoroutine(self._offered_by(remote)),
            is_known=self._entries.is_fresh,
        )
        self._holdings = StreamHoldings(reactor, memory or CLIENTS, self._all_streams)

    def startService(self) -> None:
        super().startService()
        self._holdings.start()

    def _all_streams(self) -> list[ClientStream]:
        carried = (stream for session in self.sessions() for stream in session.streams)
        mine = self.streams.key.public
        own = (stream for stream in UNREAD if getattr(stream.getHost(), "public_key", None) == mine)
        unread = (stream for stream in own if isinstance(stream, ClientStream))
        return list(dict.fromkeys((*self.streams.all, *carried, *unread)))

    # --- what an application uses ---

    def connect(
        self,
        remote: PubKey | DmsgAddress,
        factory: IProtocolFactory,
        port: int = 0,
        *,
        timeout: float = CONNECT_TIMEOUT,
        via: PubKey | None = None,
        resumable: bool = True,
    ) -> Deferred[IProtocol]:
        """Open a stream to ``remote``; fires with the factory's connected protocol.

        Tries every server of the remote, those first that this client is
        connected to; with ``via`` only that one.  Fails with :class:`~dmsg.errors.ConnectFailed`, which
        says why each failed, :class:`~dmsg.errors.EntryNotFound`,
        :class:`~dmsg.errors.DiscoveryError`, :class:`~dmsg.errors.EncryptionUnavailable`
        or, when the time is over, :class:`~dmsg.errors.ConnectTimeout`.

        :param port: whom there: 0 to 65535; an address names its own.
        :param timeout: seconds for the whole of it.
        :raises TypeError: ``port`` is not an int.
        :raises ValueError: it is not a port, or the address names another one.
        :param resumable: the stream goes on over another server when its own is lost.
        """
        address = DmsgAddress.of(remote, port)

        def prepare(remote: PubKey, entry: Entry) -> Opening[ClientSession]:
            secure = self._agree(remote, entry, address.port)
            upgrade = secure and self._offers(remote, entry, UPGRADE_FEATURE)

            def opening(session: ClientSession, seconds: float) -> Deferred[IProtocol]:
                return session.open(
                    remote,
                    factory,
                    seconds,
                    port=address.port,
                    secure=secure,
                    resumable=resumable,
                    upgrade=upgrade,
                )

            return opening

        return self._reach(address.public_key, prepare, timeout, via).addErrback(self._what_to_do, address)

    @staticmethod
    def _what_to_do(failure: Failure, address: DmsgAddress) -> Failure:
        """Where all servers between the two are of 2019, the reasons of each say nothing of a way out."""
        error = failure.value
        if isinstance(error, ConnectFailed) and error.attempts and all(PLAIN_ONLY in why for _, why in error.attempts):
            raise ConnectFailed(
                f"{address.public_key.short}: none of its servers carries secure transports, and its program is too "
                "old to do without; update dmsg there, or let both use a server of dmsg",
                error.attempts,
                error.key,
            ) from None
        return failure

    def probe(
        self, remote: PubKey, port: int | None = None, *, timeout: float = CONNECT_TIMEOUT, via: PubKey | None = None
    ) -> Deferred[IProtocol]:
        """Open a stream that only measures: no program of the remote sees it, and nobody has to listen.

        Each ``send(b"")`` of the protocol's transport is a round trip.  Fails as :meth:`connect`, and with
        :class:`~dmsg.errors.PingUnavailable` when the remote cannot do that.

        :param port: somebody must listen there, or it is refused; None: of the client itself.
        """

        def prepare(remote: PubKey, entry: Entry) -> Opening[ClientSession]:
            if self.encryption is Encryption.OFF or not entry.offers(PING_FEATURE):
                raise PingUnavailable(f"{remote.short} does not answer pings below its programs")
            factory = Factory.forProtocol(Protocol)
            upgrade = self._offers(remote, entry, UPGRADE_FEATURE)

            def opening(session: ClientSession, seconds: float) -> Deferred[IProtocol]:
                probe = 0 if port is None else 1
                return session.open(remote, factory, seconds, port=port or 0, secure=True, probe=probe, upgrade=upgrade)

            return opening

        return self._reach(remote, prepare, timeout, via)

    def listen(self, factory: IProtocolFactory, port: int = 0) -> IListeningPort:
        """Accept streams with ``factory``; one listener on each port.

        Port 0 is asked for by those who name none.

        :raises CannotListenError: there is one already.
        :raises ValueError: not a port.
        """
        if port and self.encryption is Encryption.OFF:
            raise CannotListenError(
                None, port, OSError("encryption is off, and without it only port 0 can be listened on")
            )
        return super().listen(factory, port)

    @property
    def refused(self) -> dict[str, int]:
        """What others asked of this client and did not get, by reason; ``handshakes`` were not even looked at."""
        found = {reason.name.lower(): number for reason, number in self.streams.refused.items()}
        return {**found, "handshakes": self.streams.doorman.refused}

    def server_session(self, server: PubKey) -> Deferred[ClientSession]:
        """The connection to ``server``, for measuring: the present one, or one made now."""
        return self._set.session(server)

    # --- its sessions ---

    def _session_opener(self, entry: Entry) -> SessionEndpoint:
        assert entry.server is not None
        return SessionEndpoint(
            self._reactor,
            self._turn,
            self._key,
            entry.key,
            entry.server.address,
            self.streams,
            pings=lambda: self._carries_secure(entry),
            no_pings=lambda: self._is_plain(entry),
            receipts=self.streams.receipts and entry.offers(RECEIPT_FEATURE),
        )

    def _is_plain(self, entry: Entry) -> None:
        """A connection showed that this server is of 2019: an earlier program of its key left the mark."""
        assert entry.server is not None
        self._plain_servers.pop(entry.key, None)
        self._plain_servers[entry.key] = entry.server.address, self._reactor.seconds() + PLAIN_TIME
        if len(self._plain_servers) > PLAIN_SERVERS:
            del self._plain_servers[next(iter(self._plain_servers))]

    def _carries_secure(self, entry: Entry) -> bool:
        """Whether a server knows PING and carries secure transports, as its entry and earlier connections say."""
        address, until = self._plain_servers.get(entry.key, ("", 0.0))
        same = entry.server is not None and entry.server.address == address
        return entry.offers(RELAY_FEATURE) and not (same and until > self._reactor.seconds())

    def _carries(self, entry: Entry) -> bool:
        return self.encryption is Encryption.OFF or self._carries_secure(entry)

    def _migrate(self, stream: StreamTransport) -> None:
        assert isinstance(stream, ClientStream)
        self.streams.migrate(stream)

    async def _stop(self) -> None:
        await self._let_close()
        self._holdings.stop()
        self.streams.stop()
        await super()._stop()

    async def _let_close(self) -> None:
        """Streams that are being closed say first what was written to them, as TCP's do when a program has ended."""
        until = self._reactor.seconds() + CLOSING
        while self._reactor.seconds() < until and any(
            one.disconnecting and not one.over for one in self._all_streams()
        ):
            await deferLater(self._reactor, CLOSING_LOOK)

    # --- secure or not ---

    def _agree(self, remote: PubKey, entry: Entry, port: int) -> bool:
        """Whether the transport is to be a secure one.

        :raises EncryptionUnavailable: the policy or the port asks for one and the remote has none.
        """
        if self.encryption is Encryption.OFF:
            if port:
                raise EncryptionUnavailable("encryption is off, and without it only port 0 can be reached")
            return False
        if self._offers(remote, entry, FEATURE):
            return True
        if self.encryption is Encryption.REQUIRE:
            raise EncryptionUnavailable(
                f"{remote.short} does not offer secure transports, and this client requires them (see --encryption)"
            )
        if port:
            raise EncryptionUnavailable(f"{remote.short} does not offer secure transports, and ports need them")
        return False

    def _offers(self, remote: PubKey, entry: Entry, feature: str) -> bool:
        """What the signed entry says; a client that has offered something once is believed to offer it on."""
        if entry.offers(feature):
            self._seen[remote, feature] = None
            if len(self._seen) > SECURE_SEEN_SIZE:
                del self._seen[next(iter(self._seen))]
            return True
        # an old entry that is shown again must not make us speak in the clear
        return (remote, feature) in self._seen

    async def _offered_by(self, remote: PubKey) -> frozenset[str]:
        """Which of the features that decide on encryption a client offers.  :raises DmsgError: nobody knows."""
        features = (FEATURE, UPGRADE_FEATURE)
        try:
            entry = await self._entries.of(remote)
        except DmsgError:
            known = frozenset(feature for feature in features if (remote, feature) in self._seen)
            if not known:
                raise  # nothing is known of it: that is no leave to speak in the clear
            return known
        return frozenset(feature for feature in features if self._offers(remote, entry, feature))

    # --- resuming ---

    async def _reconnect(self, stream: ClientStream) -> None:
        """Let a stream go on over whatever server is common to both ends, for as long as it may take.

        A stream that still has its transport keeps it until the remote is found elsewhere.
        """
        peer = stream.getPeer()
        assert isinstance(peer, DmsgAddress)
        remote = peer.public_key
        left_behind = stream.server
        deadline = self._reactor.seconds() + self.streams.resume_timeout
        if (pause := self.streams.before_moving(stream)) > 0.0:
            await deferLater(self._reactor, pause)
        rounds = 0
        # what is cancelled may end in any error; then the stream is over, or the client stops
        while self._reactor.seconds() < deadline and self.streams.is_live(stream):
            moving = stream.kept.transport is not None
            for server in await self._ways(remote, left_behind, moving=moving, fresh=rounds > 0):
                if not self.streams.is_live(stream):
                    return
                try:
                    await self._turn_to_resume(server, remote)
                    session = await self.server_session(server).addTimeout(RESUME_ATTEMPT, self._reactor)
                    upgrade = (remote, UPGRADE_FEATURE) in self._seen
                    await session.reopen(stream, min(RESUME_ATTEMPT, REQUEST_TIMEOUT), upgrade=upgrade)
                except TransportRefused as error:
                    if error.final:
                        raise
                    if error.reason == CloseReason.RATE_LIMITED:
                        self._back_off(server, remote)
                except CancelledError:
                    raise
                except Exception as error:  # Twisted's connect errors have no common class
                    _log.debug("not resumed through {server}: {error}", server=server.short, error=str(error))
                else:
                    return
            rounds += 1
            delay = min(RESUME_MAX_DELAY, RESUME_DELAY * 1.5**rounds)
            await deferLater(self._reactor, delay * (0.7 + 0.6 * self._random.random()))

    async def _turn_to_resume(self, server: PubKey, remote: PubKey) -> None:
        wait = self._resume_after.get((server, remote), 0.0) - self._reactor.seconds()
        if wait > 0.0:
            await deferLater(self._reactor, wait)
        await self._resumed.wait(remote)

    def _back_off(self, server: PubKey, remote: PubKey) -> None:
        now = self._reactor.seconds()
        before = max(now, self._resume_after.get((server, remote), 0.0))
        after = min(before + RESUME_BACK_OFF, now + RESUME_MAX_DELAY)
        remember(self._resume_after, (server, remote), after, REFUSED_SIZE)

    async def _ways(self, remote: PubKey, left_behind: PubKey | None, *, moving: bool, fresh: bool) -> list[PubKey]:
        """Servers by which to reach ``remote``, other ones than that left behind first."""
        if fresh:
            self._entries.doubt(remote)
        try:
            entry = await self._entries.of(remote)
            servers = self._servers_of(remote, entry)
            self._offers(remote, entry, UPGRADE_FEATURE)
        except DmsgError:
            servers = []
        others = [server for server in servers if server != left_behind]
        if moving or left_behind is None:
            return others
        # the entry may be late: the remote may still be, or be again, where it was
        return [*others, left_behind]
