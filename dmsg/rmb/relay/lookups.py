"""Messages that wait until the registry has said where their receiver is.

Those to one twin wait in line, so that they keep their order.  Who asks for many twins
at once, or has much waiting, is read more slowly; nothing is refused for it, because a
sender takes a refusal as final.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from dmsg.base.bounded_tables import uncount
from dmsg.net.isolate import isolated
from dmsg.net.turns import Hold
from dmsg.rmb.errors import RegistryUnavailable, TwinNotFound
from dmsg.rmb.registry.cache import CachedRegistry
from dmsg.rmb.relay.mail import Mail
from dmsg.rmb.relay.sessions import RelaySession
from dmsg.rmb.twins.twin import Twin

MAX_LOOKUPS = 200
"""Questions to the registry that a session has begun; then it is not read from."""
MAX_LOOKING_SIZE = 64 * 1024 * 1024
"""Bytes of messages that wait for the registry, of all sessions; then who sends more is not read from."""
LOOKUP_PATIENCE, LOOKUP_RETRY = 5.0, 0.5
"""Seconds for which a registry that is away is asked again about a receiver, and between."""


class Waiting(NamedTuple):
    """A message that waits for the registry."""

    session: RelaySession
    mail: Mail


class LookupLines:
    """One line for each twin that the registry is asked about.

    :param answered: told of each message, in its order, what the registry said: the twin, None when there is none, or
        why that is not known.
    :ivar looking: bytes of messages that wait, by who sent them.
    """

    def __init__(
        self,
        clock: IReactorTime,
        registry: CachedRegistry,
        answered: Callable[[Waiting, Twin | Failure | None], None],
    ) -> None:
        self._clock = clock
        self._registry = registry
        self._answered = answered
        self._lines: dict[int, deque[Waiting]] = {}
        self.size = 0
        """Bytes of all messages that wait."""
        self.looking: Counter[RelaySession] = Counter()
        self._held: dict[RelaySession, None] = {}
        """Sessions that are not read because of what waits."""

    def __contains__(self, twin: int) -> bool:
        """Whether there is a line for a twin."""
        return twin in self._lines

    def add(self, waiting: Waiting) -> None:
        """A message waits; the registry is asked, unless it is already."""
        session, twin = waiting.session, waiting.mail.destination.twin
        self._count(session, len(waiting.mail.data))
        line = self._lines.get(twin)
        if line is not None:
            line.append(waiting)
            return
        self._lines[twin] = deque([waiting])
        session.lookups += 1
        if session.lookups >= MAX_LOOKUPS and session.socket is not None:
            session.socket.hold(Hold.LOOKUPS)
        began = self._clock.seconds()

        def ask() -> None:
            self._registry.get(twin).addBoth(answered)

        def answered(result: Twin | Failure) -> None:
            away = isinstance(result, Failure) and result.check(RegistryUnavailable)
            if away and self._clock.seconds() - began < LOOKUP_PATIENCE:
                # a word to the sender is for ever, and the registry may be back in a moment
                self._clock.callLater(LOOKUP_RETRY, ask)
                return
            said = None if isinstance(result, Failure) and result.check(TwinNotFound) else result
            session.lookups -= 1
            if session.lookups <= MAX_LOOKUPS // 2 and session.socket is not None:
                session.socket.release(Hold.LOOKUPS)
            for one in self._lines.pop(twin):
                isolated(self._over, one, said)

        ask()

    def _over(self, waiting: Waiting, said: Twin | Failure | None) -> None:
        self._count(waiting.session, -len(waiting.mail.data))
        self._answered(waiting, said)

    def lost(self, session: RelaySession) -> None:
        """A session is gone: it is not read any more."""
        self._held.pop(session, None)

    def forget(self, session: RelaySession) -> None:
        """What a session that has ended sent and that waits: it sends it again."""
        for line in self._lines.values():
            for waiting in [one for one in line if one.session is session]:
                line.remove(waiting)
                self._count(session, -len(waiting.mail.data))
                waiting.mail.lose()

    def _count(self, session: RelaySession, size: int) -> None:
        """So much more, or less, waits; where it is too much, who sends more is not read."""
        self.size += size
        if size > 0:
            self.looking[session] += size
        else:
            uncount(self.looking, session, -size)
        if size > 0 and self.size > MAX_LOOKING_SIZE and session.socket is not None:
            self._held[session] = None
            session.socket.hold(Hold.REGISTRY)
        elif self.size <= MAX_LOOKING_SIZE // 2 and self._held:
            held, self._held = self._held, {}
            for one in held:
                if one.socket is not None:
                    one.socket.release(Hold.REGISTRY)
