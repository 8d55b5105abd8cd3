"""States of a channel at a client, the table of their transitions, and the client's record of each channel.

A channel begins with an OpenChannel, which contains the first message of a KK handshake. The other end answers with
ChannelOpened, and then the channel is open. A CloseChannel is answered with a ChannelClosed, after which the server may
give the id to another channel. So an end that has sent CloseChannel keeps the id until the answer arrives. Its state is
CLOSING if the channel was open, ABANDONED if it never opened, and ENDED if both ends sent CloseChannel at the same
time. Thus a frame of the old channel is not mistaken for one of the next channel with that id.

Only control frames go through the table. For a Send, of which there are thousands a second, the client only tests one
attribute. If the table has no transition for a state and an input, the input is ignored and counted::

    (nothing) -- send OPEN -------> OPENING
              -- receive OPEN ----> OFFERED
    OPENING   -- receive OPENED --> OPEN
              -- receive CLOSED --> CLOSED
              -- send CLOSE ------> ABANDONED
              -- receive CLOSE ---> CLOSED
    OFFERED   -- send OPENED -----> OPEN
              -- send CLOSED -----> CLOSED
              -- receive CLOSE ---> CLOSED
              -- receive CLOSED --> CLOSED
    OPEN      -- send CLOSE ------> CLOSING
              -- receive CLOSE ---> CLOSED
              -- receive CLOSED --> CLOSED
              -- send CLOSED -----> CLOSED
    CLOSING   -- receive CLOSE ---> ENDED
              -- receive CLOSED --> CLOSED
              -- send CLOSED -----> CLOSED
    ENDED     -- receive CLOSED --> CLOSED
              -- receive OPEN ----> OFFERED
    ABANDONED -- receive OPEN ----> OFFERED
              -- receive OPENED --> ABANDONED
              -- receive CLOSE ---> CLOSED
              -- receive CLOSED --> CLOSED
              -- send CLOSED -----> CLOSED
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

from dmsg.keys import PubKey
from dmsg.messaging.core.agreement import Offer, Proposal
from dmsg.messaging.core.secure import ChannelCiphers


class State(Enum):
    """State of a channel. An id without a channel has the state None."""

    OPENING = auto()
    """This side has sent OpenChannel."""
    OFFERED = auto()
    """This side has received OpenChannel and has not answered."""
    OPEN = auto()
    CLOSING = auto()
    """This side has sent CloseChannel. It sends no more data, but still receives data."""
    ABANDONED = auto()
    """This side has withdrawn its request: it sent CloseChannel before its OpenChannel was answered."""
    ENDED = auto()
    """Both ends have sent CloseChannel at the same time. The id stays in use until ChannelClosed arrives."""
    CLOSED = auto()


class Input(Enum):
    """Inputs of the state machine: control frames that are sent or received."""

    SEND_OPEN = auto()
    RECV_OPEN = auto()
    SEND_OPENED = auto()
    RECV_OPENED = auto()
    SEND_CLOSE = auto()
    RECV_CLOSE = auto()
    SEND_CLOSED = auto()
    RECV_CLOSED = auto()


TRANSITIONS: dict[tuple[State | None, Input], State] = {
    (None, Input.SEND_OPEN): State.OPENING,
    (None, Input.RECV_OPEN): State.OFFERED,
    (State.OPENING, Input.RECV_OPENED): State.OPEN,
    (State.OPENING, Input.RECV_CLOSED): State.CLOSED,
    (State.OPENING, Input.SEND_CLOSE): State.ABANDONED,
    # The remote closed the channel before it answered, and its server forwarded the CloseChannel.
    (State.OPENING, Input.RECV_CLOSE): State.CLOSED,
    (State.OFFERED, Input.SEND_OPENED): State.OPEN,
    (State.OFFERED, Input.SEND_CLOSED): State.CLOSED,
    (State.OFFERED, Input.RECV_CLOSE): State.CLOSED,
    (State.OFFERED, Input.RECV_CLOSED): State.CLOSED,
    (State.OPEN, Input.SEND_CLOSE): State.CLOSING,
    (State.OPEN, Input.RECV_CLOSE): State.CLOSED,
    (State.OPEN, Input.RECV_CLOSED): State.CLOSED,
    (State.OPEN, Input.SEND_CLOSED): State.CLOSED,
    # Both ends closed the channel at the same time.
    (State.CLOSING, Input.RECV_CLOSE): State.ENDED,
    (State.ENDED, Input.RECV_CLOSED): State.CLOSED,
    # An OpenChannel with this id shows that the server has closed the former channel.
    (State.ENDED, Input.RECV_OPEN): State.OFFERED,
    (State.ABANDONED, Input.RECV_OPEN): State.OFFERED,
    (State.CLOSING, Input.RECV_CLOSED): State.CLOSED,
    (State.CLOSING, Input.SEND_CLOSED): State.CLOSED,
    # The remote's answer and this side's CloseChannel crossed each other.
    (State.ABANDONED, Input.RECV_OPENED): State.ABANDONED,
    (State.ABANDONED, Input.RECV_CLOSE): State.CLOSED,
    (State.ABANDONED, Input.RECV_CLOSED): State.CLOSED,
    (State.ABANDONED, Input.SEND_CLOSED): State.CLOSED,
}


class ClientChannel:
    """Record of a client about one of its channels.

    :ivar id: id of the channel in the frames that the server sends on this link. This client chooses the id, from 0 up,
        if it opens the channel, or if it answers with two ids. Otherwise the server chooses it.
    :ivar name: id of the channel in the frames that this client sends. It differs from ``id`` only with two ids; then
        the server chooses it.
    :ivar named: whether ``name`` is known. With two ids, the server may not have sent it yet.
    :ivar reports_messages: whether each message is a separate event; otherwise consecutive messages are joined.
    :ivar remote: key of the other client.
    :ivar user: object that the session attaches; the core does not use it.
    :ivar ciphers: ciphers of the channel while it is open, else None.
    """

    __slots__ = ("ciphers", "id", "name", "named", "offer", "proposal", "remote", "reports_messages", "state", "user")

    def __init__(self, channel_id: int, remote: PubKey) -> None:
        self.id = self.name = channel_id
        self.named = True
        self.reports_messages = False
        self.remote = remote
        self.state: State | None = None
        self.user: Any = None
        self.proposal: Proposal | None = None
        self.offer: Offer | None = None
        self.ciphers: ChannelCiphers | None = None

    def apply(self, event: Input) -> bool:
        """Change the state by the transition for ``event``. If there is none, return False without a change."""
        after = TRANSITIONS.get((self.state, event))
        if after is None:
            return False
        self.state = after
        return True
