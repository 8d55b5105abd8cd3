"""Connected session of a relay: its incoming messages, its delivery, and its socket."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

from dmsg.net.turns import HoldReason
from dmsg.rmb.errors import Drop
from dmsg.rmb.relay.delivery import Delivery
from dmsg.rmb.relay.ports import Store
from dmsg.rmb.relay.rules import Rules
from dmsg.rmb.socket.confirm import Ledger
from dmsg.rmb.socket.session_buffer import SessionBuffer
from dmsg.rmb.socket.websocket import BAD_DATA, TRY_LATER, Socket
from dmsg.rmb.twins.address import Session

ASKING_PING = 8
"""Length in bytes of the pings with which clients of this package ask for the confirmation of their messages."""
MAX_UNSETTLED, MAX_UNSETTLED_SIZE = 20_000, 64 * 1024 * 1024
"""Number and bytes of a session's unsettled messages. At either one, the relay stops reading from the session."""

MAX_UNWATCHED_SIZE = 64 * 1024
"""Maximum size in bytes of an incomplete message that the relay does not watch. A session with a larger incomplete
message is in ``growing``."""


class SessionHost(Protocol):
    """Interface of the relay for its sessions.

    :ivar durable: whether messages are stored before delivery if they come from a session that never repeats an
        unconfirmed message.
    :ivar backlog_messages: maximum number of messages that wait for a session before their senders are paused.
    :ivar backlog_size: maximum bytes of the messages that wait for a session before their senders are paused.
    :ivar unfinished: number of bytes of all incomplete messages.
    :ivar growing: sessions with a large incomplete message.
    :ivar parked: sessions whose messages were buffered while they were paused.
    """

    durable: bool
    backlog_messages: int
    backlog_size: int
    rules: Rules
    counters: Counter[str]
    unfinished: int
    growing: dict[RelaySession, None]
    parked: dict[RelaySession, None]

    @property
    def deliveries(self) -> Store[Delivery]:
        """Timers and stored queue for deliveries."""

    def call_next_turn(self, call: Callable[[], None]) -> None:
        """Call a function in the next reactor turn."""

    def connected(self, session: RelaySession) -> None:
        """Register a session whose socket was opened."""

    def received(self, session: RelaySession, data: bytes) -> None:
        """Process one message of a session."""

    def lost(self, session: RelaySession) -> None:
        """Remove a session whose connection was lost."""

    def count_fragments(self, session: RelaySession, small: int) -> None:
        """Count ``small`` small fragments that a session has sent."""

    def check_unfinished(self) -> None:
        """Enforce the limit of all incomplete messages, because their size has changed."""


