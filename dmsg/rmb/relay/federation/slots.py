"""Which messages for other relays are tried next.  No I/O.

There are so many attempts at once.  A relay that does not answer, or answers
late, keeps one for seconds, and anybody can list such relays, under any number of
names, for his twins: so relays that answered quickly when they were last asked
have some to themselves, and no sender has more than his part.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

from attrs import define

from dmsg.base.tables import remember, uncount

MAX_POSTS = 256
"""Messages in an attempt at once."""
MAX_SLOW_POSTS = 192
"""Of these for relays that are not known to answer quickly."""
MAX_QUICK_OF_SENDER, MAX_SLOW_OF_SENDER = 48, 32
"""Of one sender, for relays that are known to, and for others."""
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
    """Items that wait for an attempt, and those that have one."""

    def __init__(self) -> None:
        self._waiting: dict[bool, _Lines[Item]] = {False: _Lines(), True: _Lines()}
        """Those for quick relays (False), and for slow ones (True)."""
        # what could not begin, by what has no room: relays, or a sender's part
        self._blocked: dict[Hashable, _Lines[Item]] = {}
        self._attempts: dict[Item, _Attempt] = {}
        self._of_relays: Counter[Relays] = Counter()
        self._of_sender: Counter[tuple[int, bool]] = Counter()
        self._slow = 0
        self._quick: OrderedDict[Relays, None] = OrderedDict()
        self._failing: OrderedDict[Relays, None] = OrderedDict()

    def is_quick(self, relays: Relays) -> bool:
        """They answered quickly when they were last asked."""
        return relays in self._quick

    def add(self, item: Item, relays: Relays, sender: int) -> None:
        """It is to be tried.  :param sender: the twin that sent it."""
        self._waiting[relays not in self._quick].put(item, relays, sender)

    def take(self) -> Item | None:
        """One whose attempt begins now; None: there is no room, or nothing that waits for it."""
        while len(self._attempts) < MAX_POSTS:
            slow = not self._waiting[False]
            lines = self._waiting[slow]
            if not lines or (slow and self._slow >= MAX_SLOW_POSTS):
                return None
            item, relays, sender = lines.take()
            if item in self._attempts:
                continue
            if slow is (relays in self._quick):  # it was otherwise when it was put there
                self.add(item, relays, sender)
                continue
            part = sender, slow
            if self._of_relays[relays] >= self._most(relays):
                self._block(relays, item, relays, sender)
            elif self._of_sender[part] >= self._most_of(slow):
                self._block(part, item, relays, sender)
            else:
                self._begin(item, _Attempt(relays, sender, slow))
                return item
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
        part = attempt.sender, attempt.slow
        uncount(self._of_relays, attempt.relays)
        uncount(self._of_sender, part)
        if attempt.slow:
            self._slow -= 1
        self._unblock(attempt.relays, self._most(attempt.relays) - self._of_relays[attempt.relays])
        self._unblock(part, self._most_of(attempt.slow) - self._of_sender[part])

    def _most(self, relays: Relays) -> int:
        return 1 if relays in self._failing else MAX_POSTS_OF_ONE

    @staticmethod
    def _most_of(slow: bool) -> int:
        return MAX_SLOW_OF_SENDER if slow else MAX_QUICK_OF_SENDER

    def _begin(self, item: Item, attempt: _Attempt) -> None:
        self._attempts[item] = attempt
        self._of_relays[attempt.relays] += 1
        self._of_sender[attempt.sender, attempt.slow] += 1
        self._slow += attempt.slow

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
