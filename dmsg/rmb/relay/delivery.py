"""Delivery of messages to one session of a relay: which wait, are sent and are confirmed, and when they are stored.

The relay sends a ping after the messages. A message is confirmed, and so delivered, when the session has answered that
ping. Sent messages that are not confirmed yet are in the *window*. When the window is full, further messages are
appended to a queue in memory, the *backlog* (:mod:`dmsg.rmb.relay.backlog`). When the backlog is full, the senders of
further messages are paused: the relay first stops processing their messages, and then stops reading them
(back-pressure). The pause ends when the receiving session has caught up, or when it is disconnected because it
confirmed nothing for a minute. Senders of answers are not paused for a stalled session, because that session has
requested the answers. A message whose confirmation takes longer than two seconds is also stored in the session's queue,
in SQLite or Redis, from which it is delivered even if the relay is killed.

The session pings the relay, too. The relay answers when every message that the session sent before the ping is
*settled*: confirmed by its receiver, stored in a queue, accepted by another relay, or refused. A sender sends unsettled
messages again, so no message is lost when a relay is killed. Receivers recognise repeated messages.

Clients of the reference implementation do not recognise repeated messages, and would deliver them to a service twice.
So if such a client answers pings at all, a message to it counts as delivered as soon as it is written to the client's
connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

from twisted.python.failure import Failure

from dmsg.rmb.relay.backlog import BACKLOG_MESSAGES, Backlog
from dmsg.rmb.relay.ports import Carrier, Store
from dmsg.rmb.relay.queue.interface import QueuedMessage, QueueId
from dmsg.rmb.socket.confirm import Message
from dmsg.rmb.twins.address import Session

WINDOW_MESSAGES = 1024
"""Maximum number of unconfirmed messages that are sent to a session."""
WINDOW_SIZE = 4 * 1024 * 1024
"""Maximum bytes of the unconfirmed messages that are sent to a session. The last message may exceed the limit."""
SPILL_AFTER = 2.0
"""Seconds without confirmation after which a sent message is also stored in the session's queue."""
OVERHEAD = 300
"""Number of bytes of memory that each message takes in addition to its data."""
FEW_IN_WINDOW = 64
"""Number of unconfirmed messages below which a session that logs an error for each ping is pinged with a delay."""


