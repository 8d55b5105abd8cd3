"""Table of the clients that count towards a server's maximum, grouped by address block. A full server evicts one of
them for a newcomer.

A client that counts towards the maximum has a *place*.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from twisted.internet.interfaces import IReactorTime

from dmsg.net.blocks import BlockCounts

FEW_PLACES = 4
"""Number of clients of one block, such as a household or a small office, that are never evicted for clients of other
blocks."""
GREEDY_DIVISOR = 16
"""Divisor that gives the limit of one block: the maximum number of clients divided by this number. If no client is
idle, the block with the highest load loses its newest client, even a busy one, if its load exceeds the limit."""
MAX_SEARCHED_BLOCKS = 16
"""Maximum number of blocks that are searched for an idle client to evict, beginning with the block with the highest
load."""
SEARCH_AGAIN = 1.0
"""Seconds for which the list of the blocks with the highest load is reused to find an idle client. Making the list
takes milliseconds, and newcomers could cause this work again and again at hardly any cost to them."""


class PlacedSession(Protocol):
    """Interface of a client's session that can be in the table of :class:`Places`."""

    @property
    def idle(self) -> bool:
        """Whether the client has no transport or channel open."""


SessionT = TypeVar("SessionT", bound=PlacedSession)


class Places(Generic[SessionT]):
    """Table of the clients that have a place, which means that they count towards the server's maximum."""

    def __init__(self, reactor: IReactorTime) -> None:
        self._reactor = reactor
        self._counts = BlockCounts()
        """Number of clients with a place, by block. ``_placed`` contains the clients of each block, the newest last."""
        self._placed: dict[str, dict[SessionT, None]] = {}
        self._block_of: dict[SessionT, str] = {}
        self._searched: list[str] = []
        self._next_search = 0.0

    def __len__(self) -> int:
        """Return the number of clients in the table."""
        return len(self._block_of)

    def __contains__(self, session: SessionT) -> bool:
        """Return whether a client is in the table."""
        return session in self._block_of

    @property
    def evictable(self) -> int:
        """Number of clients that could be evicted for clients from a block of which no client is connected yet."""
        return max(0, self._counts[self._counts.heaviest()] - FEW_PLACES)

    def give(self, session: SessionT, block: str) -> None:
        """Add a client of ``block`` to the table, so that the client counts towards the server's maximum."""
        self._block_of[session] = block
        self._counts.add(block)
        self._placed.setdefault(block, {})[session] = None

    def take(self, session: SessionT) -> None:
        """Remove a client from the table, if it has a place."""
        block = self._block_of.pop(session, None)
        if block is None:
            return
        self._counts.remove(block)
        placed = self._placed[block]
        del placed[session]
        if not placed:
            del self._placed[block]

    def may_come(self, block: str) -> bool:
        """Return whether a new client of ``block`` could evict another client. This is an estimate, made before the
        handshake."""
        heaviest = self._counts.load(self._counts.heaviest())
        return heaviest > max(FEW_PLACES, self._counts.load(block) + 1)

    def _load_to_exceed(self, session: SessionT) -> float:
        """Return the load that another block must exceed, so that one of its clients can be evicted for ``session``.
        The load of the session's own block already includes the session."""
        return max(FEW_PLACES, self._counts.load(self._block_of[session]))

    def may_stay(self, session: SessionT) -> bool:
        """Return whether another client could be evicted for ``session``, whose place in the table exceeds the maximum
        number of clients."""
        return self._counts.load(self._counts.heaviest()) > self._load_to_exceed(session)

    def victim_for(self, session: SessionT, limit: int) -> SessionT | None:
        """Choose the client to evict for ``session``, from a block whose load is higher than that of the block of
        ``session``. Return None if there is no such client.

        :param limit: maximum number of clients.
        """
        if not self.may_stay(session):
            return None
        least = self._load_to_exceed(session)
        now = self._reactor.seconds()
        # The newest idle client is evicted, so that a flood of connections cannot displace clients that came before it.
        victim = self._newest_idle(self._counts.heaviest())
        if victim is None:
            if now >= self._next_search:
                self._next_search = now + SEARCH_AGAIN
                self._searched = self._counts.by_load(MAX_SEARCHED_BLOCKS)
            idle = (self._newest_idle(block) for block in self._searched if self._counts.load(block) > least)
            victim = next((one for one in idle if one is not None), None)
        block = self._counts.heaviest()
        # If no client is idle, a busy client of a block with a large part of all clients is evicted. Otherwise an
        # attacker could protect its clients by keeping all of them busy.
        if victim is None and self._counts.load(block) > max(least, limit / GREEDY_DIVISOR):
            victim = next(reversed(self._placed[block]))
        return victim

    def _newest_idle(self, block: str) -> SessionT | None:
        return next((one for one in reversed(self._placed.get(block, {})) if one.idle), None)
