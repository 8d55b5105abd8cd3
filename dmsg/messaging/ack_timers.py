"""A channel whose ends acknowledge, or may: timers around :mod:`dmsg.messaging.core.acks`."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.interfaces import IDelayedCall, IReactorTime

from dmsg.messaging.core.acks import ACK_INTERVAL, GAP, AckLayer, looks_acknowledged
from dmsg.net.streams.outbox import Ticket

UNDECIDED_LIMIT = 2.0
"""Seconds that what is written waits for a first word of the remote, where only that says whether it acknowledges."""


class AckedEnd:
    """One end of a channel.

    :param send: one message of the channel.
    :param acknowledged: told the ticket of the payload that the remote has.
    :param ready: told that another payload may be sent.
    :param undecided: told that something waits, and nobody knows how to say it.
    :ivar decided: it is known that the remote acknowledges.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        decided: bool,
        send: Callable[[bytes], None],
        acknowledged: Callable[[Ticket | None], None],
        ready: Callable[[], None],
        undecided: Callable[[], None],
    ) -> None:
        self._reactor = reactor
        self._layer = AckLayer()
        self._send = send
        self._acknowledged = acknowledged
        self._ready = ready
        self._undecided = undecided
        self._ticket: Ticket | None = None
        self._free_at = 0.0
        self._payload_last = False
        self._first = True
        self._stopped = False
        self._timers: dict[str, IDelayedCall] = {}
        self.decided = decided

    @property
    def in_flight(self) -> int:
        """Payloads that the remote has not acknowledged."""
        return self._layer.in_flight

    def may_send(self) -> bool:
        """A payload may be sent now; if not, ``ready`` is told when."""
        if not self.decided:
            self._after("undecided", UNDECIDED_LIMIT, self._undecided)
            return False
        if self._layer.in_flight:
            return False
        wait = self._free_at - self._reactor.seconds()
        if wait > 0:
            self._after("ready", wait, self._ready)
            return False
        return True

    def send(self, data: bytes | memoryview, ticket: Ticket | None) -> None:
        """A payload."""
        self._ticket = ticket
        self._send(self._layer.payload(data))
        self._payload_last = True
        self._free_at = self._reactor.seconds() + GAP
        self._cancel("acks")
        self._plan_acks()

    def is_raw(self, message: bytes) -> bool:
        """Whether the remote does not acknowledge: the first message of the channel says so.

        A client of this package begins with an empty one, whatever this side was told of it.
        """
        first, self._first = self._first, False
        if first and not message:
            return True
        if not self.decided and looks_acknowledged(message):
            self.decided = True
            self._cancel("undecided")
            self._ready()
        return not self.decided

    def receive(self, message: bytes) -> bytes | None:
        """The data of a message, None if it has none.

        :raises HandshakeError: the remote does not speak this.
        :raises TransportClosed: it has other data than was sent.
        """
        data, acknowledged = self._layer.receive(message)
        if acknowledged:
            ticket, self._ticket = self._ticket, None
            if self._payload_last:
                self._free_at = 0.0
            self._acknowledged(ticket)
            if self._layer.due:
                self._cancel("acks")
                self._plan_acks()
            self._ready()
        return data

    def consumed(self) -> None:
        """The program has taken all that came."""
        self._layer.consumed()
        self._plan_acks()

    def _plan_acks(self) -> None:
        if self._layer.due:
            # in the same turn the program may have an answer that they go with
            wait = ACK_INTERVAL if self._layer.in_flight else max(0.0, self._free_at - self._reactor.seconds())
            self._after("acks", wait, self._send_acks)

    def _send_acks(self) -> None:
        if self._layer.due:
            self._send(self._layer.acknowledgements())
            self._payload_last = False
            self._free_at = self._reactor.seconds() + GAP
            self._after("acks", GAP, self._send_acks)

    def flush(self) -> None:
        """Send the acknowledgements that are due at once: the channel is about to be closed."""
        self._cancel("acks")
        while self._layer.due:
            self._send(self._layer.acknowledgements())

    def _after(self, name: str, seconds: float, call: Callable[[], None]) -> None:
        def fire() -> None:
            del self._timers[name]
            call()

        if name not in self._timers and not self._stopped:
            self._timers[name] = self._reactor.callLater(seconds, fire)

    def _cancel(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()

    def stop(self) -> None:
        """The channel is over."""
        self._stopped = True
        for name in list(self._timers):
            self._cancel(name)
