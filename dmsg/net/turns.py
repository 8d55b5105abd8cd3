"""Work that takes turns of the reactor, and who holds back the reading of a connection.

A peer may send more in one read than its owner's part of a reactor turn pays for. Whoever receives the data handles
that part, keeps the rest, and goes on in the next turn; meanwhile nothing more is read. Others hold back reading, too,
each under a name of its own, and reading goes on when nobody does. No Twisted and no clock: both come with the share
(:class:`dmsg.net.turn_share.Share`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from enum import StrEnum
from typing import Protocol


class Hold(StrEnum):
    """Reason for which a connection is not read."""

    TURN = "turn"
    """Something of the last read is left for the next turn."""
    CONGESTED = "congested"
    """The peer's data go to somebody who is slower than the peer."""
    UNREAD = "unread"
    """The application has more than it takes."""
    PENDING = "pending"
    """Whether the peer may come in is being asked."""
    THROTTLED = "throttled"
    """The peer has sent more bytes a second than it may."""
    TOO_FAST = "too fast"
    """The peer's address has sent more frames a second than it may."""
    UNSENT = "unsent"
    """The peer does not read what it is sent."""
    PARKED = "parked"
    """Messages to somebody who is slow wait at their sender."""
    UNSETTLED = "unsettled"
    """The peer has sent too much that nobody has confirmed."""
    UNHANDLED = "unhandled"
    """The peer has sent too much that handlers have not taken."""
    LOOKUPS = "lookups"
    """The registry is being asked for too many of the peer's receivers."""
    REGISTRY = "registry"
    """Too much waits for the registry's answers in all."""
    OVER = "over"
    """The connection is being closed."""


class HeldReading:
    """Base of a connection whose reading several others may hold back.

    :ivar held_by: who does.
    """

    held_by: frozenset[Hold] = frozenset()

    def _stop_reading(self) -> None:
        """Read nothing more for now."""
        raise NotImplementedError

    def _read_on(self) -> None:
        """Read again."""
        raise NotImplementedError

    @property
    def held(self) -> bool:
        """Whether somebody holds back reading."""
        return bool(self.held_by)

    def hold(self, why: Hold) -> None:
        """Read nothing more until :meth:`release` with the same name; may be repeated."""
        if not self.held_by:
            self._stop_reading()
        self.held_by |= {why}

    def release(self, why: Hold) -> None:
        """Read again, unless somebody else holds back reading, too."""
        if why in self.held_by:
            self.held_by -= {why}
            if not self.held_by:
                self._read_on()


class Turns(Protocol):
    """Record of who has used how much of the present turn: :class:`dmsg.net.turn_share.Share`."""

    now: Callable[[], float]

    def allows(self, owner: Hashable) -> bool:
        """Whether there is something left for ``owner`` in this turn."""

    def left(self, owner: Hashable) -> float:
        """Seconds that ``owner`` may still use in this turn."""

    def used(self, owner: Hashable, seconds: float) -> None:
        """Count so many seconds of work for ``owner``."""

    def wait(self, one: TakesTurns) -> None:
        """Call ``one.go_on()`` in the next turn."""


class TakesTurns:
    """Base of something that receives more than it may handle in one turn.

    :ivar share: who has used how much of a turn; None: turns are not shared.
    :ivar owner: whose part of a turn the work uses.
    """

    share: Turns | None
    owner: Hashable
    _waits: bool
    """The next turn is asked for."""
    _since: float
    """Seconds of the share's clock when the work under way began, or was last counted."""

    def _work(self) -> None:
        """Go on with what was left; the next turn is there."""
        raise NotImplementedError

    def _is_idle(self) -> bool:
        """Whether there is nothing to do in the next turn."""
        return False

    def _turn_is_over(self) -> None:
        """Something is left for the next turn, and was not before."""

    def _later(self, call: Callable[[], None]) -> object:
        """Call ``call`` in the next turn, where turns are not shared."""
        raise NotImplementedError

    def _may_work(self) -> bool:
        """Whether the owner has something left of this turn."""
        share = self.share
        return share is None or share.allows(self.owner)

    def _spend(self, work: Callable[..., object], *arguments: object) -> None:
        """Work, and count the time for the owner."""
        share = self.share
        if share is None:
            work(*arguments)
            return
        owner = self.owner  # afterwards nobody may know it any more
        self._since = share.now()
        try:
            work(*arguments)
        finally:
            share.used(owner, share.now() - self._since)

    def _count(self) -> None:
        """Count the time of the work under way so far, also before its end."""
        share = self.share
        if share is not None:
            now = share.now()
            share.used(self.owner, now - self._since)
            self._since = now

    def _next_turn(self) -> None:
        """Go on in the next turn."""
        if self._waits:
            return
        self._waits = True
        self._turn_is_over()
        if self.share is not None:
            self.share.wait(self)
        else:
            self._later(self.go_on)

    def go_on(self) -> None:
        """Go on if the owner has something left of the turn that has begun, else in the next one."""
        self._waits = False
        if self._is_idle():
            return
        if self._may_work():
            self._work()
        else:
            self._next_turn()
