"""Quota of servers per poster's address. It is needed because anybody can create any number of keys, and post a server
for each.

Discovery checks each server, and sends clients to it. The counts are in memory only: servers post regularly, so the
counts are complete again soon after a restart.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

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


class TooManyServers(Exception):
    """Error: the address that posted a server's entry has already posted the maximum number of servers."""


class Reservation(NamedTuple):
    """Place of a server whose entry the store has not decided about yet.

    :ivar block: address block for which the server is counted if its entry is accepted; None if it is not counted.
    :ivar reserved: address block in which the place is taken; None if the server needs no further place there.
    """

    static: str
    block: str | None
    reserved: str | None


class ServerQuota:
    """Counter of servers by the address block of their poster."""

    def __init__(self) -> None:
        self._servers: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._counts = BlockCounts()

    def reserve(self, static: str, poster: str, now: float) -> Reservation:
        """Reserve a place for a server until the store has decided about its entry. Without reservations, the entries
        that arrive before the first decision could exceed the quota together.

        :param poster: IP address from which the entry was posted.  Addresses that are not public have no quota.
        :raises TooManyServers: the server exceeds the quota of its poster.
        """
        self._forget(now)
        block = _counted_as(poster)
        if block is None or self._servers.get(static, ("",))[0] == block:
            return Reservation(static, block, None)
        crowded = self._counts.crowded_block(block, MAX_PER_POSTER)
        if crowded:
            raise TooManyServers(f"too many servers from {crowded}")
        self._counts.add(block)
        return Reservation(static, block, block)

    def release(self, reservation: Reservation) -> None:
        """Give back the place of a reservation, because the store has not accepted the entry."""
        if reservation.reserved is not None:
            self._counts.remove(reservation.reserved)

    def accept(self, reservation: Reservation, now: float) -> None:
        """Count the server of a reservation, because the store has accepted its entry.

        Only accepted entries are counted. Otherwise anybody could replay a server's old entry from another address, and
        the server would be counted for that address.
        """
        self.release(reservation)
        before = self._servers.pop(reservation.static, None)
        if before is not None:
            self._uncount(before)
        if reservation.block is not None:
            self._servers[reservation.static] = reservation.block, now
            self._counts.add(reservation.block)
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
