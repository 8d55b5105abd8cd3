"""Offers of stored messages to the other relays of their receiver.  The receiver's session may be connected to one of
those relays."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from dmsg.rmb.relay.federation.attempts import RETRY_FIRST, RETRY_MOST, SHARE_DIVISOR, AttemptOutcome, RelayRequests
from dmsg.rmb.relay.queue.interface import QueuedMessage, QueueId, RelayQueue
from dmsg.rmb.twins.address import Session

MAX_OFFERED = 10_000
"""Maximum number of stored messages that are offered at a time. Further messages are only stored, until their receiver
connects here."""


class _Offers:
    """Messages that are stored for one session and are offered to the other relays of its twin."""

    __slots__ = ("delay", "items", "next", "relays", "running")

    def __init__(self, relays: frozenset[str]) -> None:
        self.relays = relays
        self.items: OrderedDict[QueueId, tuple[bytes, float]] = OrderedDict()
        self.next = 0.0
        self.delay = RETRY_FIRST
        self.running = False


class Offers:
    """Stored messages that one relay offers to other relays, grouped by receiving session.

    :param is_connected: function that returns whether the session with this name is connected here now.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        asking: RelayRequests,
        queue: RelayQueue,
        wall_clock: Callable[[], float],
        max_size: int,
        is_connected: Callable[[str], bool],
    ) -> None:
        """:param max_size: maximum total bytes of the messages that are offered to other relays at the same time."""
        self._reactor = reactor
        self._asking = asking
        self._queue = queue
        self._now = wall_clock
        self._max_size = max_size
        self._offers: dict[str, _Offers] = {}
        self.count = 0
        self.size = 0
        self._is_connected = is_connected

    def round(self) -> None:
        """Offer the next message of each session whose delay before the next attempt is over. Called every second."""
        now = self._reactor.seconds()
        for session in list(self._offers):
            self._offer_next(session, now)

    def add(self, session: str, queued: QueuedMessage, relays: frozenset[str], until: float) -> None:
        """Offer a stored message to other relays until one accepts it, it expires, or the session connects here."""
        offers = self._offers.get(session)
        of_session = len(offers.items) if offers is not None else 0
        if (
            self.count >= MAX_OFFERED
            or of_session >= MAX_OFFERED // SHARE_DIVISOR
            or self.size + len(queued.data) > self._max_size
        ):
            return  # The message is not offered. It stays in the queue until its receiver connects here.
        if offers is None:
            offers = self._offers[session] = _Offers(relays)
        offers.relays = relays
        offers.items[queued.id] = (queued.data, until)
        self.count += 1
        self.size += len(queued.data)
        self._offer_next(session, self._reactor.seconds())

    def _offer_next(self, session: str, now: float) -> None:
        offers = self._offers[session]
        if offers.running or offers.next > now or self._asking.stopped:
            return
        while offers.items and next(iter(offers.items.values()))[1] <= self._now():
            self._forget_offer(offers, next(iter(offers.items)))
        if not offers.items or self._is_connected(session):
            # These offers are no longer needed: all messages are in the queue, too, and the session's delivery reads
            # them from it.
            for number in list(offers.items):
                self._forget_offer(offers, number)
            del self._offers[session]
            return
        # Only one message is offered at a time. So the receiver gets its messages in order, and an absent receiver
        # costs only one request per retry.
        number, (data, _) = next(iter(offers.items.items()))
        offers.running = True

        def done(outcome: AttemptOutcome | Failure) -> None:
            offers.running = False
            if outcome is AttemptOutcome.TAKEN:
                self._forget_offer(offers, number)
                self._queue.remove(session, [number])
                offers.delay, offers.next = RETRY_FIRST, 0.0
                if self._offers.get(session) is offers:
                    self._offer_next(session, self._reactor.seconds())
            else:
                offers.next = self._reactor.seconds() + offers.delay
                offers.delay = min(RETRY_MOST, 2 * offers.delay)

        self._asking.offer(data, offers.relays, Session.parse(session).twin).addBoth(done)

    def _forget_offer(self, offers: _Offers, number: QueueId) -> None:
        offered = offers.items.pop(number, None)
        if offered is not None:
            self.count -= 1
            self.size -= len(offered[0])
