"""Scheduling of attempts to send messages to other relays. No I/O.

The number of concurrent attempts is limited. An attempt at a relay that does not answer occupies its slot for seconds,
and anyone can register twins with such relays, under any number of names.  So some slots are reserved for relays that
answered quickly when they were last asked, and each sender has its own limit.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from enum import Enum, auto
from typing import Generic, TypeVar

from attrs import define

from dmsg.base.bounded_tables import decrement, remember

MAX_POSTS = 256
"""Maximum number of concurrent attempts, each for one message."""
MAX_SLOW_POSTS = 192
"""Maximum number of concurrent attempts for relays that are not known to answer quickly."""
MAX_QUICK_OF_SENDER, MAX_SLOW_OF_SENDER = 48, 32
"""Maximum numbers of concurrent attempts for one sender: with quick relays, and with other relays."""
MAX_POSTS_OF_ONE = 16
"""Maximum number of concurrent attempts for one set of relays. While these relays do not answer, the maximum is 1."""
MAX_BATCHED, MAX_BATCHED_OF_ONE, MAX_BATCHED_OF_SENDER = 1024, 512, 256
"""Maximum numbers of concurrent attempts for quick relays that accept batches: in all, for one set of relays, and for
one sender.

They are higher than the other limits, because these attempts share connections.
"""
MAX_QUICK_ANSWER = 1.5
"""Maximum seconds until the answer of a relay that counts as quick.  A receiver that logs each ping takes one second to
confirm a message, and its relay answers only then. The limit is high enough for such relays."""
MAX_RELAY_SETS = 1000
"""Maximum number of sets of relays that are remembered as quick, and as failing."""

Relays = frozenset[str]
Item = TypeVar("Item", bound=Hashable)


class _Kind(Enum):
    """Kinds of relays, in the order in which attempts for them begin."""

    BATCH = auto()
    """Relays that answer quickly and accept batches."""
    QUICK = auto()
    SLOW = auto()
    """Relays that are not known to answer quickly."""


_MAX_OF_RELAYS = {
    _Kind.BATCH: MAX_BATCHED_OF_ONE,
    _Kind.QUICK: MAX_POSTS_OF_ONE,
    _Kind.SLOW: MAX_POSTS_OF_ONE,
}
_MAX_OF_SENDER = {
    _Kind.BATCH: MAX_BATCHED_OF_SENDER,
    _Kind.QUICK: MAX_QUICK_OF_SENDER,
    _Kind.SLOW: MAX_SLOW_OF_SENDER,
}


@define
class _Attempt:
    relays: Relays
    sender: int
    kind: _Kind


class _SenderQueues(Generic[Item]):
    """Queues of waiting items, one for each sender. The senders take turns."""

    def __init__(self) -> None:
        self._queues: OrderedDict[int, deque[tuple[Item, Relays]]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._queues)

    def put(self, item: Item, relays: Relays, sender: int) -> None:
        self._queues.setdefault(sender, deque()).append((item, relays))

    def take(self) -> tuple[Item, Relays, int]:
        sender, queue = next(iter(self._queues.items()))
        item, relays = queue.popleft()
        if queue:
            self._queues.move_to_end(sender)
        else:
            del self._queues[sender]
        return item, relays, sender


class Slots(Generic[Item]):
    """Scheduler of attempts, with the items that are waiting and those with an attempt in progress.

    :param takes_many: function that returns whether a relay accepts several messages in one POST.
    """

    def __init__(self, takes_many: Callable[[str], bool] = lambda relay: False) -> None:
        self._takes_many = takes_many
        self._waiting: dict[_Kind, _SenderQueues[Item]] = {kind: _SenderQueues() for kind in _Kind}
        # Items whose attempts could not begin. The key is the limit that blocks the items: that of a set of relays, or
        # that of a sender.
        self._blocked: dict[Hashable, _SenderQueues[Item]] = {}
        self._attempts: dict[Item, _Attempt] = {}
        self._attempts_by_kind: Counter[_Kind] = Counter()
        self._of_relays: Counter[Relays] = Counter()
        self._of_sender: Counter[tuple[int, _Kind]] = Counter()
        self._quick: OrderedDict[Relays, None] = OrderedDict()
        self._failing: OrderedDict[Relays, None] = OrderedDict()

    def is_quick(self, relays: Relays) -> bool:
        """Whether these relays answered quickly when they were last asked."""
        return relays in self._quick

    def _kind(self, relays: Relays) -> _Kind:
        if relays not in self._quick:
            return _Kind.SLOW
        return _Kind.BATCH if all(map(self._takes_many, relays)) else _Kind.QUICK

    def add(self, item: Item, relays: Relays, sender: int) -> None:
        """Queue an item until its attempt may begin.

        :param sender: number of the twin that sent the message.
        """
        self._waiting[self._kind(relays)].put(item, relays, sender)

    def take(self) -> Item | None:
        """Return an item whose attempt begins now; None if no further attempt may begin."""
        while (kind := self._next_kind()) is not None:
            item, relays, sender = self._waiting[kind].take()
            if item in self._attempts:
                continue
            if kind is not self._kind(relays):
                # Since the item was added, these relays have become quick or slow, or have begun or ceased to accept
                # batches. So the item is queued again for their present kind.
                self.add(item, relays, sender)
                continue
            part = sender, kind
            # An item that exceeds a limit waits in a queue of that limit. It is examined again only when an attempt
            # under the same limit ends.
            if self._of_relays[relays] >= self._limit_of(relays, kind):
                self._block(relays, item, relays, sender)
            elif self._of_sender[part] >= _MAX_OF_SENDER[kind]:
                self._block(part, item, relays, sender)
            else:
                self._begin(item, _Attempt(relays, sender, kind))
                return item
        return None

    def _next_kind(self) -> _Kind | None:
        """Return the first kind of relays that has waiting items and is below its limit of concurrent attempts; None if
        no kind is."""
        count = self._attempts_by_kind
        posts = count[_Kind.QUICK] + count[_Kind.SLOW]
        if self._waiting[_Kind.BATCH] and count[_Kind.BATCH] < MAX_BATCHED:
            return _Kind.BATCH
        if self._waiting[_Kind.QUICK]:
            return _Kind.QUICK if posts < MAX_POSTS else None
        if self._waiting[_Kind.SLOW] and posts < MAX_POSTS and count[_Kind.SLOW] < MAX_SLOW_POSTS:
            return _Kind.SLOW
        return None

    def finish(self, item: Item, seconds: float | None) -> None:
        """Record that the attempt to send an item has ended, and how quickly a relay answered.

        :param seconds: seconds until a relay answered; None if none answered.
        """
        self.record_speed(self._attempts[item].relays, seconds)
        self.release(item)

    def record_speed(self, relays: Relays, seconds: float | None) -> None:
        """Record how quickly relays answered.

        :param seconds: seconds until a relay answered; None if none answered.
        """
        if seconds is None:
            remember(self._failing, relays, None, MAX_RELAY_SETS)
        else:
            self._failing.pop(relays, None)
        if seconds is not None and seconds <= MAX_QUICK_ANSWER:
            remember(self._quick, relays, None, MAX_RELAY_SETS)
        else:
            self._quick.pop(relays, None)

    def release(self, item: Item) -> None:
        """Record that the attempt to send an item has ended. The answer time of the relays is not recorded."""
        attempt = self._attempts.pop(item)
        part = attempt.sender, attempt.kind
        decrement(self._attempts_by_kind, attempt.kind)
        decrement(self._of_relays, attempt.relays)
        decrement(self._of_sender, part)
        # The limit of these relays may have changed, because it depends on how they answered.
        kind = self._kind(attempt.relays)
        self._unblock(attempt.relays, self._limit_of(attempt.relays, kind) - self._of_relays[attempt.relays])
        self._unblock(part, _MAX_OF_SENDER[attempt.kind] - self._of_sender[part])

    def _limit_of(self, relays: Relays, kind: _Kind) -> int:
        return 1 if relays in self._failing else _MAX_OF_RELAYS[kind]

    def _begin(self, item: Item, attempt: _Attempt) -> None:
        self._attempts[item] = attempt
        self._attempts_by_kind[attempt.kind] += 1
        self._of_relays[attempt.relays] += 1
        self._of_sender[attempt.sender, attempt.kind] += 1

    def _block(self, key: Hashable, item: Item, relays: Relays, sender: int) -> None:
        queues = self._blocked.get(key)
        if queues is None:
            queues = self._blocked[key] = _SenderQueues()
        queues.put(item, relays, sender)

    def _unblock(self, key: Hashable, limit: int) -> None:
        queues = self._blocked.get(key)
        for _ in range(limit):
            if not queues:
                break
            self.add(*queues.take())
        if not queues:
            self._blocked.pop(key, None)
