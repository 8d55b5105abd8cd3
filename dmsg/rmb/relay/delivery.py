"""Delivery of messages to one session of a relay: which of them were sent, which are confirmed, and which still wait.

The relay sends a ping behind the messages. A message is confirmed, and so delivered, when the session has answered that
ping. Until then the message is in the *window*. When the window is full, further messages wait in a queue in memory,
the *line*.  When the line is full, the senders of further messages are paused (*held*): the relay stops processing and
then reading their messages (back-pressure).  They are paused until the receiving session has caught up, or is ended
because it confirmed nothing for a minute.  Senders of answers are not paused for a stalled session, because that
session asked for the answers. Messages whose confirmation takes longer than two seconds are also stored in the
session's queue, in SQLite or Redis, so that none is lost when the relay is killed.

The session pings the relay, too. The relay answers when every message that the session sent before the ping is
*settled*: confirmed by its receiver, stored in a queue, accepted by another relay, or refused. A sender sends unsettled
messages again, so no message is lost when a relay is killed. Receivers recognise repeated messages.

Clients of the reference do not recognise repeated messages, and would deliver one to a service twice. A client of the
reference that answers pings therefore need not confirm a message: the message counts as delivered once it is written to
the client's connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

from twisted.python.failure import Failure

from dmsg.rmb.relay.ports import Carrier, Store
from dmsg.rmb.relay.queue.interface import QueuedMessage, QueueId
from dmsg.rmb.socket.confirm import Message
from dmsg.rmb.socket.held_messages import HeldMessages
from dmsg.rmb.twins.address import Session

WINDOW_MESSAGES = 1024
"""Maximum number of messages that are sent to a session before it has confirmed them."""
WINDOW_SIZE = 4 * 1024 * 1024
"""Maximum bytes of the messages sent to a session before it has confirmed them; the last message may exceed the
limit."""
SPILL_AFTER = 2.0
"""Seconds without confirmation after which a sent message is also stored in the session's queue."""
LINE_MESSAGES, LINE_SIZE = 4096, 8 * 1024 * 1024
"""Number and bytes of messages that wait, in memory or in the queue, until a connected session's window has room. At
either limit the senders are paused."""
OVERHEAD = 300
"""Bytes of memory that each message takes in addition to its data."""
FEW_IN_WINDOW = 64
"""Number of unconfirmed messages below which the ping that asks for their confirmation is delayed, for a session that
logs an error for each ping."""


