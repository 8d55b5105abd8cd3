"""Table of the sessions at a relay: connected ones, and those that may reconnect just after the relay has started."""

from __future__ import annotations

from collections import Counter

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IReactorTime

from dmsg.base.bounded_tables import decrement
from dmsg.base.priority_queue import PriorityQueue
from dmsg.net.own_pauses import add_fair_timeout
from dmsg.rmb.relay.sessions import RelaySession
from dmsg.rmb.twins.address import Session

START_GRACE = 10.0
"""Seconds after the relay's start in which a message to a missing session waits for the session to reconnect."""
COME_BACK = 2.0
"""Maximum seconds that a message waits for a missing session to reconnect."""
FEW_SESSIONS = 4
"""Number of a twin's sessions that are never ended to make room for other twins."""
MAX_COMING_BACK = 10_000
"""Maximum number of missing sessions for which messages wait after the relay's start."""


class Presence:
    """Connected sessions of one relay.

    :ivar sessions: newest connection of each session, by the session's address.
    :ivar of_twin: number of sessions of each twin.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._started = clock.seconds()
        self._coming_back: dict[Session, list[Deferred[bool]]] = {}
        self.sessions: dict[Session, RelaySession] = {}
        self.of_twin: Counter[int] = Counter()
        self._newest: dict[int, dict[Session, RelaySession]] = {}
        self._by_count: PriorityQueue[int] = PriorityQueue()

    def _count(self, twin: int) -> None:
        if self.of_twin[twin]:
            self._by_count.put(twin, -self.of_twin[twin])
        else:
            self._by_count.remove(twin)
            self._newest.pop(twin, None)

    def can_make_place(self, twin: int | None = None) -> bool:
        """Whether some twin has so many sessions that one of them may be ended to make room for a session of ``twin``.
        None stands for any twin."""
        most = self._by_count.first()
        own = 0 if twin is None else self.of_twin[twin]
        return most is not None and self.of_twin[most] > max(FEW_SESSIONS, own + 1)

    def make_place(self, twin: int) -> RelaySession | None:
        """Return the session to end for a new one of ``twin``: the newest idle session of the twin with most sessions.

        The result is None if no twin has clearly more sessions than ``twin``, or if none of its sessions is idle.
        """
        most = self._by_count.first()
        if most is None or not self.can_make_place(twin):
            return None
        # The newest session is ended first. So a twin that floods the relay with sessions loses new ones and keeps its
        # old ones.
        return next((one for one in reversed(self._newest[most].values()) if one.is_idle), None)

    def add(self, session: RelaySession) -> RelaySession | None:
        """Add a connected session, and notify the callers that wait for it.

        :returns: older connection of the same session, or None.
        """
        before = self.sessions.get(session.session)
        self.sessions[session.session] = session
        newest = self._newest.setdefault(session.owner, {})
        # ``make_place`` ends the newest session first. The pop moves a session that reconnects to the end of the
        # dictionary, so that it counts as the newest.
        newest.pop(session.session, None)
        newest[session.session] = session
        if before is None:
            self.of_twin[session.owner] += 1
            self._count(session.owner)
        for waiting in self._coming_back.pop(session.session, ()):
            if not waiting.called:
                waiting.callback(True)
        return before

    def remove(self, session: RelaySession) -> bool:
        """Remove a session that has ended. Return False, and remove nothing, if it has a newer connection."""
        # If a newer connection of the same session has replaced this one, the newer one must not be removed.
        if self.sessions.get(session.session) is not session:
            return False
        del self.sessions[session.session]
        decrement(self.of_twin, session.owner)
        self._newest[session.owner].pop(session.session, None)
        self._count(session.owner)
        return True

    def named(self, name: str) -> RelaySession | None:
        """Return the connected session whose queue has this name; None if the session is not connected."""
        try:
            return self.sessions.get(Session.parse(name))
        except ValueError:
            return None

    def is_here(self, name: str) -> bool:
        """Whether the session whose queue has this name is connected."""
        return self.named(name) is not None

    def wait_for_session(self, session: Session) -> Deferred[bool]:
        """Return whether a session is connected.  Just after the relay's start, wait up to :data:`COME_BACK` seconds
        for it."""
        if session in self.sessions:
            return succeed(True)
        # Many sessions reconnect just after a start, and only then.  Later, a missing session counts as offline, and
        # senders are notified at once.
        if self._clock.seconds() - self._started >= START_GRACE or len(self._coming_back) >= MAX_COMING_BACK:
            return succeed(False)
        waiting: Deferred[bool] = Deferred()
        self._coming_back.setdefault(session, []).append(waiting)

        def too_late(result: object, seconds: float) -> bool:
            others = self._coming_back.get(session, [])
            if waiting in others:
                others.remove(waiting)
            if not others:
                self._coming_back.pop(session, None)
            return False

        return add_fair_timeout(waiting, COME_BACK, self._clock, too_late)

    def stop(self) -> None:
        """Stop waiting for sessions."""
        coming, self._coming_back = self._coming_back, {}
        for waiting in (one for some in coming.values() for one in some):
            if not waiting.called:
                waiting.callback(False)
