"""The server entity: it listens, relays, registers in discovery, and leaves politely."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from random import Random, SystemRandom
from typing import Any

from twisted.application.service import Service
from twisted.internet.address import IPv4Address, IPv6Address
from twisted.internet.defer import Deferred, DeferredList, TimeoutError, maybeDeferred
from twisted.internet.endpoints import serverFromString
from twisted.internet.interfaces import IDelayedCall, IListeningPort
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.resource import Resource
from twisted.web.server import Request, Site

from dmsg.discovery.entry import Entry, ServerMeta, with_feature
from dmsg.discovery.lookup import Lookup, Lookups
from dmsg.errors import DiscoveryError, DmsgError, DropReason
from dmsg.keys import PubKey, SecKey
from dmsg.net.socketopts import tune_listening
from dmsg.telemetry.metrics import ServerMetrics
from dmsg.telemetry.service import Telemetry, TelemetrySettings
from dmsg.transport.admission import Admission
from dmsg.transport.dial import parse_address, retry_delay
from dmsg.transport.policing import Limits
from dmsg.transport.protocol import ServerFactory
from dmsg.transport.wire import RECEIPT_FEATURE, RELAY_FEATURE

REFRESH_INTERVAL = 30.0
"""Seconds between refreshes of the entry; discovery lists it for longer than that."""
CHANGE_DELAY = 2.0
"""Seconds in which changes of available_connections are collected into one POST."""
WITHDRAW_TIMEOUT = 2.0
"""Seconds that stopping waits for discovery."""
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
        self._address = public_address
        if isinstance(discovery, Lookups):
            self._lookups: Lookups | None = discovery
        else:
            self._lookups = Lookups([Lookup(reactor, url) for url in discovery]) if discovery else None
        self._metrics = metrics
        self._random: Random = random or SystemRandom()
        self._started = 0.0
        self._posted: int | None = None
        self._failures = 0
        self._register_call: IDelayedCall | None = None
        self._registering: Deferred[Any] | None = None
        self.registered_at: float | None = None
        """Seconds of the reactor's clock of the last POST that discovery took."""
        self._drain_timeout = drain_timeout
        self.telemetry = Telemetry(reactor, telemetry, "server", key.public.hex()) if telemetry is not None else None
        self.factory = ServerFactory(reactor, key, limits=limits, admission=admission, telemetry=self.telemetry)
        if self._lookups is not None:
            self.factory.registered = lambda: self._failures == 0 and self._posted is not None
        self.factory.on_change = self._changed
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
        self._changed()
        _log.info("settings and lists were read again")

    async def _start(self) -> list[IListeningPort]:
        self.factory.admission.watch(self._reactor, self.factory.admission_changed)
        for description in self._listen:
            port = await serverFromString(self._reactor, description).listen(self.factory)
            self.ports.append(port)
            self.factory.tuned = tune_listening(port) and (self.factory.tuned or len(self.ports) == 1)
            _log.info("server {key} listens on {address}", key=self._key.public.hex(), address=str(port.getHost()))
        if self._metrics is not None:
            site = Site(_StatusPages(self))
            site.noisy = False
            self.metrics_port = await serverFromString(self._reactor, self._metrics).listen(site)
        if self._lookups is not None:
            if self._address is None:
                self._address = _address_of(self.ports[0])
            self._register_soon(0)
        return self.ports

    def stopService(self) -> Deferred[None]:
        super().stopService()  # type: ignore[no-untyped-call]
        return Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        self.ready.addErrback(lambda _: None)
        self.ready.cancel()
        if self._register_call is not None and self._register_call.active():
            self._register_call.cancel()
        stopping = [maybeDeferred(port.stopListening) for port in self.ports]
        if self.metrics_port is not None:
            stopping.append(maybeDeferred(self.metrics_port.stopListening))
        await DeferredList(stopping, consumeErrors=True)
        self.factory.admission.stop()
        others = await self._others()
        # first out of discovery, so that nobody new is sent here meanwhile
        await self._withdraw()
        await self._hand_over(others)
        try:
            await self.factory.drain().addTimeout(CLOSE_TIMEOUT, self._reactor)
        except TimeoutError:
            _log.info("{count} clients did not leave in time", count=len(self.factory.sessions))
        if self.telemetry is not None:
            await self.telemetry.stop()
        if self._lookups is not None:
            await self._lookups.close()

    # --- leaving ---

    async def _others(self) -> list[PubKey]:
        """Servers that clients can go to."""
        if self._lookups is None or not self.factory.sessions or not self._drain_timeout:
            return []
        try:
            entries = await self._lookups.available_servers().addTimeout(WITHDRAW_TIMEOUT, self._reactor)
        except (DmsgError, TimeoutError):
            return []
        return [entry.key for entry in entries if entry.key != self._key.public]

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

    # --- discovery ---

    def _changed(self) -> None:
        if self.factory.available_connections != self._posted:
            self._register_soon(CHANGE_DELAY)

    def _register_soon(self, delay: float) -> None:
        if not self.running or self._lookups is None or self._address is None:
            return
        call = self._register_call
        if call is not None and call.active():
            # after a failure the delay grows; a change does not cut it short
            if self._failures or call.getTime() <= self._reactor.seconds() + delay:
                return
            call.cancel()
        self._register_call = self._reactor.callLater(delay, self._register)

    def _register(self) -> None:
        assert self._lookups is not None
        if self._registering is not None:
            return
        available = self.factory.available_connections

        def make(entry: Entry) -> Entry:
            assert self._address is not None
            version = with_feature(entry.version, RELAY_FEATURE)
            version = with_feature(version, RECEIPT_FEATURE, self.telemetry is not None)
            return replace(entry, version=version, server=ServerMeta(self._address, available))

        def done(result: Any) -> None:
            self._registering = None
            if isinstance(result, Failure):
                self._failures += 1
                if result.check(DiscoveryError) is None:
                    _log.failure("registering failed", result)
                elif self._failures == 1:
                    _log.warn("not registered: {error}", error=str(result.value))
                self._register_soon(retry_delay(self._failures, self._random))
                return
            if self._failures or self._posted is None:
                _log.info("registered in discovery as {address}", address=self._address)
            self._failures = 0
            self._posted = available
            self.registered_at = self._reactor.seconds()
            changed = self.factory.available_connections != available
            self._register_soon(CHANGE_DELAY if changed else REFRESH_INTERVAL)

        self._registering = self._lookups.update(self._key, make)
        self._registering.addBoth(done)

    async def _withdraw(self) -> None:
        if self._lookups is None or self._posted is None:
            return
        try:
            await self._lookups.delete(self._key).addTimeout(WITHDRAW_TIMEOUT, self._reactor)
        except (DmsgError, TimeoutError) as error:
            _log.info("entry was not withdrawn: {error}", error=str(error))

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
                float(self._failures == 0 and self._posted is not None),
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


def _address_of(port: IListeningPort) -> str:
    host = port.getHost()
    if isinstance(host, IPv4Address) and host.host != "0.0.0.0":  # noqa: S104
        return f"{host.host}:{host.port}"
    if isinstance(host, IPv6Address) and host.host != "::":
        return f"[{host.host}]:{host.port}"
    raise DmsgError("say with --public-address where clients reach this server")


class _StatusPages(Resource):
    """``/metrics`` and ``/health``."""

    isLeaf = True

    def __init__(self, server: Server) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._server = server
        self._metrics = ServerMetrics(server)

    def render_GET(self, request: Request) -> bytes:
        if request.path == b"/metrics":
            request.setHeader(b"content-type", self._metrics.content_type)
            return self._metrics.render()
        if request.path == b"/health":
            request.setHeader(b"content-type", b"application/json")
            gauges = self._server.gauges()
            registered = bool(gauges["registered"][1]) or self._server._lookups is None
            health = {
                "status": "ok" if self._server.running else "draining",
                "registered": registered,
                "connections": gauges["connections"][1],
                "transports": gauges["transports"][1],
            }
            return json.dumps(health).encode()
        request.setResponseCode(404)
        return b"there are /metrics and /health\n"
