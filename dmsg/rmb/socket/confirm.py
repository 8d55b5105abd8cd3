"""Messages on their way, and when the pings of who sent them are answered; both ends of a websocket do it so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from dmsg.rmb.socket.held_messages import HeldMessages

FEW, FEW_BYTES = 1000, 16 * 1024 * 1024
"""Unsettled messages of a session, and their bytes, at which it is read from again, after there were too many."""
MAX_PINGS = 16
"""Pings of a session that wait for an answer; the oldest then goes unanswered, as RFC 6455 allows."""


class Message:
    """One message on its way through a relay.

    :ivar until: seconds since 1970 when its life ends.
    :ivar owner: of the session that sent it; None for what the relay itself says.
    :ivar sender: the twin that sent it; 0: the relay.
    :ivar kept: its id in the queue of the receiver, or None.
    :cvar is_answer: its receiver asked for it.
    :ivar keeping: it is being written to the queue.
    :ivar handed: it is with its receiver's connection, which answers pings.
    """

    __slots__ = ("confirmed", "data", "handed", "keeping", "kept", "owner", "sender", "settled", "until")
    is_answer = False

    def __init__(
        self, data: bytes, until: float, owner: Ledger | None, kept: int | bytes | None = None, sender: int = 0
    ) -> None:
        self.data = data
        self.until = until
        self.owner = owner
        self.kept = kept
        self.sender = sender
        self.keeping = False
        self.handed = False
        self.settled = False
        self.confirmed = False

    @property
    def durable(self) -> bool:
        """Whether its sender does not send it again, and has it written down."""
        return self.owner is not None and self.owner.durable

    def settle(self) -> None:
        """Nobody needs to send it again."""
        if not self.settled:
            self.settled = True
            if self.owner is not None:
                self.owner.advance()

    def lose(self) -> None:
        """It could not be kept: whoever sent it has to send it again."""
        if not self.settled and self.owner is not None:
            self.owner.lost()


class Ledger:
    """What a session sent that is not settled, and its pings that wait for that.

    :param pong: sends the answer to a ping.
    :param broken: called when something was lost that the session has to send again.
    """

    __slots__ = ("_added", "_broken", "_pings", "_pong", "_waiting", "durable", "holder", "relaxed", "size")

    def __init__(self, pong: Callable[[bytes], None], broken: Callable[[], None] = lambda: None) -> None:
        self._pong = pong
        self._broken = broken
        self.holder: HeldMessages | None = None
        """Holds the session while a receiver catches up; None for what another relay brings."""
        self.durable = False
        """What it sends is written down before it is delivered: it will not send it again."""
        self.size = 0
        """Bytes of what is not settled."""
        self.relaxed: Callable[[], None] | None = None
        """Called, once, when only few are left."""
        self._waiting: deque[Message] = deque()
        self._added = 0
        self._pings: deque[tuple[int, bytes]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, message: Message) -> None:
        """The session sent it."""
        self._waiting.append(message)
        self._added += 1
        self.size += len(message.data)

    def lost(self) -> None:
        """A message will not be settled."""
        self._broken()

    def advance(self) -> None:
        """Something was settled."""
        waiting = self._waiting
        while waiting and waiting[0].settled:
            self.size -= len(waiting.popleft().data)
        pings = self._pings
        while pings and self._added - len(waiting) >= pings[0][0]:
            self._pong(pings.popleft()[1])
        if self.relaxed is not None and len(waiting) <= FEW and self.size <= FEW_BYTES:
            relaxed, self.relaxed = self.relaxed, None
            relaxed()

    def ping(self, payload: bytes) -> None:
        """The session wants to know that all before this is settled."""
        if not self._waiting:
            self._pong(payload)
            return
        self._pings.append((self._added, payload))
        if len(self._pings) > MAX_PINGS:
            self._pings.popleft()
