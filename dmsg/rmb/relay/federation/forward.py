"""Forwarding of messages to the relays of their receivers: attempts, retries, and a refusal when all attempts fail.

There are three entry points. :meth:`Federation.forward` sends messages whose receiver does not use this relay.
:meth:`~dmsg.rmb.relay.federation.attempts.RelayRequests.offer` asks once whether the receiver's session is connected to
another relay. :meth:`~dmsg.rmb.relay.federation.offers.Offers.add` offers messages that are stored here to the other
relays of their receiver.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from twisted.internet.defer import CancelledError
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.base.bounded_tables import decrement
from dmsg.rmb.envelope.texts import EXPIRED, NO_RELAY, OFFLINE, REMOTE
from dmsg.rmb.errors import EnvelopeError, TwinNotFound
from dmsg.rmb.registry.interface import TwinRegistry
from dmsg.rmb.relay.delivery import SPILL_AFTER
from dmsg.rmb.relay.federation.attempts import (
    RETRY_FIRST,
    RETRY_MOST,
    SHARE_DIVISOR,
    AttemptOutcome,
    RelayPoster,
    RelayRequests,
)
from dmsg.rmb.relay.federation.offers import Offers
from dmsg.rmb.relay.federation.slots import Slots
from dmsg.rmb.relay.mail import Header, Mail
from dmsg.rmb.relay.queue.interface import BATCH, FEDERATION, QueuedMessage, QueueId, RelayQueue
from dmsg.rmb.relay.ranker import Ranker

MAX_PASSES = 3
"""Number of times that all relays of a twin are tried in turn before the message waits for a retry."""
PASS_DELAY = 0.1
"""Seconds between the first and the second pass over the relays. The pause before the third pass is twice as long. A
random time of up to half the pause is added to each pause."""
MAX_ITEMS, MAX_ITEMS_SIZE = 10_000, 256 * 1024 * 1024
"""Maximum number, and bytes, of messages that are being forwarded. Further messages are only put into the queue."""
TAKE_UP_BELOW = MAX_ITEMS // SHARE_DIVISOR - BATCH
"""While fewer messages than this are being forwarded, the federation queue is read again at once, without waiting for
the next periodic check. A whole batch from the queue can then be added without exceeding the limit of one sender, even
if one twin sent all these messages."""
PASSED_OVER_FOR = 10.0
"""Maximum seconds until the queue is read again from its beginning, if messages in it were skipped. A message is
skipped while its sender has too many messages that are being forwarded.

