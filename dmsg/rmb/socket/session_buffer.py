"""Buffer for the messages of a paused session: they wait here, in order, until a slow receiver has caught up.

The relay continues to read from a paused session for a while, because the session's confirmations follow its messages
on the same socket. If the relay did not read them, two sessions that flood each other would wait for each other for
ever.  So the session's messages and pings are buffered. When they take too much memory, the relay stops reading from
the session's socket.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable

from dmsg.net.turns import TurnAccount, TurnTaker

MAX_BUFFERED_SIZE = 4 * 1024 * 1024
"""Number of buffered bytes at which the relay stops reading from the session."""
UNCONFIRMED_FACTOR = 8
"""Factor that multiplies ``MAX_BUFFERED_SIZE`` while the session has messages to confirm."""
OVERHEAD = 100
"""Number of bytes that are counted for each buffered message in addition to its length."""
MESSAGES_PER_TURN = 1000
"""Maximum number of messages processed in one reactor turn. Processing stops earlier if the twin's time
in the turn is used up."""


class SessionBuffer(TurnTaker):
    """Buffered messages of one paused session.

    :param message: function that processes a buffered message.
    :param ping: function that processes a buffered ping.
    :param call_next_turn: function that schedules a callback for the next reactor turn.
    :param hold: function that stops reading from the socket.
    :param release: function that resumes reading from the socket.
    :param confirms: function that returns whether the session has messages to confirm.
    :ivar size: number of bytes buffered now.
    :ivar stored_bytes: number of bytes buffered since the session began.
    """

    __slots__ = (
        "_awaited",
        "_confirms",
        "_hold",
        "_in_next_turn",
        "_message",
        "_ping",
        "_release",
        "_waiting",
        "_waits",
        "owner",
        "share",
        "size",
        "stored_bytes",
    )

    def __init__(
        self,
        message: Callable[[bytes], None],
        ping: Callable[[bytes], None],
        call_next_turn: Callable[[Callable[[], None]], object],
        hold: Callable[[], None],
        release: Callable[[], None],
        confirms: Callable[[], bool],
    ) -> None:
        self._message, self._ping, self._in_next_turn = message, ping, call_next_turn
        self._hold, self._release, self._confirms = hold, release, confirms
        self._awaited: set[object] = set()
        self._waiting: deque[tuple[bool, bytes]] = deque()
        self.size = 0
        self.stored_bytes = 0
        self._waits = False
        self.share: TurnAccount | None = None
        self.owner: Hashable = None

    def take_turns(self, share: TurnAccount | None, owner: Hashable) -> None:
        """Charge the processing time of buffered messages to ``owner``, whose time in each reactor turn ``share``
        limits."""
        self.share, self.owner = share, owner

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_active(self) -> bool:
        """Whether new messages of the session must be buffered here: the session is paused, or older messages are
        still buffered."""
        return bool(self._awaited or self._waiting)

    def wait_for(self, backlog: object) -> None:
        """Pause the session until ``backlog`` is shorter."""
        self._awaited.add(backlog)

    def stop_waiting_for(self, backlog: object) -> None:
        """Note that ``backlog`` is shorter. Process the buffered messages if the session waits for no other
        backlog."""
        self._awaited.discard(backlog)
        self._process_soon()

    def put(self, data: bytes, *, is_message: bool) -> None:
        """Buffer a message or a ping of the session."""
        self._waiting.append((is_message, data))
        self.size += len(data) + OVERHEAD
        self.stored_bytes += len(data) + OVERHEAD
        if self.size >= MAX_BUFFERED_SIZE * (UNCONFIRMED_FACTOR if self._confirms() else 1):
            self._hold()

    def clear(self) -> None:
        """Drop the buffered messages, because the session has ended. Its client will send unconfirmed messages
        again."""
        self._waiting.clear()
        self._awaited.clear()
        self.size = 0

    def _process_soon(self) -> None:
        if self._waiting and not self._awaited:
            self._next_turn()

    def _later(self, call: Callable[[], None]) -> object:
        return self._in_next_turn(call)

    def _work(self) -> None:
        self._spend(self._resume)
        if self.size < MAX_BUFFERED_SIZE // 2:
            self._release()
        self._process_soon()

    def _resume(self) -> None:
        share = self.share
        until = share.now() + share.seconds_left(self.owner) if share is not None else 0.0
        for _ in range(MESSAGES_PER_TURN):
            if self._awaited or not self._waiting:
                break
            is_message, data = self._waiting.popleft()
            self.size -= len(data) + OVERHEAD
            (self._message if is_message else self._ping)(data)
            if share is not None and share.now() >= until:
                break
