"""A session at a relay: what was sent to it, what it confirmed, what it has to wait for.

A message counts as delivered when the session's websocket has answered a ping
that was sent behind it.  Until then it is in the *window*; when that is full,
what comes waits in a *line* in memory, and those who send it are read no
further.  Where the answer takes longer than two seconds the session's queue takes
over, so that a relay that is killed loses nothing of it; who sends more is held
all the same, until the session has caught up, or is ended because it confirmed
nothing for a minute.  Only answers hold nobody: the session asked for them.  In
the same way a ping of the session itself is answered when all it sent before is *settled*:
confirmed by its receiver, in a queue, with another relay, or refused.  So
whoever sends again what was not confirmed loses nothing when a relay is
killed; receivers know what they have had.

Clients of the reference do not know that.  They would hand to a service twice
what comes twice, so what was handed to the connection of one that answers
pings counts as delivered at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

from twisted.python.failure import Failure

from dmsg.rmb.relay.ports import Carrier, Store
from dmsg.rmb.relay.queue.interface import Queued, QueueId
from dmsg.rmb.socket.confirm import Message
from dmsg.rmb.socket.held_messages import HeldMessages
from dmsg.rmb.twins.address import Session

WINDOW_MESSAGES = 1024
"""Messages sent to a session and not confirmed."""
WINDOW_SIZE = 4 * 1024 * 1024
"""Bytes of these; one message more may be larger."""
SPILL_AFTER = 2.0
"""Seconds without confirmation after which the queue keeps a message too."""
LINE_MESSAGES, LINE_SIZE = 4096, 8 * 1024 * 1024
"""Messages that wait for the window of a connected session, in memory or in its queue, and their bytes; who sends more
is held."""
OVERHEAD = 300
"""Bytes that a message takes in memory besides its own."""
FEW_IN_WINDOW = 64
"""Messages unconfirmed by a session that logs each ping, up to which it is pinged behind them only in a while."""


class Delivery:
    """Messages to one connected session, in order.

    What is in the queue is older than what is in the line, and that is older
    than nothing else: so the line moves into the window only when the queue is
    empty, and goes into the queue as a whole.

    :param line: messages in the line at which senders are held; with those behind it in the queue.
    :param size: bytes of these.
    :ivar appending: messages on their way into the queue that :meth:`offer` did not take.
    :ivar lazy: the session is a client of the reference, which does not know what it has had, and logs an error for
        each ping: there are as few behind messages as may be.
    :ivar answers: it has answered a ping.
    :ivar stalled: it has confirmed nothing for long, and is treated as one that is away.
    :ivar catching_up: there is, or may be, something in the queue that goes first.
    """

    __slots__ = (
        "_after",
        "_again",
        "_barrier",
        "_behind",
        "_behind_size",
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
        # messages and bytes up to which all is with the connection, or confirmed
        self._handed = self._handed_size = 0
        self._handing = False
        self._barrier = False
        self._after: QueueId | None = None
        self._reading = self._again = self._inside = self._more = False
        self._keeping = 0
        # ids of what is in the queue only because its confirmation took long
        self._skip: set[QueueId] = set()
        self._line: deque[Message] = deque()
        self._line_messages = line
        self._most_size = size
        self._line_size = 0
        self._lined = 0
        """Messages that were put into the line so far; ``_marks``: how many at the last two looks."""
        self._marks = (0, 0)
        self._behind = self._behind_size = 0
        """Messages that went into the queue while it was connected and were not read from it, and their bytes."""
        self._held: set[HeldMessages] = set()
        self.appending = 0
        self.stalled = False
        self.lazy = False
        self.answers = False
        self.catching_up = True
        self.closed = False
        self.since: float | None = None
        """When the present wait for a confirmation began; the relay's clock sets it."""

    def __len__(self) -> int:
        return len(self._window) + len(self._line)

    @property
    def sent(self) -> int:
        """Messages that were sent to it since it connected."""
        return self._sent

    @property
    def size(self) -> int:
        """Bytes of its window and its line, with what each message takes besides."""
        return self._size + self._line_size + OVERHEAD * len(self)

    def start(self) -> None:
        """Deliver what is in the queue."""
        if self.lazy:
            self._carrier.barrier(0)  # does it answer?
        self._read()

    @property
    def trusted(self) -> bool:
        """Whether what was handed to its connection counts as delivered."""
        return self.lazy and self.answers and not self.stalled

    @property
    def _full(self) -> bool:
        return len(self._window) >= WINDOW_MESSAGES or self._size >= WINDOW_SIZE

    def offer(self, message: Message) -> bool:
        """Take a message, to be sent now or from the line; False when it has to go into the queue."""
        if not (self._line or self.catching_up or self._full):
            self._send(message)
            return True
        if self.stalled or self._too_long or message.durable:
            self._behind += 1
            self._behind_size += len(message.data)
            self._wait_for_me(message)
            # into the queue before what comes now, so that the order stays
            self._spill_all()
            self.catching_up = True
            self._again = True
            return False
        if not self._line:
            self._store.waits(self)
        self._line.append(message)
        self._lined += 1
        self._line_size += len(message.data)
        self._wait_for_me(message)
        return True

    def _wait_for_me(self, message: Message) -> None:
        holder = message.owner.holder if message.owner is not None else None
        if holder is None or holder in self._held or (self.stalled and message.is_answer):
            return
        if self._crowded(1):
            self._held.add(holder)
            holder.wait_for(self)

    @property
    def crowded(self) -> bool:
        """Whether so much waits that who sends more is held."""
        return self._crowded(1)

    @property
    def _too_long(self) -> bool:
        """Twice what holds senders: those that nobody can hold have filled it."""
        return len(self._line) >= 2 * self._line_messages or self._line_size >= 2 * LINE_SIZE

    def _crowded(self, part: int) -> bool:
        """The ``part``-th part of what holds senders waits."""
        waiting, size = len(self._line) + self._behind, self._line_size + self._behind_size
        most = LINE_SIZE if self._most_size is None else min(LINE_SIZE, self._most_size)
        return waiting * part >= self._line_messages or size * part >= most

    def _advance_line(self) -> None:
        """From the line into the window, when the queue has nothing that goes before."""
        line = self._line
        while line and not (self.catching_up or self._full):
            message = line.popleft()
            self._line_size -= len(message.data)
            self._send(message)
        self._release_if_roomy()

    def _release_if_roomy(self) -> None:
        if self._held and not self._crowded(2):
            self._release()

    def _release(self) -> None:
        held, self._held = self._held, set()
        for holder in held:
            holder.caught_up(self)

    def look(self) -> None:
        """Every second: when something has waited for two to three, all that waits goes to the queue, in its order, so
        that it survives the process."""
        if self._line and self._lined - len(self._line) < self._marks[0]:
            self._spill_all()
        self._marks = (self._marks[1], self._lined)

    def stall(self) -> None:
        """It confirms nothing: let the queue keep everything, and hold nobody for what the session asked for."""
        before, self.stalled = self.stalled, True
        self._spill_all()
        if not before:
            self._release()  # who sends it more that is no answer is held again

    def _spill_all(self) -> None:
        """The window into the queue, and the line behind it, so that they have their order there too."""
        self.spill()
        if not self._line:
            return
        line, self._line = self._line, deque()
        self._behind += len(line)
        self._behind_size += self._line_size
        self._line_size = 0
        self.catching_up = True
        self._again = True
        for message in line:
            self._put_by(message)

    def _put_by(self, message: Message) -> None:
        self._keeping += 1

        def done(result: object) -> None:
            self._keeping -= 1
            self._again = True
            if not self._keeping and not self.closed:
                self._read()

        kept = self._store.keep(self.session, message)
        kept.addCallbacks(lambda _: message.settle(), lambda _: message.lose()).addBoth(done)

    def _send(self, message: Message) -> None:
        self._window.append(message)
        self._size += len(message.data)
        self._sent += 1
        self._sent_size += len(message.data)
        self._carrier.send(message.data)
        if self.trusted:
            self._hand_later()
        elif message.kept is None and (self.stalled or message.durable):
            self._keep(message)
        self._ping()

    def _hand_later(self) -> None:
        if not self._handing:
            self._handing = True
            self._store.hand_later(self)

    def hand(self) -> bool:
        """Count as delivered what is with the connection of a session that is trusted.

        :returns: whether that is all; else it has to be called again.
        """
        self._handing = False
        if not self.trusted or self.closed:
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
        """They are delivered: the queue need not have them any more."""
        removed = [message.kept for message in messages if message.kept is not None]
        if not removed:
            return
        for message in messages:
            if not self._reading:  # else they may be in what is being read
                self._skip.discard(message.kept)
            message.kept = None
        self._store.remove(self.session, removed)

    def _ping(self) -> None:
        if self._barrier:
            return
        self._barrier = True
        if self.lazy:
            self._store.ping_later(self)
        else:
            self.ping_behind()

    @property
    def few(self) -> bool:
        """So few are unconfirmed that their confirmation can wait."""
        return len(self._window) < FEW_IN_WINDOW and self._size < WINDOW_SIZE // 2

    def ping_behind(self) -> None:
        """Ask the session to confirm all that was sent."""
        if self._window and not self.closed:
            self._carrier.barrier(self._sent)
            self._store.busy(self)
        else:
            self._barrier = False

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
        if not self.answers:
            self.answers = True
            if self.lazy:
                self._hand_later()
        removed = []
        if self._confirmed < number:
            # an answer that confirms nothing new is no sign that it reads
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
        self._behind = max(0, self._behind - len(batch)) if batch else 0
        self._behind_size = max(0, self._behind_size - sum(len(one.data) for one in batch)) if self._behind else 0
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
        self._release_if_roomy()
        if batch or self._again:
            self._more = True
            self._read()
        elif not self.appending:
            self.catching_up = False
            self._advance_line()

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
        self._keep_all(list(self._window))

    def _keep_all(self, messages: Iterable[Message], *, durable: bool = False) -> None:
        """:param durable: only what its sender does not send again."""
        for message in messages:
            if message.kept is None and not message.keeping and (message.durable or not durable):
                self._keep(message)

    def _keep(self, message: Message) -> None:
        message.keeping = True
        # nothing is read until its id is known: it would be sent a second time
        self._keeping += 1

        def kept(number: QueueId) -> None:
            message.kept = number
            message.settle()
            if message.confirmed or (message.handed and self.trusted):
                self._remove([message])
            else:
                self._skip.add(number)

        def done(result: object) -> None:
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
        self.hand()
        delivered = self.trusted
        self.closed = True
        left = [
            message
            for message in self._window
            if message.kept is None and not message.keeping and not (message.handed and delivered)
        ]
        left += self._line
        self._window.clear()
        self._line.clear()
        self._size = self._line_size = 0
        self._release()
        return left
