"""Timers and callbacks of the acknowledgement layer. Its rules are in :mod:`dmsg.messaging.core.acks`."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.interfaces import IDelayedCall, IReactorTime

from dmsg.messaging.core.acks import ACK_INTERVAL, SEND_GAP, AckLayer, looks_acknowledged
from dmsg.net.own_pauses import FairTimeout, stop_timeout
from dmsg.net.streams.outbox import Ticket

UNDECIDED_LIMIT = 2.0
"""Seconds to wait, while data are queued, for the remote's first message, which shows whether the remote uses
acknowledgements. After that the stream ends."""


class AckedEnd:
    """Acknowledgement layer of one end of a channel, whose remote uses acknowledgements or may use them.

    :param send: function that sends one message over the channel.
    :param on_acknowledged: callback invoked with the ticket of a payload that the remote has acknowledged.
    :param on_ready: callback invoked when another payload may be sent.
    :param on_undecided: callback invoked if data are queued and the remote has not shown in time whether it uses
        acknowledgements.
    :ivar decided: whether the remote is known to use acknowledgements.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        decided: bool,
        send: Callable[[bytes], None],
        on_acknowledged: Callable[[Ticket | None], None],
        on_ready: Callable[[], None],
        on_undecided: Callable[[], None],
    ) -> None:
        self._reactor = reactor
        self._layer = AckLayer()
        self._send = send
        self._acknowledged = on_acknowledged
        self._ready = on_ready
        self._on_undecided = on_undecided
        self._ticket: Ticket | None = None
        self._free_at = 0.0
        self._payload_last = False
        self._first = True
        self._stopped = False
        self._timers: dict[str, IDelayedCall] = {}
        self._undecided: FairTimeout | None = None
        self.decided = decided

    @property
    def in_flight(self) -> int:
        """Number of sent payloads that the remote has not acknowledged."""
        return self._layer.in_flight

    def may_send(self) -> bool:
        """Whether a payload may be sent now. If not, ``on_ready`` or ``on_undecided`` is called later."""
        if not self.decided:
            if self._undecided is None and not self._stopped:
                self._undecided = FairTimeout(self._reactor, UNDECIDED_LIMIT, self._end_undecided)
            return False
        if self._layer.in_flight:
            return False
        wait = self._free_at - self._reactor.seconds()
        if wait > 0:
            self._start_timer("ready", wait, self._ready)
            return False
        return True

    def _end_undecided(self) -> None:
        self._undecided = None
        self._on_undecided()

    def send(self, data: bytes | memoryview, ticket: Ticket | None) -> None:
        """Send a payload in one message with the acknowledgements that are due."""
        self._ticket = ticket
        self._send(self._layer.payload(data))
        self._payload_last = True
        self._free_at = self._reactor.seconds() + SEND_GAP
        self._cancel("acks")
        self._plan_acks()

    def is_raw(self, message: bytes) -> bool:
        """Whether ``message`` shows that the remote uses no acknowledgements. Call this for each message of the remote.

        An empty first message means that the remote is a client of this package that uses no acknowledgements, whatever
        the options of this side say.
        """
        first, self._first = self._first, False
        if first and not message:
            return True
        if not self.decided and looks_acknowledged(message):
            self.decided = True
            stop_timeout(self._undecided)
            self._ready()
        return not self.decided

    def receive(self, message: bytes) -> bytes | None:
        """Process a message, and return its data, or None if it contains only acknowledgements.

        :raises HandshakeError: the message does not have the format of the acknowledgement layer.
        :raises TransportClosed: the remote acknowledges data that this side did not send.
        """
        data, acknowledged = self._layer.receive(message)
        if acknowledged:
            ticket, self._ticket = self._ticket, None
            if self._payload_last:
                # The remote's program has read the acknowledged payload, so the next message cannot overwrite the
                # payload any more.
                self._free_at = 0.0
            self._acknowledged(ticket)
            if self._layer.due:
                self._cancel("acks")
                self._plan_acks()
            self._ready()
        return data

    def consumed(self) -> None:
        """Acknowledge all data received so far, because the application has read them."""
        self._layer.consumed()
        self._plan_acks()

    def _plan_acks(self) -> None:
        if self._layer.due:
            # Acknowledgements wait at least until the next reactor turn. If the application writes an answer in this
            # turn, the answer's message can contain them.
            wait = ACK_INTERVAL if self._layer.in_flight else max(0.0, self._free_at - self._reactor.seconds())
            self._start_timer("acks", wait, self._send_acks)

    def _send_acks(self) -> None:
        if self._layer.due:
            self._send(self._layer.acknowledgements())
            self._payload_last = False
            self._free_at = self._reactor.seconds() + SEND_GAP
            self._start_timer("acks", SEND_GAP, self._send_acks)

    def flush(self) -> None:
        """Send all due acknowledgements now, because the channel is about to be closed."""
        self._cancel("acks")
        while self._layer.due:
            self._send(self._layer.acknowledgements())

    def _start_timer(self, name: str, seconds: float, call: Callable[[], None]) -> None:
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
        """Cancel the timers, because the channel is closed or the remote uses no acknowledgements."""
        self._stopped = True
        stop_timeout(self._undecided)
        for name in list(self._timers):
            self._cancel(name)
