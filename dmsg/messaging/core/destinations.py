"""Decision about an OpenChannel: to which link it is forwarded, with which channel ids, or why it is refused.  No I/O.

The inputs are the body of the OpenChannel, the opener's link, the limits and the time.  The output is the newest link
of the remote's key and a free id there, or a :class:`~dmsg.errors.DropReason`.  The decision changes only rate limits;
the relay creates the channel.

A link's client and the server must never use one id for two channels.  So the id of a closed channel stays in use while
data of that channel are unsent.  All openers share a rate limit per destination, so that no client gets more requests
than it can answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dmsg.base.fair_rate import CrowdedRates
from dmsg.errors import DropReason, KeyFormatError
from dmsg.messaging.core.peers import End, RelayPeer
from dmsg.messaging.core.policing import Limits
from dmsg.messaging.core.wire import ID_COUNT, decode_open

PEER_QUEUE_MAXIMUM = 4 * 1024 * 1024
"""Size in bytes of a link's output queue above which the link is closed when a control frame is queued."""


class Destinations:
    """Chooser of the link and the ids for a new channel.

    :param newest: newest link of each key; the relay updates this mapping.
    :param choose: function that returns a free id for a channel that the server opens to a link, or None if no id is
        free.
    """

    def __init__(self, newest: Mapping[bytes, RelayPeer], choose: Callable[[RelayPeer], int | None]) -> None:
        self._newest = newest
        self.choose = choose
        self._crowds = CrowdedRates()

    def assign_id(self, peer: RelayPeer, name: int) -> tuple[int | None, End | None]:
        """Choose the id at the opener's link for a channel whose OpenChannel has the id ``name``.

        :returns: the id, or None if no id can be used; and the end of an existing channel that has the same id
            ``name``, or None.
        """
        if peer.two_ids:
            # A client with two ids chooses the id that the server uses in its frames to the client. It has not chosen
            # one yet for an end that is ``nameless``, so such an end does not have the id ``name``.
            there = next((one for one in peer.ends.values() if one.name == name and not one.nameless), None)
            taken = name in peer.ends or name in peer.draining
            return self.choose(peer) if taken else name, there
        # The client reuses the id, so it will not answer the CloseChannel of the former channel any more.
        peer.answers_due.pop(name, None)
        # While the former channel has unsent frames for the client, the id is not free.
        return None if name in peer.draining else name, peer.ends.get(name)

    def find(
        self, peer: RelayPeer, body: bytes, limits: Limits, now: float
    ) -> tuple[RelayPeer, int, bytes] | DropReason:
        """Return the link to which to forward an OpenChannel, the channel's id there, and the Noise message in the
        OpenChannel.

        If the OpenChannel must be refused, return the reason instead.
        """
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
        """Return the reason to refuse a channel from ``peer`` to ``remote``, or None."""
        if remote.key == peer.key:
            return DropReason.REFUSED
        most = limits.max_per_pair
        if most < ID_COUNT and sum(end.other.peer is remote for end in peer.ends.values()) >= most:
            return DropReason.TOO_MANY_PER_PAIR
        rate, burst = limits.destination_rate, limits.destination_burst
        if rate and not self._crowds.take(remote.requests, (*peer.port.blocks, peer.key), rate, burst, now):
            return DropReason.DESTINATION_RATE
        # Openers are refused while the remote's output queue is more than half full. Otherwise their OpenChannels could
        # fill the queue, and the link of a slow reader would be closed.
        slow = remote.congested and remote.port.queued() > PEER_QUEUE_MAXIMUM // 2
        return DropReason.QUEUE_FULL if slow else None
