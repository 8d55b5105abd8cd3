"""Quota of servers for each poster, because anybody can create any number of keys.

Each server costs discovery checks, and clients may be sent to it. The counts are in memory only: servers post
regularly, so after a restart the counts are soon complete again.
"""

from __future__ import annotations

from collections import OrderedDict

from dmsg.net.addresses import is_public
from dmsg.net.blocks import BlockCounts, blocks_of

OF_POSTER = 32
"""Maximum number of servers whose entries come from one public address. Wider address blocks may have this number times
their factor.
"""
REMEMBERED = 16_384
"""Maximum number of servers that are remembered; beyond that the one that posted longest ago is forgotten."""
FORGOTTEN_AFTER = 3600.0
"""Seconds after its last post until a server is forgotten."""


class ServerQuota:
    """Counter of servers by the address block of their poster."""

    def __init__(self) -> None:
        self._servers: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._counts = BlockCounts()

    def refusal(self, static: str, poster: str, now: float) -> str | None:
        """Return why a server exceeds the quota, or None if it does not.

        :param poster: IP address from which the entry was posted.  Addresses that are not public have no quota.
        """
        self._forget(now)
        block = _counted_as(poster)
        if block is None or self._servers.get(static, ("",))[0] == block:
            return None
        crowded = self._counts.crowded_block(block, OF_POSTER)
        return f"too many servers from {crowded}" if crowded else None

    def count(self, static: str, poster: str, now: float) -> None:
        """Count a server whose entry was accepted.

        Entries are counted only after acceptance. Otherwise anybody could replay a server's entry and have the server
        counted for another address.
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
            if len(self._servers) <= REMEMBERED and now - server[1] < FORGOTTEN_AFTER:
                return
            del self._servers[static]
            self._uncount(server)

    def _uncount(self, server: tuple[str, float]) -> None:
        block, _ = server
        self._counts.remove(block)


def _counted_as(poster: str) -> str | None:
    """Return the block of a public address; None for other addresses, which are not counted."""
    return blocks_of(poster)[0].name if is_public(poster) else None
