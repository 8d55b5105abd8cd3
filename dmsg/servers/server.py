"""What a server of any family is: it listens, admits, relays, registers in discovery, and leaves politely."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random, SystemRandom
from typing import Any

from twisted.application.service import Service
from twisted.internet.defer import Deferred, DeferredList, TimeoutError, maybeDeferred
from twisted.internet.endpoints import serverFromString
from twisted.internet.interfaces import IDelayedCall, IListeningPort, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.base.buckets import RateLimit
from dmsg.base.memory import Memory
from dmsg.discovery.lookups import Lookups
from dmsg.errors import DropReason, RemoteProtocolError
from dmsg.keys import PubKey, SecKey
from dmsg.net.addresses import parse_address
from dmsg.net.isolate import isolated
from dmsg.net.links.acceptor import MAX_HANDSHAKES, Acceptor
from dmsg.net.links.link import Link
from dmsg.net.share import STEPS
from dmsg.net.socketopts import tune_listening
from dmsg.net.web.guard import GuardedFactory
from dmsg.servers.admission import Admission
from dmsg.servers.holdings import LinkHoldings
from dmsg.servers.registration import Registration, address_of
from dmsg.servers.selflook import look_at_self
from dmsg.servers.status import StatusPages, status_site
from dmsg.telemetry.metrics import ServerMetrics

DRAIN_TIMEOUT = 8.0
"""Seconds that stopping leaves to what clients have open, by default."""
DRAIN_LOOK = 0.1
"""Seconds between looks whether all of it is gone."""
CLOSE_TIMEOUT = 5.0
"""Seconds that stopping waits for clients to take their last frames."""
PENDING = 2
"""Who pauses a link, besides the relay, which is 1."""
TOO_FAST = 8
"""Another one: its frames are more than may be handled one by one."""
FRAME_RATE = 100_000.0
"""Frames a second of one address that are handled one by one, by default: control frames, frames of no transport, and
those that go elsewhere than the ones before them.  More is read later."""
CLOSED_AT_ONCE = 512
"""Transports of a connection that ended that are closed in one turn of the reactor."""
STRAY_RATE = 2_000.0
"""Frames of no transport a second of one address, beyond what each client may send, before its connection ends."""
STRAY_BURST = 200_000.0
"""And so many at once: what the windows of many transports hold when their other ends are lost."""

_log = Logger()


class ServedSession:
    """One connected client of a server; it is served once it is admitted."""

    __slots__ = ("_factory", "_peer", "link")

    def __init__(self, factory: Any) -> None:
        self._factory = factory
        self._peer: Any = None
        self.link: Link | None = None

    @property
    def backlog(self) -> int:
        """Bytes that wait for it before they come to its link."""
        return int(self._factory.backlog_of(self._peer)) if self._peer is not None else 0

    # --- for a family ---

    def _connected(self, link: Link) -> None:
        """The handshake is done, nothing is decided yet."""

    def _serve(self, link: Link) -> Any:
        """It is admitted: what the relay calls it."""
        return self._factory.relay.add(link.remote, link)

    def refuse(self, reason: DropReason = DropReason.NOT_ADMITTED) -> None:
        """There is no room, or this key is not, or no longer, admitted."""
        assert self.link is not None
        self.link.close(reason)

    # --- the link's side ---

    def link_up(self, link: Link) -> None:
        self.link = link
        assert link.remote is not None
        self._connected(link)
        self._factory.session_up(self)
        if link.ended_for is not None:
            return
        admitted = self._factory.admission.check(link.remote)
        if isinstance(admitted, bool):
            self._decided(admitted)
            return
        link.pause_reading(PENDING)

        def decided(result: Any) -> None:
            if self.link is not None:
                link.resume_reading(PENDING)
                self._decided(result is True)
                link.read_again()

        admitted.addBoth(decided)

    def _decided(self, admitted: bool) -> None:
        link = self.link
        assert link is not None
        if not admitted:
            self.refuse()
        elif link.ended_for is None:
            self._peer = self._serve(link)

    def frames_received(self, buffer: bytearray, end: int) -> int:
        if self._peer is None:
            return 0 if self.link is not None and self.link.ended_for is None else end
        relay, link = self._factory.relay, self.link
        taken: int = relay.receive_frames(self._peer, buffer, end, STEPS)
        if relay.steps and link is not None:
            if relay.steps >= STEPS:
                link.left()
            self._factory.paid(link, relay.steps, relay.strays)
        return taken

    def link_congested(self) -> None:
        if self._peer is not None:
            self._factory.relay.congest(self._peer)

    def link_relieved(self) -> None:
        if self._peer is not None:
            self._factory.relay.relieve(self._peer)

    def link_lost(self, reason: Failure) -> None:
        self._leave()
        self._factory.session_down(self)
        self.link = None

    def _leave(self) -> None:
        """A little at a time: others are not to wait until thousands of transports are closed."""

        def close_some() -> None:
            if not self._factory.relay.remove(self._peer, CLOSED_AT_ONCE):
                self._factory.later(self._leave)

        if self._peer is not None:
            isolated(close_some)


class ServingFactory(Acceptor):
    """Accepts links, admits their keys, and gives them to one relay.

    :ivar relay: of the family; it has ``peers``, ``drops``, ``limits`` and ``draining``.
    """

    relay: Any

    def __init__(
        self,
        reactor: IReactorTime,
        drops: Counter[DropReason],
        *,
        admission: Admission | None = None,
        max_handshakes: int = MAX_HANDSHAKES,
    ) -> None:
        super().__init__(reactor, drops, max_handshakes=max_handshakes, counted=_COUNTED_BY_RELAY)
        self.admission = admission or Admission()
        self._timers: dict[Any, IDelayedCall] = {}
        self._frames = RateLimit(FRAME_RATE, FRAME_RATE)
        self._strays = RateLimit(STRAY_RATE, STRAY_BURST)
        self.slowed = 0
        """How often a client was read later for its frames a second."""

    @property
    def limits(self) -> Any:
        """What one client may have; may be set at any time."""
        return self.relay.limits

    @limits.setter
    def limits(self, limits: Any) -> None:
        self.relay.limits = limits

    @property
    def draining(self) -> bool:
        """Nobody new is taken: the clients are told to leave, or all is closed."""
        return bool(self.relay.draining)

    def admission_changed(self) -> None:
        """The lists are others now: end the connections of those who are no longer admitted."""
        for session in list(self.sessions):
            link = session.link
            if link is not None and link.remote is not None and self.admission.listed(link.remote) is False:
                session.refuse()

    def later(self, call: Callable[[], None]) -> None:
        """In the next turn of the reactor."""
        self._reactor.callLater(0, call)

    def _once_after(self, seconds: float, peer: Any, call: Callable[[Any], None]) -> None:
        """Tell the relay something of ``peer`` in a while, unless that is due already."""
        if peer in self._timers:
            return

        def due() -> None:
            del self._timers[peer]
            call(peer)

        self._timers[peer] = self._reactor.callLater(seconds, due)

    def paid(self, link: Link, steps: int, strays: int) -> None:
        """Frames of a link were handled one by one.

        :raises RemoteProtocolError: more of no transport than can be an accident.
        """
        now = self._reactor.seconds()
        owner = str(link.owner)
        wait = self._frames.charge(owner, steps, now)
        if wait > 0.0 and not link.is_paused(TOO_FAST):
            self.slowed += 1
            link.pause_reading(TOO_FAST)
            self._reactor.callLater(wait, link.resume_reading, TOO_FAST)
        if strays and self._strays.charge(owner, strays, now) > 0.0:
            raise RemoteProtocolError(DropReason.FLOOD, "flood of frames of no transport")

    def backlog_of(self, peer: Any) -> int:
        """Bytes that the relay itself keeps for a client."""
        return 0

    def _close_relay(self) -> None:
        """Close what clients have open, and take nobody new."""
        self.relay.close_all()

    def drain(self) -> Deferred[None]:
        """Close everything, take nobody new; fires when all are gone."""
        self._close_relay()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        return self.close_all()


class RelayServer(Service):
    """The entity around such a factory.

    :param factory: of the family.
    :param mark: the version of the entry, with what the server offers.
    :ivar ready: fires with the listening ports.
    """

    metrics_prefix = "dmsg_server"

    def __init__(
        self,
        reactor: Any,
        key: SecKey,
        listen: Sequence[str],
        factory: Any,
        *,
        mark: Callable[[str], str],
        public_address: str | None,
        discovery: Sequence[str] | Lookups,
        drain_timeout: float,
        metrics: str | None,
        random: Random | None,
        memory: int | None = None,
    ) -> None:
        """:param memory: bytes that are held for clients, in all; None: see :func:`~dmsg.base.memory.default_limit`.

        :raises DmsgError: the public address is malformed.
        """
        if public_address is not None:
            parse_address(public_address)
        self._reactor = reactor
        self._key = key
        self._listen = tuple(listen)
        self._metrics = metrics
        self._drain_timeout = drain_timeout
        self._started = 0.0
        self.factory = factory
        self.memory = Memory(memory)
        self._holdings = LinkHoldings(reactor, factory, self.memory)
        self.registration = Registration(
            reactor,
            key,
            discovery,
            random or SystemRandom(),
            mark=mark,
            available=lambda: self.factory.available_connections,
        )
        self.registration.address = self._public_address = public_address
        self._looking: Deferred[None] | None = None
        self.reachable: bool | None = None
        """Whether it reached itself at its public address; None: it has not looked."""
        self.factory.on_change = self.registration.changed
        self.ports: list[IListeningPort] = []
        self.metrics_port: IListeningPort | None = None
        self._status_refused = 0
        self.ready: Deferred[list[IListeningPort]] = Deferred()

    # --- for a family ---

    async def _leave(self) -> None:
        """Withdraw the entry, and give clients the time that they have."""
        raise NotImplementedError

    async def _closed(self) -> None:
        """All clients are gone."""

    def health(self) -> dict[str, Any]:
        """What ``/health`` says."""
        return {
            "status": "draining" if not self.running else "full" if self.factory.full else "ok",
            "registered": self.registration.current or not self.registration.wanted,
            "reachable": self.reachable,
            "shared_with": self.registration.shared_with,
            "connections": len(self.factory.sessions),
        }

    # --- service ---

    def startService(self) -> None:
        super().startService()  # type: ignore[no-untyped-call]
        self._started = time.time()
        self.ready = Deferred.fromCoroutine(self._start())

    def reload(self, limits: Any = None) -> None:
        """Read the lists again; with other ``limits`` from now on."""
        if limits is not None:
            self.factory.limits = limits
        self.factory.admission.look(force=True)
        self.factory.admission_changed()
        self.registration.changed()
        _log.info("{what} were read again", what="lists" if limits is None else "settings and lists")

    async def _start(self) -> list[IListeningPort]:
        self.factory.admission.watch(self._reactor, self.factory.admission_changed)
        self._holdings.start()
        for description in self._listen:
            port = await serverFromString(self._reactor, description).listen(self.factory)
            self.ports.append(port)
            self.factory.tuned = tune_listening(port) and (self.factory.tuned or len(self.ports) == 1)
            _log.info("server {key} listens on {address}", key=self._key.public.hex(), address=str(port.getHost()))
        if self._metrics is not None:
            self.metrics_port = await serverFromString(self._reactor, self._metrics).listen(self._status_pages())
            _log.info("/metrics and /health are at {address}", address=str(self.metrics_port.getHost()))
        if self.registration.wanted:
            self.registration.address = self.registration.address or address_of(self.ports[0])
            self.registration.start()
        if self._public_address is not None and self.registration.wanted:
            self._looking = self._look(self._public_address)
        return self.ports

    def _status_pages(self) -> GuardedFactory:
        """What listens for who watches this server; others may find it, too."""

        def refused(_: str) -> None:
            self._status_refused += 1

        metrics = ServerMetrics(self, self.metrics_prefix, [self.factory.relay_seconds])
        return status_site(self._reactor, StatusPages(metrics, self.health), refused)

    def _look(self, address: str) -> Deferred[None]:
        """Whether clients reach this server where its entry says, as far as it can see that itself."""

        def looked(result: Any) -> None:
            self._looking = None
            self.reachable = not isinstance(result, Failure)
            if not self.running or not isinstance(result, Failure):
                return
            _log.warn(
                "this server does not reach itself at its public address {address}: {error}.  Clients are sent there: "
                "is it right, and let through?  (Some networks do not lead back in.)",
                address=address,
                error=str(result.value).rstrip(".") or type(result.value).__name__,
            )

        return look_at_self(self._reactor, address, self._make_visit).addBoth(looked)

    def _make_visit(self, make_user: Callable[[PubKey], Any], failed: Callable[[Any, Failure], None]) -> Link:
        """A link of the family to this server itself."""
        raise NotImplementedError

    def stopService(self) -> Deferred[None]:
        super().stopService()  # type: ignore[no-untyped-call]
        return Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        self.ready.addErrback(lambda _: None)
        self.ready.cancel()
        if self._looking is not None:
            self._looking.cancel()
        self.registration.stop()
        stopping = [maybeDeferred(port.stopListening) for port in self.ports]
        if self.metrics_port is not None:
            stopping.append(maybeDeferred(self.metrics_port.stopListening))
        await DeferredList(stopping, consumeErrors=True)
        self.factory.admission.stop()
        await self._leave()
        try:
            await self.factory.drain().addTimeout(CLOSE_TIMEOUT, self._reactor)
        except TimeoutError:
            _log.info("{count} clients did not leave in time", count=len(self.factory.sessions))
        self._holdings.stop()
        await self._closed()
        await self.registration.close()

    # --- what it says of itself (ServerStatistics) ---

    def by_connections(self) -> dict[str, int]:
        """How many addresses have so many connections."""
        found: dict[str, int] = self.factory.by_connections()
        return found

    def gauges(self) -> dict[str, tuple[str, float]]:
        """What goes up and down."""
        factory = self.factory
        return {
            "connections": ("Connected clients", len(factory.sessions)),
            "available_connections": ("Clients that may still connect", factory.available_connections),
            "handshakes": ("Handshakes under way", factory.handshakes),
            "congested": (
                "Clients that read slower than they are sent to",
                sum(peer.congested for peer in factory.relay.peers),
            ),
            "start_time_seconds": ("When the server started", self._started),
            "queue_bytes": (
                "Bytes that wait for clients to take them",
                sum(peer.port.queued() for peer in factory.relay.peers),
            ),
            "held_bytes": ("Bytes held for clients, at the last look", self.memory.total),
            "memory_limit_bytes": ("Bytes that may be held for clients", self.memory.limit),
            "reachable": (
                "1 when the server reached itself at its public address, 0 when not, -1 when it has not looked",
                -1.0 if self.reachable is None else float(self.reachable),
            ),
            "registered": ("1 when the last POST to discovery was taken", float(self.registration.current)),
        }

    def counters(self) -> dict[str, tuple[str, float]]:
        """What only goes up."""
        relay = self.factory.relay
        hook = self.factory.admission.hook
        return {
            "connections_opened": ("Clients that have connected", self.factory.connections_opened),
            "frames": ("Frames received", relay.frames),
            "frame_bytes": ("Bytes of frames received", relay.frame_bytes),
            "turns_waited": (
                "Reads that went on in a later turn, for others to have theirs",
                self.factory.share.waited,
            ),
            "slowed": ("Times that an address was read later for its frames a second", self.factory.slowed),
            "status_refused": ("Requests and connections for /metrics and /health refused", self._status_refused),
            "memory_given": ("What was given up because too much was held", sum(self.memory.given.values())),
            "admission_unanswered": (
                "Questions to the admission hook without an answer",
                hook.unanswered if hook is not None else 0,
            ),
        }

    def drops(self) -> dict[DropReason, int]:
        """How often each reason occurred."""
        drops: dict[DropReason, int] = self.factory.relay.drops
        return drops


_COUNTED_BY_RELAY = frozenset(
    {
        DropReason.REPLACED,
        DropReason.SEND_BUFFER_FULL,
        DropReason.TOO_MANY_CONNECTIONS,
        DropReason.TOO_MANY_FROM_ADDRESS,
        DropReason.DRAINING,
    }
)
"""Ends of links that are counted where they are decided."""
