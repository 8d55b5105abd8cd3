"""Receipts that a client could not hand in, because its connection was lost: kept for its next one.  No I/O.

The transports of a connection that is lost end with it, and nobody is there to
take their receipts.  The server may live, or come back: it takes them a while
later (:mod:`dmsg.transport.owed`).
"""

from __future__ import annotations

from collections import OrderedDict, deque

from dmsg.keys import PubKey

KEPT_OF_SERVER = 1024
"""Receipts that are kept for one server; then the oldest goes."""
KEPT_SERVERS = 16
"""Servers for which some are kept; then those go whose connection was lost longest ago."""


class KeptReceipts:
    """Those of one client."""

    def __init__(self) -> None:
        self._of: OrderedDict[PubKey, deque[bytes]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def keep(self, server: PubKey, receipt: bytes) -> None:
        """Keep one.  :param receipt: as it is to be handed in."""
        self._of.setdefault(server, deque(maxlen=KEPT_OF_SERVER)).append(receipt)
        self._of.move_to_end(server)
        if len(self._of) > KEPT_SERVERS:
            self._of.popitem(last=False)

    def take(self, server: PubKey) -> list[bytes]:
        """All for a server; they are not kept any more."""
        return list(self._of.pop(server, ()))
