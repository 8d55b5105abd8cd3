"""Confirmation of messages, the same at both ends of a websocket: a ping is answered when all messages before it are
settled."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from dmsg.rmb.socket.held_messages import HeldMessages

FEW, FEW_BYTES = 1000, 16 * 1024 * 1024
"""Number and bytes of a session's unsettled messages at which reading resumes after it was stopped."""
MAX_PINGS = 16
"""Maximum number of a session's pings that wait for an answer; above it the oldest ping is never answered, as RFC 6455
allows."""


class Message:
    """Message on its way through a relay.

    :ivar until: when the message expires, in seconds since 1970.
    :ivar owner: ledger of the session that sent it; None for messages of the relay itself.
    :ivar sender: the twin that sent it; 0 for the relay.
    :ivar queue_id: id of the message in the receiver's queue, or None.
    :cvar is_answer: whether the message answers an earlier one of its receiver.
    :ivar keeping: whether the message is being written to the queue.
    :ivar handed: whether the message was written to the connection of a receiver that answers pings.
    """

    __slots__ = ("confirmed", "data", "handed", "keeping", "owner", "queue_id", "sender", "settled", "until")
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
        self.handed = False
        self.settled = False
        self.confirmed = False

    @property
    def durable(self) -> bool:
        """Whether the message must be stored before delivery, because its sender does not send it again."""
        return self.owner is not None and self.owner.durable

    def settle(self) -> None:
        """Mark the message as settled: its sender need not send it again."""
        if not self.settled:
            self.settled = True
            if self.owner is not None:
                self.owner.advance()

    def lose(self) -> None:
        """Report that the message could not be stored, so that its sender sends it again."""
        if not self.settled and self.owner is not None:
            self.owner.lost()


class Ledger:
    """Unsettled messages of a session, and its pings that wait until they are settled.

    :param pong: sends the answer to a ping.
    :param on_broken: called when a message was lost that the session has to send again.
    """

    __slots__ = ("_added", "_on_broken", "_pings", "_pong", "_waiting", "durable", "holder", "relaxed", "size")

    def __init__(self, pong: Callable[[bytes], None], on_broken: Callable[[], None] = lambda: None) -> None:
        self._pong = pong
        self._on_broken = on_broken
        self.holder: HeldMessages | None = None
        """Object that pauses the session while a receiver catches up; None for messages of another relay."""
        self.durable = False
        """Whether messages of the session are stored before delivery, because it does not resend."""
        self.size = 0
        """Bytes of the unsettled messages."""
        self.relaxed: Callable[[], None] | None = None
        """Callback invoked once when few unsettled messages are left."""
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

    def lost(self) -> None:
        """Report that a message was lost and will never be settled."""
        self._on_broken()

    def advance(self) -> None:
        """Remove the settled messages at the front, and answer the pings behind them."""
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
        """Answer a ping, now or once all messages before it are settled."""
        if not self._waiting:
            self._pong(payload)
            return
        self._pings.append((self._added, payload))
        if len(self._pings) > MAX_PINGS:
            self._pings.popleft()
