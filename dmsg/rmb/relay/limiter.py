"""Rate limit of twins: a number of messages, and of bytes, in each fixed window of one minute.

Twins have to answer the requests of others.  So a request is charged to the twin that sends it, and the answer is not
charged. Otherwise strangers could use up a twin's limit by sending it many requests.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

WINDOW = 60
"""Length of a window in seconds. Windows begin at multiples of this length since 1970."""
MAX_TWINS = 100_000
"""Maximum number of twins whose counts are remembered. Above it, the twin whose last message is oldest is forgotten."""
FREE_ANSWER = 4096
"""Number of bytes of an answer that are not charged to the answering twin. Further bytes are charged, because that twin
chooses the length of its answer."""


@dataclass(slots=True)
class _Window:
    number: int
    count: int = 0
    size: int = 0
    questions: int = 0


class FixedWindow:
    """Counter of the messages and bytes that each twin sends, over all its sessions.

    :param count: maximum number of messages in a window.
    :param size: maximum bytes in a window, and in a single message.
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
        """Note a request to ``twin``, so that the answer of ``twin`` will not be charged.

        :param twin: number of a twin that exists in the registry.
        """
        window = self._window_of(twin, now)
        # Without this maximum, a twin that receives many requests could send any number of uncharged answers at once.
        window.questions = min(window.questions + 1, self.count)

    def measure(self, twin: int, size: int, now: float, *, is_answer: bool = False) -> bool:
        """Count a message of ``size`` bytes, and return whether it is within the limit of ``twin``.

        A message that is larger than a window's limit is not counted. Any other message is counted, even if it is
        refused. For an answer to a request, only the bytes beyond ``FREE_ANSWER`` count.
        """
        # A message above the limit is never allowed. Counting it would only use up the limit for smaller messages.
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
        """Charge ``messages`` messages to ``twin`` for other things that cost as much work, such as small fragments."""
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
                # The number of unanswered requests is not reset, because their answers may be sent in the new window.
                window.number, window.count, window.size = number, 0, 0
        return window
