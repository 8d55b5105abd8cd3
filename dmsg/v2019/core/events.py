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
    """Event: the server's OK frame has arrived."""


@dataclass(slots=True)
class Requested:
    """Event: another client asks for ``transport``.

    The session answers with ``ClientConnection.accept``, with ``ClientConnection.accept_secure`` if the transport has
    an offer, or with ``ClientConnection.close``.  If the transport's state is CLOSED by then, the session does not
    answer.
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
    """Event: ``transport``, which the other side requested and this side answered, is open.

    :ivar left: transport that carried a resumed stream before; None for a new stream.
    :ivar tickets: tickets of the frames of a resumed stream that the other end has received.
    :ivar unsent: data of a resumed stream to send again, with the tickets of the data.
    """

    transport: ClientTransport
    left: Transport | None = None
    tickets: list[object] = field(default_factory=list)
    unsent: list[tuple[bytes | memoryview, object]] = field(default_factory=list)


@dataclass(slots=True)
class Resumed:
    """Event: the other end has confirmed that it, too, continues the stream over ``transport``.

    :ivar tickets: tickets of the frames that the other end has received.
    :ivar unsent: data to send again, with the tickets of the data.
    """

    transport: ClientTransport
    tickets: list[object]
    unsent: list[tuple[bytes | memoryview, object]]


@dataclass(slots=True)
class DataReceived:
    """Event: user data, never empty, have arrived; call ``ClientConnection.consumed`` once the data are read."""

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
    """Event: the remote has received ``count`` more frames; ``tickets`` are the tickets of those sent with one."""

    transport: ClientTransport
    count: int
    tickets: list[object]


class EndedBy(Enum):
    """Party that ended a transport."""

    REMOTE = auto()
    """The remote client; its CLOSE is authenticated."""
    ANYBODY = auto()
    """The remote or any server on the path; the CLOSE frame is not authenticated."""
    HERE = auto()
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
        """Whether the stream is over because another transport would end in the same way.

        The end of an open transport is final unless it came in a CLOSE that a server may have forged.  A refusal is
        final only if the remote authenticated it, or if the two ends disagree on the history of the stream.
        """
        if self.by is EndedBy.HERE and self.refused:
            return self.reason == CloseReason.HASH_MISMATCH
        return self.by is not EndedBy.ANYBODY


@dataclass(slots=True)
class Ponged:
    """Event: the server answered the PING that had this ``payload``."""

    payload: bytes


@dataclass(slots=True)
class Draining:
    """Event: the server stops in ``seconds`` seconds and names ``servers`` to which the client can move."""

    seconds: int
    servers: list[PubKey]


@dataclass(slots=True)
class Noticed:
    """Event: the server sent a NOTICE to this client, with ``code`` and a text of at most 64 bytes."""

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
