"""The server entity: it listens, relays, registers in discovery, and leaves politely."""

from __future__ import annotations

import time
from collections.abc import Sequence
from random import Random, SystemRandom
from typing import Any

from twisted.application.service import Service
from twisted.internet.defer import Deferred, DeferredList, TimeoutError, maybeDeferred
from twisted.internet.endpoints import serverFromString
from twisted.internet.interfaces import IListeningPort
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.web.server import Site

from dmsg.delegation.admission import Admission
from dmsg.delegation.dial import parse_address
from dmsg.delegation.registration import Registration, StatusPages, address_of
from dmsg.discovery.entry import with_feature
from dmsg.discovery.lookup import Lookups
from dmsg.errors import DropReason
from dmsg.keys import PubKey, SecKey
from dmsg.net.socketopts import tune_listening
from dmsg.telemetry.service import Telemetry, TelemetrySettings
from dmsg.transport.policing import Limits
from dmsg.transport.protocol import ServerFactory
from dmsg.transport.wire import RECEIPT_FEATURE, RELAY_FEATURE

DRAIN_TIMEOUT = 8.0
"""Seconds that stopping leaves to clients to move their streams elsewhere, by default."""
DRAIN_LOOK = 0.1
"""Seconds between looks whether all have moved."""
DRAIN_GRACE = 1.0
"""Seconds that clients have at least to be found elsewhere, when there is an elsewhere."""
CLOSE_TIMEOUT = 5.0
"""Seconds that stopping waits for clients to take their CLOSE frames."""

_log = Logger()


