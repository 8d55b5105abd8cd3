"""Events that the client's core returns for the channels of a link, in the order of the frames that caused them."""

from __future__ import annotations

from attrs import frozen

from dmsg.errors import CloseReason
from dmsg.messaging.core.state import ClientChannel


@frozen
class Requested:
    """Event: another client asks for a channel; the session answers with ``accept`` or ``close``."""

    channel: ClientChannel


@frozen
class Opened:
    """Event: a channel that this side requested is open."""

    channel: ClientChannel


@frozen
class Rejected:
    """Event: a channel that this side requested was refused.

    :ivar why: text for people; the protocol has no codes for reasons.
    """

    channel: ClientChannel
    why: str


@frozen
class DataReceived:
    """Event: user data have arrived, in one message or several consecutive ones."""

    channel: ClientChannel
    data: bytes


@frozen
class Closed:
    """Event: a channel is closed; the application gets earlier data first.

    :ivar reason: UNSPECIFIED after a CloseChannel of either end, ABORTED after a ChannelClosed without one, or
        NOT_AUTHENTIC.
    """

    channel: ClientChannel
    reason: CloseReason = CloseReason.UNSPECIFIED


Event = Requested | Opened | Rejected | DataReceived | Closed
