"""Receipts that a client could not hand in, because its connection was lost: kept for its next one.  No I/O.

The transports of a connection that is lost end with it, and nobody is there to
take their receipts.  The server may live, or come back: it takes them a while
later (:mod:`dmsg.telemetry.receipts_due`).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from itertools import count

from dmsg.keys import PubKey

KEPT_OF_SERVER = 1024
"""Receipts that are kept for one server; then the one goes that tells of fewest bytes: opening many transports must
not push out what others have carried."""
KEPT_SERVERS = 16
"""Servers for which some are kept; then those go whose connection was lost longest ago."""


class KeptReceipts:
    """Those of one client."""

    def __init__(self) -> None:
        self._of: OrderedDict[PubKey, list[tuple[int, int, bytes]]] = OrderedDict()
        """Heaps of size, number and receipt: the one of fewest bytes is found at once."""
        self._numbers = count()

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def keep(self, server: PubKey, receipt: bytes, size: int) -> None:
        """Keep one.

        :param receipt: as it is to be handed in.
        :param size: the bytes of user data that it tells of.
        """
        kept = self._of.setdefault(server, [])
        heapq.heappush(kept, (size, next(self._numbers), receipt))
        if len(kept) > KEPT_OF_SERVER:
            heapq.heappop(kept)
        self._of.move_to_end(server)
        if len(self._of) > KEPT_SERVERS:
            self._of.popitem(last=False)

    def take(self, server: PubKey) -> list[bytes]:
        """All for a server; they are not kept any more."""
        return [receipt for _, _, receipt in sorted(self._of.pop(server, ()), key=lambda one: one[1])]
