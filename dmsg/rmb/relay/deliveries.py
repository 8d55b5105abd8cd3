"""Deliveries of a relay: their timers, and their access to the stored queue.

A delivery asks for confirmations, and checks whether its messages are written, at times that this module chooses. So
many deliveries need only one timer.
"""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime

from dmsg.rmb.errors import EnvelopeError
from dmsg.rmb.relay.delivery import Delivery
from dmsg.rmb.relay.mail import Header
from dmsg.rmb.relay.queue.interface import QueuedMessage, QueueId, RelayQueue
from dmsg.rmb.socket.confirm import Message
from dmsg.rmb.twins.address import Session

PING_DELAY = 0.05
"""Seconds by which a ping that asks for confirmation is delayed. Only pings to clients of the reference implementation
are delayed, because these clients log an error for each ping."""
MAX_PING_DELAY = 1.0
"""Maximum delay in seconds of a ping that asks a client of the reference implementation for confirmation. The ping is
delayed repeatedly by ``PING_DELAY`` as long as few messages to the client are unconfirmed."""
WRITE_CHECK_DELAY, MAX_WRITE_CHECK_DELAY = 0.02, 0.32
"""Seconds between the first and the second check whether all messages of a session were written to its connection, and
maximum seconds between two checks. The pause doubles with each check.
"""


class Deliveries:
    """Timers and stored queue of the deliveries of one relay.

    Implements :class:`~dmsg.rmb.relay.ports.Store`.

    :param wall_clock: function that returns seconds since 1970.
    :param on_expired: callback invoked with a stored message that has expired.
    """

    def __init__(
        self,
        clock: IReactorTime,
        queue: RelayQueue,
        wall_clock: Callable[[], float],
        on_expired: Callable[[bytes], None],
    ) -> None:
        self._clock = clock
        self._queue = queue
        self._wall_clock = wall_clock
        self._on_expired = on_expired
        self.waiting: dict[Delivery, None] = {}
        """Deliveries with messages in their window or backlog. Deliveries that have become empty are removed later."""
        self._to_ping: dict[Delivery, float] = {}
        self._to_check: list[tuple[Delivery, float]] = []

    # --- timers ---

    def note_waiting(self, delivery: Delivery) -> None:
        """Record that a delivery has messages in its backlog, which is its queue in memory."""
        self.waiting[delivery] = None

    def mark_busy(self, delivery: Delivery) -> None:
        """Record that a delivery is waiting for a confirmation."""
        if delivery.since is None:
            delivery.since = self._clock.seconds()
        self.waiting[delivery] = None

    def ping_later(self, delivery: Delivery) -> None:
        """Send a ping after the messages of a delivery, within ``PING_DELAY`` seconds, or within ``MAX_PING_DELAY``
        seconds while few messages are unconfirmed."""
        if not self._to_ping:
            self._clock.callLater(PING_DELAY, self._request_confirmations)
        self._to_ping[delivery] = self._clock.seconds()

    def _request_confirmations(self) -> None:
        waiting, self._to_ping = self._to_ping, {}
        now = self._clock.seconds()
        for delivery, since in waiting.items():
            if delivery.has_few_unconfirmed and now - since < MAX_PING_DELAY and not delivery.closed:
                self._to_ping[delivery] = since
            else:
                delivery.request_confirmation()
        if self._to_ping:
            self._clock.callLater(PING_DELAY, self._request_confirmations)

    def count_delivered_later(self, delivery: Delivery, wait: float = WRITE_CHECK_DELAY) -> None:
        """Call :meth:`~dmsg.rmb.relay.delivery.Delivery.count_delivered` after this reactor turn, at whose end the sent
        messages are written. Repeat the call, with growing pauses, until it returns True.

        :param wait: seconds before the first repetition. The pauses limit the cost: a call takes up to 0.15 ms, and
            there may be many sessions that read nothing.
        """
        if not self._to_check:
            self._clock.callLater(0, self._check_delivered)
        self._to_check.append((delivery, wait))

    def _check_delivered(self) -> None:
        waiting, self._to_check = self._to_check, []
        for delivery, wait in waiting:
            if not delivery.count_delivered():
                self._clock.callLater(wait, self.count_delivered_later, delivery, min(2 * wait, MAX_WRITE_CHECK_DELAY))

    # --- the stored queue ---

    def keep(self, session: Session, message: Message) -> Deferred[QueueId]:
        """Append a message to a session's queue."""
        return self._queue.append(str(session), message.data, message.until, message.sender)

    def read(self, session: Session, after: QueueId | None) -> Deferred[list[QueuedMessage]]:
        """Return the oldest messages in a session's queue whose ids are above ``after``."""
        return self._queue.read(str(session), after)

    def remove(self, session: Session, ids: list[QueueId]) -> None:
        """Delete messages from a session's queue."""
        self._queue.remove(str(session), ids)

    def life_end(self, queued: QueuedMessage) -> float | None:
        """Return the time at which a message expires. If it has expired, notify its sender and return None."""
        try:
            header = Header.read(queued.data)
        except EnvelopeError:
            return None
        now = self._wall_clock()
        if header.is_over(now) and header.kind != "pong":
            self._on_expired(queued.data)
            return None
        return header.until(now)
