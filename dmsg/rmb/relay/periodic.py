"""Timer of a relay: once a second, it starts the checks of deliveries, of silent sessions and of expired messages."""

from __future__ import annotations

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from dmsg.net.own_pauses import PausesBetweenChecks
from dmsg.rmb.errors import Drop
from dmsg.rmb.relay.delivery import SPILL_AFTER
from dmsg.rmb.relay.sessions import MAX_UNWATCHED_SIZE
from dmsg.rmb.relay.switch import Switch
from dmsg.rmb.socket.websocket import FAILED, GOING_AWAY, TRY_LATER
from dmsg.rmb.twins.address import Session

ROUND_INTERVAL = 1.0
"""Seconds between two rounds of a relay's periodic checks."""
IDLE_PING = 30.0
"""Seconds without received data after which a session is pinged."""
SILENT_AFTER = 75.0
"""Seconds without received data after which a session is ended."""
STALLED_AFTER = 60.0
"""Seconds after which a session is ended if a confirmation is expected from it and none arrives."""
UNFINISHED_FOR = 60.0
"""Seconds after which a session is ended if one of its messages is incomplete, counted from the time when more than
``MAX_UNWATCHED_SIZE`` bytes of the message have arrived."""
PRESENT_EVERY = 30.0
"""Seconds between two announcements, to other processes on the same queue, of the sessions connected here."""
MAX_POLLED_SESSIONS = 1000
"""Maximum number of sessions whose queues are polled for new messages in one round."""

_log = Logger()


class PeriodicChecks:
    """Periodic checks of the sessions and messages of one :class:`~dmsg.rmb.relay.switch.Switch`."""

    def __init__(self, clock: IReactorTime, switch: Switch) -> None:
        self._clock = clock
        self._switch = switch
        self._pauses = PausesBetweenChecks(clock, ROUND_INTERVAL)
        self._present_at = 0.0
        self._to_poll: list[Session] = []

    def round(self) -> None:
        """Run all checks. An error in one check stops neither the other checks nor the next round."""
        for step in (
            self._leave_out_pause,
            self._check_deliveries,
            self._check_unfinished,
            self._check_sessions,
            self._poll,
            self._answer_expired,
            self._announce_sessions,
            self._switch.limited.log_refused,
            self._switch.federation.round,
        ):
            try:
                step()
            except Exception:
                _log.failure("unhandled error in a periodic task of the relay")

    def _leave_out_pause(self) -> None:
        """Delay all deadlines of the sessions by the pause of this process since the last round."""
        if not (paused := self._pauses.measure()):
            return
        switch = self._switch
        for delivery in switch.deliveries.waiting:
            if delivery.since is not None:
                delivery.since += paused
        for session in switch.sessions.values():
            session.heard_at += paused
        for session in switch.growing:
            if session.unfinished_since is not None:
                session.unfinished_since += paused

    def _check_deliveries(self) -> None:
        """Store messages whose confirmations take long, and end sessions that confirm nothing."""
        switch, now = self._switch, self._clock.seconds()
        # The loop uses a copy, because ending a session changes the table.
        for delivery in list(switch.deliveries.waiting):
            if not len(delivery):
                del switch.deliveries.waiting[delivery]
                continue
            delivery.check()
            if delivery.since is not None and now - delivery.since >= SPILL_AFTER:
                delivery.stall()
                session = switch.sessions.get(delivery.session)
                here = session if session is not None and session.delivery is delivery else None
                # The relay does not read from a paused session, so it may not have read the session's confirmations
                # yet. A session is paused while the receiver of its messages does not read. So a paused session gets
                # twice the time, within which the relay ends a receiver that confirms nothing.
                limit = 2 * STALLED_AFTER if here is not None and here.is_paused else STALLED_AFTER
                if now - delivery.since >= limit:
                    switch.evictions["back_pressure_timeout"] += 1
                    if here is not None:
                        here.end(Drop.STALLED, FAILED, "nothing was confirmed for too long")

    def _check_unfinished(self) -> None:
        """End sessions that have sent an incomplete message and do not complete it in time."""
        now = self._clock.seconds()
        for session in list(self._switch.growing):
            since = session.unfinished_since
            if since is None:
                session.unfinished_since = now
            # An honest, slow sender of a large message looks like an attacker who uses up memory, so both are ended.
            elif now - since >= UNFINISHED_FOR:
                session.end(Drop.UNFINISHED, TRY_LATER, "a message was not completed in time")

    def _check_sessions(self) -> None:
        """Ping sessions from which nothing was received for a while, and end those that stay silent."""
        switch, now = self._switch, self._clock.seconds()
        for session in list(switch.sessions.values()):
            socket = session.socket
            if session.unfinished <= MAX_UNWATCHED_SIZE:
                session.unfinished_since = None
            if socket is not None and socket.has_received:
                socket.has_received = False
                session.heard_at = now
            elif socket is not None and socket.is_reading_paused:
                # The relay does not read from a paused session, so it cannot know whether the session is silent. The
                # ping shows the session that the relay is alive.
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

    def _announce_sessions(self) -> None:
        now = self._clock.seconds()
        if now - self._present_at >= PRESENT_EVERY:
            self._present_at = now
            self._switch.queue.present([str(session) for session in self._switch.sessions])

    def _poll(self) -> None:
        """Poll queues for new messages, because relays of the reference implementation on the same Redis do not
        announce them."""
        sessions = self._switch.sessions
        if not self._to_poll:
            self._to_poll = list(sessions)
        some, self._to_poll = self._to_poll[:MAX_POLLED_SESSIONS], self._to_poll[MAX_POLLED_SESSIONS:]
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
