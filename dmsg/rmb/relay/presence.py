"""Which sessions are connected to a relay, and for which it waits just after its start."""

from __future__ import annotations

from collections import Counter

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IReactorTime

from dmsg.base.bounded_tables import uncount
from dmsg.base.priority_queue import PriorityQueue
from dmsg.rmb.relay.sessions import RelaySession
from dmsg.rmb.twins.address import Session

START_GRACE = 10.0
"""Seconds after the start in which a session that is not there is given time to come back."""
COME_BACK = 2.0
"""Seconds for which one session is waited for."""
FEW_SESSIONS = 4
"""Sessions of one twin that are never ended for those of others."""
MAX_COMING_BACK = 10_000
"""Sessions that are waited for after a start."""


class Presence:
    """The connected sessions of one relay.

    :ivar sessions: by their names; of each the newest connection.
    :ivar of_twin: how many sessions each twin has.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._started = clock.seconds()
        self._coming_back: dict[Session, list[Deferred[bool]]] = {}
        self.sessions: dict[Session, RelaySession] = {}
        self.of_twin: Counter[int] = Counter()
        self._newest: dict[int, dict[Session, RelaySession]] = {}
        self._most: PriorityQueue[int] = PriorityQueue()

    def _count(self, twin: int) -> None:
        if self.of_twin[twin]:
            self._most.put(twin, -self.of_twin[twin])
        else:
            self._most.remove(twin)
            self._newest.pop(twin, None)

    def makes_place(self, twin: int | None = None) -> bool:
        """Whether a twin has so many sessions that one may go for another one of ``twin``, or of somebody (None)."""
        most = self._most.first()
        own = 0 if twin is None else self.of_twin[twin]
        return most is not None and self.of_twin[most] > max(FEW_SESSIONS, own + 1)

    def make_place(self, twin: int) -> RelaySession | None:
        """The session that has to go for one of ``twin``: of the twin with most the newest that waits for nothing.

        None: there is none, because nobody has more, or because all of them have something under way.
        """
        most = self._most.first()
        if most is None or not self.makes_place(twin):
            return None
        return next((one for one in reversed(self._newest[most].values()) if one.is_idle), None)

    def add(self, session: RelaySession) -> RelaySession | None:
        """It is connected, and has its name from now on; who waits for it is told.

        :returns: the connection that had the name before.
        """
        before = self.sessions.get(session.session)
        self.sessions[session.session] = session
        newest = self._newest.setdefault(session.owner, {})
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
        """It is gone; False when a newer connection has its name by now."""
        if self.sessions.get(session.session) is not session:
            return False
        del self.sessions[session.session]
        uncount(self.of_twin, session.owner)
        self._newest[session.owner].pop(session.session, None)
        self._count(session.owner)
        return True

    def named(self, name: str) -> RelaySession | None:
        """By what the queue calls it."""
        try:
            return self.sessions.get(Session.parse(name))
        except ValueError:
            return None

    def is_here(self, name: str) -> bool:
        """Whether the session that the queue calls so is connected."""
        return self.named(name) is not None

    def comes_back(self, session: Session) -> Deferred[bool]:
        """Whether a session is there, or comes within :data:`COME_BACK` where this relay has just been started."""
        if session in self.sessions:
            return succeed(True)
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

        return waiting.addTimeout(COME_BACK, self._clock, too_late)

    def stop(self) -> None:
        """Nobody is waited for any more."""
        coming, self._coming_back = self._coming_back, {}
        for waiting in (one for some in coming.values() for one in some):
            if not waiting.called:
                waiting.callback(False)
