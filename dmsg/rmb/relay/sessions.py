"""A connected session of a relay: what comes from its socket, what goes to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

from dmsg.net.turns import Hold
from dmsg.rmb.errors import Drop
from dmsg.rmb.relay.delivery import Delivery
from dmsg.rmb.relay.ports import Store
from dmsg.rmb.relay.rules import Rules
from dmsg.rmb.socket.confirm import Ledger
from dmsg.rmb.socket.held_messages import HeldMessages
from dmsg.rmb.socket.websocket import BAD_DATA, TRY_LATER, Socket
from dmsg.rmb.twins.address import Session

ASKING_PING = 8
"""Bytes of the pings by which clients of this package ask whether all before was taken."""
MAX_UNSETTLED, MAX_UNSETTLED_SIZE = 20_000, 64 * 1024 * 1024
"""Messages of a session that are not settled, and their bytes; then it is not read from."""

SMALL = 64 * 1024
"""Bytes of a message that is not whole, below which nobody minds."""


class Home(Store[Delivery], Protocol):
    """What a session needs of the relay around it.

    :ivar durable: what sessions send that will not send it again is written down first.
    :ivar line_messages: messages that may wait for a session's window.
    :ivar line_size: bytes of these.
    :ivar unfinished: bytes of all messages that are not whole.
    :ivar growing: sessions with a message that is not whole.
    :ivar parked: sessions that have sent something while they were held.
    """

    durable: bool
    line_messages: int
    line_size: int
    rules: Rules
    counters: Counter[str]
    unfinished: int
    growing: dict[RelaySession, None]
    parked: dict[RelaySession, None]

    def later(self, call: Callable[[], None]) -> None:
        """In the next turn of the reactor."""

    def connected(self, session: RelaySession) -> None:
        """Its socket is open."""

    def received(self, session: RelaySession, data: bytes) -> None:
        """One message of it."""

    def lost(self, session: RelaySession) -> None:
        """Its connection is gone."""

    def fragmented(self, session: RelaySession, small: int) -> None:
        """It sent so many small fragments."""

    def look_at_unfinished(self) -> None:
        """There is more that is not whole than before."""


class RelaySession:
    """A connected session: what comes from its socket, what goes to it.

    Provides :class:`~dmsg.rmb.socket.websocket.Receiver` and :class:`~dmsg.rmb.relay.ports.Carrier`.
    """

    __slots__ = (
        "bytes_in",
        "delivery",
        "gone",
        "heard_at",
        "ledger",
        "lookups",
        "messages_in",
        "parking",
        "session",
        "socket",
        "switch",
        "unfinished",
        "unfinished_since",
    )

    def __init__(self, switch: Home, session: Session, *, asks: bool = True) -> None:
        """:param asks: it pings behind its messages, and sends again what is not confirmed."""
        self.switch = switch
        self.session = session
        self.socket: Socket | None = None
        self.ledger = Ledger(self._answer_ping, self._broken)
        self.delivery = Delivery(session, self, switch, switch.line_messages, switch.line_size)
        self.parking = HeldMessages(
            self._receive,
            self.ledger.ping,
            switch.later,
            lambda: self._hold(Hold.PARKED),
            lambda: self._release(Hold.PARKED),
            lambda: len(self.delivery) > 0,
        )
        self.ledger.holder = self.parking
        self._asks(asks)
        self.heard_at = 0.0
        self.unfinished = 0
        """Bytes of a message that is not whole."""
        self.unfinished_since: float | None = None
        """When it began to send the message that is not whole."""
        self.lookups = 0
        self.messages_in = self.bytes_in = 0
        """What it has sent since it connected."""
        self.gone = False

    @property
    def owner(self) -> int:
        """Whose it is: the twin's."""
        return self.session.twin

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way to the session, and it has sent nothing that is not settled or not whole."""
        return not (len(self.delivery) or self.unfinished or self.lookups or self.parking.size or len(self.ledger))

    # --- the socket ---

    def opened(self, socket: Socket) -> None:
        self.socket = socket
        socket.grew = self._unfinished
        self.parking.take_turns(socket.share, self.owner)
        socket.fragmented = self._fragmented
        self.switch.connected(self)

    def _unfinished(self, size: int) -> None:
        if size != self.unfinished and not self.gone:
            self.switch.unfinished += size - self.unfinished
            if size < self.unfinished:
                self.unfinished_since = None  # a message became whole: what is left is of the next one
            self.unfinished = size
            if size > SMALL:
                self.switch.growing[self] = None
            else:
                self.switch.growing.pop(self, None)
            self.switch.look_at_unfinished()

    def _fragmented(self, small: int) -> None:
        if not self.gone:
            self.switch.fragmented(self, small)

    def _asks(self, asks: bool) -> None:
        self.ledger.durable = self.switch.durable and not asks
        self.delivery.lazy = not asks

    @property
    def is_held(self) -> bool:
        """Whether it is not read because of what it sends to others."""
        return self.parking.closed

    def _hold(self, why: Hold) -> None:
        if self.socket is not None:
            self.socket.hold(why)

    def _release(self, why: Hold) -> None:
        if self.socket is not None:
            self.socket.release(why)

    def received(self, data: bytes) -> None:
        if self.parking.closed:
            self.switch.parked[self] = None
            self.parking.put(data, is_message=True)
        else:
            self._receive(data)

    def _receive(self, data: bytes) -> None:
        if not self.gone:
            self.messages_in += 1
            self.bytes_in += len(data)
            self.switch.received(self, data)
            ledger = self.ledger
            if ledger.relaxed is None and (len(ledger) >= MAX_UNSETTLED or ledger.size >= MAX_UNSETTLED_SIZE):
                ledger.relaxed = self._resume
                self.socket.hold(Hold.UNSETTLED)  # type: ignore[union-attr]

    def ping_received(self, payload: bytes) -> None:
        if self.delivery.lazy and len(payload) == ASKING_PING:
            self._asks(True)
        if self.parking.closed:
            self.parking.put(payload, is_message=False)
        else:
            self.ledger.ping(payload)

    def pong_received(self, payload: bytes) -> None:
        if len(payload) != 8 or self.gone:
            return
        try:
            self.delivery.confirmed(int.from_bytes(payload, "big"))
        except ValueError:
            self.end(Drop.BAD_FRAME, BAD_DATA, "confirms what was not sent")

    def lost(self, why: str) -> None:
        self.switch.lost(self)

    def _resume(self) -> None:
        if self.socket is not None:
            self.socket.release(Hold.UNSETTLED)

    def _broken(self) -> None:
        """Something that it sent was lost here: it shall connect again, and send it again."""
        if not self.gone:
            self.end(Drop.QUEUE_FAILED, TRY_LATER, "the queue of this relay does not take messages now")

    def _answer_ping(self, payload: bytes) -> None:
        if self.socket is not None:
            self.socket.pong(payload)

    def end(self, drop: Drop, code: int, why: str) -> None:
        """End the session, for a reason that is counted."""
        self.switch.rules.drops[drop] += 1
        if self.socket is not None:
            self.socket.flush()  # what is on its way is not put into the queue as well
        self.switch.lost(self)
        if self.socket is not None:
            self.socket.close(code, why)
            if drop in (Drop.UNFINISHED, Drop.FRAGMENTS):
                self.socket.forget()

    # --- the delivery ---

    @property
    def unsent(self) -> int:
        """Bytes that were not given to the connection yet."""
        return self.socket.unsent if self.socket is not None else 0

    def send(self, data: bytes) -> None:
        self.switch.counters["message_tx"] += 1
        self.switch.counters["message_tx_bytes"] += len(data)
        self.socket.send(data)  # type: ignore[union-attr]

    def barrier(self, number: int) -> None:
        self.socket.ping(number.to_bytes(8, "big"))  # type: ignore[union-attr]
