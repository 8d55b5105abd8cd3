"""Processing of received data in portions, one per reactor turn, and the reasons for which reading from a connection is
paused.

A peer may send more in one read than its owner's share of a reactor turn allows. The receiver processes as much as the
share allows, buffers the rest, and continues in the next turn. Until then, reading from the connection is paused. Other
parts of the program can pause reading as well, each for a reason of its own. Reading resumes when no reason is left. So
no part needs to know which other parts have paused reading.

Data stay in order, because the rest of a read is processed before the connection is read again. Every receiver with
unprocessed data continues in a later turn, whatever the other receivers do. This module uses neither
Twisted nor a clock directly; the share (:class:`dmsg.net.turn_share.TurnShare`) has both.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from enum import StrEnum
from typing import Protocol


class HoldReason(StrEnum):
    """Reason for which reading from a connection is paused."""

    TURN = "turn"
    """The rest of the last read must be processed first, in the next reactor turn."""
    CONGESTED = "congested"
    """The receivers of the peer's data read more slowly than the peer sends."""
    UNREAD = "unread"
    """The application has paused its stream, and the buffer of unread data is full."""
    PENDING = "pending"
    """The decision whether the peer is admitted is still pending."""
    THROTTLED = "throttled"
    """The peer has exceeded its limit of bytes per second."""
    TOO_FAST = "too fast"
    """The peer's address has exceeded its limit of frames per second."""
    COALESCE = "coalesce"
    """The peer has sent many tiny TCP segments. Reading is paused for a moment, so that the kernel joins the next
    segments, and one read returns many of them."""
    UNSENT = "unsent"
    """The peer does not read the data sent to it."""
    BUFFER_FULL = "buffer full"
    """The buffer of the peer's messages is full. It fills because the receiver of one of them is slow, and the others
    wait behind that message."""
    UNSETTLED = "unsettled"
    """The peer has sent too many messages that are not settled yet."""
    UNHANDLED = "unhandled"
    """The peer has sent too many messages that no handler has accepted yet."""
    LOOKUPS = "lookups"
    """Too many registry look-ups for the receivers of this peer's messages are pending."""
    REGISTRY = "registry"
    """Too many messages, of all peers together, wait for registry look-ups."""
    CLOSING = "closing"
    """The connection is being closed."""


NOT_HELD: frozenset[HoldReason] = frozenset()
"""Empty set of reasons, for a connection whose reading is not paused."""


class HeldReading:
    """Base of a connection whose reading can be paused for several reasons at once.

    :ivar held_by: reasons for which reading is paused now.
    """

    held_by: frozenset[HoldReason] = NOT_HELD

    def _stop_reading(self) -> None:
        """Pause reading."""
        raise NotImplementedError

    def _read_on(self) -> None:
        """Resume reading."""
        raise NotImplementedError

    @property
    def is_reading_paused(self) -> bool:
        """Whether reading is paused."""
        return bool(self.held_by)

    def hold(self, reason: HoldReason) -> None:
        """Pause reading until :meth:`release` is called with the same reason. A second call with this reason has no
        effect."""
        if not self.held_by:
            self._stop_reading()
        self.held_by |= {reason}

    def release(self, reason: HoldReason) -> None:
        """Remove a reason. Resume reading if no other reason is left."""
        if reason in self.held_by:
            # An empty result is replaced by NOT_HELD, which all connections share. Otherwise each connection would
            # keep an empty set of 216 bytes.
            self.held_by = (self.held_by - {reason}) or NOT_HELD
            if not self.held_by:
                self._read_on()


class TurnAccount(Protocol):
    """Interface of the account of time in a turn, which :class:`dmsg.net.turn_share.TurnShare` implements."""

    now: Callable[[], float]

    def allows(self, owner: Hashable) -> bool:
        """Whether ``owner`` has time left in this turn."""

    def seconds_left(self, owner: Hashable) -> float:
        """Return the seconds of this turn that ``owner`` may still use."""

    def used(self, owner: Hashable, seconds: float, now: float | None = None) -> None:
        """Charge ``seconds`` of work to ``owner``.

        :param now: time of the clock, if the caller has just read it.
        """

    def wait(self, taker: TurnTaker) -> None:
        """Call ``taker.proceed()`` in the next turn."""


class TurnTaker:
    """Base of a receiver that may receive more data than it may process in one turn.

    :ivar share: account that divides a turn's time fairly among owners; None to use no account.
    :ivar owner: owner to whom the time of the work is charged.
    """

    share: TurnAccount | None
    owner: Hashable
    _waits: bool
    """Whether a call in the next turn is scheduled."""
    _since: float
    """Time up to which the current work has been charged to the owner. Until the first charge, it is the time at which
    the work began."""

    def _work(self) -> None:
        """Process more of the buffered data; called in the next turn."""
        raise NotImplementedError

    def _is_idle(self) -> bool:
        """Whether no buffered data are left to process."""
        return False

    def _on_work_left(self) -> None:
        """Hook that is called once in each turn that ends with work left over for the next turn."""

    def _later(self, call: Callable[[], None]) -> object:
        """Schedule ``call`` for the next turn. Called only if ``share`` is None."""
        raise NotImplementedError

    def _may_work(self) -> bool:
        """Whether the owner has time left in this turn."""
        share = self.share
        return share is None or share.allows(self.owner)

    def _spend(self, work: Callable[..., object], *arguments: object) -> None:
        """Call ``work``, and charge the time of the call to the owner."""
        share = self.share
        if share is None:
            work(*arguments)
            return
        owner = self.owner  # The owner is read before the call, because ``work`` may clear it.
        self._since = share.now()
        try:
            work(*arguments)
        finally:
            now = share.now()
            share.used(owner, now - self._since, now)

    def _count(self) -> None:
        """Charge the time of the current work up to now to the owner."""
        share = self.share
        if share is not None:
            now = share.now()
            share.used(self.owner, now - self._since, now)
            self._since = now

    def _next_turn(self) -> None:
        """Schedule a call of :meth:`proceed` in the next turn, unless one is scheduled."""
        if self._waits:
            return
        self._waits = True
        self._on_work_left()
        if self.share is not None:
            self.share.wait(self)
        else:
            self._later(self.proceed)

    def proceed(self) -> None:
        """Process buffered data if the owner of the connection has time left in this turn; otherwise wait for the next
        turn."""
        self._waits = False
        if self._is_idle():
            return
        if self._may_work():
            self._work()
        else:
            self._next_turn()
