"""Rate limit of twins: a number of messages and bytes in a fixed window of one minute.

A twin has to answer the requests of others.  So a request is charged to the twin that asks, and its answer is not
charged; otherwise strangers could use up a twin's limit with many requests.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

WINDOW = 60
"""Length of a window in seconds; windows begin at multiples of it since 1970."""
MAX_TWINS = 100_000
"""Number of twins whose counts are remembered; the one that was silent for longest is evicted first."""
FREE_ANSWER = 4096
"""Bytes of an answer that are not charged to the answering twin's limit.  The bytes above it are, because the answering
twin chooses the length."""


@dataclass(slots=True)
class _Window:
    number: int
    count: int = 0
    size: int = 0
    questions: int = 0


class FixedWindow:
    """Counter of the messages and bytes that each twin sends, over all its sessions.

    :param count: number of messages allowed in a window.
    :param size: bytes allowed in a window, and in a single message.
    """

    def __init__(self, count: int, size: int, *, window: int = WINDOW, limit: int = MAX_TWINS) -> None:
        self.count = count
        self.size = size
        self._window = window
        self._most = limit
        self._twins: OrderedDict[int, _Window] = OrderedDict()

    def __len__(self) -> int:
        return len(self._twins)

    def ask(self, twin: int, now: float) -> None:
        """Count a request to ``twin``, so that its answer is not charged.

        :param twin: a twin that the registry knows.
        """
        window = self._window_of(twin, now)
        # Without this bound a popular twin could save up uncharged answers, and send them all at once.
        window.questions = min(window.questions + 1, self.count)

    def measure(self, twin: int, size: int, now: float, *, is_answer: bool = False) -> bool:
        """Count a message of ``size`` bytes, and return whether it is within the limit of ``twin``.

        A message larger than a whole window's bytes is not counted; any other is, even when it is refused. For an
        answer to a request, only the bytes beyond ``FREE_ANSWER`` count.
        """
        # Such a message is never allowed, so counting it would only use up the limit for smaller ones.
        if size > self.size:
            return False
        window = self._window_of(twin, now)
        if is_answer and window.questions:
            window.questions -= 1
            if size <= FREE_ANSWER:
                return True
            window.size += size - FREE_ANSWER
            return window.size <= self.size
        window.count += 1
        window.size += size
        return window.count <= self.count and window.size <= self.size

    def charge(self, twin: int, messages: int, now: float) -> None:
        """Count something else that ``twin`` sent, such as small fragments, as this number of messages, because it
        costs as much work."""
        self._window_of(twin, now).count += messages

    def _window_of(self, twin: int, now: float) -> _Window:
        number = int(now) // self._window
        window = self._twins.get(twin)
        if window is None:
            window = self._twins[twin] = _Window(number)
            if len(self._twins) > self._most:
                self._twins.popitem(last=False)
        else:
            self._twins.move_to_end(twin)
            if window.number != number:
                # Requests without an answer are carried over into the new window, because their answers may come a
                # minute later.
                window.number, window.count, window.size = number, 0, 0
        return window
