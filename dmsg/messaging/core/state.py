"""States of a channel at a client, the table of their transitions, and the record that a client has of each channel.

A channel begins with an OpenChannel, which carries the first message of a KK handshake. The other end answers with
ChannelOpened, and the channel is open. A CloseChannel is answered with a ChannelClosed, after which the server gives
the id to another channel. So an end that has closed its channel keeps the id until the answer comes: in CLOSING after
an open channel, in ABANDONED after one that never opened, in ENDED when both ends closed at the same time. A frame for
the old channel is then not taken for one of the next channel with that id.

Only control frames go through the table. Send, of which there are thousands a second, tests one attribute. A pair of
state and input that is missing from the table is ignored and counted::

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
    """State of a channel; None stands for an id without a channel."""

    OPENING = auto()
    """OpenChannel is sent."""
    OFFERED = auto()
    """OpenChannel is received and not answered."""
    OPEN = auto()
    CLOSING = auto()
    """CloseChannel is sent: this side sends no more data, but still receives data."""
    ABANDONED = auto()
    """CloseChannel is sent before an answer to this side's OpenChannel came, because the request was given up."""
    ENDED = auto()
    """Both ends sent CloseChannel at the same time; the id stays in use until the ChannelClosed for it arrives."""
    CLOSED = auto()


class Input(Enum):
    """Event that moves a channel from one state to another."""

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
    # This happens when the remote closes before it has answered, and its server forwards the CloseChannel.
    (State.OPENING, Input.RECV_CLOSE): State.CLOSED,
    (State.OFFERED, Input.SEND_OPENED): State.OPEN,
    (State.OFFERED, Input.SEND_CLOSED): State.CLOSED,
    (State.OFFERED, Input.RECV_CLOSE): State.CLOSED,
    (State.OFFERED, Input.RECV_CLOSED): State.CLOSED,
    (State.OPEN, Input.SEND_CLOSE): State.CLOSING,
    (State.OPEN, Input.RECV_CLOSE): State.CLOSED,
    (State.OPEN, Input.RECV_CLOSED): State.CLOSED,
    (State.OPEN, Input.SEND_CLOSED): State.CLOSED,
    # This happens when both ends close at the same time.
    (State.CLOSING, Input.RECV_CLOSE): State.ENDED,
    (State.ENDED, Input.RECV_CLOSED): State.CLOSED,
    # An OpenChannel with this id shows that the server has closed the former channel.
    (State.ENDED, Input.RECV_OPEN): State.OFFERED,
    (State.ABANDONED, Input.RECV_OPEN): State.OFFERED,
    (State.CLOSING, Input.RECV_CLOSED): State.CLOSED,
    (State.CLOSING, Input.SEND_CLOSED): State.CLOSED,
    # This happens when the remote's answer crosses this side's CloseChannel.
    (State.ABANDONED, Input.RECV_OPENED): State.ABANDONED,
    (State.ABANDONED, Input.RECV_CLOSE): State.CLOSED,
    (State.ABANDONED, Input.RECV_CLOSED): State.CLOSED,
    (State.ABANDONED, Input.SEND_CLOSED): State.CLOSED,
}


class ClientChannel:
    """End of a channel at one of its two clients.

    :ivar id: id by which the server names the channel on this link: chosen from 0 up by the side that opens it, by the
        server for the other side, and with two ids by the answer of this side.
    :ivar name: id by which this side names the channel to the server: the same, or with two ids the one that the server
        chose.
    :ivar named: whether ``name`` is known, because the server has sent it or there is only one id.
    :ivar reports_messages: whether each message is an event of its own; otherwise consecutive messages are joined.
    :ivar remote: key of the other client.
    :ivar user: object that the session attaches; the core does not use it.
    :ivar ciphers: ciphers of the open channel, else None.
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
        """Apply an input to the state; return False, without a change, if the table does not have the pair."""
        after = TRANSITIONS.get((self.state, event))
        if after is None:
            return False
        self.state = after
        return True
