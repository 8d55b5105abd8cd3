"""Fair division of the time of a reactor turn, so that no owner of connections delays the other owners.

The time to process a read depends on its content: 64 KiB may be one frame or thirteen thousand. So the time itself is
measured. Each *owner*, such as an address block, has a share of the turn's time. The share of a wider block is that of
a narrow block times the wider block's factor (:mod:`dmsg.net.blocks`). An owner that has used up its share is served
again in the next turn; its received data stay buffered until then. The next turn begins with the owners that have
waited longest. If no other owner has work, the next turn begins at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Protocol

from twisted.internet.interfaces import IReactorTime

from dmsg.net.blocks import MIN_FACTOR, blocks_of
from dmsg.net.isolate import call_isolated

TURN_BUDGET = 0.008
"""Seconds of a reactor turn that all owners together may use."""
MAX_SHARE = 0.002
"""Maximum share of one owner in a reactor turn, in seconds. Owners get this share if there are few of them."""
MIN_SHARE = 0.0002
"""Minimum share of one owner in a reactor turn, in seconds. Owners get this share if there are many of them. Work that
has begun is finished even if it exceeds the share."""
SERVER_FRAMES = 256
"""Maximum number of frames of one read that a server processes one by one. The rest is processed in the next turn."""
CLIENT_FRAMES = 1024
"""Maximum number of frames of one read that a client processes. The rest is processed in the next turn."""


class TurnWaiter(Protocol):
    """Interface of a receiver that continues in the next turn, because its owner's share of this turn is used up."""

    @property
    def owner(self) -> Hashable:
        """Owner to whom the time of the work is charged. The account reads it when the receiver begins to wait."""

    def proceed(self) -> None:
        """Continue to process the received data; called in the next turn."""


class TurnShare:
    """Account of the time that each owner has used in the current turn.

    :ivar waited: number of times that a receiver was deferred to the next turn.
    """

    def __init__(self, reactor: IReactorTime) -> None:
        self._reactor = reactor
        self.now = reactor.seconds
        self._began = self.now()
        self._used: dict[Hashable, float] = {}
        self._used_by_wider: dict[str, float] = {}
        self._most_by_wider = 0.0
        self._share = MAX_SHARE
        # The receivers are grouped by owner, because thousands may wait for an owner such as a reverse proxy. None of
        # them is called once the share of the owner is used up.
        self._waiting: dict[Hashable, deque[TurnWaiter]] = {}
        self._is_due = False
        self.waited = 0

    def allows(self, owner: Hashable) -> bool:
        """Whether ``owner`` has time left in this turn."""
        # The share of a wider block is at least the owner's share times ``MIN_FACTOR``. If no wider block has used
        # that much time, none has used up its share, so only the owner's own time is checked.
        if self._most_by_wider < self._share * MIN_FACTOR:
            return self._used.get(owner, 0.0) < self._share
        return self.seconds_left(owner) > 0.0

    def seconds_left(self, owner: Hashable) -> float:
        """Return the seconds left to ``owner`` in this turn. Receivers that process one frame at a time compare the
        clock with this number after each frame."""
        left = self._share - self._used.get(owner, 0.0)
        if self._used_by_wider and isinstance(owner, str):
            for name, factor in blocks_of(owner)[1:]:
                left = min(left, self._share * factor - self._used_by_wider.get(name, 0.0))
        return left

    def used(self, owner: Hashable, seconds: float, now: float | None = None) -> None:
        """Charge ``owner`` for a read that took ``seconds``.

        :param now: time of the clock, if the caller has just read it.
        """
        if not self._is_due:
            # No receiver is waiting, so no callback will reset the account in the next turn. The clock shows whether a
            # new turn has begun.
            now = self.now() if now is None else now
            if not 0.0 <= now - self._began < TURN_BUDGET:
                self._next(now)
        self._used[owner] = self._used.get(owner, 0.0) + seconds
        # An owner that is not an address, such as a single connection behind a proxy, belongs to no wider block.
        if isinstance(owner, str):
            for name, _ in blocks_of(owner)[1:]:
                used = self._used_by_wider[name] = self._used_by_wider.get(name, 0.0) + seconds
                self._most_by_wider = max(self._most_by_wider, used)

    def wait(self, waiter: TurnWaiter) -> None:
        """Call ``waiter.proceed()`` in the next turn."""
        self._waiting.setdefault(waiter.owner, deque()).append(waiter)
        self.waited += 1
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._reactor.callLater(0, self._run)

    def _next(self, now: float) -> None:
        self._began = now
        self._share = min(MAX_SHARE, max(MIN_SHARE, TURN_BUDGET / max(1, len(self._used))))
        self._used.clear()
        self._used_by_wider.clear()
        self._most_by_wider = 0.0

    def _run(self) -> None:
        waiting, self._waiting = self._waiting, {}
        self._is_due = False
        self._next(self.now())
        passed_over: dict[Hashable, deque[TurnWaiter]] = {}
        for owner, of_owner in waiting.items():
            number = len(of_owner)
            while of_owner and self.allows(owner):
                call_isolated(of_owner.popleft().proceed)
            self.waited += len(of_owner)
            if len(of_owner) == number:
                # Other owners have used up the share of a wider block. This owner stays at the front of the queue.
                # Otherwise the others could be served first in each turn, and this owner would never continue.
                passed_over[owner] = of_owner
            elif of_owner:
                # The receivers that were not called stay in front of those that were.
                of_owner.extend(self._waiting.get(owner, ()))
                self._waiting[owner] = of_owner
        for owner, of_owner in self._waiting.items():
            if owner in passed_over:
                passed_over[owner].extend(of_owner)
            else:
                passed_over[owner] = of_owner
        self._waiting = passed_over
        if self._waiting:
            self._schedule()
