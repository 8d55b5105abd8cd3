"""Processing of received data in portions, one per reactor turn, and the reasons for which reading from a connection is
stopped.

A peer may send more in one read than its owner's share of a reactor turn allows. The receiver handles as much as fits,
keeps the rest, and continues in the next turn. Until then the connection is not read. Other parts of the program can
stop reading, too, each for a reason of its own; reading continues when no reason is left.  So no part has to know which
other parts have stopped it.

Data keep their order, because the rest of a read is handled before the connection is read again. Every receiver with a
rest continues in a later turn, whatever the others do. This module needs neither Twisted nor a clock: both come with
the share (:class:`dmsg.net.turn_share.TurnShare`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from enum import StrEnum
from typing import Protocol


class HoldReason(StrEnum):
    """Reason for which reading from a connection is stopped."""

    TURN = "turn"
    """The next reactor turn has to process the rest of the last read first."""
    CONGESTED = "congested"
    """The peer sends faster than the receiver of its data reads."""
    UNREAD = "unread"
    """The application has paused, and its queue is full."""
    PENDING = "pending"
    """The check whether the peer is admitted is not finished."""
    THROTTLED = "throttled"
    """The peer has sent more bytes a second than it may."""
    TOO_FAST = "too fast"
    """The peer's address has sent more frames a second than it may."""
    COALESCE = "coalesce"
    """The peer has sent very many segments of a few bytes, which the kernel joins meanwhile."""
    UNSENT = "unsent"
    """The peer does not read the data sent to it."""
    PARKED = "parked"
    """The peer's messages are buffered because a receiver is slow, and the buffer is full."""
    UNSETTLED = "unsettled"
    """The peer has sent too many messages that are not settled yet."""
    UNHANDLED = "unhandled"
    """The peer has sent too many messages that no handler has taken yet."""
    LOOKUPS = "lookups"
    """The registry look-ups of receivers of this peer's messages have reached their maximum."""
    REGISTRY = "registry"
    """The messages of all peers that wait for the registry have reached their limit."""
    OVER = "over"
    """The connection is being closed."""


class HeldReading:
    """Base of a connection whose reading can be stopped for several reasons at once.

    :ivar held_by: reasons for which reading is stopped now.
    """

    held_by: frozenset[HoldReason] = frozenset()

    def _stop_reading(self) -> None:
        """Stop reading."""
        raise NotImplementedError

    def _read_on(self) -> None:
        """Resume reading."""
        raise NotImplementedError

    @property
    def held(self) -> bool:
        """Whether reading is stopped."""
        return bool(self.held_by)

    def hold(self, reason: HoldReason) -> None:
        """Stop reading until :meth:`release` with the same reason. A second call has no effect."""
        if not self.held_by:
            self._stop_reading()
        self.held_by |= {reason}

    def release(self, reason: HoldReason) -> None:
        """Resume reading, unless another reason is left."""
        if reason in self.held_by:
            self.held_by -= {reason}
            if not self.held_by:
                self._read_on()


class TurnAccount(Protocol):
    """Interface of the account of time in a turn: :class:`dmsg.net.turn_share.TurnShare`."""

    now: Callable[[], float]

    def allows(self, owner: Hashable) -> bool:
        """Whether ``owner`` has time left in this turn."""

    def seconds_left(self, owner: Hashable) -> float:
        """Seconds that ``owner`` may still use in this turn."""

    def used(self, owner: Hashable, seconds: float) -> None:
        """Charge ``seconds`` of work to ``owner``."""

    def wait(self, taker: TurnTaker) -> None:
        """Call ``taker.proceed()`` in the next turn."""


class TurnTaker:
    """Base of a receiver that may get more than it can handle in one turn.

    :ivar share: account that divides a turn's time fairly among owners; None if turns are not shared.
    :ivar owner: owner to whom the work is charged.
    """

    share: TurnAccount | None
    owner: Hashable
    _waits: bool
    """Whether the next turn has been requested."""
    _since: float
    """Time of the share's clock when the current work began, or was last counted."""

    def _work(self) -> None:
        """Continue with the rest; called in the next turn."""
        raise NotImplementedError

    def _is_idle(self) -> bool:
        """Whether there is nothing to do in the next turn."""
        return False

    def _turn_is_over(self) -> None:
        """Handle that work is left for the next turn; called at most once per turn."""

    def _later(self, call: Callable[[], None]) -> object:
        """Schedule ``call`` for the next turn. Used only if turns are not shared."""
        raise NotImplementedError

    def _may_work(self) -> bool:
        """Whether the owner has time left in this turn."""
        share = self.share
        return share is None or share.allows(self.owner)

    def _spend(self, work: Callable[..., object], *arguments: object) -> None:
        """Do a piece of work, and charge its time to the owner."""
        share = self.share
        if share is None:
            work(*arguments)
            return
        owner = self.owner  # The owner is read before the work, which may clear it.
        self._since = share.now()
        try:
            work(*arguments)
        finally:
            share.used(owner, share.now() - self._since)

    def _count(self) -> None:
        """Charge the time of the current work so far to the owner."""
        share = self.share
        if share is not None:
            now = share.now()
            share.used(self.owner, now - self._since)
            self._since = now

    def _next_turn(self) -> None:
        """Continue in the next turn."""
        if self._waits:
            return
        self._waits = True
        self._turn_is_over()
        if self.share is not None:
            self.share.wait(self)
        else:
            self._later(self.proceed)

    def proceed(self) -> None:
        """Continue if the owner has time left in the turn that has begun, else in the next one."""
        self._waits = False
        if self._is_idle():
            return
        if self._may_work():
            self._work()
        else:
            self._next_turn()
