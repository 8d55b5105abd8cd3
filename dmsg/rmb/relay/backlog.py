"""Backlog of one session: the messages that wait until the session confirms earlier ones, and their paused senders.

The backlog is a queue in memory. Messages that wait in the stored queue are only counted here. When both together reach
a limit, the senders of further messages are paused (back-pressure). They resume when half of the limit is left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from dmsg.rmb.relay.queue.interface import QueuedMessage
from dmsg.rmb.socket.confirm import Message
from dmsg.rmb.socket.session_buffer import SessionBuffer

BACKLOG_MESSAGES, BACKLOG_SIZE = 4096, 8 * 1024 * 1024
"""Limits of the messages that wait for a connected session, in memory and in the stored queue together: their number,
and their bytes. At a limit, the senders of these messages are paused."""


class Backlog:
    """Messages that wait for one connected session, in order.

    :param messages: number of waiting messages, in memory and in the stored queue together, at which their senders are
        paused.
    :param size: number of bytes of the waiting messages at which their senders are paused; at most ``BACKLOG_SIZE``.
    :ivar messages: messages in memory, oldest first.
    :ivar size: number of bytes of the messages in memory.
    :ivar stored_count: number of messages that were stored while the session was connected and were not read back yet.
    :ivar stored_size: number of bytes of these messages.
    """

    __slots__ = (
        "_appended",
        "_marks",
        "_most_messages",
        "_most_size",
        "_paused",
        "messages",
        "size",
        "stored_count",
        "stored_size",
    )

    def __init__(self, messages: int, size: int | None) -> None:
        self._most_messages = messages
        self._most_size = BACKLOG_SIZE if size is None else min(BACKLOG_SIZE, size)
        self.messages: deque[Message] = deque()
        self.size = 0
        self.stored_count = self.stored_size = 0
        self._appended = 0
        """Number of messages appended so far. ``_marks`` contains the values of this number at the last two checks."""
        self._marks = (0, 0)
        self._paused: dict[SessionBuffer, None] = {}
        """Buffers of the paused senders."""

    # --- messages ---

    def append(self, message: Message) -> None:
        """Add a message to those in memory."""
        self.messages.append(message)
        self._appended += 1
        self.size += len(message.data)

    def take(self) -> Message:
        """Remove and return the oldest message in memory.

        :raises IndexError: there is none.
        """
        message = self.messages.popleft()
        self.size -= len(message.data)
        return message

    def take_all(self) -> deque[Message]:
        """Remove and return all messages in memory. They count as stored, because the caller stores them."""
        taken, self.messages = self.messages, deque()
        self.stored_count += len(taken)
        self.stored_size += self.size
        self.size = 0
        return taken

    def clear(self) -> None:
        """Remove all messages in memory, because the session has ended."""
        self.messages.clear()
        self.size = 0

    def count_stored(self, message: Message) -> None:
        """Count a message that the caller stores."""
        self.stored_count += 1
        self.stored_size += len(message.data)

    def count_read(self, batch: Sequence[QueuedMessage]) -> None:
        """Count messages that were read back from the stored queue; an empty batch shows that the queue is empty."""
        self.stored_count = max(0, self.stored_count - len(batch)) if batch else 0
        self.stored_size = max(0, self.stored_size - sum(len(one.data) for one in batch)) if self.stored_count else 0

    def is_stuck(self) -> bool:
        """Check, once a second, whether the oldest message was already in memory two checks ago."""
        stuck = bool(self.messages) and self._appended - len(self.messages) < self._marks[0]
        self._marks = (self._marks[1], self._appended)
        return stuck

    # --- limits, and the pauses of senders ---

    def reaches_limit(self, part: int = 1) -> bool:
        """Whether the waiting messages have reached a fraction of the limit at which senders are paused.

        :param part: divisor of the limit; 1 for the limit itself.
        """
        waiting, size = len(self.messages) + self.stored_count, self.size + self.stored_size
        return waiting * part >= self._most_messages or size * part >= self._most_size

    @property
    def is_too_long(self) -> bool:
        """Whether the messages in memory are twice as many as the limit at which senders are paused. This happens if
        senders cannot be paused."""
        return len(self.messages) >= 2 * self._most_messages or self.size >= 2 * BACKLOG_SIZE

    def pause_sender_if_full(self, message: Message, *, pauses_answers: bool) -> None:
        """Pause the sender of a message if the limit is reached.

        :param pauses_answers: whether the senders of answers are paused, too.
        """
        buffer = message.owner.buffer if message.owner is not None else None
        if buffer is None or buffer in self._paused or (message.is_answer and not pauses_answers):
            return
        if self.reaches_limit():
            self._paused[buffer] = None
            buffer.wait_for(self)

    def resume_senders_if_roomy(self) -> None:
        """Resume the paused senders if half of the limit is left."""
        if self._paused and not self.reaches_limit(2):
            self.resume_senders()

    def resume_senders(self) -> None:
        """Resume all paused senders."""
        paused, self._paused = self._paused, {}
        for buffer in paused:
            buffer.stop_waiting_for(self)
