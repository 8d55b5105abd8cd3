"""Keepalive and measurement of the round trip, with PING and PONG on one connection."""

from __future__ import annotations

import os
from collections.abc import Callable

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.python.failure import Failure

from dmsg.clients.session import no_answer
from dmsg.net.own_pauses import PauseMeter, add_fair_timeout

PING_INTERVAL = 10.0
"""Seconds between PINGs to a server that supports them."""
PING_TIMEOUT = 10.0
"""Seconds to wait for a PONG. If none arrives, the connection is closed."""
WAKE_TIMEOUT = 0.5
"""Minimum seconds to wait for the PONG to the PING that is sent after this machine was suspended. The time is short,
because a router may have dropped the connection silently and a person who opens a laptop should not wait for
``PING_TIMEOUT``."""
WAKE_ROUND_TRIPS = 4
"""Minimum number of round trips to wait for the PONG to the PING that is sent after this machine was suspended."""
SMOOTHING = 0.25
"""Weight of a new measurement in the smoothed round trip."""


class Pings:
    """PINGs of one connection, and their answers.

    :param send: sends a PING with the given payload: 8 random bytes, followed by ``instance``.
    :param on_stalled: callback invoked if the server has not answered a periodic PING in time.
    :param instance: 8 bytes by which a server distinguishes two programs with the same key; empty to send none.
    :ivar round_trip: smoothed round trip to the server in seconds; None until the first measurement.
    :ivar known: whether the server is assumed to support PING, so that periodic PINGs are sent.
    :ivar answered: whether the server has answered a PING.
    :ivar since: time of the first periodic PING, in seconds of the reactor's clock.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        send: Callable[[bytes], None],
        on_stalled: Callable[[], None],
        instance: bytes = b"",
    ) -> None:
        self._instance = instance
        self._reactor = reactor
        self._send = send
        self._on_stalled = on_stalled
        self._waiting: dict[bytes, tuple[PauseMeter, Deferred[float]]] | None = {}
        self._timer: IDelayedCall | None = None
        self.round_trip: float | None = None
        self.known = False
        self.answered = False
        self.since = 0.0

    def watch(self) -> None:
        """Start periodic PINGs. The server must support PING."""
        if not self.known and self._waiting is not None:
            self.known = True
            self.since = self._reactor.seconds()
            self._next()

    def ping(self, timeout: float = PING_TIMEOUT) -> Deferred[float]:
        """Measure the round trip to the server in seconds. Pauses of this process do not count towards ``timeout``.

        The Deferred fails with DmsgTimeout, or with the error that ended the connection.
        """
        assert self._waiting is not None
        name = os.urandom(8) + self._instance
        waiting = self._waiting

        def forget(_: Deferred[float]) -> None:
            waiting.pop(name, None)

        answered: Deferred[float] = Deferred(forget)
        meter = PauseMeter(self._reactor)

        def ended(result: float | Failure) -> float | Failure:
            meter.stop()
            return result

        waiting[name] = (meter, answered)
        add_fair_timeout(answered.addBoth(ended), timeout, self._reactor, no_answer)
        self._send(name)
        return answered

    def pong(self, payload: bytes) -> None:
        """Handle a PONG. Ignore a PONG without a pending PING."""
        if self._waiting is None or payload not in self._waiting:
            return
        meter, answered = self._waiting.pop(payload)
        meter.stop()
        self.answered = True
        if self.round_trip is None:
            self.round_trip = meter.measured
        else:
            # A pause of this process may have delayed the PONG or not. So the measurement only says that the round
            # trip has at least the measured seconds without the pause, and at most those with it.
            likely = min(max(self.round_trip, meter.elapsed - meter.paused), meter.elapsed)
            self.round_trip += SMOOTHING * (likely - self.round_trip)
        answered.callback(meter.elapsed)

    def stop(self, reason: Failure) -> None:
        """Stop the periodic PINGs, and fail pending ones with ``reason``, because the connection is lost."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting or {}, None
        for _, answered in list(waiting.values()):
            if not answered.called:
                answered.errback(reason)

    def _next(self) -> None:
        self._timer = None

        def done(result: float | Failure) -> None:
            if self._waiting is None:
                return
            if isinstance(result, Failure):
                self._on_stalled()
            else:
                self._timer = self._reactor.callLater(PING_INTERVAL, self._next)

        self.ping().addBoth(done)
