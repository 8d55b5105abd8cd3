"""Receipts that a client keeps until its next connection to a server, because the last connection was lost.  No I/O.

Transports end with their connection, and then there is no connection over which to send their receipts.  A server
that is still running, or comes back, accepts the receipts for a while (:mod:`dmsg.telemetry.receipts_due`).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from itertools import count

from dmsg.keys import PubKey

KEPT_OF_SERVER = 1024
"""Maximum number of receipts kept for one server.  Above it, the receipt for the fewest bytes is evicted, so that
opening many transports cannot push out receipts for real traffic."""
KEPT_SERVERS = 16
"""Maximum number of servers with kept receipts.  Above it, the server whose connection was lost longest ago is
evicted."""


class KeptReceipts:
    """Receipts that one client keeps, by server."""

    def __init__(self) -> None:
        self._of: OrderedDict[PubKey, list[tuple[int, int, bytes]]] = OrderedDict()
        """Heap for each server of (bytes of user data, serial number, receipt), so that the receipt for the fewest
        bytes is first."""
        self._numbers = count()

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def keep(self, server: PubKey, receipt: bytes, size: int) -> None:
        """Keep a receipt for ``server``.

        :param receipt: signed receipt, encoded as the RECEIPT frame carries it.
        :param size: number of bytes of user data that the receipt confirms.
        """
        kept = self._of.setdefault(server, [])
        # The serial number breaks ties between equal sizes and keeps the order of arrival for ``take``.
        heapq.heappush(kept, (size, next(self._numbers), receipt))
        if len(kept) > KEPT_OF_SERVER:
            heapq.heappop(kept)
        self._of.move_to_end(server)
        if len(self._of) > KEPT_SERVERS:
            self._of.popitem(last=False)

    def take(self, server: PubKey) -> list[bytes]:
        """Remove the receipts of ``server`` and return them, oldest first."""
        return [receipt for _, _, receipt in sorted(self._of.pop(server, ()), key=lambda one: one[1])]
