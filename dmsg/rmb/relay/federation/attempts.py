"""Attempts to forward a message to other relays: each relay is asked once, the most reliable first, with a limited
number of attempts at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from enum import Enum, auto
from typing import Any, Protocol, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater

from dmsg.base.bounded_tables import decrement
from dmsg.rmb.registry.interface import TwinRegistry
from dmsg.rmb.relay.federation.slots import Slots
from dmsg.rmb.relay.federation.unverified import UnverifiedTwins
from dmsg.rmb.relay.ranker import Ranker

RETRY_FIRST, RETRY_MOST = 2.0, 30.0
"""Seconds before the first retry of a message, and the maximum; the delay doubles with each retry."""
PART = 8
"""Divisor of two limits: the messages under way of one sender, and the offers of one session, may be at most this
fraction of all."""
OFFER_PATIENCE, OFFER_RETRY = 2.0, 0.1
"""Seconds for which an offer waits until fewer offers are under way, and seconds between checks."""
MAX_COUNTED = 1000
"""Maximum number of relays whose successes and errors are counted separately; the rest are counted together."""
MAX_OFFERS, MAX_OFFERS_OF_TWIN = 128, 16
"""Maximum number of messages that are offered to other relays at once: in all, and of one twin."""
MAX_WAITING = 10_000
"""Maximum number of offers that wait until fewer are under way; a further one fails without asking a relay."""

_T = TypeVar("_T")


class AttemptOutcome(Enum):
    """Result of asking one or several relays."""

    TAKEN = auto()
    REFUSED = auto()
    """All relays answered, and all refused the message for good."""
    FAILED = auto()
    """No relay accepted the message, and at least one did not answer or gave an answer that may change later."""


class RelayPoster(Protocol):
    """Interface of an object that sends messages to other relays."""

    def takes_many(self, relay: str) -> bool:
        """Whether several messages for the relay are sent in one request."""

    def post(self, relay: str, data: bytes, *, only_connected: bool) -> Awaitable[int]:
        """Return the status that the relay answers; 0 when the relay does not answer."""

    def close(self) -> Awaitable[object]:
        """Close the idle connections."""


class RelayRequests:
    """Requests of one relay to other relays.

    :ivar success: number of messages that each relay accepted.
    :ivar error: number of messages that each relay did not accept.
    :ivar not_offered: number of messages that were offered to no relay, because too many offers waited.
    """

    def __init__(
        self, reactor: IReactorTime, poster: RelayPoster, ranker: Ranker, slots: Slots[Any], registry: TwinRegistry
    ) -> None:
        self._reactor = reactor
        self._poster = poster
        self._ranker = ranker
        self._slots = slots
        self._unverified = UnverifiedTwins(reactor.seconds, registry)
        self._offering: dict[bool, Counter[int]] = {False: Counter(), True: Counter()}
        self._waiting = 0
        self._under_way: set[Deferred[Any]] = set()
        self.stopped = False
        self.not_offered = 0
        self.success: Counter[str] = Counter()
        self.error: Counter[str] = Counter()

    def run(self, coroutine: Coroutine[Deferred[object], object, _T]) -> Deferred[_T]:
        """Start a coroutine that is cancelled when the relay stops."""
        running = Deferred.fromCoroutine(coroutine)
        self._under_way.add(running)

        def done(result: _T) -> _T:
            self._under_way.discard(running)
            return result

        return running.addBoth(done)

    def offer(self, data: bytes, relays: Iterable[str], twin: int) -> Deferred[AttemptOutcome]:
        """Ask each relay once, the best first, whether it has the session connected.

        An offer above the limit waits for ``OFFER_PATIENCE`` seconds; after that it fails as if no relay had answered.

        :param twin: the twin to whose limit of offers this one is charged: the sender or the receiver of the message.
        """
        return self.run(self._offer(data, frozenset(relays), twin))

    async def _offer(self, data: bytes, relays: frozenset[str], twin: int) -> AttemptOutcome:
        # Relays that answer quickly have a separate limit of attempts, so that slow relays cannot use up all attempts.
        offering = self._offering[self._slots.is_quick(relays)]
        until = self._reactor.seconds() + OFFER_PATIENCE
        while offering.total() >= MAX_OFFERS or offering[twin] >= MAX_OFFERS_OF_TWIN:
            if self._reactor.seconds() >= until or self._waiting >= MAX_WAITING:
                self.not_offered += 1
                return AttemptOutcome.FAILED
            self._waiting += 1
            try:
                await deferLater(self._reactor, OFFER_RETRY)
            finally:
                self._waiting -= 1
        offering[twin] += 1
        try:
            began = self._reactor.seconds()
            outcome = await self.ask_all(data, relays, only_connected=True)
            failed = outcome is AttemptOutcome.FAILED
            self._slots.record_speed(relays, None if failed else self._reactor.seconds() - began)
            return outcome
        finally:
            decrement(offering, twin)

    async def ask_all(
        self,
        data: bytes,
        relays: Iterable[str],
        *,
        only_connected: bool,
        on_answered: Callable[[float], None] = lambda seconds: None,
    ) -> AttemptOutcome:
        """Ask one relay after the other until one accepts the message.

        :param on_answered: called with the seconds that a relay took to answer, whatever it answered: the relay is
            reachable.
        """
        failed = False
        if await self._unverified.refuses(data):
            return AttemptOutcome.REFUSED
        for relay in self._ranker.order(relays, self._reactor.seconds()):
            if self.stopped:
                return AttemptOutcome.FAILED
            began = self._reactor.seconds()
            code = await self._poster.post(relay, data, only_connected=only_connected)
            if code:
                on_answered(self._reactor.seconds() - began)
            self._unverified.answered(data, code)
            if code == 202:
                self._count(self.success, relay)
                return AttemptOutcome.TAKEN
            self._count(self.error, relay)
            # 408, 425 and 429 come from proxies and rate limits, so a later attempt may succeed.
            if not 400 <= code < 500 or code in (408, 425, 429):
                failed = True
                self._ranker.downvote(relay, self._reactor.seconds())
        return AttemptOutcome.FAILED if failed else AttemptOutcome.REFUSED

    def _count(self, counter: Counter[str], relay: str) -> None:
        """Count an outcome by relay, up to a limit: twins can name any number of relays, and each would add a line to
        the metrics."""
        known = relay in counter or len(counter) < MAX_COUNTED
        counter[relay if known else "other"] += 1

    async def stop(self) -> None:
        """Cancel the attempts under way and close all connections."""
        self.stopped = True
        for running in list(self._under_way):
            running.addErrback(lambda _: None)
            running.cancel()
        await self._poster.close()
