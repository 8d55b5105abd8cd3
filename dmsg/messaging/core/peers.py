"""Links of a messaging server and their ends of channels, and the choice of channel ids.  No I/O.

These are records; the rules are in :mod:`dmsg.messaging.core.relay`.  :func:`descending` chooses the id of a channel
that the server opens to a client.  The server counts downwards, because clients count upwards and the frames do not say
who chose an id.
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

    :ivar places: blocks of addresses that contain the client, the largest first; clients of a block share rates.
    """

    places: Sequence[Hashable]

    def flush(self) -> None:
        """Write the queued bytes to TCP."""


class End:
    """End of a channel at one of its two links.

    :ivar id: id by which this link's client names the channel.
    :ivar name: id by which the server names the channel to that client; the same unless the client uses two ids.
    :ivar open: whether the responder has accepted.
    :ivar opener: whether this end requested the channel.
    :ivar closed: whether this end sent CloseChannel, so that further data from it are dropped.
    :ivar backlog: frames that wait to be sent to this end.
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
        """Whether the client, which uses two ids, has not yet named the id by which to address the channel to it."""
        return self.peer.two_ids is True and not (self.open or self.opener)


@dataclass(slots=True, eq=False, repr=False)
class RelayPeer:
    """Relay's record of one link.

    :ivar two_ids: whether the client's ChannelOpened frames have two ids; None if not known yet.
    :ivar slow: whether frames for the link must queue, because it is congested or has a backlog.
    :ivar waiting: ends with a backlog, in the order of their turns.
    :ivar draining: ends of closed channels that still have a backlog, by id; these ids stay in use.
    :ivar held: whether reading from the link is paused now.
    :ivar held_at: time at which reading was paused.
    :ivar free_until: time before which the link is not paused again, unless a backlog is full.
    :ivar served: whether another receiver has taken frames of the link since it was last paused.
    :ivar progress_at: time at which the link last took output, or at which its backlog began.
    """

    key: PubKey
    port: LinkPort
    ends: dict[int, End] = field(default_factory=dict)
    ids: deque[int] = field(default_factory=lambda: deque(range(ID_COUNT - 1, ID_COUNT // 2 - 1, -1)))
    """Upper half of the ids in the order in which to use them, least recently used first."""
    doubtful: dict[int, None] = field(default_factory=dict)
    """Ids that the client refused.  It may believe that they are in use, so other ids are used first."""
    answers_due: dict[int, None] = field(default_factory=dict)
    """Ids of closed channels whose CloseChannel the client has not answered; used only if no other id is free."""
    congested: bool = False
    slow: bool = False
    waiting: deque[End] = field(default_factory=deque)
    draining: dict[int, End] = field(default_factory=dict)
    held: bool = False
    served: bool = False
    held_at: float = 0.0
    free_until: float = 0.0
    progress_at: float = 0.0
    closing: bool = False
    frames_in: int = 0
    bytes_in: int = 0
    police: Policer = field(default_factory=Policer)
    provoked: ProvokedFrames = field(default_factory=ProvokedFrames)
    """Allowance for the frames that other clients have provoked from the link's client."""
    requests: FairRate = field(default_factory=FairRate)
    """Rate limit of the OpenChannels to the link, shared fairly by their sources."""
    two_ids: bool | None = None


def descending(peer: RelayPeer) -> int | None:
    """Return a free id of a link, or None.

    The upper half comes first, least recently used first, then the lower half downwards, then doubtful ids.
    """
    # An id that is reused late is safer: frames for its former channel have probably arrived by then.
    ids = peer.ids
    # Each inspected id moves to the end, so the rotation itself keeps the order of last use.
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
