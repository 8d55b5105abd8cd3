"""Which messages for other relays are tried next.  No I/O.

There are so many attempts at once.  A relay that does not answer, or answers
late, keeps one for seconds, and anybody can list such relays, under any number of
names, for his twins: so relays that answered quickly when they were last asked
have some to themselves, and no sender has more than his part.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from enum import Enum, auto
from typing import Generic, TypeVar

from attrs import define

from dmsg.base.bounded_tables import remember, uncount

MAX_POSTS = 256
"""Messages in an attempt at once."""
MAX_SLOW_POSTS = 192
"""Of these for relays that are not known to answer quickly."""
MAX_QUICK_OF_SENDER, MAX_SLOW_OF_SENDER = 48, 32
"""Of one sender, for relays that are known to, and for others."""
MAX_POSTS_OF_ONE = 16
"""Of all for one set of relays; one only, while these do not answer."""
MAX_TOGETHER, MAX_TOGETHER_OF_ONE, MAX_TOGETHER_OF_SENDER = 1024, 512, 256
"""The same for relays that answer quickly and take many messages in one POST: an attempt is no connection there, but
a message whose receiver has not confirmed it yet."""
QUICK = 1.5
"""Seconds in which a relay has answered that is quick.  A receiver that logs each ping confirms after one second."""
REMEMBERED = 1000
"""Sets of relays that are known to be quick, or to fail."""

Relays = frozenset[str]
Item = TypeVar("Item", bound=Hashable)


class _Kind(Enum):
    """Of relays, those first whose messages go first."""

    TOGETHER = auto()
    """They answer quickly, and take many messages at once."""
    QUICK = auto()
    SLOW = auto()
    """It is not known that they answer quickly."""


_MOST_OF_RELAYS = {
    _Kind.TOGETHER: MAX_TOGETHER_OF_ONE,
    _Kind.QUICK: MAX_POSTS_OF_ONE,
    _Kind.SLOW: MAX_POSTS_OF_ONE,
}
_MOST_OF_SENDER = {
    _Kind.TOGETHER: MAX_TOGETHER_OF_SENDER,
    _Kind.QUICK: MAX_QUICK_OF_SENDER,
    _Kind.SLOW: MAX_SLOW_OF_SENDER,
}


@define
class _Attempt:
    relays: Relays
    sender: int
    kind: _Kind


class _Lines(Generic[Item]):
    """What waits, by sender; each has its turn."""

    def __init__(self) -> None:
        self._lines: OrderedDict[int, deque[tuple[Item, Relays]]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._lines)

    def put(self, item: Item, relays: Relays, sender: int) -> None:
        self._lines.setdefault(sender, deque()).append((item, relays))

    def take(self) -> tuple[Item, Relays, int]:
        sender, line = next(iter(self._lines.items()))
        item, relays = line.popleft()
        if line:
            self._lines.move_to_end(sender)
        else:
            del self._lines[sender]
        return item, relays, sender


class Slots(Generic[Item]):
    """Items that wait for an attempt, and those that have one.

    :param takes_many: whether a relay takes many messages in one POST.
    """

    def __init__(self, takes_many: Callable[[str], bool] = lambda relay: False) -> None:
        self._takes_many = takes_many
        self._waiting: dict[_Kind, _Lines[Item]] = {kind: _Lines() for kind in _Kind}
        # what could not begin, by what has no room: relays, or a sender's part
        self._blocked: dict[Hashable, _Lines[Item]] = {}
        self._attempts: dict[Item, _Attempt] = {}
        self._of_kind: Counter[_Kind] = Counter()
        self._of_relays: Counter[Relays] = Counter()
        self._of_sender: Counter[tuple[int, _Kind]] = Counter()
        self._quick: OrderedDict[Relays, None] = OrderedDict()
        self._failing: OrderedDict[Relays, None] = OrderedDict()

    def is_quick(self, relays: Relays) -> bool:
        """They answered quickly when they were last asked."""
        return relays in self._quick

    def _kind(self, relays: Relays) -> _Kind:
        if relays not in self._quick:
            return _Kind.SLOW
        return _Kind.TOGETHER if all(map(self._takes_many, relays)) else _Kind.QUICK

    def add(self, item: Item, relays: Relays, sender: int) -> None:
        """It is to be tried.  :param sender: the twin that sent it."""
        self._waiting[self._kind(relays)].put(item, relays, sender)

    def take(self) -> Item | None:
        """One whose attempt begins now; None: there is no room, or nothing that waits for it."""
        while (kind := self._next_kind()) is not None:
            item, relays, sender = self._waiting[kind].take()
            if item in self._attempts:
                continue
            if kind is not self._kind(relays):  # it was otherwise when it was put there
                self.add(item, relays, sender)
                continue
            part = sender, kind
            if self._of_relays[relays] >= self._most(relays, kind):
                self._block(relays, item, relays, sender)
            elif self._of_sender[part] >= _MOST_OF_SENDER[kind]:
                self._block(part, item, relays, sender)
            else:
                self._begin(item, _Attempt(relays, sender, kind))
                return item
        return None

    def _next_kind(self) -> _Kind | None:
        """The first of which something waits and may begin."""
        count = self._of_kind
        posts = count[_Kind.QUICK] + count[_Kind.SLOW]
        if self._waiting[_Kind.TOGETHER] and count[_Kind.TOGETHER] < MAX_TOGETHER:
            return _Kind.TOGETHER
        if self._waiting[_Kind.QUICK]:
            return _Kind.QUICK if posts < MAX_POSTS else None
        if self._waiting[_Kind.SLOW] and posts < MAX_POSTS and count[_Kind.SLOW] < MAX_SLOW_POSTS:
            return _Kind.SLOW
        return None

    def done(self, item: Item, took: float | None) -> None:
        """Its attempt is over.

        :param took: seconds until somebody answered; None: nobody did.
        """
        self.learn(self._attempts[item].relays, took)
        self.cancel(item)

    def learn(self, relays: Relays, took: float | None) -> None:
        """They were asked something.  :param took: as for :meth:`done`."""
        if took is None:
            remember(self._failing, relays, None, REMEMBERED)
        else:
            self._failing.pop(relays, None)
        if took is not None and took <= QUICK:
            remember(self._quick, relays, None, REMEMBERED)
        else:
            self._quick.pop(relays, None)

    def cancel(self, item: Item) -> None:
        """Its attempt came to nothing, and nobody was asked."""
        attempt = self._attempts.pop(item)
        part = attempt.sender, attempt.kind
        uncount(self._of_kind, attempt.kind)
        uncount(self._of_relays, attempt.relays)
        uncount(self._of_sender, part)
        # what the relays are now says how many more of theirs may begin
        kind = self._kind(attempt.relays)
        self._unblock(attempt.relays, self._most(attempt.relays, kind) - self._of_relays[attempt.relays])
        self._unblock(part, _MOST_OF_SENDER[attempt.kind] - self._of_sender[part])

    def _most(self, relays: Relays, kind: _Kind) -> int:
        return 1 if relays in self._failing else _MOST_OF_RELAYS[kind]

    def _begin(self, item: Item, attempt: _Attempt) -> None:
        self._attempts[item] = attempt
        self._of_kind[attempt.kind] += 1
        self._of_relays[attempt.relays] += 1
        self._of_sender[attempt.sender, attempt.kind] += 1

    def _block(self, key: Hashable, item: Item, relays: Relays, sender: int) -> None:
        lines = self._blocked.get(key)
        if lines is None:
            lines = self._blocked[key] = _Lines()
        lines.put(item, relays, sender)

    def _unblock(self, key: Hashable, most: int) -> None:
        lines = self._blocked.get(key)
        for _ in range(most):
            if not lines:
                break
            self.add(*lines.take())
        if not lines:
            self._blocked.pop(key, None)