class Delivery:
    """Messages to one connected session, in order.

    Messages in the stored queue are older than those in the backlog (the queue in memory). To keep this order, messages
    move from the backlog to the window only when the stored queue is empty, and the backlog is stored only as a whole.

    :param backlog: number of waiting messages, in the backlog and the stored queue together, at which their senders are
        paused.
    :param size: number of bytes of the waiting messages at which their senders are paused.
    :ivar appending: number of messages that :meth:`offer` refused and that are now being written to the stored queue.
    :ivar lazy: whether the session is a client of the reference implementation. Such a client does not recognise
        repeated messages, and logs an error for each ping, so it is pinged as rarely as possible.
    :ivar answers: whether the session has answered a ping.
    :ivar stalled: whether the session has confirmed nothing for long. It is then treated as if it were not connected.
    :ivar catching_up: whether the stored queue may contain messages, which must be sent before those in the backlog.
    """

    __slots__ = (
        "_after",
        "_backlog",
        "_barrier",
        "_carrier",
        "_checking_delivered",
        "_confirmed_count",
        "_delivered_count",
        "_delivered_size",
        "_inside",
        "_keeping",
        "_more",
        "_read_again",
        "_reading",
        "_sent_count",
        "_sent_size",
        "_size",
        "_skip",
        "_store",
        "_window",
        "answers",
        "appending",
        "catching_up",
        "closed",
        "lazy",
        "session",
        "since",
        "stalled",
    )

    def __init__(
        self,
        session: Session,
        carrier: Carrier,
        store: Store[Delivery],
        backlog: int = BACKLOG_MESSAGES,
        size: int | None = None,
    ) -> None:
        self.session = session
        self._carrier = carrier
        self._store = store
        self._window: deque[Message] = deque()
        self._size = 0
        self._sent_count = self._sent_size = 0
        self._confirmed_count = 0
        # Number and bytes of the messages that count as delivered: they are confirmed, or were written to the
        # connection of a trusted session.
        self._delivered_count = self._delivered_size = 0
        self._checking_delivered = False
        self._barrier = False
        self._after: QueueId | None = None
        self._reading = self._read_again = self._inside = self._more = False
        self._keeping = 0
        # Ids of messages that are both in the stored queue and in the window: the confirmation of a sent message took
        # long, so it was stored as well. Reads of the stored queue skip these messages.
        self._skip: set[QueueId] = set()
        self._backlog = Backlog(backlog, size)
        self.appending = 0
        self.stalled = False
        self.lazy = False
        self.answers = False
        self.catching_up = True
        self.closed = False
        self.since: float | None = None
        """Time, by the relay's clock, since when a confirmation has been expected; None if none is expected."""

    def __len__(self) -> int:
        return len(self._window) + len(self._backlog.messages)

    @property
    def sent_count(self) -> int:
        """Number of messages sent to the session since it connected."""
        return self._sent_count

    @property
    def size(self) -> int:
        """Number of bytes of memory that the messages in the window and the backlog take, including ``OVERHEAD`` for
        each."""
        return self._size + self._backlog.size + OVERHEAD * len(self)

    def start(self) -> None:
        """Begin to deliver, first the messages in the stored queue."""
        if self.lazy:
            self._carrier.barrier(0)  # This ping shows whether the client answers pings at all.
        self._read()

    @property
    def is_trusted(self) -> bool:
        """Whether a message counts as delivered as soon as it is written to the session's connection."""
        return self.lazy and self.answers and not self.stalled

    @property
    def _is_full(self) -> bool:
        return len(self._window) >= WINDOW_MESSAGES or self._size >= WINDOW_SIZE

    def offer(self, message: Message) -> bool:
        """Accept a message into the window or the backlog. Return False if the caller must store it in the queue
        instead."""
        if not (self._backlog.messages or self.catching_up or self._is_full):
            self._send(message)
            return True
        if self.stalled or self._backlog.is_too_long or message.durable:
            self._backlog.count_stored(message)
            self._backlog.pause_sender_if_full(message, pauses_answers=not self.stalled)
            # The backlog is stored before this message, so that the messages stay in order.
            self._spill_all()
            self.catching_up = True
            self._read_again = True
            return False
        if not self._backlog.messages:
            self._store.note_waiting(self)
        self._backlog.append(message)
        self._backlog.pause_sender_if_full(message, pauses_answers=not self.stalled)
        return True

    @property
    def is_crowded(self) -> bool:
        """Whether so many messages are waiting that the senders of further messages must be paused."""
        return self._backlog.reaches_limit()

    def _advance_backlog(self) -> None:
        """Move messages from the backlog into the window, if the stored queue contains no older messages."""
        backlog = self._backlog
        while backlog.messages and not (self.catching_up or self._is_full):
            self._send(backlog.take())
        backlog.resume_senders_if_roomy()

    def check(self) -> None:
        """Store the window and the backlog in the queue if the oldest message of the backlog was already in the backlog
        two checks ago. Called once a second."""
        if self._backlog.is_stuck():
            self._spill_all()

    def stall(self) -> None:
        """Mark the session as stalled and store all its messages in the queue. Senders of answers to it are no longer
        paused."""
        before, self.stalled = self.stalled, True
        self._spill_all()
        if not before:
            # All paused senders are resumed. Those that send more than answers are paused again at their next message.
            self._backlog.resume_senders()

    def _spill_all(self) -> None:
        """Move all messages to the stored queue: the unconfirmed ones of the window first, then those in the
        backlog."""
        self.spill()
        if not self._backlog.messages:
            return
        waiting = self._backlog.take_all()
        self.catching_up = True
        self._read_again = True
        for message in waiting:
            self._store_waiting(message)

    def _store_waiting(self, message: Message) -> None:
        self._keeping += 1

        def done(result: object) -> None:
            self._keeping -= 1
            self._read()

        kept = self._store.keep(self.session, message)
        kept.addCallbacks(lambda _: message.settle(), lambda _: message.lose()).addBoth(done)

    def _send(self, message: Message) -> None:
        self._window.append(message)
        self._size += len(message.data)
        self._sent_count += 1
        self._sent_size += len(message.data)
        self._carrier.send(message.data)
        if self.is_trusted:
            self._check_delivered_later()
        elif message.queue_id is None and (self.stalled or message.durable):
            self._keep(message)
        self._ping()

    def _check_delivered_later(self) -> None:
        if not self._checking_delivered:
            self._checking_delivered = True
            self._store.count_delivered_later(self)

    def count_delivered(self) -> bool:
        """Mark as delivered the messages that were written to the connection of a trusted session.

        :returns: True if no message is left to mark. Otherwise the caller must call this method again later.
        """
        self._checking_delivered = False
        if not self.is_trusted or self.closed:
            return True
        most = self._sent_size - self._carrier.unsent
        written = []
        for message in islice(self._window, self._delivered_count - self._confirmed_count, None):
            if self._delivered_size + len(message.data) > most:
                self._checking_delivered = True
                break
            self._delivered_count += 1
            self._delivered_size += len(message.data)
            written.append(message)
        self._remove(written)
        for message in written:
            message.written = True
            message.settle()
        if self._checking_delivered:
            self._keep_all(
                islice(list(self._window), self._delivered_count - self._confirmed_count, None), durable=True
            )
        return not self._checking_delivered

    def _remove(self, messages: list[Message]) -> None:
        removed = [message.queue_id for message in messages if message.queue_id is not None]
        if not removed:
            return
        for message in messages:
            # A read in progress may still return these ids, so they are remembered until it has ended.
            if not self._reading:
                self._skip.discard(message.queue_id)
            message.queue_id = None
        self._store.remove(self.session, removed)

    def _ping(self) -> None:
        # Only one ping is unanswered at a time. Its answer triggers the next ping, which covers all messages sent
        # meanwhile.
        if self._barrier:
            return
        self._barrier = True
        if self.lazy:
            self._store.ping_later(self)
        else:
            self.request_confirmation()

    @property
    def has_few_unconfirmed(self) -> bool:
        """Whether so few messages are unconfirmed that the ping after them can be delayed."""
        return len(self._window) < FEW_IN_WINDOW and self._size < WINDOW_SIZE // 2

    def request_confirmation(self) -> None:
        """Send a ping after the messages. The session's pong confirms all messages that were sent before the ping."""
        if self._window and not self.closed:
            self._carrier.barrier(self._sent_count)
            self._store.mark_busy(self)
        else:
            self._barrier = False

    def wake(self) -> None:
        """Read the stored queue, because a message was added to it."""
        self.catching_up = True
        self._read_again = True
        self._read()

    def confirmed(self, number: int) -> None:
        """Process the confirmation of the first ``number`` messages that were sent to the session.

        :raises ValueError: fewer messages were sent.
        """
        if number > self._sent_count:
            raise ValueError("the session confirms a message that was not sent")
        if not self.answers:
            self.answers = True
            if self.lazy:
                self._check_delivered_later()
        removed = []
        if self._confirmed_count < number:
            # ``since`` is reset only if the pong confirms a new message. Other pongs do not show that the session
            # reads.
            self.since = None
            self.stalled = False
        while self._confirmed_count < number:
            message = self._window.popleft()
            self._confirmed_count += 1
            self._size -= len(message.data)
            if self._confirmed_count > self._delivered_count:
                self._delivered_count += 1
                self._delivered_size += len(message.data)
            message.confirmed = True
            message.settle()
            removed.append(message)
        self._remove(removed)
        self._barrier = False
        if self._backlog.messages and not self.catching_up:
            self._advance_backlog()
        if self._window:
            self._ping()
        if self.catching_up:
            self._read()

    # --- the stored queue ---

    def _read(self) -> None:
        """Read the stored queue batch by batch until the window is full. This is a loop, not a recursion, because a
        queue may answer at once."""
        if self._inside:
            return
        self._inside = True
        try:
            self._more = True
            while self._more and not (self._reading or self.closed or self._is_full or self._keeping):
                self._reading = True
                self._read_again = self._more = False
                self._store.read(self.session, self._after).addCallbacks(self._batch_read, self._read_failed)
        finally:
            self._inside = False

    def _batch_read(self, batch: list[QueuedMessage]) -> None:
        self._reading = False
        if self.closed:
            return
        self._backlog.count_read(batch)
        expired = []
        for queued in batch:
            self._after = queued.id
            if queued.id in self._skip:
                self._skip.discard(queued.id)
                continue
            until = self._store.life_end(queued)
            if until is None:
                expired.append(queued.id)
            else:
                self._send(Message(queued.data, until, None, queued.id))
        if expired:
            self._store.remove(self.session, expired)
        self._backlog.resume_senders_if_roomy()
        if batch or self._read_again:
            self._more = True
            self._read()
        elif not self.appending:
            self.catching_up = False
            self._advance_backlog()

    def _read_failed(self, failure: Failure) -> None:
        # The error is ignored, because the relay's periodic check reads the queue again.
        self._reading = False

    def retry(self) -> None:
        """Read the stored queue again, in case a read failed or a notification about a new message was lost."""
        if self.catching_up:
            self._read()

    # --- unconfirmed messages ---

    def spill(self) -> None:
        """Store the messages of the window in the queue, too, because their confirmation takes long."""
        self._keep_all(list(self._window))

    def _keep_all(self, messages: Iterable[Message], *, durable: bool = False) -> None:
        """Store messages in the queue unless they are stored already.

        :param durable: whether to store only messages of senders that never repeat an unconfirmed message.
        """
        for message in messages:
            if message.queue_id is None and not message.keeping and (message.durable or not durable):
                self._keep(message)

    def _keep(self, message: Message) -> None:
        message.keeping = True
        # Reads of the queue wait until the message's id is known. Otherwise the message would be read back and sent
        # twice.
        self._keeping += 1

        def kept(number: QueueId) -> None:
            message.queue_id = number
            message.settle()
            if message.confirmed or (message.written and self.is_trusted):
                self._remove([message])
            else:
                self._skip.add(number)

        def done(result: object) -> None:
            message.keeping = False
            self._keeping -= 1
            if self.catching_up:
                self._read()

        def failed(failure: Failure) -> None:
            # The message could not be stored. While the message is in the window, the relay's periodic check tries
            # again to store it. After the close there is no window, so the sender must send the message again.
            if self.closed:
                message.lose()

        self._store.keep(self.session, message).addCallback(kept).addErrback(failed).addBoth(done)

    def close(self) -> list[Message]:
        """End the delivery. Return the messages that are neither confirmed nor stored in the queue."""
        self.count_delivered()
        delivered = self.is_trusted
        self.closed = True
        left = [
            message
            for message in self._window
            if message.queue_id is None and not message.keeping and not (message.written and delivered)
        ]
        left += self._backlog.messages
        self._window.clear()
        self._backlog.clear()
        self._size = 0
        self._backlog.resume_senders()
        return left
