"""The links of a messaging server and the ends of channels that each has.  No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dmsg.base.fair_rate import FairRate
from dmsg.base.policing import Provoked
from dmsg.base.ports import Port
from dmsg.keys import PubKey
from dmsg.messaging.core.policing import Police
from dmsg.messaging.core.wire import ID_COUNT


class LinkPort(Port, Protocol):
    """How bytes leave for a link.

    :ivar places: blocks of addresses that its client is in, the largest first; its rates are shared by them.
    """

    places: Sequence[Hashable]

    def flush(self) -> None:
        """Hand what is queued to TCP."""


class End:
    """One end of a channel.

    :ivar id: by which this link's client names the channel; ``name``: by which it is named to that client: the same
        unless the client speaks of two ids.
    :ivar open: the remote has accepted.
    :ivar opener: this end asked for it.
    :ivar closed: it sent CloseChannel: what it sends after that is dropped.
    :ivar backlog: frames that wait to be sent to it; ``queued``: their bytes.
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
        """It is offered to a client that is yet to say by which id it wants to hear of it."""
        return self.peer.two_ids is True and not (self.open or self.opener)


@dataclass(slots=True, eq=False, repr=False)
class RelayPeer:
    """One link, as the relay sees it.

    :ivar two_ids: whether its ChannelOpened have two ids; None: not known yet.
    :ivar slow: what is for it has to wait: it is congested, or something waits already.
    :ivar waiting: ends with a backlog, in the order of their turns.
    :ivar draining: ends of channels that are over, which something is still to be sent to: their ids are in use.
    :ivar held: it is not read; ``held_at`` since when, ``free_until`` when it may be held again.
    :ivar served: since it was held last, something of it went to a link that takes it.
    :ivar progress_at: when it took something last, or something began to wait for it.
    """

    key: PubKey
    port: LinkPort
    ends: dict[int, End] = field(default_factory=dict)
    ids: deque[int] = field(default_factory=lambda: deque(range(ID_COUNT - 1, ID_COUNT // 2 - 1, -1)))
    """Upper ids in the order in which to take them: the one that was used last comes last."""
    doubtful: dict[int, None] = field(default_factory=dict)
    """Ids that the client refused: it may believe that they are in use, and is asked with others first."""
    answers_due: dict[int, None] = field(default_factory=dict)
    """Ids of channels that are over, whose CloseChannel the client has not answered: taken if no other is free."""
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
    police: Police = field(default_factory=Police)
    provoked: Provoked = field(default_factory=Provoked)
    """Frames that others have provoked from it."""
    requests: FairRate = field(default_factory=FairRate)
    """The rate of OpenChannels to it."""
    two_ids: bool | None = None


def descending(peer: RelayPeer) -> int | None:
    """A free id of a link: from 255 down, the least recently used first; then lower ones; doubtful ones last."""
    ids = peer.ids
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
