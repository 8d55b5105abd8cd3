"""A session at a relay: what was sent to it, what it confirmed, what it has to wait for.

A message counts as delivered when the session's websocket has answered a ping
that was sent behind it.  Until then it is in the *window*; when that is full,
or the answer takes long, the session's queue takes over.  In the same way a
ping of the session itself is answered when all it sent before is *settled*:
confirmed by its receiver, in a queue, with another relay, or refused.  So
whoever sends again what was not confirmed loses nothing when a relay is
killed; receivers know what they have had.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from dmsg.rmb.address import Session
from dmsg.rmb.queues import Queued

WINDOW_MESSAGES = 1024
"""Messages sent to a session and not confirmed."""
WINDOW_SIZE = 4 * 1024 * 1024
"""Bytes of these; one message more may be larger."""
SPILL_AFTER = 2.0
"""Seconds without confirmation after which the queue keeps a message too."""
FEW, FEW_BYTES = 1000, 16 * 1024 * 1024
"""Unsettled messages of a session, and their bytes, at which it is read from again, after there were too many."""
MAX_PINGS = 16
"""Pings of a session that wait for an answer; the oldest then goes unanswered, as RFC 6455 allows."""


class Message:
    """One message on its way through a relay.

    :ivar until: seconds since 1970 when its life ends.
    :ivar owner: of the session that sent it; None for what the relay itself says.
    :ivar kept: its id in the queue of the receiver, or None.
    :ivar keeping: it is being written to the queue.
    """

    __slots__ = ("confirmed", "data", "keeping", "kept", "owner", "settled", "until")

    def __init__(self, data: bytes, until: float, owner: Ledger | None, kept: Any = None) -> None:
        self.data = data
        self.until = until
        self.owner = owner
        self.kept = kept
        self.keeping = False
        self.settled = False
        self.confirmed = False

    def settle(self) -> None:
        """Nobody needs to send it again."""
        if not self.settled:
            self.settled = True
            if self.owner is not None:
                self.owner.advance()

    def lose(self) -> None:
        """It could not be kept: whoever sent it has to send it again."""
        if not self.settled and self.owner is not None:
            self.owner.lost()


class Ledger:
    """What a session sent that is not settled, and its pings that wait for that.

    :param pong: sends the answer to a ping.
    :param broken: called when something was lost that the session has to send again.
    """

    __slots__ = ("_added", "_broken", "_pings", "_pong", "_waiting", "relaxed", "size")

    def __init__(self, pong: Callable[[bytes], None], broken: Callable[[], None] = lambda: None) -> None:
        self._pong = pong
        self._broken = broken
        self.size = 0
        """Bytes of what is not settled."""
        self.relaxed: Callable[[], None] | None = None
        """Called, once, when only few are left."""
        self._waiting: deque[Message] = deque()
        self._added = 0
        self._pings: deque[tuple[int, bytes]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, message: Message) -> None:
        """The session sent it."""
        self._waiting.append(message)
        self._added += 1
        self.size += len(message.data)

    def lost(self) -> None:
        """A message will not be settled."""
        self._broken()

    def advance(self) -> None:
        """Something was settled."""
        waiting = self._waiting
        while waiting and waiting[0].settled:
            self.size -= len(waiting.popleft().data)
        pings = self._pings
        while pings and self._added - len(waiting) >= pings[0][0]:
            self._pong(pings.popleft()[1])
        if self.relaxed is not None and len(waiting) <= FEW and self.size <= FEW_BYTES:
            relaxed, self.relaxed = self.relaxed, None
            relaxed()

    def ping(self, payload: bytes) -> None:
        """The session wants to know that all before this is settled."""
        if not self._waiting:
            self._pong(payload)
            return
        self._pings.append((self._added, payload))
        if len(self._pings) > MAX_PINGS:
            self._pings.popleft()


class Carrier(Protocol):
    """The connection of a session."""

    def send(self, data: bytes) -> None:
        """Send a message; it leaves at the end of the reactor turn."""

    def barrier(self, number: int) -> None:
        """Send a ping behind everything that was sent; its answer brings ``number`` back."""


class Store(Protocol):
    """What a delivery needs of the relay around it."""

    def keep(self, session: Session, message: Message) -> Deferred[Any]:
        """Put a message into the session's queue; fires with its id."""

    def read(self, session: Session, after: Any) -> Deferred[list[Queued]]:
        """The oldest of the session's queue behind ``after``."""

    def remove(self, session: Session, ids: list[Any]) -> None:
        """They were delivered."""

    def until(self, queued: Queued) -> float | None:
        """When the life of a queued message ends; None when it has, and was answered."""

    def busy(self, delivery: Delivery) -> None:
        """It has something in its window from now on."""