class RelaySession:
    """Connected session, which processes the messages from its socket and sends messages to it.

    Implements :class:`~dmsg.rmb.socket.websocket.Receiver` and :class:`~dmsg.rmb.relay.ports.Carrier`.
    """

    __slots__ = (
        "buffer",
        "bytes_in",
        "delivery",
        "heard_at",
        "is_lost",
        "ledger",
        "lookups",
        "messages_in",
        "session",
        "socket",
        "switch",
        "unfinished",
        "unfinished_since",
    )

    def __init__(self, switch: SessionHost, session: Session, *, resends: bool = True) -> None:
        """Create a session whose socket is not open yet.

        :param resends: whether the session requests confirmations of its messages by pings, and sends unconfirmed
            messages again.
        """
        self.switch = switch
        self.session = session
        self.socket: Socket | None = None
        self.ledger = Ledger(self._answer_ping, self._end_for_loss)
        self.delivery = Delivery(session, self, switch.deliveries, switch.backlog_messages, switch.backlog_size)
        self.buffer = SessionBuffer(
            self._receive,
            self.ledger.ping,
            switch.call_next_turn,
            lambda: self._hold(HoldReason.BUFFER_FULL),
            lambda: self._release(HoldReason.BUFFER_FULL),
            lambda: len(self.delivery) > 0,
        )
        self.ledger.buffer = self.buffer
        self._set_resends(resends)
        self.heard_at = 0.0
        self.unfinished = 0
        """Number of bytes of the session's incomplete message."""
        self.unfinished_since: float | None = None
        """Time at which a check first found the incomplete message; None if there is none."""
        self.lookups = 0
        self.messages_in = self.bytes_in = 0
        """Number of messages that the session has sent since it connected, and number of their bytes."""
        self.is_lost = False

    @property
    def owner(self) -> int:
        """Number of the twin that owns the session."""
        return self.session.twin

    @property
    def is_idle(self) -> bool:
        """Whether no message is on its way to the session, and no message from it is incomplete or unsettled."""
        return not (len(self.delivery) or self.unfinished or self.lookups or self.buffer.size or len(self.ledger))

    # --- the socket ---

    def opened(self, socket: Socket) -> None:
        self.socket = socket
        socket.grew = self._unfinished
        self.buffer.take_turns(socket.share, self.owner)
        socket.on_fragments = self._count_fragments
        self.switch.connected(self)

    def _unfinished(self, size: int) -> None:
        if size != self.unfinished and not self.is_lost:
            self.switch.unfinished += size - self.unfinished
            if size < self.unfinished:
                # A message is now complete. The remaining bytes belong to the next message.
                self.unfinished_since = None
            self.unfinished = size
            if size > MAX_UNWATCHED_SIZE:
                self.switch.growing[self] = None
            else:
                self.switch.growing.pop(self, None)
            self.switch.check_unfinished()

    def _count_fragments(self, small: int) -> None:
        if not self.is_lost:
            self.switch.count_fragments(self, small)

    def _set_resends(self, resends: bool) -> None:
        self.ledger.durable = self.switch.durable and not resends
        self.delivery.lazy = not resends

    @property
    def is_paused(self) -> bool:
        """Whether the session is paused because a receiver of its messages is slow."""
        return self.buffer.is_active

    def _hold(self, reason: HoldReason) -> None:
        if self.socket is not None:
            self.socket.hold(reason)

    def _release(self, reason: HoldReason) -> None:
        if self.socket is not None:
            self.socket.release(reason)

    def received(self, data: bytes) -> None:
        if self.buffer.is_active:
            self.switch.parked[self] = None
            self.buffer.put(data, is_message=True)
        else:
            self._receive(data)

    def _receive(self, data: bytes) -> None:
        if not self.is_lost:
            self.messages_in += 1
            self.bytes_in += len(data)
            self.switch.received(self, data)
            ledger = self.ledger
            # The session is paused, and its message is not refused, because senders treat a refusal as final.
            if ledger.on_few_left is None and (len(ledger) >= MAX_UNSETTLED or ledger.size >= MAX_UNSETTLED_SIZE):
                ledger.on_few_left = self._resume
                self.socket.hold(HoldReason.UNSETTLED)  # type: ignore[union-attr]

    def ping_received(self, payload: bytes) -> None:
        # The first ping of this size shows that the client resends unconfirmed messages after a reconnect.
        if self.delivery.lazy and len(payload) == ASKING_PING:
            self._set_resends(True)
        if self.buffer.is_active:
            self.buffer.put(payload, is_message=False)
        else:
            self.ledger.ping(payload)

    def pong_received(self, payload: bytes) -> None:
        # Pongs of pings that ask for confirmation have 8 bytes. Other pongs answer keepalive pings.
        if len(payload) != 8 or self.is_lost:
            return
        try:
            self.delivery.confirmed(int.from_bytes(payload, "big"))
        except ValueError:
            self.end(Drop.BAD_FRAME, BAD_DATA, "the session confirms a message that was not sent")

    def lost(self, reason: str) -> None:
        self.switch.lost(self)

    def _resume(self) -> None:
        if self.socket is not None:
            self.socket.release(HoldReason.UNSETTLED)

    def _end_for_loss(self) -> None:
        """End the session because one of its messages was lost here. The session will reconnect and send the message
        again."""
        if not self.is_lost:
            self.end(Drop.QUEUE_FAILED, TRY_LATER, "the queue of this relay cannot store messages now")

    def _answer_ping(self, payload: bytes) -> None:
        if self.socket is not None:
            self.socket.pong(payload)

    def end(self, drop: Drop, code: int, reason: str) -> None:
        """End the session, and count the reason."""
        self.switch.rules.drops[drop] += 1
        if self.socket is not None:
            # Sent messages are written to the connection first, so that they need not be stored in the queue.
            self.socket.flush()
        self.switch.lost(self)
        if self.socket is not None:
            self.socket.close(code, reason)
            if drop in (Drop.UNFINISHED, Drop.FRAGMENTS):
                self.socket.forget()

    # --- the delivery ---

    @property
    def unsent(self) -> int:
        """Number of bytes that are not written to the connection yet."""
        return self.socket.unsent if self.socket is not None else 0

    def send(self, data: bytes) -> None:
        self.switch.counters["message_tx"] += 1
        self.switch.counters["message_tx_bytes"] += len(data)
        self.socket.send(data)  # type: ignore[union-attr]

    def barrier(self, number: int) -> None:
        self.socket.ping(number.to_bytes(8, "big"))  # type: ignore[union-attr]
