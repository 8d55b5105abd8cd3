"""Attempts to forward a message: asks other relays one after another, the most reliable first, with limits on the
number of simultaneous attempts."""

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
"""Seconds before the first retry of a message, and maximum seconds between retries. The delay doubles with each
retry."""
SHARE_DIVISOR = 8
"""Divisor of two limits. One sender may have 1 / ``SHARE_DIVISOR`` of all messages that are being forwarded, and one
session may have 1 / ``SHARE_DIVISOR`` of all offers."""
OFFER_TIMEOUT, OFFER_RETRY = 2.0, 0.1
"""Maximum seconds that an offer waits while too many offers are in progress, and seconds between the checks."""
MAX_COUNTED = 1000
"""Maximum number of relays whose successes and errors are counted separately. Those of further relays are counted
together."""
MAX_OFFERS, MAX_OFFERS_OF_TWIN = 128, 16
"""Maximum number of messages that are offered to other relays at once: in all, and for one twin."""
MAX_WAITING = 10_000
"""Maximum number of offers that wait until fewer are in progress. A further offer fails without asking a relay."""

_T = TypeVar("_T")


class AttemptOutcome(Enum):
    """Result of asking one or more relays whether they accept a message."""

    TAKEN = auto()
    REFUSED = auto()
    """All relays answered, and all refused the message for good."""
    FAILED = auto()
    """No relay accepted the message, and a later attempt may succeed: at least one relay gave no answer, or no
    final answer."""


class RelayPoster(Protocol):
    """Interface of an object that sends messages to other relays."""

    def takes_many(self, relay: str) -> bool:
        """Whether several messages for the relay are sent in one request."""

    def post(self, relay: str, data: bytes, *, only_connected: bool) -> Awaitable[int]:
        """Send a message to a relay and return the HTTP status of its answer; 0 if it did not answer."""

    def close(self) -> Awaitable[object]:
        """Close the idle connections."""


class RelayRequests:
    """Requests of one relay to other relays.

    :ivar success: number of messages that each relay accepted.
    :ivar error: number of messages that each relay did not accept.
    :ivar not_offered: number of messages that were offered to no relay, because too many other offers were waiting.
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
        self._under_way: dict[Deferred[Any], None] = {}
        self.stopped = False
        self.not_offered = 0
        self.success: Counter[str] = Counter()
        self.error: Counter[str] = Counter()

    def run(self, coroutine: Coroutine[Deferred[object], object, _T]) -> Deferred[_T]:
        """Start a coroutine. It is cancelled when the relay stops."""
        running = Deferred.fromCoroutine(coroutine)
        self._under_way[running] = None

        def done(result: _T) -> _T:
            self._under_way.pop(running, None)
            return result

        return running.addBoth(done)

    def offer(self, data: bytes, relays: Iterable[str], twin: int) -> Deferred[AttemptOutcome]:
        """Ask each relay once, the most reliable first, to accept a message if the receiving session is connected to
        it.

        While too many offers are in progress, the offer waits up to ``OFFER_TIMEOUT`` seconds. After that it fails as
        if no relay had answered.

        :param twin: twin to whose limit of offers this offer is charged: the sender or the receiver of the message.
        """
        return self.run(self._offer(data, frozenset(relays), twin))

    async def _offer(self, data: bytes, relays: frozenset[str], twin: int) -> AttemptOutcome:
        # Offers to relays that answer quickly have separate limits, so that offers to slow relays cannot delay them.
        offering = self._offering[self._slots.is_quick(relays)]
        until = self._reactor.seconds() + OFFER_TIMEOUT
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

        :param on_answered: callback invoked with the seconds until a relay answered, whether or not it accepted the
            message.
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
            # Proxies and rate limits answer 408, 425 and 429, so a later attempt may succeed.
            if not 400 <= code < 500 or code in (408, 425, 429):
                failed = True
                self._ranker.downvote(relay, self._reactor.seconds())
        return AttemptOutcome.FAILED if failed else AttemptOutcome.REFUSED

    def _count(self, counter: Counter[str], relay: str) -> None:
        """Count an outcome by relay. Twins can name any number of relays, and each would add a line to the metrics, so
        outcomes of further relays are counted as ``other``."""
        known = relay in counter or len(counter) < MAX_COUNTED
        counter[relay if known else "other"] += 1

    async def stop(self) -> None:
        """Cancel the attempts in progress and close all connections."""
        self.stopped = True
        for running in list(self._under_way):
            running.addErrback(lambda _: None)
            running.cancel()
        await self._poster.close()
