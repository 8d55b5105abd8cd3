"""The client entity of the Messaging System."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Unpack

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IListeningPort, IProtocol, IProtocolFactory
from twisted.internet.protocol import Factory, Protocol

from dmsg.clients.client import CONNECT_TIMEOUT, DelegatedClient, Opening, log_warning
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
from dmsg.net.reactor import Reactor
from dmsg.net.streams.address import DmsgAddress


class Client(DelegatedClient[ClientSession]):
    """A client of the Messaging System.

    Start it as any Twisted service (or call ``startService()``), wait for
    :meth:`when_online`, then :meth:`connect` to public keys or :meth:`listen`.
    A stream ends with the server that carries it; the client then finds another.

    :param key: the secret key; its public key is the client's address.  Not one that a dmsg
        client uses: an entry in discovery is of one or the other.
    :param discovery: URLs, or a :class:`~dmsg.discovery.lookup.lookups.Lookups`.
    :param profile: of its servers, and of whom it talks to; a :class:`~dmsg.messaging.Profile`, or its name.
    :param acks: with ``skywire``: whether programs that others have written acknowledge what they get inside channels,
        as Go did until 2019-04-15, and this one with them.  None: the first word of a remote says it, and what is to
        be sent waits for that; where a remote waits for ours, the stream ends with ``ACKS_UNKNOWN``.  Clients of this
        package know each other: by their entries, and by an empty message at the start.
    :param two_ids: with ``skywire``: answer OpenChannel with two ids, as Go from 2019-03-13 on.
    :param choice: which servers it takes; ``min_servers``, ``prefer`` and ``only`` may be given as keywords.
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
        warned: Callable[[str], None] = log_warning,
        **options: Unpack[ServerChoiceOptions],
    ) -> None:
        """:param warned: told, each text once, what the person who runs this client ought to know; by default the log.

        :raises ValueError: min_servers cannot be that, or the profile knows neither acks nor two ids."""
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
            warned=warned,
        )
        self._doorman = HandshakeLimits(reactor.seconds, self.factories.values)

    @property
    def profile(self) -> Profile:
        """Of its servers, and of whom it talks to."""
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
        """Open a channel to ``remote``; fires with the factory's connected protocol.

        Tries every server of the remote, those first that this client is
        connected to; with ``via`` only that one.  Fails with :class:`~dmsg.errors.ConnectFailed`, which
        says why each failed, :class:`~dmsg.errors.EntryNotFound`,
        :class:`~dmsg.errors.DiscoveryError` or, when the time is over, :class:`~dmsg.errors.ConnectTimeout`.

        :param port: 0: channels have no ports.
        :raises ValueError: another one.
        """
        address = DmsgAddress.of(remote, port)
        if address.port:
            raise ValueError("the Messaging System has no ports")
        return self._open(address.public_key, factory, timeout, via)

    def probe(
        self, remote: PubKey, *, timeout: float = CONNECT_TIMEOUT, via: PubKey | None = None
    ) -> Deferred[IProtocol]:
        """Open a channel that only measures: the remote's client answers it, below its program, which need not listen.

        Fails as :meth:`connect`.  A client of 2019, or of an earlier version, gives its program the channel.
        """
        return self._open(remote, Factory.forProtocol(Protocol), timeout, via, ping=True)

    def _open(
        self, remote: PubKey, factory: IProtocolFactory, timeout: float, via: PubKey | None, *, ping: bool = False
    ) -> Deferred[IProtocol]:
        def prepare(remote: PubKey, entry: Entry) -> Opening[ClientSession]:
            offered = features(entry.version)
            if offered and self.profile.feature not in offered:
                raise ConnectFailed(f"{remote.short} does not speak {self.profile.feature}, as its entry says")

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
        """Accept channels with ``factory``.

        :param port: 0: channels have no ports.
        :raises CannotListenError: somebody listens already.
        :raises ValueError: another one.
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
            doorman=self._doorman,
        )
