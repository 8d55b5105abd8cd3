"""Messages that wait until the registry has answered which relays their receiver uses.

Messages to one twin wait in one queue, so that they stay in order.  A session that causes many look-ups at once, or
that has many bytes waiting, is paused: the relay stops reading from it. No message is refused because of a slow
registry, because senders treat a refusal as final.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from dmsg.base.bounded_tables import decrement
from dmsg.net.isolate import call_isolated
from dmsg.net.turns import HoldReason
from dmsg.rmb.errors import RegistryUnavailable, TwinNotFound
from dmsg.rmb.registry.cache import CachedRegistry
from dmsg.rmb.relay.mail import Mail
from dmsg.rmb.relay.sessions import RelaySession
from dmsg.rmb.twins.twin import Twin

MAX_LOOKUPS = 200
"""Number of unfinished look-ups of one session at which the session is paused."""
MAX_WAITING_SIZE = 64 * 1024 * 1024
"""Maximum bytes of messages of all sessions that wait for look-ups. Above this size, a session that sends a further
message is paused."""
LOOKUP_TIMEOUT, LOOKUP_RETRY = 5.0, 0.5
"""Maximum seconds for which a look-up is repeated while the registry is unavailable, and seconds between the
attempts."""


class WaitingMail(NamedTuple):
    """Message that waits for the look-up of its receiver, and the session that sent it."""

    session: RelaySession
    mail: Mail


class LookupLines:
    """Queues of waiting messages, one for each twin that is being looked up.

    :param on_answered: callback invoked for each message, in order. Its second argument is the registry's answer: the
        twin's entry, None for an unknown twin, or the failure.
    :ivar looking: number of bytes of the waiting messages, by the session that sent them.
    """

    def __init__(
        self,
        clock: IReactorTime,
        registry: CachedRegistry,
        on_answered: Callable[[WaitingMail, Twin | Failure | None], None],
    ) -> None:
        self._clock = clock
        self._registry = registry
        self._on_answered = on_answered
        self._lines: dict[int, deque[WaitingMail]] = {}
        self.size = 0
        """Number of bytes of all waiting messages."""
        self.looking: Counter[RelaySession] = Counter()
        self._held: dict[RelaySession, None] = {}
        """Sessions that are paused because the waiting messages have too many bytes."""

    def __contains__(self, twin: int) -> bool:
        """Whether messages to ``twin`` wait for its look-up."""
        return twin in self._lines

    def add(self, waiting: WaitingMail) -> None:
        """Queue a message until its receiver was looked up.  Start the look-up, unless this twin is being looked up
        already."""
        session, twin = waiting.session, waiting.mail.destination.twin
        self._count(session, len(waiting.mail.data))
        line = self._lines.get(twin)
        if line is not None:
            line.append(waiting)
            return
        self._lines[twin] = deque([waiting])
        session.lookups += 1
        if session.lookups >= MAX_LOOKUPS and session.socket is not None:
            session.socket.hold(HoldReason.LOOKUPS)
        began = self._clock.seconds()

        def ask() -> None:
            self._registry.get(twin).addBoth(answered)

        def answered(result: Twin | Failure) -> None:
            away = isinstance(result, Failure) and result.check(RegistryUnavailable)
            if away and self._clock.seconds() - began < LOOKUP_TIMEOUT:
                # No error is sent yet, because senders treat an error as final, and the registry may soon be available
                # again.
                self._clock.callLater(LOOKUP_RETRY, ask)
                return
            # TwinNotFound is a valid answer: the twin does not exist.  Any other failure says nothing about the twin.
            said = None if isinstance(result, Failure) and result.check(TwinNotFound) else result
            session.lookups -= 1
            # The session is resumed only at half of the limit. Otherwise it would be paused and resumed with each
            # answer.
            if session.lookups <= MAX_LOOKUPS // 2 and session.socket is not None:
                session.socket.release(HoldReason.LOOKUPS)
            for one in self._lines.pop(twin):
                call_isolated(self._finish, one, said)

        ask()

    def _finish(self, waiting: WaitingMail, result: Twin | Failure | None) -> None:
        self._count(waiting.session, -len(waiting.mail.data))
        self._on_answered(waiting, result)

    def forget_lost(self, session: RelaySession) -> None:
        """Note that a session has ended, so that reading from it is not resumed later."""
        self._held.pop(session, None)

    def forget(self, session: RelaySession) -> None:
        """Drop the waiting messages of a session that has ended. The session will send them again."""
        for line in self._lines.values():
            for waiting in [one for one in line if one.session is session]:
                line.remove(waiting)
                self._count(session, -len(waiting.mail.data))
                waiting.mail.lose()

    def _count(self, session: RelaySession, size: int) -> None:
        """Add ``size``, which may be negative, to the number of waiting bytes. Pause or resume sessions accordingly."""
        self.size += size
        if size > 0:
            self.looking[session] += size
        else:
            decrement(self.looking, session, -size)
        if size > 0 and self.size > MAX_WAITING_SIZE and session.socket is not None:
            self._held[session] = None
            session.socket.hold(HoldReason.REGISTRY)
        elif self.size <= MAX_WAITING_SIZE // 2 and self._held:
            held, self._held = self._held, {}
            for one in held:
                if one.socket is not None:
                    one.socket.release(HoldReason.REGISTRY)
