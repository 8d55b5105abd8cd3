"""Which messages for other relays are tried next.  No I/O.

There are so many attempts at once.  A relay that does not answer, or answers
late, keeps one for seconds, and anybody can list such relays for his twins: so
relays that answered quickly when they were last asked always have some to
themselves, and among the others no sender has more than his part.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

from attrs import define

MAX_POSTS = 256
"""Messages in an attempt at once."""
MAX_SLOW_POSTS = 192
"""Of these for relays that are not known to answer quickly."""
MAX_SLOW_OF_SENDER = 32
"""Of these for one sender."""
MAX_POSTS_OF_ONE = 16
"""Of all for one set of relays; one only, while these do not answer."""
QUICK = 1.0
"""Seconds in which a relay has answered that is quick."""
REMEMBERED = 1000
"""Sets of relays that are known to be quick, or to fail."""

Relays = frozenset[str]
Item = TypeVar("Item", bound=Hashable)


@define
class _Attempt:
    relays: Relays
    sender: int
    slow: bool


class Slots(Generic[Item]):
    """Items that wait for an attempt, and those that have one."""

    def __init__(self) -> None:
        # by relays where these are quick, else by sender: each has its turn
        self._quick_lines: OrderedDict[Hashable, deque[tuple[Item, Relays, int]]] = OrderedDict()
        self._slow_lines: OrderedDict[Hashable, deque[tuple[Item, Relays, int]]] = OrderedDict()
        # what could not begin, by what has no room: relays or a sender
        self._blocked: dict[Hashable, deque[tuple[Item, Relays, int]]] = {}
        self._attempts: dict[Item, _Attempt] = {}
        self._of_relays: Counter[Relays] = Counter()
        self._slow_of: Counter[int] = Counter()
        self._slow = 0
        self._quick: OrderedDict[Relays, None] = OrderedDict()
        self._failing: OrderedDict[Relays, None] = OrderedDict()

    def add(self, item: Item, relays: Relays, sender: int) -> None:
        """It is to be tried.  :param sender: the twin that sent it."""
        quick = relays in self._quick
        lines = self._quick_lines if quick else self._slow_lines
        lines.setdefault(relays if quick else sender, deque()).append((item, relays, sender))

    def take(self) -> Item | None:
        """One whose attempt begins now; None: there is no room, or nothing that waits for it."""
        while len(self._attempts) < MAX_POSTS:
            lines = self._quick_lines
            if not lines and self._slow < MAX_SLOW_POSTS:
                lines = self._slow_lines
            if not lines:
                return None
            key, line = next(iter(lines.items()))
            waiting = line.popleft()
            if line:
                lines.move_to_end(key)
            else:
                del lines[key]
            item, relays, sender = waiting
            slow = lines is self._slow_lines
            if item in self._attempts:
                continue
            if self._of_relays[relays] >= self._most(relays):
                self._blocked.setdefault(relays, deque()).append(waiting)
            elif slow and self._slow_of[sender] >= MAX_SLOW_OF_SENDER:
                self._blocked.setdefault(sender, deque()).append(waiting)
            else:
                self._begin(item, _Attempt(relays, sender, slow))
                return item
        return None

    def done(self, item: Item, took: float | None) -> None:
        """Its attempt is over.

        :param took: seconds until somebody answered; None: nobody did.
        """
        relays = self._attempts[item].relays
        if took is None:
            _remember(self._failing, relays)
        else:
            self._failing.pop(relays, None)
        if took is not None and took <= QUICK:
            _remember(self._quick, relays)
        else:
            self._quick.pop(relays, None)
        self.cancel(item)

    def cancel(self, item: Item) -> None:
        """Its attempt came to nothing, and nobody was asked."""
        attempt = self._attempts.pop(item)
        _uncount(self._of_relays, attempt.relays)
        if attempt.slow:
            self._slow -= 1
            _uncount(self._slow_of, attempt.sender)
        self._unblock(attempt.relays, self._most(attempt.relays) - self._of_relays[attempt.relays])
        self._unblock(attempt.sender, MAX_SLOW_OF_SENDER - self._slow_of[attempt.sender])

    def _most(self, relays: Relays) -> int:
        return 1 if relays in self._failing else MAX_POSTS_OF_ONE

    def _begin(self, item: Item, attempt: _Attempt) -> None:
        self._attempts[item] = attempt
        self._of_relays[attempt.relays] += 1
        if attempt.slow:
            self._slow += 1
            self._slow_of[attempt.sender] += 1

    def _unblock(self, key: Hashable, most: int) -> None:
        line = self._blocked.get(key)
        for _ in range(most):
            if not line:
                self._blocked.pop(key, None)
                return
            self.add(*line.popleft())


def _uncount(counter: Counter[Item], key: Item) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]


def _remember(known: OrderedDict[Relays, None], relays: Relays) -> None:
    known[relays] = None
    known.move_to_end(relays)
    if len(known) > REMEMBERED:
        known.popitem(last=False)
