"""Which receipts a server waits for: one of each end of each secure transport that it carried.  No I/O.

Whoever hands in something else costs the pipeline time and the spool room; it is
checked here, cheap things first, and a signature only where a receipt is due.
"""

from __future__ import annotations

from collections import OrderedDict

from attrs import define

from dmsg.telemetry.receipts import ReceiptError, names_in, parse_receipt

MAX_OWED = 65_536
"""Transports of which receipts are waited for; then the one goes that ended longest ago."""
OWED_FOR = 600.0
"""Seconds after its end for which a transport's receipts are waited for."""


@define
class _Transport:
    ends: set[bytes]
    ended: float | None = None


class Owed:
    """Those of one server.

    :param server: its key.
    """

    def __init__(self, server: bytes) -> None:
        self._server = server
        self._open: OrderedDict[bytes, _Transport] = OrderedDict()
        self._ended: OrderedDict[bytes, _Transport] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open) + len(self._ended)

    def carries(self, transport: bytes, one: bytes, other: bytes) -> None:
        """A transport was accepted; each of its ends, by their keys, may sign for it."""
        self._open[transport] = _Transport({one, other})
        if len(self) > MAX_OWED:
            (self._ended or self._open).popitem(last=False)

    def ended(self, transport: bytes, now: float) -> None:
        """It is over: :data:`OWED_FOR` from now on its receipts are not waited for any more."""
        owed = self._open.pop(transport, None)
        if owed is not None and owed.ends:
            owed.ended = now
            self._ended[transport] = owed
        while self._ended and (next(iter(self._ended.values())).ended or 0.0) <= now - OWED_FOR:
            self._ended.popitem(last=False)

    def takes(self, payload: bytes, by: bytes) -> bool:
        """Whether this is a receipt that was due, by the client with the key ``by``; from now on it is not any more."""
        transport, server, signer = names_in(payload)
        owed = self._open.get(transport) or self._ended.get(transport)
        if owed is None or signer != by or by not in owed.ends or server != self._server:
            return False
        try:
            receipt = parse_receipt(payload)
        except ReceiptError:
            return False
        owed.ends.discard(bytes(receipt.signer))
        if not owed.ends:
            self._ended.pop(transport, None)
        return True
