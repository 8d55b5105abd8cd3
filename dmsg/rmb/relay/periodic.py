"""What a relay looks at every second: confirmations that take long, sessions that are silent, lives that are over."""

from __future__ import annotations

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from dmsg.rmb.errors import Drop
from dmsg.rmb.relay.delivery import SPILL_AFTER
from dmsg.rmb.relay.sessions import SMALL
from dmsg.rmb.relay.switch import Switch
from dmsg.rmb.socket.websocket import FAILED, GOING_AWAY, TRY_LATER
from dmsg.rmb.twins.address import Session

ROUND = 1.0
"""Seconds between looks at what waits."""
IDLE_PING = 30.0
"""Seconds of silence after which a session is pinged."""
SILENT_AFTER = 75.0
"""Seconds of silence after which a session is ended."""
STALLED_AFTER = 60.0
"""Seconds without a confirmation after which a session is ended."""
UNFINISHED_FOR = 60.0
"""Seconds for a message to become whole, from when more than ``SMALL`` bytes of it are there."""
PRESENT_EVERY = 30.0
"""Seconds between notes of who is connected, for other processes on the same queue."""
POLLED = 1000
"""Sessions whose queues are looked at in one round."""

_log = Logger()


class Rounds:
    """The looks at one switch."""

    def __init__(self, clock: IReactorTime, switch: Switch) -> None:
        self._clock = clock
        self._switch = switch
        self._present_at = 0.0
        self._to_poll: list[Session] = []

    def round(self) -> None:
        """Every second; an error in one step ends neither the others nor the next round."""
        for step in (
            self._look_at_deliveries,
            self._look_at_unfinished,
            self._look_at_sessions,
            self._poll,
            self._answer_expired,
            self._tell_who_is_here,
            self._switch.limited.tell,
            self._switch.federation.round,
        ):
            try:
                step()
            except Exception:
                _log.failure("a step of the round failed")

    def _look_at_deliveries(self) -> None:
        """Confirmations that take long."""
        switch, now = self._switch, self._clock.seconds()
        for delivery in list(switch.waiting):
            if not len(delivery):
                del switch.waiting[delivery]
                continue
            delivery.look()
            if delivery.since is not None and now - delivery.since >= SPILL_AFTER:
                delivery.stall()
                session = switch.sessions.get(delivery.session)
                here = session if session is not None and session.delivery is delivery else None
                # its confirmations may be behind what it sends to one that does not read: that one's time ends first
                patience = 2 * STALLED_AFTER if here is not None and here.is_held else STALLED_AFTER
                if now - delivery.since >= patience:
                    switch.evictions["back_pressure_timeout"] += 1
                    if here is not None:
                        here.end(Drop.STALLED, FAILED, "nothing was confirmed for too long")

    def _look_at_unfinished(self) -> None:
        """Sessions that hold what they never finish."""
        now = self._clock.seconds()
        for session in list(self._switch.growing):
            since = session.unfinished_since
            if since is None:
                session.unfinished_since = now
            elif now - since >= UNFINISHED_FOR:
                session.end(Drop.UNFINISHED, TRY_LATER, "a message that does not end")

    def _look_at_sessions(self) -> None:
        """Sessions that are silent."""
        switch, now = self._switch, self._clock.seconds()
        for session in list(switch.sessions.values()):
            socket = session.socket
            if session.unfinished <= SMALL:
                session.unfinished_since = None
            if socket is not None and socket.heard:
                socket.heard = False
                session.heard_at = now
            elif socket is not None and socket.held:
                # it is not read, so it cannot be heard; this lets it know that the relay is there
                session.heard_at = now
                socket.ping(b"")
            elif now - session.heard_at >= SILENT_AFTER:
                switch.evictions["closed"] += 1
                session.end(Drop.SILENT, GOING_AWAY, "silent for too long")
            elif now - session.heard_at >= IDLE_PING and socket is not None:
                socket.ping(b"")
            session.delivery.retry()

    def _answer_expired(self) -> None:
        def taken(expired: list[tuple[str, bytes]]) -> None:
            for _, data in expired:
                self._switch.answer_expired(data)

        self._switch.queue.expired(self._switch.now()).addCallbacks(taken, lambda _: None)

    def _tell_who_is_here(self) -> None:
        now = self._clock.seconds()
        if now - self._present_at >= PRESENT_EVERY:
            self._present_at = now
            self._switch.queue.present([str(session) for session in self._switch.sessions])

    def _poll(self) -> None:
        """Relays that share the queue and are not of this package tell nobody what they append."""
        sessions = self._switch.sessions
        if not self._to_poll:
            self._to_poll = list(sessions)
        some, self._to_poll = self._to_poll[:POLLED], self._to_poll[POLLED:]
        quiet = [
            name
            for name in some
            if (one := sessions.get(name)) is not None and not len(one.delivery) and not one.delivery.catching_up
        ]
        if quiet:
            self._switch.queue.poll([str(name) for name in quiet]).addCallback(self._found)

    def _found(self, names: list[str]) -> None:
        for name in names:
            self._switch.appended_elsewhere(name)
