"""Account of the memory that the unanswered requests of a site use. Above its limit, the account closes connections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dmsg.net.blocks import BlockCounts

MAX_HELD = 64 * 1024 * 1024
"""Maximum number of bytes that the unanswered requests of a site may use."""


class MemoryHolder(Protocol):
    """Interface of a connection whose requests use memory.

    :ivar block: block of the client's address.
    """

    block: str

    def give_up(self) -> None:
        """Close the connection and free its memory. The caller removes the connection from the account afterwards."""


class PendingRequests:
    """Account of the memory that the unanswered requests of all connections use.

    If the limit is exceeded, a connection of the address block with the highest load is closed: the one that has used
    memory for longest. The load of a block is its memory, divided by the block's factor (:mod:`dmsg.net.blocks`).

    :param limit: limit in bytes.
    :param on_refused: called with ``busy`` for each connection that is closed.
    :ivar held: number of bytes used now.
    """

    def __init__(self, limit: int = MAX_HELD, on_refused: Callable[[str], None] = lambda reason: None) -> None:
        self.most = limit
        self.on_refused = on_refused
        self.held = 0
        self._of = BlockCounts()
        self._holders: dict[str, dict[MemoryHolder, int]] = {}

    def book(self, holder: MemoryHolder, size: int) -> None:
        """Charge ``size`` more bytes to a connection; ``size`` may be negative."""
        holders = self._holders.setdefault(holder.block, {})
        holders[holder] = holders.get(holder, 0) + size
        self.held += size
        if size > 0:
            self._of.add(holder.block, size)
            while self.held > self.most:
                self._make_room()
        elif size < 0:
            self._of.remove(holder.block, -size)

    def settle(self, holder: MemoryHolder, size: int) -> None:
        """Set the number of bytes that a connection uses."""
        if not size:
            self.remove(holder)
            return
        before = self._holders.get(holder.block, {}).get(holder, 0)
        if size != before:
            self.book(holder, size - before)

    def remove(self, holder: MemoryHolder) -> None:
        """Stop counting the memory of a connection."""
        holders = self._holders.get(holder.block)
        if holders is None or holder not in holders:
            return
        size = holders.pop(holder)
        if not holders:
            del self._holders[holder.block]
        self.held -= size
        if size:
            self._of.remove(holder.block, size)

    def _make_room(self) -> None:
        oldest = next(one for one, size in self._holders[self._of.heaviest()].items() if size)
        try:
            oldest.give_up()
        finally:
            self.remove(oldest)
        self.on_refused("busy")
