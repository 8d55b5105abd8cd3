"""Collector entity: a dmsg client that receives event files from the senders on its list."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from twisted.application.service import Service
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IListeningPort
from twisted.logger import Logger

from dmsg.base.options import LIMITS, NETWORK, Number, option
from dmsg.collector.receiver import ReceiverFactory
from dmsg.collector.status_page import CollectorStatus, Health
from dmsg.collector.store import LIMIT, RESERVE, Store
from dmsg.collector.wire import PORT, PORT_NUMBER
from dmsg.discovery.lookup.lookups import Lookups
from dmsg.keys import PubKey, SecKey
from dmsg.net.reactor import Reactor
from dmsg.net.retry_loop import RetryLoop
from dmsg.net.threads import in_thread
from dmsg.pages.port import StatusPort
from dmsg.pages.settings import PageSettings
from dmsg.servers.admission import CHECK_INTERVAL, KeyList
from dmsg.telemetry.metrics import CONTENT_TYPE
from dmsg.v2019.client import Client

COUNT_INTERVAL = 600.0
"""Seconds after which the stored bytes are counted again, because other programs may remove files."""

_log = Logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorSettings(PageSettings):
    """Settings of a collector; sizes are in bytes."""

    port: int = option(PORT, "Dmsg port to listen on", PORT_NUMBER, group=NETWORK)
    limit: int = option(
        LIMIT,
        "GiB of files to keep; when that many are stored, senders have to wait",
        Number(1, 2**20, "GiB"),
        group=LIMITS,
    )
    reserve: int = option(RESERVE, "MiB of disk space to leave free", Number(0, 2**30, "MiB"), group=LIMITS)


DEFAULTS = CollectorSettings()


class Collector(Service):
    """Service that receives and stores the files that senders deliver.

    :param root: directory of the files, see :class:`~dmsg.collector.store.Store`.
    :param senders: list of keys that may send files.
    :param discovery: URLs of discovery, or a Lookups.
    :ivar ready: Deferred that fires when the collector has started, and fails if its store or a port cannot be used.
    """

    name = "dmsg-collector"
    content_type = CONTENT_TYPE

    def __init__(
        self,
        reactor: Reactor,
        key: SecKey,
        root: Path,
        senders: KeyList,
        discovery: Sequence[str] | Lookups,
        settings: CollectorSettings = DEFAULTS,
        *,
        wall: Callable[[], float] | None = None,
    ) -> None:
        self._reactor = reactor
        self._senders = senders
        self._port = settings.port
        wall = wall or time.time
        self._wall = wall
        self.store = Store(root, limit=settings.limit, reserve=settings.reserve)
        self.factory = ReceiverFactory(reactor, self.store, self._allows, wall)
        self.client = Client(reactor, key, discovery)
        self.started = wall()
        page = CollectorStatus(self.client.public_key, self.started, self.factory, self.store, self.health)
        self._status = StatusPort(
            reactor, settings.metrics, settings.page_token, page, lambda: self.render, self.health
        )
        self.ready: Deferred[None] = Deferred()
        self._check_loop = RetryLoop(
            reactor, self._check, lambda failures: CHECK_INTERVAL, "reading the list of senders"
        )
        self._counts = RetryLoop(reactor, self._count, lambda failures: COUNT_INTERVAL, "counting files")
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    # --- service ---

    def startService(self) -> None:
        super().startService()  # type: ignore[no-untyped-call]
        self.ready = Deferred.fromCoroutine(self._start())

    async def _start(self) -> None:
        self.store.open()
        await self._status.start()
        self.client.listen(self.factory, self._port)
        self.client.startService()
        for again, seconds in ((self._check_loop, CHECK_INTERVAL), (self._counts, COUNT_INTERVAL)):
            again.start()
            again.soon(seconds)
        _log.info(
            "collector {key} listens on dmsg port {port}; it stores files of {count} listed senders in {root}",
            key=str(self.client.public_key),
            port=self._port,
            count=len(self._senders.keys),
            root=str(self.store.root),
        )
        self.client.when_published().addCallbacks(
            lambda _: _log.info(
                "collector {key} is online and can be reached by its senders", key=str(self.client.public_key)
            ),
            lambda _: None,
        )

    def stopService(self) -> Deferred[None]:
        super().stopService()  # type: ignore[no-untyped-call]
        return Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        self.ready.addErrback(lambda _: None)
        self.ready.cancel()
        self._check_loop.stop()
        self._counts.stop()
        self.factory.stop()
        if self.client.running:
            await self.client.stopService()
        await self._status.stop()
        self.store.close()

    @property
    def metrics_port(self) -> IListeningPort | None:
        """Listening port of the status page, ``/metrics`` and ``/health``; None without a status page."""
        return self._status.port

    # --- senders and stored bytes ---

    def _allows(self, key: PubKey) -> bool:
        return key in self._senders.keys

    async def _check(self) -> float:
        if self._senders.reload():
            _log.info("the list of senders changed and was reloaded: {count} keys", count=len(self._senders.keys))
        return CHECK_INTERVAL

    def reload(self) -> None:
        """Read the list of senders again."""
        self._senders.reload(force=True)
        _log.info("the list of senders was reloaded: {count} keys", count=len(self._senders.keys))

    async def _count(self) -> float:
        await in_thread(self._reactor, self.store.recount)
        return COUNT_INTERVAL

    # --- health and metrics ---

    def health(self) -> Health:
        """Return the content of ``/health``."""
        now = self._wall()
        connected = len(list(self.client.sessions()))
        return {
            "status": "ok" if connected else "not connected",
            "servers": connected,
            "files": self.factory.file_count,
            "bytes_held": self.store.total,
            "newest_file_seconds": {
                origin: max(0, round(now - at)) for origin, at in sorted(self.factory.newest.items())
            },
        }

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics for prometheus_client."""
        yield CounterMetricFamily("dmsg_collector_files", "Number of files stored", value=self.factory.file_count)
        yield CounterMetricFamily(
            "dmsg_collector_bytes", "Bytes of files stored since the start", value=self.factory.byte_count
        )
        yield GaugeMetricFamily("dmsg_collector_held_bytes", "Bytes of files in the store now", value=self.store.total)
        refused = CounterMetricFamily(
            "dmsg_collector_refused", "Number of files and streams refused, by reason", labels=["reason"]
        )
        for reason, count in sorted(self.factory.refusals.items()):
            refused.add_metric([reason.replace(" ", "_")], count)
        yield refused
        newest = GaugeMetricFamily(
            "dmsg_collector_newest_file_timestamp_seconds",
            "Unix time at which a sender's last file arrived",
            labels=["sender"],
        )
        for origin, at in sorted(self.factory.newest.items()):
            newest.add_metric([origin], at)
        yield newest

    def render(self) -> bytes:
        """Return the text that Prometheus scrapes."""
        return generate_latest(self._registry)
