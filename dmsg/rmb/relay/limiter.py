"""Rate limit of twins: a number of messages and bytes in a fixed window of one minute.

Answers are provoked by others. So the twin that asks pays for the question, and the answer is free; otherwise
strangers could use up a twin's own limit by asking a lot.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

WINDOW = 60
"""Length of a window in seconds; windows begin at multiples of it since 1970."""
MAX_TWINS = 100_000
"""Number of twins whose counts are remembered; the one that was silent for longest is evicted first."""
FREE_ANSWER = 4096
"""Bytes of an answer that are free; the rest counts, because its length is the answering twin's choice."""


@dataclass(slots=True)
class _Window:
    number: int
    count: int = 0
    size: int = 0
    questions: int = 0


class FixedWindow:
    """Counter of what each twin sends, over all its sessions.

    :param count: messages allowed in a window.
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
        """Count a question on its way to ``twin``, which makes one answer free.

        :param twin: a twin that the registry knows.
        """
        window = self._window_of(twin, now)
        # The bound keeps a popular twin from saving up free answers for a flood.
        window.questions = min(window.questions + 1, self.count)

    def measure(self, twin: int, size: int, now: float, *, is_answer: bool = False) -> bool:
        """Whether a message of ``size`` bytes is within the limit.

        A message larger than a whole window's bytes is not counted; any other is, even when it is refused. Of an answer
        to a question only the bytes beyond ``FREE_ANSWER`` count.
        """
        # Such a message never fits, so counting it would only use up the window of smaller ones.
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
        """Count something that ``twin`` sent as this number of messages, because it costs as much."""
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
                # Open questions outlive the window: an answer may come a minute later.
                window.number, window.count, window.size = number, 0, 0
        return window
