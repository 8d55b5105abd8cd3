"""Server of the protocol family v2019.  When it stops, the streams of its clients move to other servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from twisted.logger import Logger

from dmsg.base.cipher_names import AUTO, Cipher
from dmsg.discovery.entries.entry import with_feature
from dmsg.keys import PubKey, SecKey
from dmsg.net.cipher_choice import preferred_cipher
from dmsg.net.deadlines import wait_until
from dmsg.net.flush import TurnFlush
from dmsg.net.links.link import Link, MakeUser, OnFailure
from dmsg.net.links.records import RecordLink
from dmsg.net.reactor import Reactor
from dmsg.noise.xk import AES_FEATURE, XKHandshake
from dmsg.servers.server import DRAIN_CHECK_INTERVAL, RelayServer
from dmsg.servers.settings import DEFAULTS, ServerSettings
from dmsg.v2019.core.policing import Limits
from dmsg.v2019.core.wire import RECEIPT_FEATURE, RELAY_FEATURE
from dmsg.v2019.protocol import ServerFactory

if TYPE_CHECKING:
    from dmsg.telemetry.service import Telemetry
    from dmsg.telemetry.settings import TelemetrySettings

DRAIN_GRACE = 1.0
"""Minimum number of seconds for which the server continues after it has announced its stop to its clients, unless all
of them disconnect. The server makes the announcement only if there are other servers."""
_log = Logger()


class Server(RelayServer):
    """Server that relays between clients.

    :param listen: Twisted endpoint strings to listen on.
    :param settings: settings that servers of all protocol families have.
    :param limits: limits of one client. Assign to ``ServerFactory.limits`` to change them later.
    :param telemetry: settings for the events of the pipeline; None to write no events.
    :param cipher: cipher to prefer for connections: ``auto`` (the faster one on this machine), ``aes-256-gcm`` or
        ``chacha20-poly1305``. A connection uses AES-256-GCM if the client prefers it, too.
    :ivar ready: Deferred that fires with the listening ports.
    """

    name = "dmsg-server"
    factory: ServerFactory

    def __init__(
        self,
        reactor: Reactor,
        key: SecKey,
        listen: Sequence[str],
        settings: ServerSettings = DEFAULTS,
        *,
        limits: Limits | None = None,
        telemetry: TelemetrySettings | None = None,
        cipher: str = AUTO,
    ) -> None:
        """:raises DmsgError: the public address is malformed, or the directory for events cannot be used.
        :raises ValueError: ``cipher`` has an invalid value.
        """
        self._aes_gcm = preferred_cipher(cipher) is Cipher.AES_256_GCM
        self.telemetry: Telemetry | None = None
        if telemetry is not None:
            # The import is here, because most servers run without telemetry.
            from dmsg.telemetry.service import Telemetry

            self.telemetry = Telemetry(reactor, telemetry, "server", key)
        super().__init__(
            reactor,
            key,
            listen,
            ServerFactory(
                reactor,
                key,
                limits=limits,
                admission=settings.admission,
                telemetry=self.telemetry,
                aes_gcm=self._aes_gcm,
            ),
            settings,
            mark=self._mark,
        )

    def startService(self) -> None:
        if self.telemetry is not None:
            self.telemetry.start()
        super().startService()

    def _make_visit(self, make_user: MakeUser, on_failure: OnFailure) -> Link:
        handshake = XKHandshake(self._key, self._key.public)
        return RecordLink(self._reactor, TurnFlush(self._reactor), handshake, make_user, on_failure=on_failure)

    async def _clean_up(self) -> None:
        if self.telemetry is not None:
            await self.telemetry.stop()

    # --- stopping, while clients move to other servers ---

    async def _leave(self) -> None:
        others = (
            await self.registration.other_servers() if self.factory.sessions and self.settings.drain_timeout else []
        )
        # The server first withdraws from discovery, so that discovery does not send new clients to it.
        await self.registration.withdraw()
        await self._hand_over(others)

    async def _hand_over(self, servers: list[PubKey]) -> None:
        """Announce other servers to the clients, and wait until the clients' streams have moved or the drain timeout is
        over.

        :param servers: keys of the other servers.
        """
        relay = self.factory.relay
        if not servers or not relay.announce_drain(round(self.settings.drain_timeout), servers):
            return
        _log.info(
            "the server is shutting down: it names {others} other servers to its {count} clients",
            count=len(relay.peers),
            others=len(servers),
        )
        started = self._reactor.seconds()

        def is_over() -> bool:
            passed = self._reactor.seconds() - started
            return not relay.peers or (not relay.route_count and passed >= DRAIN_GRACE)

        await wait_until(self._reactor, is_over, self.settings.drain_timeout, DRAIN_CHECK_INTERVAL)
        _log.info("the drain is over: {count} transports were still open", count=relay.route_count // 2)

    def _mark(self, version: str) -> str:
        version = with_feature(version, RELAY_FEATURE)
        version = with_feature(version, AES_FEATURE, self._aes_gcm)
        return with_feature(version, RECEIPT_FEATURE, self.telemetry is not None)

    def client_name(self, key: bytes) -> str:
        return super().client_name(key) if self.telemetry is None else self.telemetry.client(key)

    # --- statistics (ServerStatistics) ---

    def gauges(self) -> dict[str, tuple[str, float]]:
        """Return the gauges by name, each with its help text and value."""
        waiting = 0 if self.telemetry is None else self.telemetry.sent.waiting
        return {
            **super().gauges(),
            "transports": ("Number of open transports", self.factory.relay.route_count // 2),
            "telemetry_files_waiting": ("Number of event files that wait for the collector", waiting),
        }

    def counters(self) -> dict[str, tuple[str, float]]:
        """Return the counters by name, each with its help text and value."""
        telemetry = self.telemetry
        return {
            **super().counters(),
            "transports_opened": ("Number of transports opened since the start", self.factory.relay.transports_opened),
            "telemetry_written": (
                "Number of events written for the pipeline",
                0 if telemetry is None else telemetry.written,
            ),
            "telemetry_lost": (
                "Number of events lost because they could not be written",
                0 if telemetry is None else telemetry.lost,
            ),
            "telemetry_files_removed": (
                "Number of event files deleted to make room for newer ones",
                0 if telemetry is None else telemetry.removed,
            ),
            "telemetry_files_sent": (
                "Number of event files that the collector has stored",
                0 if telemetry is None else telemetry.sent.delivered,
            ),
            "telemetry_files_refused": (
                "Number of event files that the collector refused",
                0 if telemetry is None else telemetry.sent.refused,
            ),
            "telemetry_send_failures": (
                "Number of failed deliveries because the collector was unreachable or full",
                0 if telemetry is None else telemetry.sent.failures,
            ),
            "throttled": ("Number of reads delayed because a client exceeded --byte-rate", self.factory.throttled),
        }

    def health(self) -> dict[str, object]:
        """Return the fields of the answer to ``/health``."""
        return {**super().health(), "transports": self.factory.relay.route_count // 2}
