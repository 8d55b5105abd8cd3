"""Receipts that a client stores until its next connection to the server, because the last connection was lost. No I/O.

When a connection is lost, its transports end, and no connection is left to send their receipts. If the server still
runs, or returns, it accepts the receipts for a while after the loss (:mod:`dmsg.telemetry.receipts_due`).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from itertools import count

from dmsg.keys import PubKey

KEPT_OF_SERVER = 1024
"""Maximum number of receipts stored for one server. Above it, the receipt for the fewest bytes is evicted, so that many
short transports cannot displace receipts for real traffic."""
KEPT_SERVERS = 16
"""Maximum number of servers with stored receipts. Above it, the receipts of one server are evicted: the server
whose last receipt was added longest ago."""


class KeptReceipts:
    """Receipts that one client stores, grouped by the server to which they go."""

    def __init__(self) -> None:
        self._of: OrderedDict[PubKey, list[tuple[int, int, bytes]]] = OrderedDict()
        """Heap of (bytes of user data, serial number, receipt) for each server, with the receipt for the fewest bytes
        first."""
        self._numbers = count()

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def keep(self, server: PubKey, receipt: bytes, size: int) -> None:
        """Store a receipt for ``server``.

        :param receipt: signed receipt, as a RECEIPT frame carries it.
        :param size: number of bytes of user data that the receipt confirms.
        """
        kept = self._of.setdefault(server, [])
        # The serial number orders receipts of equal size, and lets ``take`` return receipts in the order in which they
        # were stored.
        heapq.heappush(kept, (size, next(self._numbers), receipt))
        if len(kept) > KEPT_OF_SERVER:
            heapq.heappop(kept)
        self._of.move_to_end(server)
        if len(self._of) > KEPT_SERVERS:
            self._of.popitem(last=False)

    def take(self, server: PubKey) -> list[bytes]:
        """Remove and return the receipts of ``server``, the oldest first."""
        return [receipt for _, _, receipt in sorted(self._of.pop(server, ()), key=lambda one: one[1])]
