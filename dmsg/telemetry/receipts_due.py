"""Receipts that a server still expects (*due*): one from each end of each secure transport that it carried. No I/O.

Any other receipt would cost time in the pipeline and space in the spool, so this module rejects it. Cheap checks come
first. The signature is verified only if the receipt is due.

After a crash, a server does not know which transports it had carried. Therefore it also accepts receipts of unknown
transports for :data:`DUE_FOR` seconds after its start. The pipeline finds out from the server's earlier events which of
these receipts are genuine.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from enum import IntEnum

from attrs import define

from dmsg.telemetry.receipts import Receipt, ReceiptError, Role, named_keys, parse_receipt

MAX_DUE = 65_536
"""Maximum number of ended transports whose receipts are due. If there are more, the transport that ended first is
forgotten. Open transports are not limited here, because the server limits their number.
"""
DUE_FOR = 600.0
"""Seconds after the end of a transport for which its receipts are due. It is also the number of seconds after a start
for which receipts of earlier transports are accepted.
"""
MAX_FORMER = 65_536
"""Maximum number of receipts that are accepted for *former* transports, which are those from before the start."""
MAX_FORMER_OF_NETWORK = 4096
"""Maximum number of receipts for former transports from the clients of one network (/24, /48). A limit for each key
would not be enough, because an attacker can create any number of keys.
"""
MAX_FORMER_OF_SIGNER = 1024
"""Maximum number of receipts for former transports from one client. A client stores no more than this for one server
(:mod:`dmsg.v2019.core.receipts_kept`)."""


class ReceiptVerdict(IntEnum):
    """Verdict on a receipt that a client submits."""

    NOT = 0
    """The receipt is not due and must not be accepted."""
    KNOWN = 1
    """The receipt is due: it comes from an end of a carried transport and names the other end."""
    FORMER = 2
    """It is unknown whether the receipt is due, because the transport was carried before the server's start, if at all.
    Only the server's earlier events show whether the signer was an end of this transport."""


@define
class _Transport:
    initiator: bytes
    responder: bytes
    ends: set[bytes]
    ended: float | None = None

    def names_both_ends(self, receipt: Receipt) -> bool:
        """Whether a receipt names both ends of this transport, each in its actual role."""
        ends = (self.initiator, self.responder)
        return (receipt.signer, receipt.peer) == (ends if receipt.role is Role.INITIATOR else ends[::-1])


class ReceiptsDue:
    """Receipts that one server expects from clients.

    :param server: the server's public key.
    :param now: time of the server's start, in seconds.
    """

    def __init__(self, server: bytes, now: float = 0.0) -> None:
        self._server = server
        self._open: OrderedDict[bytes, _Transport] = OrderedDict()
        self._ended: OrderedDict[bytes, _Transport] = OrderedDict()
        self._former_until = now + DUE_FOR
        self._former: dict[bytes, set[bytes]] = {}
        """Former transports for which a receipt was accepted, by the signer of the receipt. Empty once such receipts
        are no longer accepted."""
        self._former_of: Counter[str] = Counter()
        """Number of receipts accepted for former transports, by the network of the client."""
        self._received: OrderedDict[tuple[bytes, bytes], None] = OrderedDict()
        """Transport and signer of the due receipts that were received so far, in order. When such a receipt is
        repeated, it must not be accepted as one for a former transport. Empty once receipts for former transports are
        no longer accepted.
        """

    def __len__(self) -> int:
        return len(self._open) + len(self._ended)

    def add_transport(self, transport: bytes, initiator: bytes, responder: bytes) -> None:
        """Record an accepted transport. From then on a receipt of each of its two ends is due. The ends are public
        keys."""
        self._open[transport] = _Transport(initiator, responder, {initiator, responder})

    def ended(self, transport: bytes, now: float) -> None:
        """Record the end of a transport. Its receipts stay due for :data:`DUE_FOR` seconds."""
        owed = self._open.pop(transport, None)
        if owed is not None and owed.ends:
            owed.ended = now
            self._ended[transport] = owed
            if len(self._ended) > MAX_DUE:
                self._ended.popitem(last=False)
        self._forget(now)
        while self._ended and (next(iter(self._ended.values())).ended or 0.0) <= now - DUE_FOR:
            self._ended.popitem(last=False)

    def check(self, payload: bytes, by: bytes, now: float, network: str = "") -> ReceiptVerdict:
        """Check a receipt, and record it, so that a second receipt of the same end is not due.

        :param by: public key of the client that submits the receipt.
        :param network: network of that client.
        """
        transport, server, signer = named_keys(payload)
        if signer != by or server != self._server:
            return ReceiptVerdict.NOT
        owed = self._open.get(transport) or self._ended.get(transport)
        if owed is None:
            return self._takes_former(payload, transport, by, now, network)
        if by not in owed.ends or (receipt := _parse_signed(payload)) is None or not owed.names_both_ends(receipt):
            return ReceiptVerdict.NOT
        owed.ends.discard(by)
        if not owed.ends:
            self._ended.pop(transport, None)
        if now < self._former_until:
            self._received[transport, by] = None
            if len(self._received) > MAX_DUE:
                self._received.popitem(last=False)
        return ReceiptVerdict.KNOWN

    def _forget(self, now: float) -> None:
        """Clear the tables for receipts of former transports, once such receipts are no longer accepted."""
        if now >= self._former_until and (self._former or self._received):
            self._former.clear()
            self._former_of.clear()
            self._received.clear()

    def _takes_former(self, payload: bytes, transport: bytes, by: bytes, now: float, network: str) -> ReceiptVerdict:
        """Check a receipt of a transport that this process does not know."""
        self._forget(now)
        known = self._former.get(by, set())
        if now >= self._former_until or transport in known or (transport, by) in self._received:
            return ReceiptVerdict.NOT
        if len(known) >= MAX_FORMER_OF_SIGNER or self._former_of[network] >= MAX_FORMER_OF_NETWORK:
            return ReceiptVerdict.NOT
        if self._former_of.total() >= MAX_FORMER or _parse_signed(payload) is None:
            return ReceiptVerdict.NOT
        self._former.setdefault(by, set()).add(transport)
        self._former_of[network] += 1
        return ReceiptVerdict.FORMER


def _parse_signed(payload: bytes) -> Receipt | None:
    try:
        return parse_receipt(payload)
    except ReceiptError:
        return None
