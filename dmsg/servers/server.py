"""Base class of the servers of all protocol families: accepts and admits clients, registers the server in discovery,
and shuts it down in order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from random import SystemRandom
from typing import TYPE_CHECKING

from twisted.internet.defer import Deferred, TimeoutError
from twisted.internet.interfaces import IListeningPort
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.base.memory import Memory
from dmsg.base.policing import ClientLimits
from dmsg.discovery.entries.entry import features, with_feature
from dmsg.errors import DropReason
from dmsg.keys import SecKey
from dmsg.net.addresses import parse_address
from dmsg.net.carriers.names import WEBSOCKET_HERE, carriers_of
from dmsg.net.deadlines import no_answer
from dmsg.net.links.link import Link, MakeUser, OnFailure
from dmsg.net.links.trusted_proxies import TrustedProxies
from dmsg.net.listening import ListeningService
from dmsg.net.reactor import Reactor
from dmsg.pages.port import StatusPort
from dmsg.servers.holdings import LinkHoldings
from dmsg.servers.reachability import check_reachability
from dmsg.servers.registration import Registration, address_of
from dmsg.servers.serving import AnyServing
from dmsg.servers.settings import ServerSettings
from dmsg.servers.status_page import ServerStatus

if TYPE_CHECKING:
    from dmsg.pages.site import Rendered

DRAIN_CHECK_INTERVAL = 0.1
"""Seconds between two checks whether all transports have ended, while the server drains."""
CLOSE_TIMEOUT = 5.0
"""Seconds at the end of a shutdown to wait until clients have received their last frames."""

_log = Logger()


class RelayServer(ListeningService):
    """Server of a protocol family: an entity that accepts clients, posts an entry to discovery and has a status page.

    :param factory: factory of the family that accepts clients.
    :param settings: settings of the operator.
    :param mark: function that returns the ``version`` of an entry with the server's features added to it.
    :ivar ready: Deferred that fires with the listening ports.
    """

    metrics_prefix = "dmsg_server"

    def __init__(
        self,
        reactor: Reactor,
        key: SecKey,
        listen: Sequence[str],
        factory: AnyServing,
        settings: ServerSettings,
        *,
        mark: Callable[[str], str],
    ) -> None:
        """:raises DmsgError: the public address is malformed."""
        super().__init__(reactor, listen)
        public_address = settings.public_address
        if public_address is not None:
            parse_address(public_address)
        self.listens_as = f"server {key.public.hex()}"
        self._key = key
        self.settings = settings
        self.started = 0.0
        self.factory = factory
        self.memory = Memory(settings.memory)
        self._holdings = LinkHoldings(reactor, factory, self.memory)
        self.registration = Registration(
            reactor,
            key,
            settings.discovery,
            settings.random or SystemRandom(),
            mark=lambda version: self._with_carriers(mark(version)),
            available=lambda: self.factory.places,
        )
        self.registration.address = public_address
        factory.proxies = TrustedProxies(settings.trusted_proxies, settings.proxy_protocol)
        self._reachability_check: Deferred[None] | None = None
        self.reachable: bool | None = None
        """Whether the server reached itself at its public address; None before the check."""
        self.factory.registration = self.registration
        self._status = StatusPort(
            reactor, settings.metrics, settings.page_token, self._page_model(), self._make_metrics, self.health
        )

    # --- hooks for a protocol family ---

    async def _leave(self) -> None:
        """Withdraw the entry, and give clients time to move to other servers."""
        raise NotImplementedError

    async def _clean_up(self) -> None:
        """Clean up at the end of the shutdown, after the last client has disconnected."""

    def _make_metrics(self) -> Rendered:
        """Return the function that returns the text for Prometheus."""
        # The import is here, because a server without a port for metrics does not need prometheus_client.
        from dmsg.telemetry.metrics import RelaySeconds, ServerMetrics

        seconds = RelaySeconds(self.metrics_prefix, self.factory.relay_seconds)
        return ServerMetrics(self, self.metrics_prefix, [seconds]).render

    def health(self) -> dict[str, object]:
        """Return the content of ``/health``."""
        return {
            "status": "draining" if not self.running else "full" if self.factory.is_full else "ok",
            "registered": self.registration.is_registered or not self.registration.is_wanted,
            "reachable": self.reachable,
            "shared_with": self.registration.shared_with,
            "connections": len(self.factory.sessions),
        }

    def _with_carriers(self, version: str) -> str:
        """Return ``version`` with a feature for each carrier protocol of this server, and for no other carrier."""
        here = {WEBSOCKET_HERE, *self.settings.carriers}
        for carrier in carriers_of(features(version)):
            version = with_feature(version, carrier.feature, carrier in here)
        for carrier in here:
            version = with_feature(version, carrier.feature)
        return version

    # --- service ---

    def reload(self, limits: ClientLimits | None = None) -> None:
        """Read the lists of keys again. If ``limits`` are given, apply them to all clients."""
        if limits is not None:
            self.factory.limits = limits
        # The lists are read even if their files seem unchanged, because the operator has requested it.
        self.factory.admission.reload(force=True)
        self.factory.admission_changed()
        self.registration.changed()
        _log.info("the {what} were reloaded", what="lists" if limits is None else "settings and lists")

    async def _start(self) -> None:
        self.started = time.time()
        self.factory.admission.watch(self._reactor, self.factory.admission_changed)
        self._holdings.start()
        self.factory.tuned = await self._listen(self.factory)
        await self._status.start()
        if self.registration.is_wanted:
            # The entry is posted after the port is open, because a port set to 0 has its number only then.
            self.registration.address = self.registration.address or address_of(self.ports[0])
            self.registration.start()
            if self.settings.public_address is not None:
                self._reachability_check = self._check_reachability(self.settings.public_address)

    @property
    def metrics_port(self) -> IListeningPort | None:
        """Port of the status page, ``/metrics`` and ``/health``."""
        return self._status.port

    def _page_model(self) -> ServerStatus:
        """Create the content of the status page."""
        return ServerStatus(self, str(self.name).replace("-", " "))

    def client_name(self, key: bytes) -> str:
        """Return the name of a client on the status page: its key in hexadecimal. Servers with telemetry return a
        pseudonym.
        """
        return key.hex()

    def _check_reachability(self, address: str) -> Deferred[None]:
        """Check whether this machine reaches the server at its public address, and log a warning if not."""

        def looked(result: object) -> None:
            self._reachability_check = None
            # The server stays registered even if the check fails, because clients may still reach it. Some routers do
            # not forward connections from inside the network to their own public address.
            self.reachable = not isinstance(result, Failure)
            if not self.running or not isinstance(result, Failure):
                return
            _log.warn(
                "this server cannot connect to its own public address {address}: {error}. Clients are sent to this "
                "address: check --public-address and the firewall. (In some networks no machine can connect to its "
                "own public address.)",
                address=address,
                error=str(result.value).rstrip(".") or type(result.value).__name__,
            )

        return check_reachability(self._reactor, address, self._make_visit, self.settings.carriers).addBoth(looked)

    def _make_visit(self, make_user: MakeUser, on_failure: OnFailure) -> Link:
        """Create the link by which the server connects to itself, in the protocol of its family."""
        raise NotImplementedError

    async def _stop(self) -> None:
        # Posting is stopped first, because a later POST would restore the entry after it was withdrawn.
        if self._reachability_check is not None:
            self._reachability_check.cancel()
        self.registration.stop()
        try:
            # New clients are refused from now on. Connected clients get time to move to other servers.
            await self._stop_listening()
            self.factory.admission.stop()
            await self._leave()
            try:
                await self.factory.drain().addTimeout(CLOSE_TIMEOUT, self._reactor, no_answer)
            except TimeoutError:
                _log.info(
                    "{count} clients were still connected at the deadline for draining; their connections are closed",
                    count=len(self.factory.sessions),
                )
            self._holdings.stop()
            await self._clean_up()
            await self.registration.close()
        finally:
            # The status page is closed last, so that operators can watch the shutdown on it.
            await self._status.stop()

    # --- statistics for metrics and the status page ---

    def by_connections(self) -> dict[str, int]:
        """Return the number of IP addresses with 1, 2 to 9, 10 to 99, and 100 or more connections."""
        return self.factory.by_connections()

    def gauges(self) -> dict[str, tuple[str, float]]:
        """Return the help text and the value of each gauge, by name."""
        factory = self.factory
        return {
            "connections": ("Number of connected clients", len(factory.sessions)),
            "available_connections": ("Number of clients that can still connect", factory.available_connections),
            "handshakes": ("Number of handshakes in progress", factory.handshakes),
            "congested": (
                "Number of clients that read more slowly than others send to them",
                sum(peer.congested for peer in factory.relay.peers),
            ),
            "start_time_seconds": ("Unix time at which the server started", self.started),
            "queue_bytes": (
                "Bytes queued for clients",
                sum(peer.port.queued() for peer in factory.relay.peers),
            ),
            "held_bytes": ("Bytes buffered in memory for clients at the last check", self.memory.total),
            "memory_limit_bytes": ("Limit of the bytes buffered in memory for clients (--memory)", self.memory.limit),
            "reachable": (
                "1 if the server can connect to its own public address, 0 if not, -1 before the first check",
                -1.0 if self.reachable is None else float(self.reachable),
            ),
            "registered": (
                "1 if discovery accepted the last POST of the entry, otherwise 0",
                float(self.registration.is_registered),
            ),
        }

    def counters(self) -> dict[str, tuple[str, float]]:
        """Return the help text and the value of each counter, by name."""
        relay = self.factory.relay
        hook = self.factory.admission.hook
        return {
            "connections_opened": (
                "Number of clients that have connected since the start",
                self.factory.connections_opened,
            ),
            "frames": ("Number of frames received", relay.frames),
            "frame_bytes": ("Bytes of frames received", relay.frame_bytes),
            "turns_waited": (
                "Number of reads continued in a later reactor turn, because other addresses had to be served first",
                self.factory.share.waited,
            ),
            "slowed": (
                "Number of reads delayed because an address exceeded its frames per second",
                self.factory.slowed,
            ),
            "status_refused": (
                "Number of refused requests and connections for /metrics and /health",
                self._status.refused,
            ),
            "memory_given": (
                "Number of times that buffered data was dropped because the memory limit was reached",
                sum(self.memory.dropped.values()),
            ),
            "admission_unanswered": (
                "Number of requests to the admission hook without a valid answer",
                hook.unanswered if hook is not None else 0,
            ),
        }

    def drops(self) -> dict[DropReason, int]:
        """Return the number of dropped frames and refused clients, by reason."""
        return self.factory.relay.drops
