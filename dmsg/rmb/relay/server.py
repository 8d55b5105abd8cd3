"""The relay entity: registry, queue, federation, switch, and a port that listens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from twisted.internet.task import LoopingCall, deferLater
from twisted.logger import Logger

from dmsg.base.memory import Memory
from dmsg.net.isolate import isolated
from dmsg.net.listening import ListeningService
from dmsg.net.reactor import Reactor
from dmsg.net.turn import TurnFlush
from dmsg.rmb.envelope.wire import MAX_MESSAGE
from dmsg.rmb.errors import Drop, QueueUnavailable
from dmsg.rmb.registry.cache import CachedRegistry
from dmsg.rmb.registry.service import open_registry
from dmsg.rmb.relay.federation.forward import MAX_ITEMS_SIZE, Federation
from dmsg.rmb.relay.federation.post import Poster
from dmsg.rmb.relay.holdings import SessionHoldings
from dmsg.rmb.relay.limiter import FixedWindow
from dmsg.rmb.relay.metrics import RelayMetrics
from dmsg.rmb.relay.queue.interface import QueueLimits
from dmsg.rmb.relay.queue.redis import RedisQueue
from dmsg.rmb.relay.queue.sqlite import SQLiteQueue
from dmsg.rmb.relay.ranker import PERIOD, Ranker
from dmsg.rmb.relay.rounds import ROUND, Rounds
from dmsg.rmb.relay.rules import Relay
from dmsg.rmb.relay.site import CONNECT_RATE, RelaySite
from dmsg.rmb.relay.switch import MAX_UNFINISHED, Switch
from dmsg.rmb.socket.upgrade import UpgradeResource
from dmsg.rmb.socket.websocket import GOING_AWAY
from dmsg.rmb.twins import token

MAX_SESSIONS = 100_000
"""Sessions of a relay, unless there are fewer descriptors."""
PART = 4
"""Of the limit of memory: so much for messages to other relays, and as much for those that are not whole."""
CLOSE_WAIT = 2.0
"""Seconds that stopping waits for sessions to say good-bye."""

_log = Logger()


@dataclass(frozen=True)
class RelaySettings:
    """What a relay is told.

    :ivar queue: ``sqlite:PATH`` or ``redis://HOST:PORT/DB``.
    :ivar durable: what clients send that will not send it again is in the queue before it is delivered.
    :ivar limit: messages and bytes a minute of each twin, or None.
    :ivar memory: bytes that are held for sessions in memory, in all; None: :func:`~dmsg.base.memory.default_limit`.
    """

    listen: Sequence[str]
    registry: str
    domains: frozenset[str] = frozenset()
    queue: str = "sqlite::memory:"
    limit: tuple[int, int] | None = None
    ranker_period: float = PERIOD
    max_sessions: int = MAX_SESSIONS
    max_token_ttl: int | None = token.MAX_TTL
    proxied: bool = False
    connect_rate: float = CONNECT_RATE
    token_reuse: bool = False
    durable: bool = False
    memory: int | None = None
    queue_limits: QueueLimits = field(default_factory=QueueLimits)


async def open_queue(description: str, reactor: Reactor, limits: QueueLimits) -> Any:
    """A queue from what ``--queue`` says.

    :raises DmsgError: unknown, cannot be opened, or Redis does not answer.
    """
    kind, _, rest = description.partition(":")
    if kind == "redis":
        return await RedisQueue.open(reactor, description, limits)
    if kind == "sqlite" and rest:
        return SQLiteQueue(rest, reactor, limits)
    raise QueueUnavailable(f"{description[:80]!r} is neither sqlite:PATH nor redis://HOST:PORT")


class RmbRelay(ListeningService):
    """A relay.

    :param registry: instead of the one that the settings name.
    :ivar ready: fires with the listening ports.
    :ivar switch: sessions and messages, once it is ready.
    """

    name = "rmb-relay"
    listens_as = "relay"

    def __init__(
        self,
        reactor: Reactor,
        settings: RelaySettings,
        *,
        registry: Any = None,
        wall_clock: Callable[[], float] = time.time,
        random: Random | None = None,
    ) -> None:
        super().__init__(reactor, settings.listen)
        self.settings = settings
        self._given_registry = registry
        self._wall_clock = wall_clock
        self._random = random or Random()
        self.switch: Switch | None = None
        self._queue: Any = None
        self._registry: CachedRegistry | None = None
        self._federation: Federation | None = None
        self._round: LoopingCall | None = None
        self.memory = Memory(settings.memory)
        self._holdings: SessionHoldings | None = None
        self._draining = False

    def startService(self) -> None:
        self._draining = False
        super().startService()

    async def _start(self) -> None:
        settings = self.settings
        relay = Relay(settings.domains, FixedWindow(*settings.limit) if settings.limit else None)
        self._queue = await open_queue(settings.queue, self._reactor, settings.queue_limits)
        registry = self._given_registry or open_registry(settings.registry, self._reactor)
        self._registry = CachedRegistry(registry, self._reactor)
        # a relay that is reached by http: is one on a developer's machine
        plain = any(domain.startswith("http:") for domain in settings.domains)
        self._federation = Federation(
            self._reactor,
            Poster(self._reactor, plain=plain),
            Ranker(settings.ranker_period, self._random),
            self._registry,
            self._queue,
            self._wall_clock,
            settings.domains,
            self._random,
            max_size=min(MAX_ITEMS_SIZE, self.memory.limit // PART),
        )
        self.switch = switch = Switch(
            self._reactor,
            relay,
            self._registry,
            self._queue,
            self._federation,
            self._wall_clock,
            durable=self.settings.durable,
            # two of the largest messages at least, or nobody could send one
            max_unfinished=min(MAX_UNFINISHED, max(2 * MAX_MESSAGE, self.memory.limit // PART)),
        )
        self._holdings = SessionHoldings(self._reactor, switch, self.memory)
        self._holdings.start()
        metrics = RelayMetrics(switch, self.memory)
        page = RelaySite(
            switch,
            UpgradeResource(self._reactor, TurnFlush(self._reactor)),
            self._reactor,
            metrics=metrics.render,
            health=self._health,
            admits=self._admits,
            proxied=settings.proxied,
            max_token_ttl=settings.max_token_ttl,
            connect_rate=settings.connect_rate,
            token_reuse=settings.token_reuse,
        )
        await self._listen(page.make_site())
        self._round = LoopingCall(Rounds(self._reactor, switch).round)
        self._round.clock = self._reactor
        self._round.start(ROUND, now=True)

    def _admits(self) -> Drop | None:
        if self._draining:
            return Drop.DRAINING
        assert self.switch is not None
        return Drop.TOO_MANY_SESSIONS if len(self.switch.sessions) >= self.settings.max_sessions else None

    def _health(self) -> dict[str, Any]:
        assert self.switch is not None
        return {
            "status": "draining" if self._draining else "ok",
            "sessions": len(self.switch.sessions),
            "domains": sorted(self.settings.domains),
        }

    async def _stop(self) -> None:
        """Take nobody new, say good-bye, keep what was not confirmed."""
        self._draining = True
        await self._stop_listening()
        if self._holdings is not None:
            self._holdings.stop()
        if self._round is not None and self._round.running:
            self._round.stop()
        if self.switch is not None:
            self.switch.presence.stop()
            for session in list(self.switch.sessions.values()):
                isolated(session.end, Drop.DRAINING, GOING_AWAY, "the relay is shutting down")
            await deferLater(self._reactor, 0.05)
        if self._federation is not None:
            await self._federation.stop()
        if self._queue is not None:
            await self._queue.close()
        if self._registry is not None and self._given_registry is None:
            await self._registry.close()
