"""Quota of servers per poster's address. It is needed because anybody can create any number of keys, and post a server
for each.

Discovery checks each server, and sends clients to it. The counts are in memory only: servers post regularly, so the
counts are complete again soon after a restart.
"""

from __future__ import annotations

from collections import OrderedDict

from dmsg.net.addresses import is_public
from dmsg.net.blocks import BlockCounts, blocks_of

MAX_PER_POSTER = 32
"""Maximum number of servers whose entries were posted from one public address. For a wider address block, the number is
multiplied by the factor of the block.
"""
MAX_COUNTED_SERVERS = 16_384
"""Maximum number of counted servers. Beyond that, the server whose last POST is oldest is no longer counted."""
FORGOTTEN_AFTER = 3600.0
"""Seconds after its last POST for which a server is counted."""


class ServerQuota:
    """Counter of servers by the address block of their poster."""

    def __init__(self) -> None:
        self._servers: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._counts = BlockCounts()

    def refusal(self, static: str, poster: str, now: float) -> str | None:
        """Return the reason why a server exceeds the quota of its poster, or None if it does not.

        :param poster: IP address from which the entry was posted.  Addresses that are not public have no quota.
        """
        self._forget(now)
        block = _counted_as(poster)
        if block is None or self._servers.get(static, ("",))[0] == block:
            return None
        crowded = self._counts.crowded_block(block, MAX_PER_POSTER)
        return f"too many servers from {crowded}" if crowded else None

    def count(self, static: str, poster: str, now: float) -> None:
        """Count a server whose entry was accepted.

        Only accepted entries are counted. Otherwise anybody could replay a server's old entry from another address, and
        the server would be counted for that address.
        """
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
            if len(self._servers) <= MAX_COUNTED_SERVERS and now - server[1] < FORGOTTEN_AFTER:
                return
            del self._servers[static]
            self._uncount(server)

    def _uncount(self, server: tuple[str, float]) -> None:
        block, _ = server
        self._counts.remove(block)


def _counted_as(poster: str) -> str | None:
    """Return the address block for which servers of a poster are counted; None for addresses that are not public."""
    return blocks_of(poster)[0].name if is_public(poster) else None