class Delivery:
    """Messages to one connected session, in order.

    :ivar catching_up: there is, or may be, something in the queue that goes first.
    """

    __slots__ = (
        "_after",
        "_again",
        "_barrier",
        "_carrier",
        "_confirmed",
        "_inside",
        "_keeping",
        "_more",
        "_reading",
        "_sent",
        "_size",
        "_skip",
        "_store",
        "_window",
        "catching_up",
        "closed",
        "session",
        "since",
    )

    def __init__(self, session: Session, carrier: Carrier, store: Store) -> None:
        self.session = session
        self._carrier = carrier
        self._store = store
        self._window: deque[Message] = deque()
        self._size = 0
        self._sent = 0
        self._confirmed = 0
        self._barrier = False
        self._after: Any = None
        self._reading = False
        self._again = False
        self._inside = False
        self._more = False
        self._keeping = 0
        # ids of what is in the queue only because its confirmation took long
        self._skip: set[Any] = set()
        self.catching_up = True
        self.closed = False
        self.since: float | None = None
        """When the present wait for a confirmation began; the relay's clock sets it."""

    def __len__(self) -> int:
        return len(self._window)

    def start(self) -> None:
        """Deliver what is in the queue."""
        self._read()

    @property
    def _full(self) -> bool:
        return len(self._window) >= WINDOW_MESSAGES or self._size >= WINDOW_SIZE

    def offer(self, message: Message) -> bool:
        """Send a message now; False when it has to go to the queue, behind what is there."""
        if self.catching_up or len(self._window) >= WINDOW_MESSAGES or self._size >= WINDOW_SIZE:
            if not self.catching_up:
                # into the queue before what comes now, so that the order stays
                self.spill()
                self.catching_up = True
            self._again = True
            return False
        self._send(message)
        return True

    def _send(self, message: Message) -> None:
        self._window.append(message)
        self._size += len(message.data)
        self._sent += 1
        self._carrier.send(message.data)
        if not self._barrier:
            self._barrier = True
            self._carrier.barrier(self._sent)
            self._store.busy(self)

    def poke(self) -> None:
        """Something was put into the queue."""
        self.catching_up = True
        self._again = True
        self._read()

    def confirmed(self, number: int) -> None:
        """The session has everything up to the message with that number.

        :raises ValueError: it was not sent so much.
        """
        if number > self._sent:
            raise ValueError("confirms what was not sent")
        removed = []
        if self._confirmed < number:
            # an answer that confirms nothing new is no sign that it reads
            self.since = None
        while self._confirmed < number:
            message = self._window.popleft()
            self._confirmed += 1
            self._size -= len(message.data)
            message.confirmed = True
            message.settle()
            if message.kept is not None:
                removed.append(message.kept)
                self._skip.discard(message.kept)
        if removed:
            self._store.remove(self.session, removed)
        self._barrier = False
        if self._window:
            self._barrier = True
            self._carrier.barrier(self._sent)
            self._store.busy(self)
        if self.catching_up:
            self._read()

    # --- the queue ---

    def _read(self) -> None:
        """Batch after batch, as far as the window goes; a queue that answers at once does not nest."""
        if self._inside:
            return
        self._inside = True
        try:
            self._more = True
            while self._more and not (self._reading or self.closed or self._full or self._keeping):
                self._reading = True
                self._again = self._more = False
                self._store.read(self.session, self._after).addCallbacks(self._got, self._not_read)
        finally:
            self._inside = False

    def _got(self, batch: list[Queued]) -> None:
        self._reading = False
        if self.closed:
            return
        expired = []
        for queued in batch:
            self._after = queued.id
            if queued.id in self._skip:
                self._skip.discard(queued.id)
                continue
            until = self._store.until(queued)
            if until is None:
                expired.append(queued.id)
            else:
                self._send(Message(queued.data, until, None, queued.id))
        if expired:
            self._store.remove(self.session, expired)
        if batch or self._again:
            self._more = True
            self._read()
        else:
            self.catching_up = False

    def _not_read(self, failure: Failure) -> None:
        # the relay's round comes by again
        self._reading = False

    def retry(self) -> None:
        """The queue could not be read, or nobody said that something came into it."""
        if self.catching_up:
            self._read()

    # --- what is not confirmed ---

    def spill(self) -> None:
        """Confirmations take long: let the queue keep what is in the window."""
        for message in self._window:
            if message.kept is None and not message.keeping:
                self._keep(message)

    def _keep(self, message: Message) -> None:
        message.keeping = True
        # nothing is read until its id is known: it would be sent a second time
        self._keeping += 1

        def kept(number: Any) -> None:
            message.kept = number
            message.settle()
            if message.confirmed:
                self._store.remove(self.session, [number])
            else:
                self._skip.add(number)

        def done(result: Any) -> None:
            message.keeping = False
            self._keeping -= 1
            if self.catching_up:
                self._read()

        def failed(failure: Failure) -> None:
            # where it is in a window, the relay's round comes by again
            if self.closed:
                message.lose()

        self._store.keep(self.session, message).addCallback(kept).addErrback(failed).addBoth(done)

    def close(self) -> list[Message]:
        """The connection is gone: what it had not confirmed, and no queue keeps."""
        self.closed = True
        left = [message for message in self._window if message.kept is None and not message.keeping]
        self._window.clear()
        self._size = 0
        return left
