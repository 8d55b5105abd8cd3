"""Asking other relays: each once, the best first, as many at a time as may be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from enum import Enum, auto
from typing import Any, Protocol, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater

from dmsg.base.bounded_tables import uncount
from dmsg.rmb.registry.interface import TwinRegistry
from dmsg.rmb.relay.federation.slots import Slots
from dmsg.rmb.relay.federation.unverified import Doubts
from dmsg.rmb.relay.ranker import Ranker

RETRY_FIRST, RETRY_MOST = 2.0, 30.0
"""Seconds before a message that has to wait is tried again; doubled each time."""
PART = 8
"""Of what is under way for one sender, and of what is offered for one session, the so-manieth part of all."""
OFFER_PATIENCE, OFFER_RETRY = 2.0, 0.1
"""Seconds for which an offer waits until there is room for it, and between looks."""
MAX_COUNTED = 1000
"""Relays of which successes and errors are counted apart; all others are counted together."""
MAX_OFFERS, MAX_OFFERS_OF_TWIN = 128, 16
"""Messages that are offered at once, in all, and of one twin."""
MAX_WAITING = 10_000
"""Offers that wait for room; of one more nobody is asked."""

_T = TypeVar("_T")


class Outcome(Enum):
    """What one or several relays said."""

    TAKEN = auto()
    REFUSED = auto()
    """All that answered refused it for good."""
    FAILED = auto()
    """At least one did not answer, or may say something else later."""


class RelayPoster(Protocol):
    """Sender of messages to other relays, as :class:`~dmsg.rmb.relay.federation.post.Poster`."""

    def takes_many(self, relay: str) -> bool:
        """Whether several messages for the relay leave in one request."""

    def post(self, relay: str, data: bytes, *, only_connected: bool) -> Awaitable[int]:
        """Return the status that the relay answers; 0 when the relay does not answer."""

    def close(self) -> Awaitable[object]:
        """Close the connections that are kept."""


class Asking:
    """What all of one relay's messages to others have in common.

    :ivar success: messages that each relay took; ``error`` those it did not.
    :ivar not_offered: messages that nobody was asked to take, because too many were offered.
    """

    def __init__(
        self, reactor: IReactorTime, poster: RelayPoster, ranker: Ranker, slots: Slots[Any], registry: TwinRegistry
    ) -> None:
        self._reactor = reactor
        self._poster = poster
        self._ranker = ranker
        self._slots = slots
        self._doubts = Doubts(reactor.seconds, registry)
        self._offering: dict[bool, Counter[int]] = {False: Counter(), True: Counter()}
        self._waiting = 0
        self._under_way: set[Deferred[Any]] = set()
        self.stopped = False
        self.not_offered = 0
        self.success: Counter[str] = Counter()
        self.error: Counter[str] = Counter()

    def run(self, coroutine: Coroutine[Deferred[object], object, _T]) -> Deferred[_T]:
        """Begin something that ends with the relay."""
        running = Deferred.fromCoroutine(coroutine)
        self._under_way.add(running)

        def done(result: _T) -> _T:
            self._under_way.discard(running)
            return result

        return running.addBoth(done)

    def offer(self, data: bytes, relays: Iterable[str], whose: int) -> Deferred[Outcome]:
        """Ask each relay once, the best first, whether it has the session connected.

        Where too much is offered it waits a little; then nobody is asked, which is as if nobody had answered.

        :param whose: the twin that sent it, or that it is for.
        """
        return self.run(self._offer(data, frozenset(relays), whose))

    async def _offer(self, data: bytes, relays: frozenset[str], whose: int) -> Outcome:
        # relays that answer have places of their own
        offering = self._offering[self._slots.is_quick(relays)]
        until = self._reactor.seconds() + OFFER_PATIENCE
        while offering.total() >= MAX_OFFERS or offering[whose] >= MAX_OFFERS_OF_TWIN:
            if self._reactor.seconds() >= until or self._waiting >= MAX_WAITING:
                self.not_offered += 1
                return Outcome.FAILED
            self._waiting += 1
            try:
                await deferLater(self._reactor, OFFER_RETRY)
            finally:
                self._waiting -= 1
        offering[whose] += 1
        try:
            began = self._reactor.seconds()
            outcome = await self.ask_all(data, relays, only_connected=True)
            failed = outcome is Outcome.FAILED
            self._slots.learn(relays, None if failed else self._reactor.seconds() - began)
            return outcome
        finally:
            uncount(offering, whose)

    async def ask_all(
        self,
        data: bytes,
        relays: Iterable[str],
        *,
        only_connected: bool,
        answered: Callable[[float], None] = lambda seconds: None,
    ) -> Outcome:
        """:param answered: told how many seconds one took that said anything, whatever it was: it is there."""
        failed = False
        if await self._doubts.refuses(data):
            return Outcome.REFUSED
        for relay in self._ranker.order(relays, self._reactor.seconds()):
            if self.stopped:
                return Outcome.FAILED
            began = self._reactor.seconds()
            code = await self._poster.post(relay, data, only_connected=only_connected)
            if code:
                answered(self._reactor.seconds() - began)
            self._doubts.answered(data, code)
            if code == 202:
                self._count(self.success, relay)
                return Outcome.TAKEN
            self._count(self.error, relay)
            # too many requests, and what a proxy says, may be another thing later
            if not 400 <= code < 500 or code in (408, 425, 429):
                failed = True
                self._ranker.downvote(relay, self._reactor.seconds())
        return Outcome.FAILED if failed else Outcome.REFUSED

    def _count(self, counter: Counter[str], relay: str) -> None:
        """Twins can list any number of relays; there is not a line of metrics for each."""
        known = relay in counter or len(counter) < MAX_COUNTED
        counter[relay if known else "other"] += 1

    async def stop(self) -> None:
        """End what is under way, and all connections."""
        self.stopped = True
        for running in list(self._under_way):
            running.addErrback(lambda _: None)
            running.cancel()
        await self._poster.close()
