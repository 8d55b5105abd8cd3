"""How much a twin may send through a relay: a count and bytes in a fixed minute.

Answers are provoked by others: who asks a twin pays for the question, and the
twin's answer is free, so that strangers who ask a lot do not use up what it may
send itself.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

WINDOW = 60
"""Seconds; windows begin at multiples of it since 1970."""
MAX_TWINS = 100_000
"""Twins whose counts are remembered; the one that was silent for longest is forgotten first."""
FREE_ANSWER = 4096
"""Bytes of an answer that are free; how much longer it is is the answering twin's choice."""


@dataclass(slots=True)
class _Window:
    number: int
    count: int = 0
    size: int = 0
    questions: int = 0


class FixedWindow:
    """Counts what each twin sends, over all its sessions.

    :param count: messages in a window.
    :param size: bytes in a window, and of a single message.
    """

    def __init__(self, count: int, size: int, *, window: int = WINDOW, most: int = MAX_TWINS) -> None:
        self.count = count
        self.size = size
        self._window = window
        self._most = most
        self._twins: OrderedDict[int, _Window] = OrderedDict()

    def __len__(self) -> int:
        return len(self._twins)

    def ask(self, twin: int, now: float) -> None:
        """Count a question that is on its way to ``twin``: one answer to it is free.

        :param twin: one that the registry knows.
        """
        window = self._window_of(twin, now)
        window.questions = min(window.questions + 1, self.count)

    def measure(self, twin: int, size: int, now: float, *, is_answer: bool = False) -> bool:
        """Whether a message of ``size`` bytes may pass.

        One larger than all of a window is not counted; any other is, also
        when it is refused.  Of an answer to a question only what is beyond
        ``FREE_ANSWER`` bytes counts.
        """
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
        """Count what ``twin`` has sent and what is no message, but costs as much as so many."""
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
                window.number, window.count, window.size = number, 0, 0
        return window