class Server(Service):
    """A dmsg server.

    :param listen: Twisted endpoint strings.
    :param public_address: ``host:port`` at which clients reach it; None takes
        the first listening port, which must then be on one interface.
    :param discovery: URLs, or a Lookups; empty means it is not registered.
    :param limits: what one client may have; :attr:`ServerFactory.limits` changes it later.
    :param admission: whom it admits.
    :param drain_timeout: seconds that stopping leaves to clients to move their streams.
    :param metrics: endpoint string for ``/metrics`` and ``/health``, or None.
    :param telemetry: where to write events for the pipeline, or None.
    :ivar ready: fires with the listening ports.
    """

    name = "dmsg-server"

    def __init__(
        self,
        reactor: Any,
        key: SecKey,
        listen: Sequence[str],
        *,
        public_address: str | None = None,
        discovery: Sequence[str] | Lookups = (),
        limits: Limits | None = None,
        admission: Admission | None = None,
        drain_timeout: float = DRAIN_TIMEOUT,
        metrics: str | None = None,
        telemetry: TelemetrySettings | None = None,
        random: Random | None = None,
    ) -> None:
        """:raises DmsgError: the public address is malformed, or the directory of telemetry cannot be used."""
        if public_address is not None:
            parse_address(public_address)
        self._reactor = reactor
        self._key = key
        self._listen = tuple(listen)
        self._metrics = metrics
        self._started = 0.0
        self._drain_timeout = drain_timeout
        self.telemetry = Telemetry(reactor, telemetry, "server", key.public.hex()) if telemetry is not None else None
        self.factory = ServerFactory(reactor, key, limits=limits, admission=admission, telemetry=self.telemetry)
        self.registration = Registration(
            reactor,
            key,
            discovery,
            random or SystemRandom(),
            mark=self._mark,
            available=lambda: self.factory.available_connections,
        )
        self.registration.address = public_address
        if self.registration.wanted:
            self.factory.registered = lambda: self.registration.current
        self.factory.on_change = self.registration.changed
        self.ports: list[IListeningPort] = []
        self.metrics_port: IListeningPort | None = None
        self.ready: Deferred[list[IListeningPort]] = Deferred()

    # --- service ---

    def startService(self) -> None:
        super().startService()  # type: ignore[no-untyped-call]
        self._started = time.time()
        if self.telemetry is not None:
            self.telemetry.start()
        self.ready = Deferred.fromCoroutine(self._start())

    def reload(self, limits: Limits | None = None) -> None:
        """Read the lists again; with other ``limits`` from now on."""
        if limits is not None:
            self.factory.limits = limits
        self.factory.admission.look(force=True)
        self.factory.admission_changed()
        self.registration.changed()
        _log.info("settings and lists were read again")

    async def _start(self) -> list[IListeningPort]:
        self.factory.admission.watch(self._reactor, self.factory.admission_changed)
        for description in self._listen:
            port = await serverFromString(self._reactor, description).listen(self.factory)
            self.ports.append(port)
            self.factory.tuned = tune_listening(port) and (self.factory.tuned or len(self.ports) == 1)
            _log.info("server {key} listens on {address}", key=self._key.public.hex(), address=str(port.getHost()))
        if self._metrics is not None:
            site = Site(StatusPages(self, self.health))
            site.noisy = False
            self.metrics_port = await serverFromString(self._reactor, self._metrics).listen(site)
        if self.registration.wanted:
            self.registration.address = self.registration.address or address_of(self.ports[0])
            self.registration.start()
        return self.ports

    def stopService(self) -> Deferred[None]:
        super().stopService()  # type: ignore[no-untyped-call]
        return Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        self.ready.addErrback(lambda _: None)
        self.ready.cancel()
        self.registration.stop()
        stopping = [maybeDeferred(port.stopListening) for port in self.ports]
        if self.metrics_port is not None:
            stopping.append(maybeDeferred(self.metrics_port.stopListening))
        await DeferredList(stopping, consumeErrors=True)
        self.factory.admission.stop()
        others = await self.registration.others() if self.factory.sessions and self._drain_timeout else []
        # first out of discovery, so that nobody new is sent here meanwhile
        await self.registration.withdraw()
        await self._hand_over(others)
        try:
            await self.factory.drain().addTimeout(CLOSE_TIMEOUT, self._reactor)
        except TimeoutError:
            _log.info("{count} clients did not leave in time", count=len(self.factory.sessions))
        if self.telemetry is not None:
            await self.telemetry.stop()
        await self.registration.close()

    # --- leaving ---

    async def _hand_over(self, others: list[PubKey]) -> None:
        """Tell the clients where else to go, and wait until their streams are there."""
        relay = self.factory.relay
        if not others or not relay.announce_drain(round(self._drain_timeout), others):
            return
        _log.info(
            "draining: {count} clients are told of {others} other servers", count=len(relay.peers), others=len(others)
        )
        started = self._reactor.seconds()
        while (passed := self._reactor.seconds() - started) < self._drain_timeout:
            if not relay.peers or (not relay.route_count and passed >= DRAIN_GRACE):
                break
            await deferLater(self._reactor, DRAIN_LOOK)
        _log.info("drained, {count} transports are left", count=relay.route_count // 2)

    def _mark(self, version: str) -> str:
        version = with_feature(version, RELAY_FEATURE)
        return with_feature(version, RECEIPT_FEATURE, self.telemetry is not None)

    # --- what it says of itself (ServerStatistics) ---

    def gauges(self) -> dict[str, tuple[str, float]]:
        """What goes up and down."""
        factory = self.factory
        return {
            "connections": ("Connected clients", len(factory.sessions)),
            "available_connections": ("Clients that may still connect", factory.available_connections),
            "handshakes": ("Handshakes under way", factory.handshakes),
            "transports": ("Open transports", factory.relay.route_count // 2),
            "congested": (
                "Clients that read slower than they are sent to",
                sum(p.congested for p in factory.relay.peers),
            ),
            "start_time_seconds": ("When the server started", self._started),
            "registered": (
                "1 when the last POST to discovery was taken",
                float(self.registration.current),
            ),
        }

    def counters(self) -> dict[str, tuple[str, float]]:
        """What only goes up."""
        relay = self.factory.relay
        telemetry = self.telemetry
        return {
            "connections_opened": ("Clients that have connected", self.factory.connections_opened),
            "transports_opened": ("Transports that were opened", relay.transports_opened),
            "frames": ("Frames received", relay.frames),
            "frame_bytes": ("Bytes of frames received", relay.frame_bytes),
            "telemetry_written": ("Events written for the pipeline", 0 if telemetry is None else telemetry.written),
            "telemetry_lost": ("Events that could not be written", 0 if telemetry is None else telemetry.lost),
            "telemetry_files_removed": (
                "Files of events that made room for newer ones",
                0 if telemetry is None else telemetry.removed,
            ),
            "throttled": ("Times that a client was read later for its bytes a second", self.factory.throttled),
            "admission_unanswered": (
                "Questions to the admission hook without an answer",
                hook.unanswered if (hook := self.factory.admission.hook) is not None else 0,
            ),
        }

    def drops(self) -> dict[DropReason, int]:
        """How often each reason occurred."""
        return self.factory.relay.drops

    def health(self) -> dict[str, Any]:
        """What ``/health`` says."""
        return {
            "status": "ok" if self.running else "draining",
            "registered": self.registration.current or not self.registration.wanted,
            "connections": len(self.factory.sessions),
            "transports": self.factory.relay.route_count // 2,
        }
