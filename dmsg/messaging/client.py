"""Client of the Messaging System, which applications use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Unpack

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IListeningPort, IProtocol, IProtocolFactory
from twisted.internet.protocol import Factory, Protocol

from dmsg.base.timeouts import CONNECT_TIMEOUT
from dmsg.clients.client import DelegatedClient, Opening, log_warning
from dmsg.clients.handshake_limits import HandshakeLimits
from dmsg.clients.server_choice import ANY, ServerChoice, ServerChoiceOptions
from dmsg.discovery.entries.entry import Entry, features
from dmsg.discovery.lookup.lookups import Lookups
from dmsg.errors import ConnectFailed
from dmsg.keys import PubKey, SecKey
from dmsg.messaging.core.dialect import Acks, dialect_of
from dmsg.messaging.core.wire import Profile
from dmsg.messaging.dial import SessionEndpoint
from dmsg.messaging.session import ClientSession
from dmsg.net.addresses import parse_address
from dmsg.net.carriers.names import carriers_of
from dmsg.net.reactor import Reactor
from dmsg.net.streams.address import DmsgAddress


class Client(DelegatedClient[ClientSession]):
    """Client of the Messaging System.

    Start the client like any Twisted service (or call ``startService()``), wait for :meth:`when_online`, then call
    :meth:`connect` to reach public keys, or :meth:`listen`.  A stream ends when the connection to its server is lost;
    the client then connects to another server.

    :param key: secret key, whose public key is the client's address.  A dmsg client must not use the same key, because
        the key's entry in discovery belongs to one kind of client.
    :param discovery: URLs of discoveries, or a :class:`~dmsg.discovery.lookup.lookups.Lookups`.
    :param profile: profile of the client's servers and remotes; a :class:`~dmsg.messaging.Profile`, or its name.
    :param acks: in the ``skywire`` profile, whether programs other than this package use acknowledgements inside
        channels, as the Go code did until 2019-04-15. This client then uses them, too. With None, the first message of
        a remote decides, and data wait until it arrives. If the remote waits as well, the stream ends with
        ``ACKS_UNKNOWN``. Clients of this package recognise each other by their entries, and by an empty message at the
        start of a channel.
    :param two_ids: in the ``skywire`` profile, whether to answer OpenChannel with two ids, as the Go code does from
        2019-03-13 on.
    :param choice: rules for choosing servers. ``min_servers``, ``prefer`` and ``only`` may be given as keywords
        instead.
    """

    name = "dmsg-messaging-client"

    def __init__(
        self,
        reactor: Reactor,
        key: SecKey,
        discovery: Sequence[str] | Lookups,
        choice: ServerChoice = ANY,
        *,
        profile: Profile | str = Profile.SEED,
        acks: Acks = None,
        two_ids: bool = False,
        random: Random | None = None,
        on_warning: Callable[[str], None] = log_warning,
        **options: Unpack[ServerChoiceOptions],
    ) -> None:
        """:param on_warning: callback invoked with each new warning for the client's operator; by default, warnings are
            logged.

        :raises ValueError: ``min_servers`` is out of range, or the profile does not support ``acks`` or ``two_ids``.
        """
        self.dialect = dialect_of(profile, acks, two_ids)
        super().__init__(
            reactor,
            key,
            discovery,
            replace(choice, **options),
            features={self.profile.feature: True},
            server_feature=self.profile.feature,
            advertise_visits=True,
            random=random,
            on_warning=on_warning,
        )
        self._handshake_limits = HandshakeLimits(reactor.seconds, self.factories.values)

    @property
    def profile(self) -> Profile:
        """Profile of the client's servers and remotes."""
        return self.dialect.profile

    def connect(
        self,
        remote: PubKey | DmsgAddress,
        factory: IProtocolFactory,
        port: int = 0,
        *,
        timeout: float = CONNECT_TIMEOUT,
        via: PubKey | None = None,
    ) -> Deferred[IProtocol]:
        """Open a channel to ``remote``, and return a Deferred that fires with the factory's connected protocol.

        The client tries all servers of the remote one after another, first those to which it is connected. With ``via``
        it tries only that server.  The Deferred fails with one of these errors: :class:`~dmsg.errors.ConnectFailed`,
        which contains the reason for each server; :class:`~dmsg.errors.EntryNotFound`;
        :class:`~dmsg.errors.DiscoveryError`; or, after ``timeout`` seconds, :class:`~dmsg.errors.ConnectTimeout`.

        :param port: must be 0, because channels have no ports.
        :raises ValueError: the port is not 0.
        """
        address = DmsgAddress.of(remote, port)
        if address.port:
            raise ValueError("the Messaging System has no ports")
        return self._open(address.public_key, factory, timeout, via)

    def probe(
        self, remote: PubKey, *, timeout: float = CONNECT_TIMEOUT, via: PubKey | None = None
    ) -> Deferred[IProtocol]:
        """Open a channel that only measures the round trip to ``remote``. No program needs to listen there.

        The remote's client answers such a channel itself.  Clients of 2019, and of earlier versions of this package,
        pass the channel to their program instead.  The Deferred fails with the same errors as that of :meth:`connect`.
        """
        return self._open(remote, Factory.forProtocol(Protocol), timeout, via, ping=True)

    def _open(
        self, remote: PubKey, factory: IProtocolFactory, timeout: float, via: PubKey | None, *, ping: bool = False
    ) -> Deferred[IProtocol]:
        def prepare(remote: PubKey, entry: Entry) -> Opening[ClientSession]:
            offered = features(entry.version)
            if offered and self.profile.feature not in offered:
                raise ConnectFailed(f"{remote.short} does not support {self.profile.feature} according to its entry")

            ours = self.profile.feature in offered
            acks = False if ours and self.dialect.acks is None else self.dialect.acks
            greet = ours and acks is False and self.profile is Profile.SKYWIRE

            def opening(session: ClientSession, seconds: float) -> Deferred[IProtocol]:
                return session.open(
                    remote, factory, seconds, ping=ping, acks=acks and not ping, greet=greet and not ping
                )

            return opening

        return self._reach(remote, prepare, timeout, via)

    def listen(self, factory: IProtocolFactory, port: int = 0) -> IListeningPort:
        """Accept channels, with a protocol of ``factory`` for each.

        :param port: must be 0, because channels have no ports.
        :raises CannotListenError: the client listens already.
        :raises ValueError: the port is not 0.
        """
        if port:
            raise ValueError("the Messaging System has no ports")
        return super().listen(factory)

    def _session_opener(self, entry: Entry) -> SessionEndpoint:
        assert entry.server is not None
        return SessionEndpoint(
            self._reactor,
            self._turn,
            self._key,
            entry.key,
            entry.server.address,
            self.dialect,
            lambda: self.factories.get(0),
            handshake_limits=self._handshake_limits,
            carriers=carriers_of(features(entry.version), parse_address(entry.server.address)[1]),
            memory=self._carriers,
        )
