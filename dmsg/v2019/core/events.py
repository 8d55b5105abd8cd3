"""Events that :class:`~dmsg.v2019.core.table.ClientConnection` returns, in the order of the frames that caused them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from dmsg.errors import CloseReason
from dmsg.keys import PubKey
from dmsg.streams.core.agreement import Hello
from dmsg.streams.core.resumption import Transport
from dmsg.streams.core.secure import SecureEnd
from dmsg.v2019.core.state import ClientTransport


@dataclass(slots=True)
class Established:
    """Event: the server's OK frame has arrived, so that transports can be opened."""


@dataclass(slots=True)
class Requested:
    """Event: another client requests ``transport``.

    The session answers with ``ClientConnection.accept``, with ``ClientConnection.accept_secure`` if the transport has
    an offer, or with ``ClientConnection.close``. It does not answer if the transport has been closed before the event
    is processed.
    """

    transport: ClientTransport


@dataclass(slots=True)
class Accepted:
    """Event: ``transport``, which this side requested, is open.

    :ivar hello: hello of the other end on a secure transport; None on a plain one.
    """

    transport: ClientTransport
    hello: Hello | None = None


@dataclass(slots=True)
class Confirmed:
    """Event: ``transport``, which the other client requested and this one answered, is open.

    :ivar left: transport that carried the resumed stream before; None for a new stream.
    :ivar tickets: tickets of the frames of a resumed stream that the other end has received.
    :ivar unsent: frames of a resumed stream to send again, as data and ticket.
    """

    transport: ClientTransport
    left: Transport | None = None
    tickets: list[object] = field(default_factory=list)
    unsent: list[tuple[bytes | memoryview, object]] = field(default_factory=list)


@dataclass(slots=True)
class Resumed:
    """Event: the other end has proved that it also continues the stream over ``transport``.

    :ivar tickets: tickets of the frames that the other end has received.
    :ivar unsent: frames to send again, as data and ticket.
    """

    transport: ClientTransport
    tickets: list[object]
    unsent: list[tuple[bytes | memoryview, object]]


@dataclass(slots=True)
class DataReceived:
    """Event: user data have arrived, at least one byte. Call ``ClientConnection.consumed`` once the application has
    read them."""

    transport: ClientTransport
    data: bytes


@dataclass(slots=True)
class DataEnded:
    """Event: the other end of ``transport`` has half-closed: it sends no more data and still receives."""

    transport: ClientTransport


@dataclass(slots=True)
class Acknowledged:
    """Event: the remote has received the frame that was sent with ``ticket``."""

    transport: ClientTransport
    ticket: object


@dataclass(slots=True)
class AcknowledgedAll:
    """Event: the remote has received ``count`` more frames. ``tickets`` contains the tickets of the frames that were
    sent with a ticket."""

    transport: ClientTransport
    count: int
    tickets: list[object]


class EndedBy(Enum):
    """Party that ended a transport."""

    REMOTE = auto()
    """The remote client, whose CLOSE was authenticated."""
    UNAUTHENTICATED = auto()
    """The remote client or a server on the path. The CLOSE was not authenticated, so either may have sent it."""
    LOCAL = auto()
    """The local end, because of a protocol error of the other end."""


@dataclass(slots=True)
class Closed:
    """Event: ``transport`` is closed.

    :ivar refused: whether the transport was never open.
    :ivar end: end of the secure stream that the transport carried, if any.
    """

    transport: ClientTransport
    reason: int
    refused: bool
    by: EndedBy
    end: SecureEnd | None = None

    @property
    def final(self) -> bool:
        """Whether the stream must end with this transport, because another transport would end in the same way.

        The end of an open transport is final, unless it came in a CLOSE that a server may have forged. A refusal is
        final only if the remote authenticated it, or if the two ends disagree about the history of the stream.
        """
        if self.by is EndedBy.LOCAL and self.refused:
            return self.reason == CloseReason.HASH_MISMATCH
        return self.by is not EndedBy.UNAUTHENTICATED


@dataclass(slots=True)
class Ponged:
    """Event: the server answered the PING that had this ``payload``."""

    payload: bytes


@dataclass(slots=True)
class Draining:
    """Event: the server will stop in ``seconds`` seconds. The client can move to any of ``servers``."""

    seconds: int
    servers: list[PubKey]


@dataclass(slots=True)
class Noticed:
    """Event: the server has sent this client a NOTICE, with ``code`` and a text of at most 64 bytes."""

    code: int
    text: str


Event = (
    Established
    | Requested
    | Accepted
    | Confirmed
    | Resumed
    | DataReceived
    | DataEnded
    | Acknowledged
    | AcknowledgedAll
    | Closed
    | Ponged
    | Draining
    | Noticed
)
