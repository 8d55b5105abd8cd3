"""What the client's core tells of a link's channels."""

from __future__ import annotations

from attrs import frozen

from dmsg.errors import CloseReason
from dmsg.messaging.core.state import ClientChannel


@frozen
class Requested:
    """Somebody opens a channel; answer with ``accept`` or ``reject``."""

    channel: ClientChannel


@frozen
class Opened:
    """A channel that this side asked for is open."""

    channel: ClientChannel


@frozen
class Rejected:
    """A channel that this side asked for is not to be.

    :ivar why: of a person's interest; the protocol gives no reasons.
    """

    channel: ClientChannel
    why: str


@frozen
class DataReceived:
    """Bytes for the application, of one message or several in order."""

    channel: ClientChannel
    data: bytes


@frozen
class Closed:
    """A channel is over; what came before is to be delivered first.

    :ivar reason: UNSPECIFIED after a CloseChannel, of whichever end; ABORTED after a ChannelClosed
        that nobody had asked for; NOT_AUTHENTIC.
    """

    channel: ClientChannel
    reason: CloseReason = CloseReason.UNSPECIFIED


Event = Requested | Opened | Rejected | DataReceived | Closed
