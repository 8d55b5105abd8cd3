"""Confirmation of messages, used at both ends of a websocket: a ping is answered when all earlier messages are
settled."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from dmsg.rmb.socket.session_buffer import SessionBuffer

RESUME_COUNT, RESUME_BYTES = 1000, 16 * 1024 * 1024
"""Maximum number and bytes of a session's unsettled messages at which reading from the session resumes."""
MAX_PINGS = 16
"""Maximum number of a session's pings that wait for their answer. Above it, the oldest ping is forgotten and never
answered, as RFC 6455 allows."""


class Message:
    """Message on its way through a relay.

    :ivar until: time at which the message expires, in seconds since 1970.
    :ivar owner: ledger of the session that sent the message; None for messages that the relay made.
    :ivar sender: number of the twin that sent the message; 0 for the relay.
    :ivar queue_id: id of the message in the receiver's queue, or None.
    :cvar is_answer: whether the message answers an earlier message of its receiver.
    :ivar keeping: whether the message is being written to the queue.
    :ivar written: whether the message was written to the connection of a receiver that answers pings.
    """

    __slots__ = ("confirmed", "data", "keeping", "owner", "queue_id", "sender", "settled", "until", "written")
    is_answer = False

    def __init__(
        self, data: bytes, until: float, owner: Ledger | None, queue_id: int | bytes | None = None, sender: int = 0
    ) -> None:
        self.data = data
        self.until = until
        self.owner = owner
        self.queue_id = queue_id
        self.sender = sender
        self.keeping = False
        self.written = False
        self.settled = False
        self.confirmed = False

    @property
    def durable(self) -> bool:
        """Whether the message must be stored before delivery, because its sender never repeats it."""
        return self.owner is not None and self.owner.durable

    def settle(self) -> None:
        """Mark the message as settled: its sender need not send it again."""
        if not self.settled:
            self.settled = True
            if self.owner is not None:
                self.owner.advance()

    def lose(self) -> None:
        """Report that the message could not be stored. Its sender must send it again."""
        if not self.settled and self.owner is not None:
            self.owner.report_lost()


class Ledger:
    """Unsettled messages of a session, and its pings that are waiting for them.

    :param pong: function that sends the answer to a ping.
    :param on_broken: callback invoked when a message was lost and the session must send it again.
    """

    __slots__ = ("_added", "_on_broken", "_pings", "_pong", "_waiting", "buffer", "durable", "on_few_left", "size")

    def __init__(self, pong: Callable[[bytes], None], on_broken: Callable[[], None] = lambda: None) -> None:
        self._pong = pong
        self._on_broken = on_broken
        self.buffer: SessionBuffer | None = None
        """Buffer that pauses the session until a receiver has caught up; None for messages of another relay."""
        self.durable = False
        """Whether messages of the session are stored before delivery, because the session never repeats an unconfirmed
        message."""
        self.size = 0
        """Number of bytes of the unsettled messages."""
        self.on_few_left: Callable[[], None] | None = None
        """Callback invoked once, when only a few unsettled messages are left."""
        self._waiting: deque[Message] = deque()
        self._added = 0
        self._pings: deque[tuple[int, bytes]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, message: Message) -> None:
        """Add a message that the session sent."""
        self._waiting.append(message)
        self._added += 1
        self.size += len(message.data)

    def report_lost(self) -> None:
        """Report that a message was lost and will never be settled."""
        self._on_broken()

    def advance(self) -> None:
        """Remove the settled messages at the front of the ledger, and answer the pings for which no message is left."""
        waiting = self._waiting
        while waiting and waiting[0].settled:
            self.size -= len(waiting.popleft().data)
        pings = self._pings
        while pings and self._added - len(waiting) >= pings[0][0]:
            self._pong(pings.popleft()[1])
        if self.on_few_left is not None and len(waiting) <= RESUME_COUNT and self.size <= RESUME_BYTES:
            on_few_left, self.on_few_left = self.on_few_left, None
            on_few_left()

    def ping(self, payload: bytes) -> None:
        """Answer a ping as soon as all earlier messages are settled; immediately, if they are settled already."""
        if not self._waiting:
            self._pong(payload)
            return
        self._pings.append((self._added, payload))
        if len(self._pings) > MAX_PINGS:
            self._pings.popleft()
