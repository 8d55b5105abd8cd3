"""Who may knock: what is looked at before the keys of a transport or channel are worked out, which is what costs.

A handshake that is refused here costs microseconds, one that is not a fifth of a
millisecond of Diffie-Hellman: whoever repeats what he has once seen, or knocks
without an end, would have a client do nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from dmsg.buckets import RateLimit
from dmsg.errors import CloseReason
from dmsg.keys import PubKey
from dmsg.net.stream import DmsgAddress
from dmsg.tables import remember

OF_ONE_RATE, OF_ONE_BURST = 200.0, 2000.0
"""Handshakes a second of one initiator, and at once: all streams of a lost server come again together."""
OF_ALL_RATE, OF_ALL_BURST = 1000.0, 5000.0
"""The same of all."""
REMEMBERED = 16_384
"""Ephemeral keys that are remembered: each is good for one handshake."""


class Doorman:
    """Of one client, with all its sessions.

    :param factories: those that listen.  One with ``admits``, which says of an address whether it may come, is asked
        before; nobody comes whom none of them admits.
    :ivar refused: how many were not let in.
    """

    def __init__(self, now: Callable[[], float], factories: Callable[[], Iterable[Any]]) -> None:
        self._now = now
        self._factories = factories
        self._of_one = RateLimit(OF_ONE_RATE, OF_ONE_BURST)
        self._of_all = RateLimit(OF_ALL_RATE, OF_ALL_BURST)
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self.refused = 0

    def refusal(self, initiator: PubKey, ephemeral: bytes | None) -> CloseReason | None:
        """Why a handshake is refused unseen; None if it is to be looked at.

        :param ephemeral: the key of 33 bytes with which its first message begins; None where it is always the same.
        """
        reason = self._reason(initiator, ephemeral)
        self.refused += reason is not None
        return reason

    def _reason(self, initiator: PubKey, ephemeral: bytes | None) -> CloseReason | None:
        if not self._admitted(DmsgAddress(initiator)):
            return CloseReason.REFUSED
        if ephemeral in self._seen:
            return CloseReason.NOT_AUTHENTIC
        now = self._now()
        if not self._of_one.allow(initiator.hex(), now) or not self._of_all.allow("", now):
            return CloseReason.RATE_LIMITED
        if ephemeral is not None:
            remember(self._seen, ephemeral, None, REMEMBERED)
        return None

    def _admitted(self, address: DmsgAddress) -> bool:
        listening = False
        for factory in self._factories():
            listening = True
            admits = getattr(factory, "admits", None)
            if admits is None or admits(address):
                return True
        # who does not listen answers pings, and goes on with streams of its own
        return not listening
