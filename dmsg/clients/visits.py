"""Visits of one client: temporary connections to the servers of remotes, each opened to connect to a remote.

A visit ends once it has carried no transport at two consecutive checks.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Generic

from twisted.internet.defer import CancelledError, Deferred
from twisted.python.failure import Failure

from dmsg.clients.dial import SessionOpener, SessionT
from dmsg.clients.session import SessionKeeper
from dmsg.discovery.entries.entry import Entry
from dmsg.errors import DmsgError
from dmsg.keys import PubKey
from dmsg.net.isolate import call_isolated


class Visits(Generic[SessionT]):
    """Visits of one client, and its callers that wait for a session with a server.

    :param keeper: owner of the sessions.
    :param opener: returns the object that opens sessions with the server of an entry.
    :param find_entry: returns the entry of a server.
    :param is_connecting: returns whether the first attempt at a lasting connection to a server is under way. A visit
        would be a second connection with the same key, and the server would close one of them.
    :param on_open: called when a visit has begun.
    :param on_lost: called with the server's key when a visit has ended.
    :ivar sessions: sessions of the visits, by server.
    """

    def __init__(
        self,
        keeper: SessionKeeper,
        opener: Callable[[Entry], SessionOpener[SessionT]],
        find_entry: Callable[[PubKey], Coroutine[Deferred[Any], Any, Entry]],
        *,
        is_connecting: Callable[[PubKey], bool],
        on_open: Callable[[], None],
        on_lost: Callable[[PubKey], None],
    ) -> None:
        self._keeper = keeper
        self._opener = opener
        self._find_entry = find_entry
        self._is_connecting = is_connecting
        self._on_open = on_open
        self._on_lost = on_lost
        self.sessions: dict[PubKey, SessionT] = {}
        self._waiting: dict[PubKey, list[Deferred[SessionT]]] = {}
        """Callers that wait for a session, by server."""
        self._opening: dict[PubKey, Deferred[SessionT]] = {}
        """Visits that are being opened, by server."""
        self._idle: dict[SessionT, None] = {}
        """Visits without transports at the last check."""
        self._running = False

    def start(self) -> None:
        """Allow visits."""
        self._running = True

    def refuse_new(self) -> None:
        """Allow no further visits, because the client is stopped."""
        self._running = False

    def stop(self) -> list[Deferred[None]]:
        """End all visits, and fail the callers that wait; call :meth:`refuse_new` first.

        :returns: one Deferred for each visit, which fires once the visit has ended.
        """
        ends = []
        for session in list(self.sessions.values()):
            call_isolated(session.close)
            ends.append(_fire_after(session.lost))
        for opening in list(self._opening.values()):
            opening.cancel()
        for server in list(self._waiting):
            # The visit fails at once, because the client is stopped.
            self.begin_if_awaited(server)
        return ends

    def awaited(self) -> set[PubKey]:
        """Return the servers with which callers wait for a session."""
        return set(self._waiting)

    def session(self, server: PubKey) -> Deferred[SessionT]:
        """Return a Deferred that fires with a session with ``server``: of a visit, or of a lasting connection if one is
        being made.
        """
        found: Deferred[SessionT] = Deferred()
        # Further calls wait for a visit that has already begun.
        waiting = self._waiting.get(server)
        if waiting is not None:
            waiting.append(found)
            return found
        self._waiting[server] = [found]
        if not self._is_connecting(server):
            self._begin(server)
        return found

    def begin_if_awaited(self, server: PubKey) -> None:
        """Begin a visit to ``server`` if callers wait for a session with it. Do nothing while the client makes its
        first attempt at a lasting connection to ``server``.
        """
        if server not in self._waiting or server in self._opening or self._is_connecting(server):
            return
        if all(waiting.called for waiting in self._waiting[server]):
            del self._waiting[server]
        else:
            self._begin(server)

    def use_instead(self, session: SessionT) -> None:
        """Give the session of a lasting connection to the callers that wait for one with its server."""
        waiting = self._waiting.pop(session.server, [])
        opening = self._opening.pop(session.server, None)
        if opening is not None:
            # Callers do not wait for the visit any more. It could still fail, or take long.
            opening.cancel()
        for deferred in waiting:
            if not deferred.called:
                deferred.callback(session)

    def close_idle(self) -> None:
        """Close each visit that has no transport now and had none at the previous check."""
        # A visit that was idle at only one check may be so new that its first transport is not requested yet.
        before, self._idle = self._idle, {session: None for session in self.sessions.values() if not session.transports}
        for session in [session for session in self._idle if session in before]:
            session.close()

    def _begin(self, server: PubKey) -> None:
        """Visit a server, because callers of :meth:`session` wait for it."""

        def visited(result: SessionT | Failure) -> None:
            self._opening.pop(server, None)
            if isinstance(result, Failure) and result.check(CancelledError):
                # Only ``stop`` cancels a visit. The callers that wait for the visit have not cancelled anything, so
                # they get the error of a stopped client instead of CancelledError.
                try:
                    self._check_running()
                except DmsgError:
                    result = Failure()
            for deferred in self._waiting.pop(server, ()):
                if not deferred.called:
                    deferred.callback(result)

        opening = self._opening[server] = Deferred.fromCoroutine(self._visit(server))
        opening.addBoth(visited)

    async def _visit(self, server: PubKey) -> SessionT:
        """Connect to a server temporarily; :meth:`close_idle` ends the visit."""
        self._check_running()
        entry = await self._find_entry(server)
        if entry.server is None:
            raise DmsgError("the entry belongs to a client, not to a server")
        session = await self._opener(entry).open()
        if not self._running:
            session.close()
            self._check_running()
        self.sessions[server] = session
        session.keeper = self._keeper

        def lost(_: None) -> None:
            # While this session was closing, another visit of the same server may have begun.
            if self.sessions.get(server) is session:
                del self.sessions[server]
            self._on_lost(server)

        session.lost.addCallback(lost)
        self._on_open()
        return session

    def _check_running(self) -> None:
        """Raise an error if the client is stopped, for callers that wait for a session with a server."""
        if not self._running:
            raise DmsgError("the client is stopped")


def _fire_after(deferred: Deferred[None]) -> Deferred[None]:
    done: Deferred[None] = Deferred()

    def fire(result: None) -> None:
        done.callback(None)
        return result

    deferred.addBoth(fire)
    return done
