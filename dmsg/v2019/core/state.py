"""Where a transport is, what moves it, and what a client keeps of it.

Control frames go through ``TRANSITIONS``; FWD and ACK test one attribute.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

from dmsg.keys import PubKey
from dmsg.streams.core.agreement import Offer, Proposal
from dmsg.streams.core.resumption import Answer
from dmsg.streams.core.secure import SecureEnd
from dmsg.v2019.core.wire import WINDOW_BYTES, WINDOW_FRAMES


class State(Enum):
    """Where a transport is; None, no state, is an id without a transport."""

    REQUESTED = auto()
    AGREEING = auto()
    OFFERED = auto()
    INVITED = auto()
    ANSWERED = auto()
    OPEN = auto()
    CLOSED = auto()


class Input(Enum):
    """What moves a transport from state to state."""

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
    # a secure transport is open when its initiator has shown that it holds the keys
    (State.OFFERED, Input.SEND_ANSWER): State.ANSWERED,
    (State.ANSWERED, Input.RECV_CONFIRM): State.OPEN,
    (State.ANSWERED, Input.RECV_CLOSE): State.CLOSED,
    (State.ANSWERED, Input.SEND_CLOSE): State.CLOSED,
    # an upgrade: ACCEPT says only that the messages of the handshake may follow
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
    # "accept check failed" of the reference, for anything but ACCEPT and CLOSE
    (State.REQUESTED, Input.SEND_CLOSE): State.CLOSED,
    (State.OPEN, Input.RECV_CLOSE): State.CLOSED,
    (State.OPEN, Input.SEND_CLOSE): State.CLOSED,
    # what is missing is an error; two pairs of an open transport are no inputs
    # at all: ACCEPT and unknown types are ignored, as the reference does, and
    # REQUEST on a used id ends the connection
}


class ClientTransport:
    """One end of a transport.

    :ivar id: even when this side opened it, odd when the server assigned it.
    :ivar remote: the other client's key.
    :ivar carrier: where the shell finds its stream and its session again.
    :ivar in_flight: sequence -> (size, token) of what is not acknowledged.
    :ivar is_secure: its frames are encrypted from end to end.
    :ivar secure: the end that it carries, when it does.
    :ivar answer: what it may come to carry, once its initiator confirms it.
    :ivar identity: 16 bytes, when receipts are signed.
    :ivar upgrade: its handshake is in FWD frames, behind a plain REQUEST and ACCEPT.
    :ivar prefaced: frames of the responder's preface that have come; None before its ACCEPT.
    :ivar delivered: bytes out and in that it had delivered when its stream left it.
    """

    __slots__ = (
        "ack_due",
        "answer",
        "carrier",
        "delivered",
        "held_acks",
        "held_size",
        "id",
        "identity",
        "in_flight",
        "in_flight_bytes",
        "initiator",
        "is_secure",
        "next_sequence",
        "offer",
        "payload",
        "prefaced",
        "proposal",
        "remote",
        "secure",
        "state",
        "told_window",
        "unread",
        "upgrade",
    )

    def __init__(self, transport_id: int, remote: PubKey, payload: bytes, initiator: bool, sequence: int) -> None:
        self.id = transport_id
        self.remote = remote
        self.payload = payload
        self.initiator = initiator
        self.state: State | None = None
        self.carrier: Any = None
        self.unread = 0
        self.held_size = 0
        self.held_acks: list[int] = []
        self.in_flight: dict[int, tuple[int, object]] = {}
        self.in_flight_bytes = 0
        self.next_sequence = sequence
        self.is_secure = False
        self.secure: SecureEnd | None = None
        self.answer: Answer | None = None
        self.proposal: Proposal | None = None
        self.offer: Offer | None = None
        self.told_window = 0
        self.upgrade = False
        self.prefaced: int | None = None
        self.ack_due = False
        self.identity: bytes | None = None
        self.delivered = (0, 0)

    @property
    def says_delivered(self) -> tuple[int, int]:
        """Bytes out and in, as this end's receipt has them."""
        return self.delivered if self.secure is None else self.secure.delivered

    @property
    def window_open(self) -> bool:
        """Another frame may be sent now."""
        if self.is_secure:
            return self.secure is not None and self.secure.may_send
        return self.in_flight_bytes < WINDOW_BYTES and len(self.in_flight) < WINDOW_FRAMES
