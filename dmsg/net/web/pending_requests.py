"""What a site holds of requests that are not answered, in all, and who has to go where it is too much."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dmsg.net.blocks import BlockCounts

MAX_HELD = 64 * 1024 * 1024
"""Bytes of all connections of a site."""


class Holder(Protocol):
    """A connection.

    :ivar block: of the address that it comes from.
    """

    block: str

    def give_up(self) -> None:
        """It ends, and with it what it holds: :meth:`Unanswered.let_go` follows, at the latest from here."""


class Unanswered:
    """The account.

    Where it is too much, the block of addresses that has most for its width gives: of its connections the one that has
    held something for longest.

    :param most: bytes.
    :param refused: told ``busy`` for each connection that goes.
    :ivar held: bytes now.
    """

    def __init__(self, most: int = MAX_HELD, refused: Callable[[str], None] = lambda reason: None) -> None:
        self.most = most
        self.refused = refused
        self.held = 0
        self._of = BlockCounts()
        self._holders: dict[str, dict[Holder, int]] = {}

    def book(self, one: Holder, size: int) -> None:
        """So many bytes more, or less."""
        holders = self._holders.setdefault(one.block, {})
        holders[one] = holders.get(one, 0) + size
        self.held += size
        if size > 0:
            self._of.add(one.block, size)
            while self.held > self.most:
                self._make_room()
        elif size < 0:
            self._of.remove(one.block, -size)

    def settle(self, one: Holder, size: int) -> None:
        """It has this many bytes, whatever it had."""
        before = self._holders.get(one.block, {}).get(one, 0)
        if size != before:
            self.book(one, size - before)
        if not size:
            self.let_go(one)

    def let_go(self, one: Holder) -> None:
        """It has nothing any more."""
        holders = self._holders.get(one.block)
        if holders is None or one not in holders:
            return
        size = holders.pop(one)
        if not holders:
            del self._holders[one.block]
        self.held -= size
        if size:
            self._of.remove(one.block, size)

    def _make_room(self) -> None:
        oldest = next(one for one, size in self._holders[self._of.heaviest()].items() if size)
        self.refused("busy")
        try:
            oldest.give_up()
        finally:
            self.let_go(oldest)
