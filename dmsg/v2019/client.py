"""Client of the protocol family v2019: opens and accepts secure, resumable streams."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import TypeAlias, TypeVar, Unpack

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.error import CannotListenError
from twisted.internet.interfaces import IListeningPort, IProtocol, IProtocolFactory
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.base.bounded_tables import remember
from dmsg.base.cipher_names import AUTO
from dmsg.base.memory import CLIENTS, Memory
from dmsg.clients.client import CONNECT_TIMEOUT, DelegatedClient, Opening, log_warning
from dmsg.clients.server_choice import ANY, ServerChoice, ServerChoiceOptions
from dmsg.discovery.entries.entry import Entry, features
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
from dmsg.net.addresses import parse_address
from dmsg.net.carriers.names import carriers_of
from dmsg.net.cipher_choice import preferred_cipher
from dmsg.net.deadlines import no_answer
from dmsg.net.pacing import PacedQueue
from dmsg.net.reactor import Reactor
from dmsg.net.streams.address import DmsgAddress
from dmsg.net.streams.stream import UNREAD_STREAMS, StreamTransport
from dmsg.noise.xk import AES_FEATURE
from dmsg.streams.carrier import ClientStream
from dmsg.streams.core.agreement import FEATURE, PING_FEATURE, UPGRADE_FEATURE
from dmsg.streams.holdings import StreamHoldings
from dmsg.streams.timeouts import RESUME_TIMEOUT
from dmsg.v2019.core.wire import RECEIPT_FEATURE, RELAY_FEATURE
from dmsg.v2019.dial import SessionEndpoint
from dmsg.v2019.outgoing import PLAIN_ONLY, REQUEST_TIMEOUT
from dmsg.v2019.session import ClientSession
from dmsg.v2019.transport_streams import Encryption, TransportStreams, let_close

SECURE_SEEN_SIZE = 65536
"""Maximum number of remembered pairs of a client and a feature that the client has offered. Clients to which this
client connects, and clients that connect to this one, are counted separately. Otherwise strangers could make this
client forget the features of the peers that its user has chosen."""
PLAIN_SERVERS = 1024
"""Maximum number of servers that are remembered because they do not support PING although their entries announce it."""
PLAIN_TIME = 3600.0
"""Seconds for which a server is remembered for not supporting PING although its entry announces it."""
RESUME_ATTEMPT = 5.0
"""Maximum seconds of one attempt to resume a stream through one server."""
RESUME_DELAY = 0.1
"""Seconds between the first two rounds of attempts to resume a stream. A round tries all servers. After each round the
delay is multiplied by 1.5, up to ``RESUME_MAX_DELAY``."""
RESUME_MAX_DELAY = 2.0
RESUME_BACK_OFF = 0.25
"""Seconds by which each refusal RATE_LIMITED delays further attempts to resume streams to the same peer through the
same server, up to ``RESUME_MAX_DELAY`` in total. Attempts to other peers are not delayed, because the refusal may come
from the peer."""
RESUME_RATE = 200.0
"""Maximum number of REQUESTs per second for resuming streams; the peers take turns. When a server is lost, all its
streams are resumed at once, and the next server would refuse requests above its own rate limit."""
REFUSED_SIZE = 1024
"""Maximum number of (server, peer) pairs for which the delay after RATE_LIMITED is remembered."""

T = TypeVar("T")
Requesting: TypeAlias = Callable[[ClientSession, float, bool], Deferred[T]]
"""Function that requests a transport over a session. The arguments are the session, the timeout in seconds, and whether
to request an upgrade if the server is assumed to carry plain transports only."""

_log = Logger()


def _reopen(stream: ClientStream, session: ClientSession, seconds: float, upgrade: bool) -> Deferred[None]:
    return session.reopen(stream, seconds, upgrade=upgrade)


class Client(DelegatedClient[ClientSession]):
    """Client that opens streams to public keys and accepts streams from others.

    Start the client as any Twisted service (or call ``startService()``), and wait for :meth:`~dmsg.Client.when_online`.
    Then call :meth:`~dmsg.Client.connect` to open streams, or :meth:`~dmsg.Client.listen` to accept them.

    :param key: secret key; its public key is the client's address.
    :param discovery: URLs of discovery, or a :class:`~dmsg.discovery.lookup.lookups.Lookups`.
    :param choice: servers to use; ``min_servers``, ``prefer`` and ``only`` may be given as keywords.
    :param encryption: ``require``, ``prefer`` or ``off``, see :class:`~dmsg.v2019.transport_streams.Encryption`.
    :param cipher: cipher to prefer: ``auto`` (the faster one on this machine), ``aes-256-gcm`` or
        ``chacha20-poly1305``. Two clients use AES-256-GCM if both prefer it.
    :param resume_timeout: seconds to keep trying to resume a stream whose server is lost; 0 disables resuming.
    :param receipts: whether to sign receipts for data that servers delivered, for servers that request them
        (docs/pipeline/receipts.md).
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
        cipher: str = AUTO,
        resume_timeout: float = RESUME_TIMEOUT,
        receipts: bool = False,
        random: Random | None = None,
        on_warning: Callable[[str], None] = log_warning,
        memory: Memory | None = None,
        **options: Unpack[ServerChoiceOptions],
    ) -> None:
        """:param on_warning: callback for each new warning to the person who runs this client; by default, warnings are
            logged.
        :param memory: account that limits the memory of the streams; by default, the account that all clients of the
            process share.
        :raises ValueError: ``min_servers``, ``encryption`` or ``cipher`` has an invalid value.
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
            on_warning=on_warning,
        )
        self._seen: OrderedDict[tuple[PubKey, str], None] = OrderedDict()
        self._seen_of_initiators: OrderedDict[tuple[PubKey, str], None] = OrderedDict()
        self._plain_servers: dict[PubKey, tuple[str, float]] = {}
        self._resumed = PacedQueue(reactor, lambda: RESUME_RATE)
        self._resume_after: OrderedDict[tuple[PubKey, PubKey], float] = OrderedDict()
        self.streams = TransportStreams(
            reactor,
            key,
            self.factories.get,
            self._turn.add_stream,
            encryption=self.encryption,
            cipher=preferred_cipher(cipher),
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
        own = (stream for stream in UNREAD_STREAMS if getattr(stream.getHost(), "public_key", None) == mine)
        unread = (stream for stream in own if isinstance(stream, ClientStream))
        return list(dict.fromkeys((*self.streams.all, *carried, *unread)))

    # --- interface for applications ---

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
        """Open a stream to ``remote``; the Deferred fires with the factory's connected protocol.

        The client tries every server of the remote, beginning with those to which it is connected itself, or only the
        server ``via``. If a server refuses because of a rate limit, the client tries it again with exponential backoff.

        The Deferred fails with :class:`~dmsg.errors.ConnectFailed`, which has the reason of each server,
        :class:`~dmsg.errors.EntryNotFound`, :class:`~dmsg.errors.DiscoveryError`,
        :class:`~dmsg.errors.EncryptionUnavailable` or, after ``timeout``, :class:`~dmsg.errors.ConnectTimeout`.

        :param port: port of the remote, 0 to 65535. If ``remote`` is a :class:`DmsgAddress`, its port is used.
        :param timeout: seconds for the whole call.
        :param via: public key of the only server to try.
        :param resumable: whether the stream continues over another server when its server is lost.
        :raises TypeError: ``port`` is not an int.
        :raises ValueError: ``port`` is not a port, or differs from the port of the address.
        """
        address = DmsgAddress.of(remote, port)

        def prepare(remote: PubKey, entry: Entry) -> Opening[ClientSession]:
            secure = self._agree(remote, entry, address.port)
            upgrade = secure and self._offers(remote, entry, UPGRADE_FEATURE)

            def opening(session: ClientSession, seconds: float, upgrade: bool) -> Deferred[IProtocol]:
                return session.open(
                    remote,
                    factory,
                    seconds,
                    port=address.port,
                    secure=secure,
                    resumable=resumable,
                    upgrade=upgrade,
                )

            return self._try_upgrade(opening, upgrade=upgrade)

        return self._reach(address.public_key, prepare, timeout, via).addErrback(self._explain_old_servers, address)

    @staticmethod
    def _explain_old_servers(failure: Failure, address: DmsgAddress) -> Failure:
        """Return a clearer error if none of the common servers carries secure transports. The error of each single
        server does not say what to do."""
        error = failure.value
        if isinstance(error, ConnectFailed) and error.attempts and all(PLAIN_ONLY in why for _, why in error.attempts):
            raise ConnectFailed(
                f"{address.public_key.short}: none of its servers carries secure transports, and the dmsg there is too "
                "old to encrypt through servers of 2019; update dmsg there, or connect both clients to a server that "
                "runs dmsg",
                error.attempts,
                error.key,
            ) from None
        return failure

    def probe(
        self, remote: PubKey, port: int | None = None, *, timeout: float = CONNECT_TIMEOUT, via: PubKey | None = None
    ) -> Deferred[IProtocol]:
        """Open a stream that only measures round trips. No program of the remote sees the stream, and none needs to
        listen.

        Each ``send(b"")`` of the protocol's transport measures a round trip. The Deferred fails with the errors of
        :meth:`connect`, and with :class:`~dmsg.errors.PingUnavailable` if the remote does not answer probes.

        :param port: port to check: the stream is opened only if a program of the remote listens there. None if no port
            is to be checked.
        :param via: public key of the only server to try.
        """

        def prepare(remote: PubKey, entry: Entry) -> Opening[ClientSession]:
            if self.encryption is Encryption.OFF or not entry.offers(PING_FEATURE):
                raise PingUnavailable(
                    f"{remote.short} answers no pings: its program is of 2019 or an earlier version of dmsg"
                )
            factory = Factory.forProtocol(Protocol)
            upgrade = self._offers(remote, entry, UPGRADE_FEATURE)

            def opening(session: ClientSession, seconds: float, upgrade: bool) -> Deferred[IProtocol]:
                probe = 0 if port is None else 1
                return session.open(remote, factory, seconds, port=port or 0, secure=True, probe=probe, upgrade=upgrade)

            return self._try_upgrade(opening, upgrade=upgrade)

        return self._reach(remote, prepare, timeout, via)

    def listen(self, factory: IProtocolFactory, port: int = 0) -> IListeningPort:
        """Accept streams to ``port``, with protocols from ``factory``. Each port has one listener.

        Port 0 receives the streams of clients that name no port.

        :raises CannotListenError: the port has a listener already, or encryption is off and the port is not 0.
        :raises ValueError: ``port`` is not a port.
        """
        if port and self.encryption is Encryption.OFF:
            raise CannotListenError(
                None, port, OSError("encryption is off, and without it only port 0 can be listened on")
            )
        return super().listen(factory, port)

    @property
    def refused(self) -> dict[str, int]:
        """Number of refused requests of other clients, by reason. The reason ``handshakes`` counts requests that were
        refused without computing their handshake, to save time."""
        found = {reason.name.lower(): number for reason, number in self.streams.refused.items()}
        return {**found, "handshakes": self.streams.handshake_limits.refused}

    def server_session(self, server: PubKey) -> Deferred[ClientSession]:
        """Return the session with ``server``, for measurements and for resuming streams. Connect to the server if there
        is no session."""
        return self._set.session(server)

    # --- sessions ---

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
            no_pings=lambda: self._mark_plain(entry),
            on_secure=lambda: self._plain_servers.pop(entry.key, None),
            receipts=self.streams.receipts and entry.offers(RECEIPT_FEATURE),
            aes_gcm=self.streams.prefers_aes and entry.offers(AES_FEATURE),
            carriers=carriers_of(features(entry.version), parse_address(entry.server.address)[1]),
            memory=self._carriers,
        )

    def _mark_plain(self, entry: Entry) -> None:
        """Remember that a server does not support PING, as a connection has shown, although the server's entry
        announces it.

        This happens if a program of 2019 has replaced a newer program with the same key, because the old program leaves
        the entry's features as they are.
        """
        assert entry.server is not None
        self._plain_servers.pop(entry.key, None)
        self._plain_servers[entry.key] = entry.server.address, self._reactor.seconds() + PLAIN_TIME
        if len(self._plain_servers) > PLAIN_SERVERS:
            del self._plain_servers[next(iter(self._plain_servers))]

    def _carries_secure(self, entry: Entry) -> bool:
        """Return whether a server supports PING and secure transports, judged by its entry and by earlier
        connections."""
        address, until = self._plain_servers.get(entry.key, ("", 0.0))
        same = entry.server is not None and entry.server.address == address
        return entry.offers(RELAY_FEATURE) and not (same and until > self._reactor.seconds())

    def _can_carry(self, entry: Entry) -> bool:
        return self.encryption is Encryption.OFF or self._carries_secure(entry)

    def _migrate(self, stream: StreamTransport) -> None:
        assert isinstance(stream, ClientStream)
        self.streams.migrate(stream)

    async def _stop(self) -> None:
        await let_close(self._reactor, self._all_streams)
        self._holdings.stop()
        self.streams.stop()
        await super()._stop()

    # --- choice of encryption ---

    def _agree(self, remote: PubKey, entry: Entry, port: int) -> bool:
        """Return whether the transport to ``remote`` must be secure.

        :raises EncryptionUnavailable: the policy or the port requires a secure transport, but the remote offers none;
            or encryption is off, but the port requires it.
        """
        if self.encryption is Encryption.OFF:
            if port:
                raise EncryptionUnavailable("encryption is off, and ports other than 0 need encryption")
            return False
        if self._offers(remote, entry, FEATURE):
            return True
        if self.encryption is Encryption.REQUIRE:
            raise EncryptionUnavailable(
                f"{remote.short} does not offer secure transports, and this client requires them (see --encryption)"
            )
        if port:
            raise EncryptionUnavailable(
                f"{remote.short} does not offer secure transports, and ports other than 0 need them"
            )
        return False

    def _offers(self, remote: PubKey, entry: Entry, feature: str) -> bool:
        """Return whether a client, to which this client connects, offers a feature in its signed entry, or has offered
        it in an earlier entry that this process has seen."""
        if entry.offers(feature):
            remember(self._seen, (remote, feature), None, SECURE_SEEN_SIZE)
            return True
        # Features that a client once offered are remembered. Otherwise an attacker could replay an old entry to make
        # this client use plain transports.
        return self._has_offered(remote, feature)

    def _has_offered(self, remote: PubKey, feature: str) -> bool:
        return (remote, feature) in self._seen or (remote, feature) in self._seen_of_initiators

    async def _offered_by(self, remote: PubKey) -> frozenset[str]:
        """Return the features of an initiator that decide on encryption.

        :raises DmsgError: the look-up failed, and no earlier entry is known.
        """
        decisive = (FEATURE, UPGRADE_FEATURE)
        try:
            entry = await self._entries.get(remote)
        except DmsgError:
            known = frozenset(feature for feature in decisive if self._has_offered(remote, feature))
            if not known:
                # With no earlier entry, the error is passed on. An attacker who blocks the look-up must not cause a
                # plain transport.
                raise
            return known
        for feature in decisive:
            if entry.offers(feature):
                remember(self._seen_of_initiators, (remote, feature), None, SECURE_SEEN_SIZE)
        return frozenset(feature for feature in decisive if self._has_offered(remote, feature))

    def _try_upgrade(self, request: Requesting[T], *, upgrade: bool) -> Callable[[ClientSession, float], Deferred[T]]:
        """Return a function that requests a transport, with an upgrade if the server is assumed to carry plain
        transports only. If the remote refuses the plain transport of the upgrade, the function requests a secure one.

        :param upgrade: whether the remote accepts upgrades.
        """

        async def try_both(session: ClientSession, seconds: float) -> T:
            deadline = self._reactor.seconds() + seconds
            try:
                return await request(session, seconds, upgrade)
            except TransportRefused as error:
                if not upgrade or error.final or error.reason != CloseReason.ENCRYPTION_REQUIRED:
                    raise
                refused = error
            # Most probably, the remote's connection to this server supports secure transports. So it was for another
            # reason that the server has not answered this client's PING, or that its entry announces nothing.
            try:
                return await request(session, max(deadline - self._reactor.seconds(), 0.01), False)
            except EncryptionUnavailable:
                raise refused from None  # The server is one of 2019, and the remote has refused for another reason.

        return lambda session, seconds: Deferred.fromCoroutine(try_both(session, seconds))

    # --- resuming ---

    async def _reconnect(self, stream: ClientStream) -> None:
        """Resume a stream over any server that both ends have in common. Try all of these servers repeatedly until the
        resume timeout.

        A stream that still has a transport keeps this transport until another server is found.
        """
        peer = stream.getPeer()
        assert isinstance(peer, DmsgAddress)
        remote = peer.public_key
        left_behind = stream.server
        deadline = self._reactor.seconds() + self.streams.resume_timeout
        if (pause := self.streams.before_moving(stream)) > 0.0:
            await deferLater(self._reactor, pause)
        rounds = 0
        # The loop checks is_live, because a cancelled attempt may fail with an error other than CancelledError.
        # Attempts are cancelled when the stream is closed or the client stops.
        while self._reactor.seconds() < deadline and self.streams.is_live(stream):
            moving = stream.secure_end.transport is not None
            for server in await self._servers_to(remote, left_behind, moving=moving, fresh=rounds > 0):
                if not self.streams.is_live(stream):
                    return
                try:
                    await self._turn_to_resume(server, remote)
                    session = await self.server_session(server).addTimeout(RESUME_ATTEMPT, self._reactor, no_answer)
                    upgrade = self._has_offered(remote, UPGRADE_FEATURE)
                    reopen = self._try_upgrade(partial(_reopen, stream), upgrade=upgrade)
                    await reopen(session, min(RESUME_ATTEMPT, REQUEST_TIMEOUT))
                except TransportRefused as error:
                    if error.final:
                        raise
                    if error.reason == CloseReason.RATE_LIMITED:
                        self._back_off(server, remote)
                except CancelledError:
                    raise
                except Exception as error:
                    # Exception is caught, because the errors of connections in Twisted have no common base class.
                    _log.debug(
                        "the stream could not be resumed through server {server}: {error}",
                        server=server.short,
                        error=str(error),
                    )
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

    async def _servers_to(
        self, remote: PubKey, left_behind: PubKey | None, *, moving: bool, fresh: bool
    ) -> list[PubKey]:
        """Return the servers through which to resume a stream to ``remote``, in the order in which to try them.

        :param left_behind: server of the stream's last transport, or None. It is tried last.
        :param moving: whether the stream still has a transport over ``left_behind``. If so, that server is not tried.
        :param fresh: whether to fetch the entry of ``remote`` again instead of using a cached one.
        """
        if fresh:
            self._entries.mark_stale(remote)
        try:
            entry = await self._entries.get(remote)
            servers = self._servers_of(remote, entry)
            self._offers(remote, entry, UPGRADE_FEATURE)
        except DmsgError:
            servers = []
        others = [server for server in servers if server != left_behind]
        if moving or left_behind is None:
            return others
        # The last server is tried even if the entry does not name it: the entry may be outdated, and the remote may
        # still be connected to that server or have returned to it.
        return [*others, left_behind]
