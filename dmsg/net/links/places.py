"""Places of a server's clients, by blocks of addresses: which client of a full server has to leave for a newcomer."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from twisted.internet.interfaces import IReactorTime

from dmsg.net.blocks import BlockCounts

FEW_PLACES = 4
"""Number of clients of one block, such as those of a household or a small office, that are never disconnected in favour
of others."""
GREEDY_PART = 16
"""Divisor of the number of places. If no client is idle, a block that has more than this fraction of all places loses
its newest client, even though that client is busy.
"""
SEARCHED = 16
"""Maximum number of blocks that are searched for an idle client, beginning with the one that has most clients."""
SEARCH_AGAIN = 1.0
"""Seconds for which the list of blocks with most clients is reused to find an idle client. Making the list takes
milliseconds, and a newcomer could cause this work again and again for nearly nothing.
"""


class PlacedSession(Protocol):
    """Interface of the session of a client that may have a place."""

    @property
    def idle(self) -> bool:
        """Whether the client has no transport or channel open."""


SessionT = TypeVar("SessionT", bound=PlacedSession)


class Places(Generic[SessionT]):
    """Clients that have a place."""

    def __init__(self, reactor: IReactorTime) -> None:
        self._reactor = reactor
        self._counts = BlockCounts()
        """Number of clients with a place, by block. ``_placed`` holds these clients, the newest last."""
        self._placed: dict[str, dict[SessionT, None]] = {}
        self._block_of: dict[SessionT, str] = {}
        self._searched: list[str] = []
        self._next_search = 0.0

    def __len__(self) -> int:
        """Return the number of clients that have a place."""
        return len(self._block_of)

    def __contains__(self, session: SessionT) -> bool:
        """Return whether a client has a place."""
        return session in self._block_of

    @property
    def evictable(self) -> int:
        """Number of clients that may have to leave for a newcomer of a block without clients."""
        return max(0, self._counts[self._counts.heaviest()] - FEW_PLACES)

    def give(self, session: SessionT, block: str) -> None:
        """Give a place to a client of ``block``."""
        self._block_of[session] = block
        self._counts.add(block)
        self._placed.setdefault(block, {})[session] = None

    def take(self, session: SessionT) -> None:
        """Take the place of a client, if it has one."""
        block = self._block_of.pop(session, None)
        if block is None:
            return
        self._counts.remove(block)
        placed = self._placed[block]
        del placed[session]
        if not placed:
            del self._placed[block]

    def may_come(self, block: str) -> bool:
        """Return whether a new client of ``block`` could get the place of another client.  This is an estimate, made
        before the handshake.
        """
        heaviest = self._counts.load(self._counts.heaviest())
        return heaviest > max(FEW_PLACES, self._counts.load(block) + 1)

    def _load_to_exceed(self, session: SessionT) -> float:
        """Return the load that another block must exceed to lose a client for ``session``, which is already counted."""
        return max(FEW_PLACES, self._counts.load(self._block_of[session]))

    def may_stay(self, session: SessionT) -> bool:
        """Return whether another client could leave for ``session``, which has a place above the limit."""
        return self._counts.load(self._counts.heaviest()) > self._load_to_exceed(session)

    def victim_for(self, session: SessionT, limit: int) -> SessionT | None:
        """Return the client that has to leave for ``session``: one of a block with more load, or None.

        :param limit: number of places.
        """
        if not self.may_stay(session):
            return None
        least = self._load_to_exceed(session)
        now = self._reactor.seconds()
        # The newest client is ended, so that a flood of connections cannot displace clients that came before it.
        victim = self._newest_idle(self._counts.heaviest())
        if victim is None:
            if now >= self._next_search:
                self._next_search = now + SEARCH_AGAIN
                self._searched = self._counts.by_load(SEARCHED)
            idle = (self._newest_idle(block) for block in self._searched if self._counts.load(block) > least)
            victim = next((one for one in idle if one is not None), None)
        block = self._counts.heaviest()
        # If no client is idle, a block with a large part of all places loses a busy one, because an attacker can keep
        # all its clients busy.
        if victim is None and self._counts.load(block) > max(least, limit / GREEDY_PART):
            victim = next(reversed(self._placed[block]))
        return victim

    def _newest_idle(self, block: str) -> SessionT | None:
        return next((one for one in reversed(self._placed.get(block, {})) if one.idle), None)
