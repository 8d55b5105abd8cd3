"""Relay entity, which consists of a registry, a queue, the federation, a switch and a listening port."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from twisted.internet.interfaces import IListeningPort
from twisted.internet.task import LoopingCall, deferLater
from twisted.logger import Logger

from dmsg.base.memory import Memory
from dmsg.net.deadlines import wait_until
from dmsg.net.flush import TurnFlush
from dmsg.net.isolate import call_isolated
from dmsg.net.listening import ListeningService
from dmsg.net.reactor import Reactor
from dmsg.pages.port import StatusPort
from dmsg.rmb.envelope.wire import MAX_MESSAGE
from dmsg.rmb.errors import Drop
from dmsg.rmb.registry.cache import CachedRegistry
from dmsg.rmb.registry.interface import TwinRegistry
from dmsg.rmb.registry.service import open_registry
from dmsg.rmb.relay.federation.forward import MAX_ITEMS_SIZE, Federation
from dmsg.rmb.relay.federation.post import Poster
from dmsg.rmb.relay.holdings import SessionHoldings
from dmsg.rmb.relay.limiter import FixedWindow
from dmsg.rmb.relay.metrics import RelayMetrics
from dmsg.rmb.relay.periodic import ROUND_INTERVAL, PeriodicChecks
from dmsg.rmb.relay.queue.interface import QueueLimits, RelayQueue
from dmsg.rmb.relay.queue.redis import RedisQueue
from dmsg.rmb.relay.queue.sqlite import SQLiteQueue
from dmsg.rmb.relay.ranker import Ranker
from dmsg.rmb.relay.rules import Rules
from dmsg.rmb.relay.settings import RelaySettings, check_queue
from dmsg.rmb.relay.site import RelaySite
from dmsg.rmb.relay.status_page import RmbRelayStatus
from dmsg.rmb.relay.switch import MAX_UNFINISHED, Switch
from dmsg.rmb.socket.upgrade import UpgradeResource
from dmsg.rmb.socket.websocket import GOING_AWAY, TRY_LATER

MEMORY_DIVISOR = 4
"""Divisor of the memory limit. Messages to other relays may use 1 / ``MEMORY_DIVISOR`` of the limit, and so may
incomplete messages."""
QUEUE_NOT_WRITABLE = "the queue cannot store messages"
"""Value of ``status`` in ``/health`` while the queue cannot be written, for example because the disk is full."""
CLOSE_WAIT = 2.0
"""Maximum seconds that the relay waits, when it stops, for sessions to confirm their messages. Unconfirmed messages
stay in the queues."""
CHECK_INTERVAL = 0.02
"""Seconds between two checks whether sessions have confirmed their messages, while the relay stops."""

_log = Logger()


async def open_queue(description: str, reactor: Reactor, limits: QueueLimits, *, durable: bool = False) -> RelayQueue:
    """Open the queue that ``--queue`` describes.

    :param durable: whether messages in an SQLite file survive a power cut; Redis has its own settings for that.
    :raises DmsgError: the description is invalid, the file cannot be opened, or Redis does not answer.
    """
    kind, _, rest = check_queue(description).partition(":")
    if kind == "redis":
        return await RedisQueue.open(reactor, description, limits)
    return SQLiteQueue(rest, reactor, limits, durable=durable)


@dataclass(frozen=True)
class _Running:
    """Objects that exist once a relay has started."""

    queue: RelayQueue
    registry: CachedRegistry
    federation: Federation
    switch: Switch
    holdings: SessionHoldings
    round: LoopingCall


class RmbRelay(ListeningService):
    """Relay of the message bus.

    :param registry: registry to use instead of the one in the settings.
    :ivar ready: Deferred that fires with the listening ports.
    :ivar switch: switch of the relay; None until the relay has started.
    """

    name = "rmb-relay"
    listens_as = "relay"

    def __init__(
        self,
        reactor: Reactor,
        settings: RelaySettings,
        *,
        registry: TwinRegistry | None = None,
        wall_clock: Callable[[], float] | None = None,
        random: Random | None = None,
    ) -> None:
        super().__init__(reactor, settings.listen)
        self.settings = settings
        self._given_registry = registry
        self._wall_clock = wall_clock or time.time
        self._random = random or Random()
        self._running: _Running | None = None
        self.memory = Memory(settings.memory)
        self._draining = False
        self._status: StatusPort | None = None
        self.started = 0.0

    def startService(self) -> None:
        self._draining = False
        super().startService()

    async def _start(self) -> None:
        self.started = self._wall_clock()
        settings = self.settings
        queue = await open_queue(settings.queue, self._reactor, settings.queue_limits, durable=settings.durable)
        try:
            self._running = running = self._make(queue)
        except BaseException:
            # If, for example, the registry cannot be opened, the queue must not stay open.
            await queue.close()
            raise
        running.holdings.start()
        metrics = RelayMetrics(running.switch, self.memory).render
        shown = RmbRelayStatus(self, running.switch)
        token = self.settings.page_token
        self._status = StatusPort(self._reactor, self.settings.metrics, token, shown, lambda: metrics, self.health)
        await self._status.start()
        await self._listen(self._page(running.switch, metrics).make_site())
        running.round.clock = self._reactor
        running.round.start(ROUND_INTERVAL, now=True)

    @property
    def switch(self) -> Switch | None:
        """Switch of the relay, with its sessions; None until the relay has started."""
        return None if self._running is None else self._running.switch

    @property
    def _running_parts(self) -> _Running:
        assert self._running is not None
        return self._running

    def _make(self, queue: RelayQueue) -> _Running:
        """Create the parts of a relay that use an open queue."""
        settings = self.settings
        registry = CachedRegistry(
            self._given_registry or open_registry(settings.registry, self._reactor), self._reactor
        )
        # Only a relay on a developer's machine has an http: URL. So only such a relay may send to relays with http:
        # URLs.
        plain = any(domain.startswith("http:") for domain in settings.domains)
        make_federation = partial(
            Federation,
            self._reactor,
            Poster(self._reactor, plain=plain),
            Ranker(settings.ranker_period, self._random),
            registry,
            queue,
            self._wall_clock,
            settings.domains,
            random=self._random,
            max_size=min(MAX_ITEMS_SIZE, self.memory.limit // MEMORY_DIVISOR),
        )
        switch = Switch(
            self._reactor,
            Rules(settings.domains, FixedWindow(*settings.limit) if settings.limit else None),
            registry,
            queue,
            make_federation,
            self._wall_clock,
            durable=settings.durable,
            # The limit must allow two messages of the maximum size. Otherwise nobody could send such a message.
            max_unfinished=min(MAX_UNFINISHED, max(2 * MAX_MESSAGE, self.memory.limit // MEMORY_DIVISOR)),
        )
        holdings = SessionHoldings(self._reactor, switch, self.memory)
        return _Running(
            queue,
            registry,
            switch.federation,
            switch,
            holdings,
            LoopingCall(PeriodicChecks(self._reactor, switch).round),
        )

    @property
    def metrics_port(self) -> IListeningPort | None:
        """Port of the status page, ``/metrics`` and ``/health``; None if there is no separate port."""
        return None if self._status is None else self._status.port

    def _page(self, switch: Switch, metrics: Callable[[], bytes]) -> RelaySite:
        settings = self.settings
        return RelaySite(
            switch,
            UpgradeResource(self._reactor, TurnFlush(self._reactor)),
            self._reactor,
            settings,
            metrics=metrics,
            health=self.health,
            admits=self._admits,
            make_place=self._make_place,
        )

    def _admits(self) -> Drop | None:
        if self._draining:
            return Drop.DRAINING
        switch = self._running_parts.switch
        if len(switch.sessions) < self.settings.max_sessions or switch.presence.can_make_place():
            return None
        return Drop.TOO_MANY_SESSIONS

    def _make_place(self, twin: int) -> bool:
        """Return whether ``twin`` may have another session. At the limit, end a session of the twin with most
        sessions."""
        switch = self._running_parts.switch
        if len(switch.sessions) < self.settings.max_sessions:
            return True
        session = switch.presence.make_place(twin)
        if session is None:
            return False
        session.end(
            Drop.CROWDED_OUT,
            TRY_LATER,
            "the relay is full: a session of the twin with most sessions was ended for another twin",
        )
        return True

    def health(self) -> dict[str, object]:
        """Return the content of ``/health``."""
        switch = self._running_parts.switch
        trouble = switch.queue.trouble
        return {
            "status": "draining" if self._draining else "ok" if trouble is None else QUEUE_NOT_WRITABLE,
            **({} if trouble is None else {"queue": trouble}),
            "sessions": len(switch.sessions),
            "domains": sorted(self.settings.domains),
        }

    async def _stop(self) -> None:
        """Accept no new sessions, end the connected ones, and store the unconfirmed messages."""
        self._draining = True
        try:
            await self._leave()
        finally:
            if self._status is not None:
                await self._status.stop()

    async def _wait_for_confirmations(self, switch: Switch) -> None:
        """Wait until sessions have confirmed their messages. Unconfirmed messages would be delivered a second time."""
        for session in switch.sessions.values():
            session.delivery.request_confirmation()

        def are_confirmed() -> bool:
            return not any(len(one.delivery) and not one.delivery.stalled for one in switch.sessions.values())

        await wait_until(self._reactor, are_confirmed, CLOSE_WAIT, CHECK_INTERVAL)

    async def _leave(self) -> None:
        await self._stop_listening()
        running = self._running
        if running is None:
            return
        await self._wait_for_confirmations(running.switch)
        running.holdings.stop()
        if running.round.running:
            running.round.stop()
        running.switch.limited.log_refused(last=True)
        running.switch.presence.stop()
        for session in list(running.switch.sessions.values()):
            call_isolated(session.end, Drop.DRAINING, GOING_AWAY, "the relay is shutting down")
        await deferLater(self._reactor, 0.05)
        await running.federation.stop()
        await running.queue.close()
        if self._given_registry is None:
            await running.registry.close()
