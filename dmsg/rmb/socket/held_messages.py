"""What a session sends while it is held: it waits here, in order, until a receiver has caught up.

A held session is still read for a while, because the answers to the relay's
own pings are behind what it sends: two sessions that flood each other would
otherwise wait for each other for ever.  Its messages and pings are put by;
only when they take too much room is its socket not read any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable

from dmsg.net.turns import TakesTurns, Turns

PARKED_SIZE = 4 * 1024 * 1024
"""Bytes put by at which a session is not read any more."""
BOTH_WAYS = 8
"""Times as many, while the session itself has something to confirm."""
OVERHEAD = 100
"""What each message counts for besides its bytes."""
AT_ONCE = 1000
"""Messages taken up again in one reactor turn, if the part that their twin has of it lasts so long."""


class HeldMessages(TakesTurns):
    """That of one session.

    :param message: takes a message up again; ``ping`` a ping.
    :param later: calls something in the next reactor turn.
    :param hold: stops reading the socket; ``release``: reads it again.
    :param confirms: whether the session has something to confirm.
    :ivar size: bytes that wait here; ``come``: that have so far.
    """

    __slots__ = (
        "_confirms",
        "_for",
        "_hold",
        "_in_next_turn",
        "_message",
        "_ping",
        "_release",
        "_waiting",
        "_waits",
        "come",
        "owner",
        "share",
        "size",
    )

    def __init__(
        self,
        message: Callable[[bytes], None],
        ping: Callable[[bytes], None],
        later: Callable[[Callable[[], None]], object],
        hold: Callable[[], None],
        release: Callable[[], None],
        confirms: Callable[[], bool],
    ) -> None:
        self._message, self._ping, self._in_next_turn = message, ping, later
        self._hold, self._release, self._confirms = hold, release, confirms
        self._for: set[object] = set()
        self._waiting: deque[tuple[bool, bytes]] = deque()
        self.size = 0
        self.come = 0
        self._waits = False
        self.share: Turns | None = None
        self.owner: Hashable = None

    def take_turns(self, share: Turns | None, owner: Hashable) -> None:
        """Count what is taken up again as work of ``owner``, as what comes from its socket."""
        self.share, self.owner = share, owner

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def closed(self) -> bool:
        """What comes now has to wait."""
        return bool(self._for or self._waiting)

    def wait_for(self, delivery: object) -> None:
        """Nothing more is taken until ``delivery`` has caught up."""
        self._for.add(delivery)

    def caught_up(self, delivery: object) -> None:
        """It has."""
        self._for.discard(delivery)
        self._soon()

    def put(self, data: bytes, *, is_message: bool) -> None:
        """The session sent this."""
        self._waiting.append((is_message, data))
        self.size += len(data) + OVERHEAD
        self.come += len(data) + OVERHEAD
        if self.size >= PARKED_SIZE * (BOTH_WAYS if self._confirms() else 1):
            self._hold()

    def clear(self) -> None:
        """The session is gone: it sends again what nobody confirmed."""
        self._waiting.clear()
        self._for.clear()
        self.size = 0

    def _soon(self) -> None:
        if self._waiting and not self._for:
            self._next_turn()

    def _later(self, call: Callable[[], None]) -> object:
        return self._in_next_turn(call)

    def _work(self) -> None:
        self._spend(self._take_up)
        if self.size < PARKED_SIZE // 2:
            self._release()
        self._soon()

    def _take_up(self) -> None:
        share = self.share
        until = share.now() + share.left(self.owner) if share is not None else 0.0
        for _ in range(AT_ONCE):
            if self._for or not self._waiting:
                break
            is_message, data = self._waiting.popleft()
            self.size -= len(data) + OVERHEAD
            (self._message if is_message else self._ping)(data)
            if share is not None and share.now() >= until:
                break
