"""Which receipts a server waits for: one of each end of each secure transport that it carried.  No I/O.

Whoever hands in something else costs the pipeline time and the spool room; it is
checked here, cheap things first, and a signature only where a receipt is due.

A server that was killed does not know, when it runs again, what it had carried.
For a while after its start it takes receipts of transports that it does not
know, too; which of them it had really carried, its events before tell the pipeline.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from enum import IntEnum

from attrs import define

from dmsg.telemetry.receipts import Receipt, ReceiptError, Role, names_in, parse_receipt

MAX_OWED = 65_536
"""Transports that are over of which receipts are waited for; then the one goes that ended longest ago.  Those that are
open are as many as the server carries."""
OWED_FOR = 600.0
"""Seconds after its end for which a transport's receipts are waited for; for as long after a start, those of
transports from before it are taken."""
MAX_FORMER = 65_536
"""Receipts of transports from before the start that are taken in all."""
MAX_FORMER_OF_NETWORK = 4096
"""Those of clients in one network (/24, /48): keys cost nothing, so a share for each key is none."""
MAX_FORMER_OF_SIGNER = 1024
"""Those of one client: as many as it keeps for a server (:mod:`dmsg.v2019.core.kept`)."""


class Due(IntEnum):
    """What a server makes of a receipt."""

    NOT = 0
    KNOWN = 1
    """Of a transport that it carried, by an end of it that names the other one."""
    FORMER = 2
    """Of a transport from before its start; whether the signer was an end of it, its events before tell."""


@define
class _Transport:
    initiator: bytes
    responder: bytes
    ends: set[bytes]
    ended: float | None = None

    def names_ends(self, receipt: Receipt) -> bool:
        """Whether a receipt says who asked and who was asked, as it was."""
        ends = (self.initiator, self.responder)
        return (receipt.signer, receipt.peer) == (ends if receipt.role is Role.INITIATOR else ends[::-1])


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
        """Signer -> former transports of which it has handed in a receipt, as long as those are taken."""
        self._former_of: Counter[str] = Counter()
        """The same, counted by network."""
        self._taken: OrderedDict[tuple[bytes, bytes], None] = OrderedDict()
        """Transport, signer of the newest receipts that were due, as long: they are not former ones."""

    def __len__(self) -> int:
        return len(self._open) + len(self._ended)

    def carries(self, transport: bytes, initiator: bytes, responder: bytes) -> None:
        """A transport was accepted; each of its ends, by their keys, may sign for it."""
        self._open[transport] = _Transport(initiator, responder, {initiator, responder})

    def ended(self, transport: bytes, now: float) -> None:
        """It is over: :data:`OWED_FOR` from now on its receipts are not waited for any more."""
        owed = self._open.pop(transport, None)
        if owed is not None and owed.ends:
            owed.ended = now
            self._ended[transport] = owed
            if len(self._ended) > MAX_OWED:
                self._ended.popitem(last=False)
        self._forget(now)
        while self._ended and (next(iter(self._ended.values())).ended or 0.0) <= now - OWED_FOR:
            self._ended.popitem(last=False)

    def takes(self, payload: bytes, by: bytes, now: float, network: str = "") -> Due:
        """Whether this is a receipt that was due; from now on it is not any more.

        :param by: the key of the client that hands it in; ``network``: where that client is.
        """
        transport, server, signer = names_in(payload)
        if signer != by or server != self._server:
            return Due.NOT
        owed = self._open.get(transport) or self._ended.get(transport)
        if owed is None:
            return self._takes_former(payload, transport, by, now, network)
        if by not in owed.ends or (receipt := _signed(payload)) is None or not owed.names_ends(receipt):
            return Due.NOT
        owed.ends.discard(by)
        if not owed.ends:
            self._ended.pop(transport, None)
        if now < self._former_until:
            self._taken[transport, by] = None
            if len(self._taken) > MAX_OWED:
                self._taken.popitem(last=False)
        return Due.KNOWN

    def _forget(self, now: float) -> None:
        """What is needed only as long as former receipts are taken."""
        if now >= self._former_until and (self._former or self._taken):
            self._former.clear()
            self._former_of.clear()
            self._taken.clear()

    def _takes_former(self, payload: bytes, transport: bytes, by: bytes, now: float, network: str) -> Due:
        """Of a transport that this process has not carried, or not any more."""
        self._forget(now)
        known = self._former.get(by, set())
        if now >= self._former_until or transport in known or (transport, by) in self._taken:
            return Due.NOT
        if len(known) >= MAX_FORMER_OF_SIGNER or self._former_of[network] >= MAX_FORMER_OF_NETWORK:
            return Due.NOT
        if self._former_of.total() >= MAX_FORMER or _signed(payload) is None:
            return Due.NOT
        self._former.setdefault(by, set()).add(transport)
        self._former_of[network] += 1
        return Due.FORMER


def _signed(payload: bytes) -> Receipt | None:
    try:
        return parse_receipt(payload)
    except ReceiptError:
        return None
