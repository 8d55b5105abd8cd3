"""Choice, for an OpenChannel, of the link to forward it to and of the channel's ids, or of a reason to refuse it.  No
I/O.

The inputs are the body of the OpenChannel, the opener's link, the limits and the time.  The output is the newest link
of the remote's key with a free id there, or a :class:`~dmsg.errors.DropReason`.  Nothing changes but rate limits; the
relay makes the channel.

A link's client and the server must never use one id for two channels.  An id with unsent data of a closed channel
therefore stays in use.  All openers share the rate of a destination, so that no client is asked for more than it can
answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dmsg.base.fair_rate import CrowdedRates
from dmsg.errors import DropReason, KeyFormatError
from dmsg.messaging.core.peers import End, RelayPeer
from dmsg.messaging.core.policing import Limits
from dmsg.messaging.core.wire import ID_COUNT, decode_open

PEER_QUEUE_MAXIMUM = 4 * 1024 * 1024
"""Maximum bytes in a link's queue when an answer is added; above it, the link is closed."""


class Destinations:
    """Finder of the link and the ids of a channel that is being opened.

    :param newest: newest link of each key; the relay keeps it up to date.
    :param choose: returns the id for a channel that is opened to a link; None when none is free.
    """

    def __init__(self, newest: Mapping[bytes, RelayPeer], choose: Callable[[RelayPeer], int | None]) -> None:
        self._newest = newest
        self.choose = choose
        self._crowds = CrowdedRates()

    def assign_id(self, peer: RelayPeer, name: int) -> tuple[int | None, End | None]:
        """Return the id for a channel that its opener calls ``name``, or None, and the end that has that name now."""
        if peer.two_ids:
            # With two ids, the client's ids and the server's are separate.  Only an end whose id the client has chosen
            # can have the same name.
            there = next((one for one in peer.ends.values() if one.name == name and not one.nameless), None)
            taken = name in peer.ends or name in peer.draining
            return self.choose(peer) if taken else name, there
        # The client reuses the id, so it no longer expects the answer that was due for the former channel.
        peer.answers_due.pop(name, None)
        # The id is not free, because frames of its former channel may still wait for the client.
        return None if name in peer.draining else name, peer.ends.get(name)

    def find(
        self, peer: RelayPeer, body: bytes, limits: Limits, now: float
    ) -> tuple[RelayPeer, int, bytes] | DropReason:
        """Return the link to forward an OpenChannel to, the channel's id there, and the handshake message that the
        OpenChannel carries; or the reason to refuse the OpenChannel."""
        try:
            key, message = decode_open(body)
        except KeyFormatError:
            return DropReason.BAD_REQUEST
        remote = self._newest.get(key)
        if remote is None or remote.closing:
            return DropReason.NO_SUCH_PEER
        reason = self._refusal(peer, remote, limits, now)
        if reason is not None:
            return reason
        number = self.choose(remote)
        return DropReason.TOO_MANY_TRANSPORTS if number is None else (remote, number, message)

    def _refusal(self, peer: RelayPeer, remote: RelayPeer, limits: Limits, now: float) -> DropReason | None:
        """Return why ``remote`` gets no OpenChannel of ``peer``, or None. All openers share the rate of ``remote``."""
        if remote.key == peer.key:
            return DropReason.REFUSED
        most = limits.max_per_pair
        if most < ID_COUNT and sum(end.other.peer is remote for end in peer.ends.values()) >= most:
            return DropReason.TOO_MANY_PER_PAIR
        rate, burst = limits.destination_rate, limits.destination_burst
        if rate and not self._crowds.take(remote.requests, (*peer.port.places, peer.key), rate, burst, now):
            return DropReason.DESTINATION_RATE
        # While half of the remote's queue is full, openers are refused. Otherwise their OpenChannels could fill it, and
        # the link of a slow reader would be ended.
        slow = remote.congested and remote.port.queued() > PEER_QUEUE_MAXIMUM // 2
        return DropReason.QUEUE_FULL if slow else None
