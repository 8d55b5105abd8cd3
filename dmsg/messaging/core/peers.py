"""Records of a messaging server about its links and their channels, and the choice of channel ids.  No I/O.

The rules are in :mod:`dmsg.messaging.core.relay`. :func:`descending` chooses the id of a channel that the server opens
to a client. The server begins with high ids because clients begin with low ones, and frames do not say which side chose
an id.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dmsg.base.fair_rate import FairRate
from dmsg.base.policing import ProvokedFrames
from dmsg.base.ports import Port
from dmsg.keys import PubKey
from dmsg.messaging.core.policing import Policer
from dmsg.messaging.core.wire import ID_COUNT


class LinkPort(Port, Protocol):
    """Interface through which the relay sends bytes to a link.

    :ivar blocks: address blocks that contain the client, the largest first; the clients of a block share rate limits.
    """

    blocks: Sequence[Hashable]

    def flush(self) -> None:
        """Write the queued bytes to TCP now."""


class End:
    """One of the two ends of a channel, at one link.

    :ivar id: id of the channel in the frames that this link's client sends.
    :ivar name: id of the channel in the frames that the server sends to this client. It differs from ``id`` only if the
        client uses two ids.
    :ivar open: whether the responder has accepted the channel.
    :ivar opener: whether this end has requested the channel.
    :ivar closed: whether this end has sent CloseChannel, so that further data from it are dropped.
    :ivar backlog: frames that are queued for this end.
    :ivar queued: number of bytes in the backlog.
    """

    __slots__ = ("backlog", "closed", "id", "name", "open", "opener", "other", "peer", "queued")

    def __init__(self, peer: RelayPeer, number: int, opener: bool) -> None:
        self.peer = peer
        self.id = self.name = number
        self.opener = opener
        self.open = False
        self.closed = False
        self.backlog: deque[bytes | bytearray] = deque()
        self.queued = 0
        self.other: End

    @property
    def nameless(self) -> bool:
        """Whether the server does not know yet which id to use for the channel in its frames to this client.

        A client that uses two ids chooses this id itself. As the responder, it states the id when it accepts.
        """
        return self.peer.two_ids is True and not (self.open or self.opener)


@dataclass(slots=True, eq=False, repr=False)
class RelayPeer:
    """Relay's record of one link.

    :ivar two_ids: whether the client uses two ids for a channel, one for each direction; None if not known yet. The
        client's ChannelOpened frames show this.
    :ivar slow: whether frames for the link must be queued, because the link is congested or has a backlog.
    :ivar waiting: ends that have a backlog, in the order of their turns.
    :ivar draining: ends of closed channels that still have a backlog, by id. These ids stay in use.
    :ivar is_paused: whether reading from the link is paused now.
    :ivar paused_at: time at which reading was paused.
    :ivar free_until: time before which only a full backlog pauses the link again.
    :ivar served: whether frames from the link were accepted since it was last paused, by receivers without a long
        backlog.
    :ivar progress_at: time at which the link last accepted output, or at which its backlog began.
    """

    key: PubKey
    port: LinkPort
    ends: dict[int, End] = field(default_factory=dict)
    ids: deque[int] = field(default_factory=lambda: deque(range(ID_COUNT - 1, ID_COUNT // 2 - 1, -1)))
    """Upper half of the ids, in the order in which to use them: the least recently used first."""
    doubtful: dict[int, None] = field(default_factory=dict)
    """Ids with which the client refused a channel. The client may believe that they are in use, so other ids are used
    first."""
    answers_due: dict[int, None] = field(default_factory=dict)
    """Ids of closed channels for which the client has not answered CloseChannel yet. They are used last, only if no
    other id is free."""
    congested: bool = False
    slow: bool = False
    waiting: deque[End] = field(default_factory=deque)
    draining: dict[int, End] = field(default_factory=dict)
    is_paused: bool = False
    served: bool = False
    paused_at: float = 0.0
    free_until: float = 0.0
    progress_at: float = 0.0
    closing: bool = False
    frames_in: int = 0
    bytes_in: int = 0
    police: Policer = field(default_factory=Policer)
    provoked: ProvokedFrames = field(default_factory=ProvokedFrames)
    """Number of late frames that the client may send without charge, because other clients may have caused them."""
    requests: FairRate = field(default_factory=FairRate)
    """Rate limit of OpenChannels to this link, which the openers share fairly."""
    two_ids: bool | None = None


def descending(peer: RelayPeer) -> int | None:
    """Return a free id of a link, or None.

    An id of the upper half (128 to 255) is chosen as long as one is free, the least recently used one first. Next come
    the ids of the lower half, from 127 down. The ids in ``doubtful`` and then those in ``answers_due`` are used only if
    no other is free.
    """
    # Reusing an id late is safer, because the frames of its former channel have probably arrived by then.
    ids = peer.ids
    # Each inspected id moves to the end, so the ids stay in the order of their last use.
    for _ in range(len(ids)):
        number = ids.popleft()
        ids.append(number)
        if _is_free(peer, number):
            return number
    lower = range(ID_COUNT // 2 - 1, -1, -1)
    free = next((one for one in lower if _is_free(peer, one)), None)
    if free is None:
        free = next((one for one in (*peer.doubtful, *peer.answers_due) if not _is_used(peer, one)), None)
    return free


def _is_free(peer: RelayPeer, number: int) -> bool:
    return not _is_used(peer, number) and number not in peer.doubtful and number not in peer.answers_due


def _is_used(peer: RelayPeer, number: int) -> bool:
    return number in peer.ends or number in peer.draining
