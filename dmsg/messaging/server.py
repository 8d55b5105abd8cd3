"""Server of the Messaging System, which an operator runs."""

from __future__ import annotations

from collections.abc import Sequence

from twisted.logger import Logger

from dmsg.discovery.entries.entry import with_feature
from dmsg.keys import SecKey
from dmsg.messaging.core.dialect import profile_of
from dmsg.messaging.core.handshake import JSONHandshake
from dmsg.messaging.core.policing import Limits
from dmsg.messaging.core.wire import Profile
from dmsg.messaging.protocol import ServerFactory
from dmsg.net.deadlines import wait_until
from dmsg.net.flush import TurnFlush
from dmsg.net.links.link import Link, MakeUser, OnFailure
from dmsg.net.links.plain import PlainLink
from dmsg.net.reactor import Reactor
from dmsg.servers.server import DRAIN_CHECK_INTERVAL, RelayServer
from dmsg.servers.settings import DEFAULTS, ServerSettings

_log = Logger()


class Server(RelayServer):
    """Server of the Messaging System.

    :param listen: Twisted endpoint strings.
    :param profile: profile of the server's clients; a :class:`~dmsg.messaging.Profile`, or its name.
    :param two_ids: in the ``skywire`` profile, whether the server sends two ids (as the Go code does from 2019-03-13
        on) to a client that has not answered any OpenChannel yet. With None, it sends as many ids as the other client
        of the channel has sent.
    :param settings: settings that servers of all protocol families have.
    :param limits: limits of one client.
    :ivar ready: Deferred that fires with the listening ports.
    """

    name = "dmsg-messaging-server"
    metrics_prefix = "dmsg_messaging_server"
    factory: ServerFactory

    def __init__(
        self,
        reactor: Reactor,
        key: SecKey,
        listen: Sequence[str],
        settings: ServerSettings = DEFAULTS,
        *,
        profile: Profile | str = Profile.SEED,
        two_ids: bool | None = None,
        limits: Limits | None = None,
    ) -> None:
        """:raises DmsgError: the public address is malformed.

        :raises ValueError: there is no such profile, or ``two_ids`` is set with :attr:`Profile.SEED`.
        """
        profile = profile_of(profile)
        factory = ServerFactory(reactor, key, profile, limits=limits, admission=settings.admission, two_ids=two_ids)
        super().__init__(
            reactor, key, listen, factory, settings, mark=lambda version: with_feature(version, profile.feature)
        )

    def _make_visit(self, make_user: MakeUser, on_failure: OnFailure) -> Link:
        handshake = JSONHandshake(self._key, self._key.public, profile=self.factory.profile)
        return PlainLink(self._reactor, TurnFlush(self._reactor), handshake, make_user, on_failure=on_failure)

    async def _leave(self) -> None:
        # The entry is withdrawn first. Otherwise discovery would send new clients to this server while it stops.
        await self.registration.withdraw()
        relay = self.factory.relay
        relay.draining = True
        if not await wait_until(
            self._reactor, lambda: not relay.channel_count, self.settings.drain_timeout, DRAIN_CHECK_INTERVAL
        ):
            _log.info("the server stops: {count} channels are closed", count=relay.channel_count)

    def gauges(self) -> dict[str, tuple[str, float]]:
        """Return the gauges of the metrics: for each name, its help text and value."""
        return {**super().gauges(), "channels": ("Number of open channels", self.factory.relay.channel_count)}

    def counters(self) -> dict[str, tuple[str, float]]:
        """Return the counters of the metrics: for each name, its help text and value."""
        opened = self.factory.relay.channels_opened
        return {**super().counters(), "channels_opened": ("Number of channels opened since the start", opened)}

    def health(self) -> dict[str, object]:
        """Return the content of ``/health``."""
        return {**super().health(), "channels": self.factory.relay.channel_count}