class Delivery:
    """Messages to one connected session, in order.

    Messages in the stored queue are older than messages in the line (the queue in memory).  So messages go from the
    line to the window only when the stored queue is empty, and the line is stored only as a whole.

    :param line: number of waiting messages, in the line and in the stored queue, at which their senders are paused.
    :param size: bytes of these messages.
    :ivar appending: number of messages that :meth:`offer` did not take and that are being written to the stored queue.
    :ivar lazy: whether the session is a client of the reference. Such a client does not recognise repeated messages and
        logs an error for each ping, so it is pinged as rarely as possible.
    :ivar answers: whether the session has answered a ping.
    :ivar stalled: whether the session has confirmed nothing for long; it is then treated like a session that is not
        connected.
    :ivar catching_up: whether the stored queue may contain messages, which must be sent before those in the line.
    """

    __slots__ = (
        "_after",
        "_barrier",
        "_carrier",
        "_confirmed",
        "_handed",
        "_handed_size",
        "_handing",
        "_held",
        "_inside",
        "_keeping",
        "_line",
        "_line_messages",
        "_line_size",
        "_lined",
        "_marks",
        "_more",
        "_most_size",
        "_queued_count",
        "_queued_size",
        "_read_again",
        "_reading",
        "_sent",
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
        line: int = LINE_MESSAGES,
        size: int | None = None,
    ) -> None:
        self.session = session
        self._carrier = carrier
        self._store = store
        self._window: deque[Message] = deque()
        self._size = 0
        self._sent = self._sent_size = 0
        self._confirmed = 0
        # Number and bytes of the messages that were written to the connection, or are confirmed.
        self._handed = self._handed_size = 0
        self._handing = False
        self._barrier = False
        self._after: QueueId | None = None
        self._reading = self._read_again = self._inside = self._more = False
        self._keeping = 0
        # Ids, in the stored queue, of messages that are also in the window; they were stored because their confirmation
        # took long.
        self._skip: set[QueueId] = set()
        self._line: deque[Message] = deque()
        self._line_messages = line
        self._most_size = size
        self._line_size = 0
        self._lined = 0
        """Number of messages appended to the line so far; ``_marks`` holds its values at the last two checks."""
        self._marks = (0, 0)
        self._queued_count = self._queued_size = 0
        """Number of messages that were stored while the session was connected and are not read back yet, followed by
        their bytes."""
        self._held: set[HeldMessages] = set()
        self.appending = 0
        self.stalled = False
        self.lazy = False
        self.answers = False
        self.catching_up = True
        self.closed = False
        self.since: float | None = None
        """Time at which the wait for a confirmation began, by the relay's clock; None without such a wait."""

    def __len__(self) -> int:
        return len(self._window) + len(self._line)

    @property
    def sent(self) -> int:
        """Number of messages sent to the session since it connected."""
        return self._sent

    @property
    def size(self) -> int:
        """Bytes of the messages in the window and the line, including ``OVERHEAD`` for each."""
        return self._size + self._line_size + OVERHEAD * len(self)

    def start(self) -> None:
        """Begin to deliver the messages in the stored queue."""
        if self.lazy:
            self._carrier.barrier(0)  # Send a ping at once, to find out whether the client answers pings at all.
        self._read()

    @property
    def is_trusted(self) -> bool:
        """Whether a message counts as delivered once it is written to the session's connection."""
        return self.lazy and self.answers and not self.stalled

    @property
    def _is_full(self) -> bool:
        return len(self._window) >= WINDOW_MESSAGES or self._size >= WINDOW_SIZE

    def offer(self, message: Message) -> bool:
        """Accept a message into the window or the line; return False when the caller has to store it in the queue."""
        if not (self._line or self.catching_up or self._is_full):
            self._send(message)
            return True
        if self.stalled or self._is_too_long or message.durable:
            self._queued_count += 1
            self._queued_size += len(message.data)
            self._wait_for_me(message)
            # The line is stored in the queue before this message, so that the messages stay in order.
            self._spill_all()
            self.catching_up = True
            self._read_again = True
            return False
        if not self._line:
            self._store.note_waiting(self)
        self._line.append(message)
        self._lined += 1
        self._line_size += len(message.data)
        self._wait_for_me(message)
        return True

    def _wait_for_me(self, message: Message) -> None:
        holder = message.owner.holder if message.owner is not None else None
        if holder is None or holder in self._held or (self.stalled and message.is_answer):
            return
        if self._reaches_limit(1):
            self._held.add(holder)
            holder.wait_for(self)

    @property
    def is_crowded(self) -> bool:
        """Whether so many messages wait that the senders of further ones have to pause."""
        return self._reaches_limit(1)

    @property
    def _is_too_long(self) -> bool:
        """Whether the line has twice the size at which senders are paused.  Senders that cannot be paused make it grow
        so far."""
        return len(self._line) >= 2 * self._line_messages or self._line_size >= 2 * LINE_SIZE

    def _reaches_limit(self, part: int) -> bool:
        """Whether the waiting messages reach a ``part``-th of the limit at which senders are paused."""
        waiting, size = len(self._line) + self._queued_count, self._line_size + self._queued_size
        most = LINE_SIZE if self._most_size is None else min(LINE_SIZE, self._most_size)
        return waiting * part >= self._line_messages or size * part >= most

    def _advance_line(self) -> None:
        """Move messages from the line into the window, as long as the stored queue contains no older ones."""
        line = self._line
        while line and not (self.catching_up or self._is_full):
            message = line.popleft()
            self._line_size -= len(message.data)
            self._send(message)
        self._release_if_roomy()

    def _release_if_roomy(self) -> None:
        if self._held and not self._reaches_limit(2):
            self._release()

    def _release(self) -> None:
        held, self._held = self._held, set()
        for holder in held:
            holder.stop_waiting_for(self)

    def check(self) -> None:
        """Store the window and the line in the queue if a message has been in the line for two checks, one a second."""
        if self._line and self._lined - len(self._line) < self._marks[0]:
            self._spill_all()
        self._marks = (self._marks[1], self._lined)

    def stall(self) -> None:
        """Treat the session as stalled: store all its messages in the queue, and stop pausing the senders of answers to
        it."""
        before, self.stalled = self.stalled, True
        self._spill_all()
        if not before:
            # All paused senders go on: those of answers are not paused for a stalled session, and others pause again at
            # their next message.
            self._release()

    def _spill_all(self) -> None:
        """Move all messages to the stored queue: first the unconfirmed ones of the window, then the waiting ones."""
        self.spill()
        if not self._line:
            return
        line, self._line = self._line, deque()
        self._queued_count += len(line)
        self._queued_size += self._line_size
        self._line_size = 0
        self.catching_up = True
        self._read_again = True
        for message in line:
            self._put_by(message)

    def _put_by(self, message: Message) -> None:
        self._keeping += 1

        def done(result: object) -> None:
            self._keeping -= 1
            self._read()

        kept = self._store.keep(self.session, message)
        kept.addCallbacks(lambda _: message.settle(), lambda _: message.lose()).addBoth(done)

    def _send(self, message: Message) -> None:
        self._window.append(message)
        self._size += len(message.data)
        self._sent += 1
        self._sent_size += len(message.data)
        self._carrier.send(message.data)
        if self.is_trusted:
            self._hand_later()
        elif message.queue_id is None and (self.stalled or message.durable):
            self._keep(message)
        self._ping()

    def _hand_later(self) -> None:
        if not self._handing:
            self._handing = True
            self._store.hand_later(self)

    def count_delivered(self) -> bool:
        """Count the messages that were written to the connection of a trusted session as delivered.

        :returns: whether all messages are counted; otherwise call this method again later.
        """
        self._handing = False
        if not self.is_trusted or self.closed:
            return True
        most = self._sent_size - self._carrier.unsent
        handed = []
        for message in islice(self._window, self._handed - self._confirmed, None):
            if self._handed_size + len(message.data) > most:
                self._handing = True
                break
            self._handed += 1
            self._handed_size += len(message.data)
            handed.append(message)
        self._remove(handed)
        for message in handed:
            message.handed = True
            message.settle()
        if self._handing:
            self._keep_all(islice(list(self._window), self._handed - self._confirmed, None), durable=True)
        return not self._handing

    def _remove(self, messages: list[Message]) -> None:
        removed = [message.queue_id for message in messages if message.queue_id is not None]
        if not removed:
            return
        for message in messages:
            if not self._reading:  # A read under way may return these ids, so they are remembered until it has ended.
                self._skip.discard(message.queue_id)
            message.queue_id = None
        self._store.remove(self.session, removed)

    def _ping(self) -> None:
        # One ping is under way at a time; its answer starts the next one, which covers all messages sent meanwhile.
        if self._barrier:
            return
        self._barrier = True
        if self.lazy:
            self._store.ping_later(self)
        else:
            self.ping_behind()

    @property
    def has_few_unconfirmed(self) -> bool:
        """Whether so few messages are unconfirmed that the ping behind them can be delayed."""
        return len(self._window) < FEW_IN_WINDOW and self._size < WINDOW_SIZE // 2

    def ping_behind(self) -> None:
        """Send a ping behind the messages; the session's answer confirms all messages sent before it."""
        if self._window and not self.closed:
            self._carrier.barrier(self._sent)
            self._store.mark_busy(self)
        else:
            self._barrier = False

    def wake(self) -> None:
        """Read the stored queue, because a message was added to it."""
        self.catching_up = True
        self._read_again = True
        self._read()

    def confirmed(self, number: int) -> None:
        """Process a confirmation of all messages up to this number.

        :raises ValueError: fewer messages were sent.
        """
        if number > self._sent:
            raise ValueError("the session confirms a message that was not sent")
        if not self.answers:
            self.answers = True
            if self.lazy:
                self._hand_later()
        removed = []
        if self._confirmed < number:
            # The time of the wait is not reset by a pong that confirms nothing new, because such a pong does not show
            # that the session reads.
            self.since = None
            self.stalled = False
        while self._confirmed < number:
            message = self._window.popleft()
            self._confirmed += 1
            self._size -= len(message.data)
            if self._confirmed > self._handed:
                self._handed += 1
                self._handed_size += len(message.data)
            message.confirmed = True
            message.settle()
            removed.append(message)
        self._remove(removed)
        self._barrier = False
        if self._line and not self.catching_up:
            self._advance_line()
        if self._window:
            self._ping()
        if self.catching_up:
            self._read()

    # --- the stored queue ---

    def _read(self) -> None:
        """Read the stored queue batch by batch until the window is full, in a loop because a queue may answer at
        once."""
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
        self._queued_count = max(0, self._queued_count - len(batch)) if batch else 0
        self._queued_size = max(0, self._queued_size - sum(len(one.data) for one in batch)) if self._queued_count else 0
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
        self._release_if_roomy()
        if batch or self._read_again:
            self._more = True
            self._read()
        elif not self.appending:
            self.catching_up = False
            self._advance_line()

    def _read_failed(self, failure: Failure) -> None:
        # The error is ignored, because the relay's periodic check reads the queue again.
        self._reading = False

    def retry(self) -> None:
        """Read the stored queue again, in case a read failed or a notification of a new message was lost."""
        if self.catching_up:
            self._read()

    # --- unconfirmed messages ---

    def spill(self) -> None:
        """Store the messages of the window in the queue, because their confirmation takes long."""
        self._keep_all(list(self._window))

    def _keep_all(self, messages: Iterable[Message], *, durable: bool = False) -> None:
        """Store messages in the queue unless they are stored already.

        :param durable: whether to store only messages that their senders do not send again.
        """
        for message in messages:
            if message.queue_id is None and not message.keeping and (message.durable or not durable):
                self._keep(message)

    def _keep(self, message: Message) -> None:
        message.keeping = True
        # Reads of the queue wait until the id of the message is known; otherwise the message would be read back and
        # sent a second time.
        self._keeping += 1

        def kept(number: QueueId) -> None:
            message.queue_id = number
            message.settle()
            if message.confirmed or (message.handed and self.is_trusted):
                self._remove([message])
            else:
                self._skip.add(number)

        def done(result: object) -> None:
            message.keeping = False
            self._keeping -= 1
            if self.catching_up:
                self._read()

        def failed(failure: Failure) -> None:
            # While a message is in the window, the relay's periodic check tries again to store it. After the close, the
            # window is empty, so the sender has to send the message again.
            if self.closed:
                message.lose()

        self._store.keep(self.session, message).addCallback(kept).addErrback(failed).addBoth(done)

    def close(self) -> list[Message]:
        """End the delivery; return the messages that are neither confirmed nor stored in the queue."""
        self.count_delivered()
        delivered = self.is_trusted
        self.closed = True
        left = [
            message
            for message in self._window
            if message.queue_id is None and not message.keeping and not (message.handed and delivered)
        ]
        left += self._line
        self._window.clear()
        self._line.clear()
        self._size = self._line_size = 0
        self._release()
        return left
