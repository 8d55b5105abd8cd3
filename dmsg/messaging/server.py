"""The server entity of the Messaging System: it listens, relays, registers in discovery, and leaves politely."""

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
from dmsg.keys import SecKey
from dmsg.messaging.policing import Limits
from dmsg.messaging.protocol import ServerFactory
from dmsg.messaging.wire import Profile
from dmsg.net.socketopts import tune_listening

DRAIN_TIMEOUT = 8.0
"""Seconds that stopping leaves to channels to end, by default: the protocol knows no way to move them."""
DRAIN_LOOK = 0.1
"""Seconds between looks whether all have ended."""
CLOSE_TIMEOUT = 5.0
"""Seconds that stopping waits for clients to take their last frames."""

_log = Logger()


class Server(Service):
    """A messaging server.

    :param listen: Twisted endpoint strings.
    :param profile: of its clients.
    :param public_address: ``host:port`` at which clients reach it; None takes
        the first listening port, which must then be on one interface.
    :param discovery: URLs, or a Lookups; empty means it is not registered.
    :param limits: what one client may have.
    :param admission: whom it admits.
    :param drain_timeout: seconds that stopping leaves to channels to end.
    :param metrics: endpoint string for ``/metrics`` and ``/health``, or None.
    :ivar ready: fires with the listening ports.
    """

    name = "dmsg-messaging-server"

    def __init__(
        self,
        reactor: Any,
        key: SecKey,
        listen: Sequence[str],
        *,
        profile: Profile = Profile.SEED,
        public_address: str | None = None,
        discovery: Sequence[str] | Lookups = (),
        limits: Limits | None = None,
        admission: Admission | None = None,
        drain_timeout: float = DRAIN_TIMEOUT,
        metrics: str | None = None,
        random: Random | None = None,
    ) -> None:
        """:raises DmsgError: the public address is malformed."""
        if public_address is not None:
            parse_address(public_address)
        self._reactor = reactor
        self._key = key
        self._listen = tuple(listen)
        self._metrics = metrics
        self._drain_timeout = drain_timeout
        self._started = 0.0
        self.factory = ServerFactory(reactor, key, profile, limits=limits, admission=admission)
        self.registration = Registration(
            reactor,
            key,
            discovery,
            random or SystemRandom(),
            mark=lambda version: with_feature(version, profile.feature),
            available=lambda: self.factory.available_connections,
        )
        self.registration.address = public_address
        self.factory.on_change = self.registration.changed
        self.ports: list[IListeningPort] = []
        self.metrics_port: IListeningPort | None = None
        self.ready: Deferred[list[IListeningPort]] = Deferred()

    def startService(self) -> None:
        super().startService()  # type: ignore[no-untyped-call]
        self._started = time.time()
        self.ready = Deferred.fromCoroutine(self._start())

    async def _start(self) -> list[IListeningPort]:
        self.factory.admission.watch(self._reactor, self.factory.admission_changed)
        for description in self._listen:
            port = await serverFromString(self._reactor, description).listen(self.factory)
            self.ports.append(port)
            self.factory.tuned = tune_listening(port) and (self.factory.tuned or len(self.ports) == 1)
            _log.info(
                "messaging server {key} listens on {address}, profile {profile}",
                key=self._key.public.hex(),
                address=str(port.getHost()),
                profile=self.factory.profile.value,
            )
        if self._metrics is not None:
            site = Site(StatusPages(self, self.health, "dmsg_messaging_server"))
            site.noisy = False
            self.metrics_port = await serverFromString(self._reactor, self._metrics).listen(site)
        if self.registration.wanted:
            self.registration.address = self.registration.address or address_of(self.ports[0])
            self.registration.start()
        return self.ports

    def reload(self, limits: Limits | None = None) -> None:
        """Read the lists again; with other ``limits`` from now on."""
        if limits is not None:
            self.factory.limits = limits
        self.factory.admission.look(force=True)
        self.factory.admission_changed()
        self.registration.changed()
        _log.info("settings and lists were read again")

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
        # first out of discovery, so that nobody new is sent here meanwhile
        await self.registration.withdraw()
        relay = self.factory.relay
        relay.draining = True
        until = self._reactor.seconds() + self._drain_timeout
        while relay.channel_count and self._reactor.seconds() < until:
            await deferLater(self._reactor, DRAIN_LOOK)
        if relay.channel_count:
            _log.info("{count} channels are closed", count=relay.channel_count)
        try:
            await self.factory.drain().addTimeout(CLOSE_TIMEOUT, self._reactor)
        except TimeoutError:
            _log.info("{count} clients did not leave in time", count=len(self.factory.sessions))
        await self.registration.close()

    # --- what it says of itself (ServerStatistics) ---

    def gauges(self) -> dict[str, tuple[str, float]]:
        """What goes up and down."""
        factory = self.factory
        return {
            "connections": ("Connected clients", len(factory.sessions)),
            "available_connections": ("Clients that may still connect", factory.available_connections),
            "handshakes": ("Handshakes under way", factory.handshakes),
            "channels": ("Open channels", factory.relay.channel_count),
            "congested": (
                "Clients that read slower than they are sent to",
                sum(peer.congested for peer in factory.relay.peers),
            ),
            "start_time_seconds": ("When the server started", self._started),
            "registered": ("1 when the last POST to discovery was taken", float(self.registration.current)),
        }

    def counters(self) -> dict[str, tuple[str, float]]:
        """What only goes up."""
        relay = self.factory.relay
        hook = self.factory.admission.hook
        return {
            "connections_opened": ("Clients that have connected", self.factory.connections_opened),
            "channels_opened": ("Channels that were opened", relay.channels_opened),
            "frames": ("Frames received", relay.frames),
            "frame_bytes": ("Bytes of frames received", relay.frame_bytes),
            "admission_unanswered": (
                "Questions to the admission hook without an answer",
                hook.unanswered if hook is not None else 0,
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
            "channels": self.factory.relay.channel_count,
        }
