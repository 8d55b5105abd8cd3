"""Limits of incoming handshakes, checked before the expensive Diffie-Hellman.

Refusing a handshake here takes microseconds; processing one takes a fifth of a millisecond. Without limits, an attacker
that replays recorded handshakes, or sends endless new ones, would keep a client from all other work.
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
"""Rate per second and burst of handshakes of one known initiator. The burst is large, because all streams of a lost
server return together."""
ONE_STRANGER_RATE, ONE_STRANGER_BURST = 50.0, 200.0
"""Rate per second and burst of handshakes of one unknown initiator. Data that follow such a handshake wait for it."""
OF_STRANGERS_RATE, OF_STRANGERS_BURST = 1000.0, 2000.0
"""Rate per second and burst of handshakes of all unknown initiators through one server: a fifth of a core.

The rate is shared fairly among the keys of initiators, so a new one is admitted even if others ask often.  But keys
cost nothing. Only the server, which sees addresses, can stop an attacker that keeps changing keys. The server forwards
less than this rate (:data:`~dmsg.base.policing.DESTINATION_FACTOR`).
"""
OF_KNOWN_RATE, OF_KNOWN_BURST = 1000.0, 5000.0
"""Rate per second and burst of handshakes of all known initiators through one server."""
RESERVED_RATE, RESERVED_BURST = 2.0, 20.0
"""Rate per second and burst of handshakes that each known initiator may make even if others use up the common rate."""
MAX_SERVERS = 64
"""Maximum number of servers for which strangers are counted. The one with the oldest last handshake is forgotten
first.
"""
KNOWN = 4096
"""Maximum number of keys remembered because a handshake with them was completed."""
REMEMBERED = 16_384
"""Minimum number of ephemeral keys remembered to refuse replays: each is valid for one handshake."""


Refusal = Callable[[bytes, bytes | None], CloseReason | None]
"""Function that returns why an initiator's handshake is refused, or None. Arguments are the 33 bytes of its key and of
its ephemeral key.
"""


class HandshakeLimits:
    """Limits of incoming handshakes of one client, for all its sessions.

    The name of an initiator is not proven yet, and the server may have invented it. So the sessions with different
    servers are limited separately, and known initiators do not wait behind unknown ones.

    :param factories: returns the listening factories. A factory may have ``admits``, which says whether an address may
        connect. An initiator that no factory admits is refused.
    :ivar refused: number of refused handshakes.
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
        """Return the function that the session with ``server`` calls for each handshake; see :meth:`refusal`."""
        return partial(self.refusal, server.hex())

    def remember(self, key: PubKey) -> None:
        """Remember a key that has completed a handshake. Its next handshakes are those of a known initiator."""
        remember(self._known, key, None, KNOWN)

    def refusal(self, server: str, initiator: bytes, ephemeral: bytes | None) -> CloseReason | None:
        """Return why a handshake is refused before it is processed, or None to process it.

        :param initiator: 33 bytes, which may not be a valid key.
        :param ephemeral: ephemeral key of 33 bytes at the start of the first message; None if it is always the same.
        """
        reason = self._reason(server, initiator, ephemeral)
        self.refused += reason is not None
        return reason

    def _reason(self, server: str, initiator: bytes, ephemeral: bytes | None) -> CloseReason | None:
        # The cheapest check comes first: a replayed handshake is found by one look-up in a table.
        if ephemeral in self._seen:
            return CloseReason.NOT_AUTHENTIC
        if not self._admitted(initiator):
            return CloseReason.REFUSED
        if not self._has_place(server, initiator):
            return CloseReason.RATE_LIMITED
        # Only the keys of processed handshakes are remembered. Refused ones cost an attacker nothing, and would evict
        # the others from the table.
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
        # The reserve lets each known initiator in even while others use up the common rate.
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
        # A client without listeners checks no further: it still answers pings and resumes its own streams.
        return not listening
