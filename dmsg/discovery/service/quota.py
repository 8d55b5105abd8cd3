"""How many servers somebody may have: whoever can post entries can make as many keys as he likes.

Each server costs discovery a look, and may be one that clients connect to.  It is
kept in the process: servers post again and again, and what is forgotten at a
restart is learned again.
"""

from __future__ import annotations

from collections import OrderedDict

from dmsg.net.addresses import is_public
from dmsg.net.blocks import BlockCounts, blocks_of

OF_POSTER = 32
"""Servers whose entries come from one public address; of the blocks around it as many times as many as their factor."""
REMEMBERED = 16_384
"""Servers that are remembered; the one that posted longest ago is forgotten."""
FORGOTTEN_AFTER = 3600.0
"""Seconds after its last POST."""


class ServerQuota:
    """Counts servers by who posts them."""

    def __init__(self) -> None:
        self._servers: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._counts = BlockCounts()

    def refusal(self, static: str, poster: str, now: float) -> str | None:
        """Why a server is one too many; None: it is not.

        :param poster: the address from which its entry is posted; whoever is beside discovery may have as many as he
            likes.
        """
        self._forget(now)
        block = _counted_as(poster)
        if block is None or self._servers.get(static, ("",))[0] == block:
            return None
        crowded = self._counts.crowded(block, OF_POSTER)
        return f"too many servers from {crowded}" if crowded else None

    def count(self, static: str, poster: str, now: float) -> None:
        """Its entry was taken: only now, or anybody could say it again in its place and have it counted as his."""
        before = self._servers.pop(static, None)
        if before is not None:
            self._uncount(before)
        block = _counted_as(poster)
        if block is not None:
            self._servers[static] = block, now
            self._counts.add(block)
        self._forget(now)

    def _forget(self, now: float) -> None:
        while self._servers:
            static, server = next(iter(self._servers.items()))
            if len(self._servers) <= REMEMBERED and now - server[1] < FORGOTTEN_AFTER:
                return
            del self._servers[static]
            self._uncount(server)

    def _uncount(self, server: tuple[str, float]) -> None:
        block, _ = server
        self._counts.remove(block)


def _counted_as(poster: str) -> str | None:
    """The block of a public address; None: nobody is counted."""
    return blocks_of(poster)[0].name if is_public(poster) else None
