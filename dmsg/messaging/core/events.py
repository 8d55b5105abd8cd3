"""Events that the client's core returns for the channels of a link, in the order of the frames that caused them."""

from __future__ import annotations

from attrs import frozen

from dmsg.errors import CloseReason
from dmsg.messaging.core.state import ClientChannel


@frozen
class Requested:
    """Event: another client requests a channel. The session must answer with ``accept`` or ``close``."""

    channel: ClientChannel


@frozen
class Opened:
    """Event: a channel that this side requested is open."""

    channel: ClientChannel


@frozen
class Rejected:
    """Event: a channel that this side requested was refused.

    :ivar why: reason as text for people; the protocol has no codes for reasons.
    """

    channel: ClientChannel
    why: str


@frozen
class DataReceived:
    """Event: data of the application have arrived, in one message or in several consecutive ones."""

    channel: ClientChannel
    data: bytes


@frozen
class Closed:
    """Event: a channel was closed. All data received before the close were reported in earlier events.

    :ivar reason: UNSPECIFIED if one of the ends sent CloseChannel; ABORTED if a ChannelClosed came without a
        CloseChannel; NOT_AUTHENTIC if a message was not authentic.
    """

    channel: ClientChannel
    reason: CloseReason = CloseReason.UNSPECIFIED


Event = Requested | Opened | Rejected | DataReceived | Closed
