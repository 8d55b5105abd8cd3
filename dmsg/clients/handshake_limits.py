"""Rate limits for incoming handshakes, which are checked before the expensive Diffie-Hellman computation.

A refusal takes microseconds; processing a handshake takes a fifth of a millisecond. Without limits, an attacker could
occupy a client completely by replaying recorded handshakes or sending new ones.
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

ONE_KNOWN_RATE, ONE_KNOWN_BURST = 200.0, 2000.0
"""Rate per second and burst of handshakes of one known initiator. The burst is large, because all streams that are
resumed after the loss of a server begin a handshake at the same time.
"""
ONE_STRANGER_RATE, ONE_STRANGER_BURST = 50.0, 200.0
"""Rate per second and burst of handshakes of one unknown initiator."""
ALL_STRANGERS_RATE, ALL_STRANGERS_BURST = 1000.0, 2000.0
"""Rate per second and burst of handshakes of all unknown initiators through one server. At this rate, handshakes use a
fifth of a processor core.

The rate is shared fairly among the keys of initiators, so that an initiator is admitted even if others send many
handshakes. An attacker can evade this by changing keys, because keys cost nothing. Only the server, which knows
addresses, can stop such an attacker. The server forwards fewer handshakes than this rate
(:data:`~dmsg.base.policing.DESTINATION_FACTOR`).
"""
ALL_KNOWN_RATE, ALL_KNOWN_BURST = 1000.0, 5000.0
"""Rate per second and burst of handshakes of all known initiators through one server."""
RESERVED_RATE, RESERVED_BURST = 2.0, 20.0
"""Rate per second and burst of handshakes that each known initiator may make even if the rate of all known initiators
is used up.
"""
MAX_SERVERS = 64
"""Maximum number of servers for which handshakes of unknown initiators are counted. The server whose last handshake is
oldest is forgotten first.
"""
MAX_KNOWN = 4096
"""Maximum number of known initiators: keys with which a handshake was completed. Keys to which this client has opened a
stream are counted separately, because strangers with many keys could otherwise displace them.
"""
MIN_REMEMBERED = 16_384
"""Minimum number of recent ephemeral keys that are remembered. A handshake with one of them is a
replay and is refused.
"""


Refusal = Callable[[bytes, bytes | None], CloseReason | None]
"""Function that returns the reason why a handshake is refused, or None. Its arguments are the initiator's key and
ephemeral key, 33 bytes each.
"""


class HandshakeLimits:
    """Limits of incoming handshakes of one client, for all its sessions.

    Before the handshake the initiator's key is not proved, and a server may have invented it. So each server has limits
    of its own. Known and unknown initiators have separate limits, too, so that unknown ones cannot use up the rate of
    the others.

    :param now: monotonic clock, in seconds.
    :param factories: returns the factories that accept streams. A factory may have a method ``admits(address)`` that
        says whether a peer may connect. An initiator that no factory admits is refused.
    :ivar refused: number of refused handshakes.
    """

    def __init__(self, now: Callable[[], float], factories: Callable[[], Iterable[object]]) -> None:
        self._now = now
        self._factories = factories
        self._one_known = RateLimit(ONE_KNOWN_RATE, ONE_KNOWN_BURST)
        self._one_stranger = RateLimit(ONE_STRANGER_RATE, ONE_STRANGER_BURST)
        self._all_strangers: OrderedDict[str, FairRate] = OrderedDict()
        self._all_known = RateLimit(ALL_KNOWN_RATE, ALL_KNOWN_BURST)
        self._reserved = RateLimit(RESERVED_RATE, RESERVED_BURST)
        self._known_keys: OrderedDict[bytes, None] = OrderedDict()
        self._contacted_keys: OrderedDict[bytes, None] = OrderedDict()
        self._seen = Fingerprints(MIN_REMEMBERED)
        self.refused = 0

    def at(self, server: PubKey) -> Refusal:
        """Return the function with which the session with ``server`` checks each handshake; see :meth:`refusal`."""
        return partial(self.refusal, server.hex())

    def remember(self, key: PubKey) -> None:
        """Remember a key that has completed a handshake, so that it is a known initiator from now on."""
        remember(self._known_keys, key, None, MAX_KNOWN)

    def remember_contacted(self, key: PubKey) -> None:
        """Remember a key to which this client has opened a stream, so that it is a known initiator from now on."""
        remember(self._contacted_keys, key, None, MAX_KNOWN)

    def refusal(self, server: str, initiator: bytes, ephemeral: bytes | None) -> CloseReason | None:
        """Return the reason why a handshake is refused, or None if it is to be processed.

        :param server: key of the server that forwarded the handshake, in hexadecimal.
        :param initiator: claimed key of the initiator: 33 bytes, which need not be a valid key.
        :param ephemeral: initiator's ephemeral key, 33 bytes; None if the request has none.
        """
        reason = self._reason(server, initiator, ephemeral)
        self.refused += reason is not None
        return reason

    def _reason(self, server: str, initiator: bytes, ephemeral: bytes | None) -> CloseReason | None:
        # This check is first because it is the cheapest, one look-up in a table.
        if ephemeral in self._seen:
            return CloseReason.NOT_AUTHENTIC
        if not self._admitted(initiator):
            return CloseReason.REFUSED
        if not self._has_place(server, initiator):
            return CloseReason.RATE_LIMITED
        # Only the ephemeral keys of accepted handshakes are remembered. Otherwise an attacker could evict these from
        # the table with handshakes that are refused.
        if ephemeral is not None:
            self._seen.add(ephemeral)
        return None

    def _has_place(self, server: str, initiator: bytes) -> bool:
        now = self._now()
        who = f"{server} {initiator.hex()}"
        if initiator not in self._known_keys and initiator not in self._contacted_keys:
            strangers = self._all_strangers.get(server) or FairRate()
            remember(self._all_strangers, server, strangers, MAX_SERVERS)
            return self._one_stranger.allow(who, now) and strangers.take(
                (initiator,), ALL_STRANGERS_RATE, ALL_STRANGERS_BURST, now
            )
        if not self._one_known.allow(who, now):
            return False
        # Each known initiator has a reserved rate, because others may have used up the common rate.
        return self._reserved.allow(who, now) or self._all_known.allow(server, now)

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
        # Without listeners every handshake is accepted, because it may be a ping or resume a stream that this client
        # opened.
        return not listening
