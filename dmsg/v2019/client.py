"""Client of the protocol family v2019: opens and accepts secure, resumable streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import TypeAlias, TypeVar, Unpack

from twisted.internet.defer import Deferred
from twisted.internet.error import CannotListenError
from twisted.internet.interfaces import IListeningPort, IProtocol, IProtocolFactory
from twisted.internet.protocol import Factory, Protocol
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.base.cipher_names import AUTO
from dmsg.base.memory import CLIENTS, Memory
from dmsg.base.timeouts import CONNECT_TIMEOUT, RESUME_TIMEOUT
from dmsg.clients.client import DelegatedClient, Opening, log_warning
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
from dmsg.net.reactor import Reactor
from dmsg.net.streams.address import DmsgAddress
from dmsg.net.streams.stream import UNREAD_STREAMS, StreamTransport
from dmsg.noise.xk import AES_FEATURE
from dmsg.streams.carrier import ClientStream
from dmsg.streams.core.agreement import FEATURE, PING_FEATURE, UPGRADE_FEATURE
from dmsg.streams.holdings import StreamHoldings
from dmsg.v2019.core.wire import RECEIPT_FEATURE, RELAY_FEATURE
from dmsg.v2019.dial import SessionEndpoint
from dmsg.v2019.offered_features import OfferedFeatures
from dmsg.v2019.outgoing import PLAIN_ONLY
from dmsg.v2019.resumption import Resumption
from dmsg.v2019.session import ClientSession
from dmsg.v2019.transport_streams import Encryption, TransportStreams, let_close

PLAIN_SERVERS = 1024
"""Maximum number of servers that are remembered because they do not support PING although their entries announce it."""
PLAIN_TIME = 3600.0
"""Seconds for which a server is remembered for not supporting PING although its entry announces it."""
T = TypeVar("T")
Requesting: TypeAlias = Callable[[ClientSession, float, bool], Deferred[T]]
"""Function that requests a transport over a session. The arguments are the session, the timeout in seconds, and whether
to request an upgrade if the server is assumed to carry plain transports only."""

_log = Logger()


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
        self._offered = OfferedFeatures(self.encryption, self._entries)
        self._plain_servers: dict[PubKey, tuple[str, float]] = {}
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
            reconnect=lambda stream: Deferred.fromCoroutine(self._resumption.resume(stream)),
            features_of=lambda remote: Deferred.fromCoroutine(self._offered.of_initiator(remote)),
            is_known=self._entries.is_fresh,
        )
        self._resumption = Resumption(
            reactor,
            self._random,
            self.streams,
            servers_of=self._servers_to_resume,
            open_session=self.server_session,
            reopen=self._reopen,
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
            secure = self._offered.must_be_secure(remote, entry, address.port)
            upgrade = secure and self._offered.offers(remote, entry, UPGRADE_FEATURE)

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
            upgrade = self._offered.offers(remote, entry, UPGRADE_FEATURE)

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

    async def _servers_to_resume(self, remote: PubKey, fresh: bool) -> list[PubKey]:
        if fresh:
            self._entries.mark_stale(remote)
        try:
            entry = await self._entries.get(remote)
            servers = self._servers_of(remote, entry)
        except DmsgError:
            return []
        self._offered.offers(remote, entry, UPGRADE_FEATURE)
        return servers

    def _reopen(self, stream: ClientStream, session: ClientSession, seconds: float) -> Deferred[None]:
        peer = stream.getPeer()
        assert isinstance(peer, DmsgAddress)

        def reopening(session: ClientSession, seconds: float, upgrade: bool) -> Deferred[None]:
            return session.reopen(stream, seconds, upgrade=upgrade)

        upgrade = self._offered.has_offered(peer.public_key, UPGRADE_FEATURE)
        return self._try_upgrade(reopening, upgrade=upgrade)(session, seconds)
