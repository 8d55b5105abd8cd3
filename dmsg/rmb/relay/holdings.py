"""Memory that a relay uses for its sessions, as it is reported to the memory limit (:mod:`dmsg.base.memory`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from twisted.internet.interfaces import IReactorTime

from dmsg.base.memory import Holding, Memory
from dmsg.net.memory_watch import MemoryWatch
from dmsg.rmb.errors import Drop
from dmsg.rmb.relay.sessions import RelaySession
from dmsg.rmb.relay.switch import Switch
from dmsg.rmb.socket.websocket import TRY_LATER

MIN_REPORTED_SIZE = 16 * 1024
"""Number of bytes of memory below which a session is not reported."""


class SessionHoldings(MemoryWatch[RelaySession]):
    """Memory that a relay uses, counted for each twin. It consists of messages that wait for receivers, for the
    registry or for other relays, of the buffered messages of paused senders, and of incomplete messages.

    Ending a session frees its memory: unconfirmed messages to the session go to its queue, and the session sends its
    own unconfirmed messages again. Messages to other relays are dropped, unless an attempt is in progress, and their
    senders are notified.
    """

    holders = "sessions"

    def __init__(self, reactor: IReactorTime, switch: Switch, memory: Memory) -> None:
        super().__init__(reactor, memory)
        self._switch = switch
        memory.add(self._holdings, self.log_dropped)

    def _holdings(self) -> Iterator[Holding]:
        self.next_check()
        switch = self._switch
        for delivery in list(switch.deliveries.waiting):
            session = switch.sessions.get(delivery.session)
            # A newer connection has replaced this one. Ending the newer connection would not free this memory.
            if session is None or session.delivery is not delivery:
                continue
            size = delivery.size + (session.socket.unsent if session.socket is not None else 0)
            if size >= MIN_REPORTED_SIZE:
                age = 0.0 if delivery.since is None else self.now - delivery.since
                yield Holding((f"twin {session.owner}",), "messages", size, age, self._end_of(session))
        for session in list(switch.parked):
            buffer = session.buffer
            if session.is_lost or not len(buffer):
                del switch.parked[session]
            elif buffer.size >= MIN_REPORTED_SIZE:
                age = self.age(session, buffer.stored_bytes - buffer.size, buffer.stored_bytes)
                yield Holding((f"twin {session.owner}",), "parked", buffer.size, age, self._end_of(session))

        for session in switch.growing:
            age = 0.0 if session.unfinished_since is None else self.now - session.unfinished_since
            end = self._end_of(session, Drop.UNFINISHED)
            yield Holding((f"twin {session.owner}",), "unfinished", session.unfinished, age, end)
        for session, size in switch.lookups.looking.items():
            # The memory is charged to the twin and not to the session, because one twin may open many sessions.
            yield Holding((f"twin {session.owner}",), "registry", size, 0.0, partial(self._forget_lookups, session))
        for twin, size in switch.federation.sizes().items():
            yield Holding((f"twin {twin}",), "federation", size, 0.0, partial(switch.federation.give_up, twin))

    def _forget_lookups(self, session: RelaySession) -> None:
        self._end_of(session)()
        self._switch.lookups.forget(session)

    @staticmethod
    def _end_of(session: RelaySession, drop: Drop = Drop.MEMORY) -> Callable[[], None]:
        return partial(session.end, drop, TRY_LATER, "this relay buffers too many messages for this session")
