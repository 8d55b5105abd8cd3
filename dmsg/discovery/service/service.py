"""Discovery entity: combines a store, the HTTP interface to the store, and the listening ports."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from twisted.internet.address import IPv4Address, IPv6Address
from twisted.internet.interfaces import IListeningPort
from twisted.logger import Logger
from twisted.web.server import Site

from dmsg.discovery.checks.schedule import ServerChecks
from dmsg.discovery.service.api import DiscoveryAPI
from dmsg.discovery.service.expiry import DropLog, ExpirySweep
from dmsg.discovery.service.settings import DEFAULTS, DiscoverySettings
from dmsg.discovery.service.site import make_site
from dmsg.discovery.service.status_page import DiscoveryStatus
from dmsg.discovery.store.base import IEntryStore
from dmsg.discovery.store.opening import clock_of, open_store
from dmsg.errors import DiscoveryError
from dmsg.net.clock import ClockWatch
from dmsg.net.listening import ListeningService
from dmsg.net.reactor import Reactor
from dmsg.net.web.guard import GuardedFactory
from dmsg.pages.port import StatusPort
from dmsg.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from dmsg.telemetry.service import Telemetry

_log = Logger()


@dataclass(frozen=True, slots=True)
class _Running:
    """Objects that exist only while a discovery runs."""

    store: IEntryStore
    checks: ServerChecks | None
    sweep: ExpirySweep
    api: DiscoveryAPI
    site: Site
    watch: ClockWatch | None

    async def stop(self) -> None:
        """Stop all parts except the store, which is needed until the last request has ended."""
        self.site.resource.stop()
        if self.checks is not None:
            await self.checks.stop()
        self.sweep.stop()
        if self.watch is not None:
            self.watch.stopService()


class Discovery(ListeningService):
    """Twisted service that runs a discovery.

    :param listen: Twisted endpoint strings, such as ``tcp:9090`` or ``ssl:9443:...``.
    :param store: value of ``--store``, see :func:`~dmsg.discovery.store.opening.open_store`.
    :param settings: settings of the operator.
    :ivar ready: Deferred that fires with the listening ports. It fails with StoreError, or with the error of a port.
    """

    name = "dmsg-discovery"
    listens_as = "discovery"

    def __init__(
        self,
        reactor: Reactor,
        listen: Sequence[str],
        store: str,
        settings: DiscoverySettings = DEFAULTS,
        *,
        random: Random | None = None,
    ) -> None:
        """Open the directory of telemetry. The store and the ports are opened when the service starts.

        :param random: random numbers with which a store in memory draws the servers that it returns.
        :raises DmsgError: the telemetry directory cannot be used.
        """
        super().__init__(reactor, listen)
        self._random = random
        self._store_description = store
        self._settings = settings
        self._running: _Running | None = None
        self.metrics = Metrics()
        self.telemetry: Telemetry | None = None
        if settings.telemetry is not None:
            # The import is here, because most discoveries run without telemetry.
            from dmsg.telemetry.service import Telemetry

            self.telemetry = Telemetry(reactor, settings.telemetry, "discovery")
        self._requests = self._entries = 0
        self._started = 0.0
        self._status: StatusPort | None = None
        self._guarded: GuardedFactory | None = None

    async def _start(self) -> None:
        settings, description = self._settings, self._store_description
        self._started = time.time()
        clock, moves = clock_of(description, self._reactor)
        drops = DropLog(self._reactor.seconds, self.metrics)
        limit = settings.limit_of(description)
        store = await open_store(
            description, self._reactor, limit, self._random, clock, drops.count, durable=settings.durable
        )
        self._running = running = self._make(store, clock, moves)
        if self._settings.ranking is not None:
            self._settings.ranking.watch(self._reactor)
        if self.telemetry is not None:
            self.telemetry.loads.append(self._load)
            self.telemetry.beats.append(self._count_entries)
            self._count_entries()
            self.telemetry.start()
        guarded = self._guarded = GuardedFactory(
            running.site,
            self._reactor,
            by_place=not settings.proxied,
            on_refused=lambda why: self.metrics.refused.labels(why).inc(),
        )
        self._status = StatusPort(
            self._reactor,
            settings.metrics,
            settings.page_token,
            DiscoveryStatus(self._reactor, running.api, self.metrics, self._started, clock),
            lambda: running.api.reports.rendered_metrics,
            running.api.reports.health_report,
        )
        await self._status.start()
        await self._listen(guarded)

    @property
    def metrics_port(self) -> IListeningPort | None:
        """Port of the status page, ``/metrics`` and ``/health``; None if there is none."""
        return None if self._status is None else self._status.port

    def _make(self, store: IEntryStore, clock: Callable[[], float], moves: bool) -> _Running:
        """Create the parts of the service that use an open store.

        :param clock: clock of the store, in seconds since 1970.
        :param moves: whether this clock jumps when the system's clock is set.
        """
        settings, checks = self._settings, None
        if settings.checks and settings.server_ttl > 0:
            checks = ServerChecks(
                self._reactor,
                store,
                clock,
                settings.server_ttl,
                lasts=settings.entry_ttl,
                openings=settings.openings,
                anywhere=settings.private_servers,
                checked_at=dict(settings.check_at),
            )
            checks.start()
        sweep = ExpirySweep(self._reactor, store, clock)
        sweep.start()
        api = DiscoveryAPI(
            self._reactor,
            store,
            clock,
            self.metrics,
            settings,
            wall_clock=time.time,
            telemetry=self.telemetry,
            checks=None if checks is None else checks.soon,
        )
        watch = None
        if moves:
            watch = ClockWatch(self._reactor, lambda step: self._clock_was_set(step, clock()))
            watch.startService()
        return _Running(store, checks, sweep, api, make_site(api, self._reactor, self.metrics, settings), watch)

    def _clock_was_set(self, step: float, now: float) -> None:
        """Adapt a store that uses the system's clock after this clock was set.

        If the clock was set forward, all entries seem expired, so the sweep waits until clients have posted again. If
        the clock was set back, times in the store that are now in the future are set to the present.

        :param step: seconds by which the clock was set; negative if it was set back.
        :param now: present time of the store's clock, in seconds since 1970.
        """
        assert self._running is not None
        if step > 0:
            self._running.sweep.postpone()
            return
        self._running.store.shift_times(now).addErrback(
            lambda failure: _log.warn(
                "times of entries that are ahead of the clock could not be set to the present: {error}",
                error=failure.getErrorMessage(),
            )
        )

    def own_url(self) -> str:
        """Return the plain HTTP URL at which programs on this machine reach the service.

        :raises DiscoveryError: the service does not listen yet, or only with TLS.
        """
        for description, port in zip(self._descriptions, self.ports, strict=False):
            if description.startswith("tcp:"):
                host = port.getHost()
                if isinstance(host, IPv4Address):
                    return f"http://{'127.0.0.1' if host.host == '0.0.0.0' else host.host}:{host.port}"  # noqa: S104
                if isinstance(host, IPv6Address):
                    return f"http://[{'::1' if host.host == '::' else host.host}]:{host.port}"
        raise DiscoveryError("this discovery does not listen for plain HTTP yet")

    # --- heartbeats of the telemetry ---

    def _count_entries(self) -> None:
        """Query the number of entries in the store. The answer arrives after this heartbeat, so a heartbeat reports the
        number of the previous query.
        """
        if self._running is not None:
            self._running.store.count().addCallbacks(self._record_count, lambda _: None)

    def _record_count(self, entries: int) -> None:
        self._entries = entries
        self.metrics.entries.set(entries)

    def _load(self) -> dict[str, object]:
        assert self._running is not None
        came = self._running.api.requests
        requests, self._requests = came - self._requests, came
        return {"entries": self._entries, "requests": requests}

    async def _stop(self) -> None:
        if self._status is not None:
            await self._status.stop()
        await self._stop_listening()
        running = self._running
        if running is not None:
            await running.stop()
        if self._settings.ranking is not None:
            self._settings.ranking.stop()
        if self.telemetry is not None:
            await self.telemetry.stop()
        if self._guarded is not None:
            self._guarded.guard.drop_all()
        if running is not None:
            await running.store.close()
            self._running = None