The queue is read again earlier when ``BATCH`` messages have finished since the last such read.
"""
MAX_FINISHED_IDS = 1000
"""Number of finished messages whose ids are remembered. A read of the queue that began before they finished may still
return them."""
FULL = "too many messages for other relays"

_log = Logger()


@dataclass(slots=True, eq=False)
class _Item:
    """Message that is being forwarded to another relay."""

    mail: Mail
    relays: frozenset[str]
    done: Callable[[Mail, str | None], None]
    since: float
    queue_id: QueueId | None = None
    keeping: bool = False
    running: bool = False
    is_offered: bool = False
    answered: float | None = None
    """Seconds that a relay took to answer in the last attempt; None if no relay answered."""
    next: float = 0.0
    delay: float = field(default_factory=lambda: RETRY_FIRST)

    def record_answer(self, seconds: float) -> None:
        """Record that a relay answered after this many seconds."""
        self.answered = seconds


class Federation:
    """Forwarding of messages to other relays.

    :ivar asking: requests to other relays. The offers of stored messages use the same object.
    :param is_connected: function that returns whether the session with this name is connected here now.
    :param on_finished: callback for messages that were read from the queue. Its arguments are the message and the text
        of an error, or None if a relay accepted the message.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        poster: RelayPoster,
        ranker: Ranker,
        registry: TwinRegistry,
        queue: RelayQueue,
        wall_clock: Callable[[], float],
        domains: frozenset[str],
        is_connected: Callable[[str], bool],
        on_finished: Callable[[Mail, str | None], None],
        random: Random | None = None,
        max_size: int = MAX_ITEMS_SIZE,
    ) -> None:
        """:param max_size: maximum bytes of the messages that are being forwarded."""
        self._max_size = max_size
        self._reactor = reactor
        self._registry = registry
        self._queue = queue
        self._now = wall_clock
        self._domains = domains
        self._on_finished = on_finished
        self._random = random or Random()
        self._slots: Slots[_Item] = Slots(poster.takes_many)
        self.asking = RelayRequests(reactor, poster, ranker, self._slots, registry)
        self.offers = Offers(reactor, self.asking, queue, wall_clock, max_size // SHARE_DIVISOR, is_connected)
        self._size = 0
        self._items_of: Counter[int] = Counter()
        self._size_of: Counter[int] = Counter()
        self._passed_over = False
        """Whether a message in the queue was skipped, because its sender had too many messages that were being
        forwarded."""
        self._again_at = 0.0
        self._finished_count = self._finished_before = 0
        """Number of messages that have finished. ``_finished_before`` is the value when the queue was last read from
        its beginning."""
        self._items: dict[_Item, None] = {}
        self._by_queue_id: dict[QueueId, _Item] = {}
        self._finished_ids: deque[QueueId] = deque(maxlen=MAX_FINISHED_IDS)
        self._taking = False
        self._has_backlog = False
        """Whether the queue may contain more messages that can be forwarded now."""

    def __len__(self) -> int:
        return len(self._items)

    # --- messages for other relays ---

    def forward(
        self,
        mail: Mail,
        relays: frozenset[str],
        done: Callable[[Mail, str | None], None],
    ) -> None:
        """Send a message to one of ``relays``.

        :param done: callback. Its arguments are the message and the text of an error, or None if a relay accepted the
            message.
        """
        item = _Item(mail, relays, done, self._reactor.seconds())
        if not self._has_room(item):
            self._store_only(item)
            return
        self._add(item)
        # The sender never sends a message again, so the message must be stored before it counts as accepted.
        if mail.owner is not None and mail.owner.durable:
            self._store(item)
        self._make_ready(item)

    def _store_only(self, item: _Item) -> None:
        """Store a message in the queue only, because too many are being forwarded. It is read back when there are
        fewer."""

        mail = item.mail

        def kept(number: QueueId) -> None:
            self._has_backlog = True
            mail.settle()

        keeping = self._queue.append(FEDERATION, mail.data, mail.until, mail.sender)
        keeping.addCallbacks(kept, lambda failure: item.done(mail, FULL))

    def _has_room(self, item: _Item) -> bool:
        """Whether one more message may be forwarded now. Two limits apply: the limit of all messages, and the limit of
        the message's sender, which is a ``SHARE_DIVISOR``-th of the first."""
        sender = item.mail.sender
        return (
            len(self._items) < MAX_ITEMS
            and self._size < self._max_size
            and self._items_of[sender] < MAX_ITEMS // SHARE_DIVISOR
            and self._size_of[sender] < self._max_size // SHARE_DIVISOR
        )

    def _add(self, item: _Item) -> None:
        self._items[item] = None
        self._size += len(item.mail.data)
        self._items_of[item.mail.sender] += 1
        self._size_of[item.mail.sender] += len(item.mail.data)

    def _take_from_queue(self) -> None:
        """Read messages from the queue, unless too many are being forwarded already."""
        if not self._taking and len(self._items) < MAX_ITEMS // 2 and self._size < self._max_size // 2:
            if not self._has_backlog and self._may_begin_again():
                self._passed_over = False
                self._again_at = self._reactor.seconds() + PASSED_OVER_FOR
                self._finished_before = self._finished_count
                self._queue.release_federation()
            self._taking = True
            self._queue.take_federation().addCallbacks(self._on_batch, lambda _: None).addBoth(self._taking_ended)

    def _may_begin_again(self) -> bool:
        """Whether to read the queue again from its beginning, because of skipped messages."""
        return self._passed_over and (
            self._reactor.seconds() >= self._again_at or self._finished_count - self._finished_before >= BATCH
        )

    def _make_ready(self, item: _Item) -> None:
        self._slots.add(item, item.relays, item.mail.sender)
        self._next()

    def _next(self) -> None:
        """Begin as many attempts as the limits allow."""
        while not self.asking.stopped and (item := self._slots.take()) is not None:
            if item in self._items and not item.running:
                item.running, item.is_offered, item.answered = True, False, None
                self.asking.run(self._attempt(item)).addBoth(self._attempted, item)
            else:
                self._slots.release(item)

    def _attempted(self, result: object, item: _Item) -> None:
        if item.is_offered:
            self._slots.finish(item, item.answered)
        else:
            self._slots.release(item)
        item.running = False
        if isinstance(result, Failure) and not result.check(CancelledError):
            _log.failure("unhandled error while a message was forwarded to another relay", result)
            self._schedule_retry(item)
        self._next()

    def sizes(self) -> dict[int, int]:
        """Return, for each sending twin, the number of bytes of its messages that are being forwarded."""
        return dict(self._size_of)

    def give_up(self, sender: int) -> None:
        """Drop all messages of a twin, and notify the twin. Messages with an attempt in progress are not dropped."""
        for item in [one for one in self._items if not one.running and one.mail.sender == sender]:
            self._finish(item, FULL)

    def _schedule_retry(self, item: _Item) -> None:
        """Schedule a retry of a message that no relay accepted. Store the message in the queue until then."""
        item.next = self._reactor.seconds() + item.delay
        # The delay doubles, so that a relay that is down for an hour causes few attempts. Retries end when the message
        # expires.
        item.delay = min(RETRY_MOST, 2 * item.delay)
        self._store(item)

    async def _attempt(self, item: _Item) -> None:
        for number in range(MAX_PASSES):
            if self.asking.stopped:
                return
            if number:
                await deferLater(self._reactor, PASS_DELAY * number * (1 + self._random.random() / 2))
            if item.mail.header.is_over(self._now()):
                self._finish(item, EXPIRED)
                return
            item.is_offered = True
            outcome = await self.asking.ask_all(
                item.mail.data, item.relays, only_connected=False, on_answered=item.record_answer
            )
            if outcome is not AttemptOutcome.FAILED:
                self._finish(item, None if outcome is AttemptOutcome.TAKEN else REMOTE + OFFLINE)
                return
        self._schedule_retry(item)

    def _finish(self, item: _Item, error: str | None) -> None:
        # The end of an attempt, the expiry and :meth:`give_up` may all finish a message, but only the first counts.
        if self._items.pop(item, self) is self:
            return
        self._size -= len(item.mail.data)
        sender = item.mail.sender
        decrement(self._items_of, sender)
        decrement(self._size_of, sender, len(item.mail.data))
        if item.queue_id is not None:
            self._by_queue_id.pop(item.queue_id, None)
            # A read of the queue in progress may still return this message, so its id is remembered.
            self._finished_ids.append(item.queue_id)
            self._queue.remove(FEDERATION, [item.queue_id])
        item.done(item.mail, error)
        self._finished_count += 1
        if len(self._items) < TAKE_UP_BELOW and (self._has_backlog or self._may_begin_again()):
            self._take_from_queue()

    def _store(self, item: _Item) -> None:
        """Store a message in the queue, so that it survives the end of the process."""
        if item.queue_id is not None or item.keeping:
            return
        item.keeping = True
        mail = item.mail

        def kept(number: QueueId) -> None:
            item.queue_id = number
            if item in self._items:
                self._by_queue_id[number] = item
            else:
                self._finished_ids.append(number)
                self._queue.remove(FEDERATION, [number])
            mail.settle()

        def done(result: object) -> None:
            item.keeping = False

        keeping = self._queue.append(FEDERATION, mail.data, mail.until, mail.sender)
        keeping.addCallback(kept).addErrback(lambda _: None).addBoth(done)

    def round(self) -> None:
        """Move messages that could not be delivered for some seconds to the queue, retry those whose delay is over, and
        read further ones from the queue. Called every second."""
        now = self._reactor.seconds()
        self.offers.round()
        for item in list(self._items):
            if item.running or item.next > now:
                if now - item.since >= SPILL_AFTER:
                    self._store(item)
            elif item.next:
                item.next = 0.0
                self.asking.run(self._requeue(item)).addErrback(self._failed)
        self._take_from_queue()

    def _failed(self, failure: Failure) -> None:
        if not failure.check(CancelledError):
            _log.failure("unhandled error while a message for another relay was retried", failure)

    async def _requeue(self, item: _Item) -> None:
        """Retry a message with the relays that the registry lists for the receiver now."""
        if item.mail.header.is_over(self._now()):
            self._finish(item, EXPIRED)
            return
        try:
            twin = await self._registry.get(item.mail.destination.twin)
        except TwinNotFound:
            self._finish(item, f"{REMOTE}self twin not found!")
            return
        except Exception:
            item.next = self._reactor.seconds() + item.delay
            return
        # The receiver may have changed its relays since the message was accepted.
        item.relays = twin.relays - self._domains - {""}
        if not item.relays:
            self._finish(item, REMOTE + NO_RELAY.removeprefix("relay info "))
            return
        self._make_ready(item)

    def _on_batch(self, batch: list[QueuedMessage]) -> None:
        self._has_backlog = bool(batch)
        for queued in batch:
            # The read may have begun before the message was finished, so it may return a finished message.
            if queued.id in self._by_queue_id or queued.id in self._finished_ids:
                continue
            try:
                header = Header.read(queued.data)
            except EnvelopeError:
                self._queue.remove(FEDERATION, [queued.id])
                continue
            mail = Mail(queued.data, header.until(self._now()), None, header)
            item = _Item(mail, frozenset(), self._on_finished, self._reactor.seconds())
            item.queue_id = queued.id
            if self._has_room(item):
                self._add(item)
                self._by_queue_id[queued.id] = item
                self.asking.run(self._requeue(item)).addErrback(self._failed)
            else:
                self._passed_over = True

    def _taking_ended(self, result: object) -> None:
        self._taking = False

    # --- stopping ---

    async def stop(self) -> None:
        """Store the messages that are being forwarded, and close all connections."""
        # No attempt may begin while the messages are being stored.
        self.asking.stopped = True
        for item in list(self._items):
            self._store(item)
        await self.asking.stop()
