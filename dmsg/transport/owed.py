"""Which receipts a server waits for: one of each end of each secure transport that it carried.  No I/O.

Whoever hands in something else costs the pipeline time and the spool room; it is
checked here, cheap things first, and a signature only where a receipt is due.

A server that was killed does not know, when it runs again, what it had carried.
For a while after its start it takes receipts of transports that it does not
know, too; which of them it had really carried, its events before tell the pipeline.
"""

from __future__ import annotations

from collections import OrderedDict

from attrs import define

from dmsg.telemetry.receipts import ReceiptError, names_in, parse_receipt

MAX_OWED = 65_536
"""Transports of which receipts are waited for; then the one goes that ended longest ago."""
OWED_FOR = 600.0
"""Seconds after its end for which a transport's receipts are waited for; after the start those of former ones."""
MAX_FORMER = 16_384
"""Receipts of transports from before the start that are taken in all."""
MAX_FORMER_OF_SIGNER = 1024
"""Those of one client: as many as it keeps for a server (:mod:`dmsg.transport.kept`)."""


@define
class _Transport:
    ends: set[bytes]
    ended: float | None = None


class Owed:
    """Those of one server.

    :param server: its key.
    :param now: seconds, when it starts.
    """

    def __init__(self, server: bytes, now: float = 0.0) -> None:
        self._server = server
        self._open: OrderedDict[bytes, _Transport] = OrderedDict()
        self._ended: OrderedDict[bytes, _Transport] = OrderedDict()
        self._former_until = now + OWED_FOR
        self._former: dict[bytes, set[bytes]] = {}
        """Signer -> transports of which it has handed in a receipt, as long as former ones are taken."""
        self._former_count = 0

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

    def takes(self, payload: bytes, by: bytes, now: float) -> bool:
        """Whether this is a receipt that was due, by the client with the key ``by``; from now on it is not any more."""
        transport, server, signer = names_in(payload)
        if signer != by or server != self._server:
            return False
        owed = self._open.get(transport) or self._ended.get(transport)
        if owed is None:
            return self._takes_former(payload, transport, by, now)
        if by not in owed.ends or not _is_signed(payload):
            return False
        owed.ends.discard(by)
        if not owed.ends:
            self._ended.pop(transport, None)
        if now < self._former_until:
            self._former.setdefault(by, set()).add(transport)
        return True

    def _takes_former(self, payload: bytes, transport: bytes, by: bytes, now: float) -> bool:
        """Of a transport that this process has not carried, or not any more."""
        if now >= self._former_until:
            self._former.clear()
            return False
        known = self._former.get(by, set())
        full = self._former_count >= MAX_FORMER or len(known) >= MAX_FORMER_OF_SIGNER
        if full or transport in known or not _is_signed(payload):
            return False
        self._former.setdefault(by, set()).add(transport)
        self._former_count += 1
        return True


def _is_signed(payload: bytes) -> bool:
    try:
        parse_receipt(payload)
    except ReceiptError:
        return False
    return True
