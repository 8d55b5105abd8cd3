"""Who may knock: what is looked at before the keys of a transport or channel are worked out, which is what costs.

A handshake that is refused here costs microseconds, one that is not a fifth of a
millisecond of Diffie-Hellman: whoever repeats what he has once seen, or knocks
without an end, would have a client do nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial

from dmsg.base.bounded_tables import remember
from dmsg.base.buckets import RateLimit
from dmsg.base.fair_rate import FairRate
from dmsg.base.fingerprints import Fingerprints
from dmsg.errors import CloseReason, KeyFormatError
from dmsg.keys import PubKey
from dmsg.net.streams.address import DmsgAddress

OF_ONE_RATE, OF_ONE_BURST = 200.0, 2000.0
"""Handshakes a second of one initiator, and at once: all streams of a lost server come again together."""
ONE_STRANGER_RATE, ONE_STRANGER_BURST = 50.0, 200.0
"""The same of one who has not been met: what comes behind his handshakes waits for them."""
OF_STRANGERS_RATE, OF_STRANGERS_BURST = 1000.0, 2000.0
"""The same of all who have not been met, through one server: a fifth of a core.  They share it by their keys, so that a
new one comes in however often some others knock.  New keys cost nothing: only the server, which sees addresses, can
keep somebody from coming under ever new ones, and it passes on less than this
(:data:`~dmsg.base.policing.DESTINATION_FACTOR`)."""
OF_KNOWN_RATE, OF_KNOWN_BURST = 1000.0, 5000.0
"""And of all who have been met."""
RESERVED_RATE, RESERVED_BURST = 2.0, 20.0
"""What each of those has, whatever the others do."""
MAX_SERVERS = 64
"""Servers by which strangers are counted; the one through which nobody came for longest is forgotten."""
KNOWN = 4096
"""Keys that are remembered because a handshake with them came to its end."""
REMEMBERED = 16_384
"""Ephemeral keys that are remembered at least: each is good for one handshake."""


Refusal = Callable[[bytes, bytes | None], CloseReason | None]
"""Says of the 33 bytes of an initiator's key and of its ephemeral key why it is refused, or None."""


class HandshakeLimits:
    """Of one client, with all its sessions.

    What is asked in whose name is not proven yet, and the server between may have made it up: so the sessions with
    different servers have nothing in common, and who has been met does not wait behind those who have not.

    :param factories: those that listen.  One with ``admits``, which says of an address whether it may come, is asked
        before; nobody comes whom none of them admits.
    :ivar refused: how many were not let in.
    """

    def __init__(self, now: Callable[[], float], factories: Callable[[], Iterable[object]]) -> None:
        self._now = now
        self._factories = factories
        self._of_one = RateLimit(OF_ONE_RATE, OF_ONE_BURST)
        self._of_stranger = RateLimit(ONE_STRANGER_RATE, ONE_STRANGER_BURST)
        self._of_strangers: OrderedDict[str, FairRate] = OrderedDict()
        self._of_known = RateLimit(OF_KNOWN_RATE, OF_KNOWN_BURST)
        self._reserved = RateLimit(RESERVED_RATE, RESERVED_BURST)
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._seen = Fingerprints(REMEMBERED)
        self.refused = 0

    def at(self, server: PubKey) -> Refusal:
        """For the session with a server."""
        return partial(self.refusal, server.hex())

    def met(self, key: PubKey) -> None:
        """It has shown that it is who it says."""
        remember(self._known, key, None, KNOWN)

    def refusal(self, server: str, initiator: bytes, ephemeral: bytes | None) -> CloseReason | None:
        """Why a handshake is refused unseen; None if it is to be looked at.

        :param initiator: 33 bytes, which may be no key.
        :param ephemeral: the key of 33 bytes with which its first message begins; None where it is always the same.
        """
        reason = self._reason(server, initiator, ephemeral)
        self.refused += reason is not None
        return reason

    def _reason(self, server: str, initiator: bytes, ephemeral: bytes | None) -> CloseReason | None:
        if ephemeral in self._seen:
            return CloseReason.NOT_AUTHENTIC
        if not self._admitted(initiator):
            return CloseReason.REFUSED
        if not self._has_place(server, initiator):
            return CloseReason.RATE_LIMITED
        if ephemeral is not None:
            self._seen.add(ephemeral)
        return None

    def _has_place(self, server: str, initiator: bytes) -> bool:
        now = self._now()
        who = f"{server} {initiator.hex()}"
        if initiator not in self._known:
            strangers = self._of_strangers.get(server) or FairRate()
            remember(self._of_strangers, server, strangers, MAX_SERVERS)
            return self._of_stranger.allow(who, now) and strangers.take(
                (initiator,), OF_STRANGERS_RATE, OF_STRANGERS_BURST, now
            )
        if not self._of_one.allow(who, now):
            return False
        return self._reserved.allow(who, now) or self._of_known.allow(server, now)

    def _admitted(self, initiator: bytes) -> bool:
        listening = False
        address: DmsgAddress | None = None
        for factory in self._factories():
            listening = True
            admits = getattr(factory, "admits", None)
            if admits is None:
                return True
            try:
                address = address or DmsgAddress(PubKey(initiator))
            except KeyFormatError:
                return False
            if admits(address):
                return True
        # who does not listen answers pings, and goes on with streams of its own
        return not listening
