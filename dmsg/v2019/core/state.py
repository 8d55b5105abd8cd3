"""States of a transport at a client, the table of their transitions, and the client's record of each transport.

A transport begins with a REQUEST. Its responder answers with ACCEPT or CLOSE, and either end may close it later.

* A plain transport is OPEN after ACCEPT.
* A secure transport carries handshake messages in REQUEST and ACCEPT. Its responder is ANSWERED until the first frame
  of the initiator proves that the initiator has the keys. A replayed REQUEST therefore never opens a transport.
* An upgrade is used through a server of 2019, which refuses a REQUEST with a handshake message. It begins with a plain
  REQUEST. The responder answers with an invitation (INVITED), and the handshake messages follow in FWD frames while the
  initiator is AGREEING.

Only control frames are checked with the table. FWD and ACK, of which there may be thousands per second, test one
attribute instead. If the table has no entry for a state and an input, the input is an error of the remote and ends the
transport. There are two exceptions for an open transport: ACCEPT and unknown types are ignored, as in the reference,
and a REQUEST for an id in use ends the connection::

    (nothing) -- send REQUEST --------> REQUESTED
              -- receive REQUEST -----> OFFERED
    OFFERED   -- send ACCEPT ---------> OPEN
              -- send ANSWER ---------> ANSWERED
              -- send INVITATION -----> INVITED
              -- send CLOSE ----------> CLOSED
              -- receive CLOSE -------> CLOSED
    ANSWERED  -- receive CONFIRM -----> OPEN
              -- receive CLOSE -------> CLOSED
              -- send CLOSE ----------> CLOSED
    REQUESTED -- receive INVITATION --> AGREEING
              -- receive ACCEPT ------> OPEN
              -- receive CLOSE -------> CLOSED
              -- send CLOSE ----------> CLOSED
    AGREEING  -- receive ACCEPT ------> OPEN
              -- receive CLOSE -------> CLOSED
              -- send CLOSE ----------> CLOSED
    INVITED   -- receive OFFER -------> OFFERED
              -- receive CLOSE -------> CLOSED
              -- send CLOSE ----------> CLOSED
    OPEN      -- receive CLOSE -------> CLOSED
              -- send CLOSE ----------> CLOSED
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from dmsg.keys import PubKey
from dmsg.streams.core.agreement import Offer, Proposal
from dmsg.streams.core.resumption import Answer
from dmsg.streams.core.secure import SecureEnd
from dmsg.v2019.core.wire import WINDOW_BYTES, WINDOW_FRAMES


class State(Enum):
    """State of a transport; None stands for an id without a transport."""

    REQUESTED = auto()
    AGREEING = auto()
    OFFERED = auto()
    INVITED = auto()
    ANSWERED = auto()
    OPEN = auto()
    CLOSED = auto()


class Input(Enum):
    """Event that moves a transport from one state to another."""

    SEND_REQUEST = auto()
    RECV_REQUEST = auto()
    SEND_INVITATION = auto()
    RECV_INVITATION = auto()
    RECV_OFFER = auto()
    SEND_ACCEPT = auto()
    SEND_ANSWER = auto()
    RECV_CONFIRM = auto()
    RECV_ACCEPT = auto()
    RECV_CLOSE = auto()
    SEND_CLOSE = auto()


TRANSITIONS: dict[tuple[State | None, Input], State] = {
    (None, Input.SEND_REQUEST): State.REQUESTED,
    (None, Input.RECV_REQUEST): State.OFFERED,
    (State.OFFERED, Input.SEND_ACCEPT): State.OPEN,
    # A secure transport is open once its initiator has proved that it holds the keys.
    (State.OFFERED, Input.SEND_ANSWER): State.ANSWERED,
    (State.ANSWERED, Input.RECV_CONFIRM): State.OPEN,
    (State.ANSWERED, Input.RECV_CLOSE): State.CLOSED,
    (State.ANSWERED, Input.SEND_CLOSE): State.CLOSED,
    # In an upgrade, ACCEPT only announces that handshake messages may follow.
    (State.REQUESTED, Input.RECV_INVITATION): State.AGREEING,
    (State.AGREEING, Input.RECV_ACCEPT): State.OPEN,
    (State.AGREEING, Input.RECV_CLOSE): State.CLOSED,
    (State.AGREEING, Input.SEND_CLOSE): State.CLOSED,
    (State.OFFERED, Input.SEND_INVITATION): State.INVITED,
    (State.INVITED, Input.RECV_OFFER): State.OFFERED,
    (State.INVITED, Input.RECV_CLOSE): State.CLOSED,
    (State.INVITED, Input.SEND_CLOSE): State.CLOSED,
    (State.OFFERED, Input.SEND_CLOSE): State.CLOSED,
    (State.OFFERED, Input.RECV_CLOSE): State.CLOSED,
    (State.REQUESTED, Input.RECV_ACCEPT): State.OPEN,
    (State.REQUESTED, Input.RECV_CLOSE): State.CLOSED,
    # Any answer except ACCEPT and CLOSE closes the transport, as in the reference ("accept check failed").
    (State.REQUESTED, Input.SEND_CLOSE): State.CLOSED,
    (State.OPEN, Input.RECV_CLOSE): State.CLOSED,
    (State.OPEN, Input.SEND_CLOSE): State.CLOSED,
}


@dataclass(slots=True, eq=False, repr=False)
class ClientTransport:
    """Record of a transport at one of its two clients.

    :ivar id: transport id: an even number if this client opened the transport, an odd one if the server assigned the
        id.
    :ivar remote: key of the other client.
    :ivar carrier: object that binds the transport to its stream and session. Set and used only outside the core.
    :ivar in_flight: (size, ticket) of each unacknowledged frame of a plain transport, by sequence.
    :ivar is_secure: whether the frames are encrypted end to end.
    :ivar secure: end of the secure stream that the transport carries, or None.
    :ivar answer: this end's answer to a RESUME. Once the initiator confirms it, the transport carries the resumed
        stream.
    :ivar identity: 16 bytes that identify the transport in receipts; None if no receipt is due.
    :ivar upgrade: whether the handshake messages are sent in FWD frames, after a plain REQUEST and ACCEPT.
    :ivar prefaced: number of frames of the responder's preface that have arrived; None before the responder's ACCEPT.
    :ivar delivered: numbers of sent and of received bytes that were delivered before the stream left this transport.
    """

    id: int
    remote: PubKey
    payload: bytes
    initiator: bool
    next_sequence: int
    state: State | None = None
    carrier: Any = None
    unread: int = 0
    held_size: int = 0
    held_acks: list[int] = field(default_factory=list)
    in_flight: dict[int, tuple[int, object]] = field(default_factory=dict)
    in_flight_bytes: int = 0
    is_secure: bool = False
    secure: SecureEnd | None = None
    answer: Answer | None = None
    proposal: Proposal | None = None
    offer: Offer | None = None
    told_window: int = 0
    upgrade: bool = False
    prefaced: int | None = None
    ack_due: bool = False
    identity: bytes | None = None
    delivered: tuple[int, int] = (0, 0)

    @property
    def says_delivered(self) -> tuple[int, int]:
        """Numbers of sent and of received bytes that this end's receipt states as delivered."""
        return self.delivered if self.secure is None else self.secure.delivered

    @property
    def window_open(self) -> bool:
        """Whether another frame may be sent now."""
        if self.is_secure:
            return self.secure is not None and self.secure.may_send
        return self.in_flight_bytes < WINDOW_BYTES and len(self.in_flight) < WINDOW_FRAMES
