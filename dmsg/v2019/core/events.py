"""What :class:`~dmsg.v2019.core.table.ClientConnection` tells: plain values, in the order of the frames."""

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
    """The server's OK frame is there."""


@dataclass(slots=True)
class Requested:
    """Another client asks for ``transport``: answer with
    ``ClientConnection.accept``, ``ClientConnection.accept_secure`` when it
    has an offer, or ``ClientConnection.close``, unless its state is CLOSED meanwhile."""

    transport: ClientTransport


@dataclass(slots=True)
class Accepted:
    """``transport``, which this side opened, is open.

    :ivar hello: what the other end says, when it is secure.
    """

    transport: ClientTransport
    hello: Hello | None = None


@dataclass(slots=True)
class Confirmed:
    """``transport``, which the other side opened and this side answered, is open.

    :ivar left: what carried the stream before, if it goes on here.
    :ivar tickets: of what the other end has, of a stream that goes on.
    :ivar unsent: what is to be sent again, likewise.
    """

    transport: ClientTransport
    left: Transport | None = None
    tickets: list[object] = field(default_factory=list)
    unsent: list[tuple[bytes | memoryview, object]] = field(default_factory=list)


@dataclass(slots=True)
class Resumed:
    """The other end of a stream goes on over ``transport``, too, over which this end resumed it.

    :ivar tickets: of what the other end has.
    :ivar unsent: what is to be sent again.
    """

    transport: ClientTransport
    tickets: list[object]
    unsent: list[tuple[bytes | memoryview, object]]


@dataclass(slots=True)
class DataReceived:
    """User bytes, never empty; say ``ClientConnection.consumed`` when they are read."""

    transport: ClientTransport
    data: bytes


@dataclass(slots=True)
class DataEnded:
    """The other end of ``transport`` sends no more data; it still takes some."""

    transport: ClientTransport


@dataclass(slots=True)
class Acknowledged:
    """The remote has the frame that was sent with ``ticket``."""

    transport: ClientTransport
    ticket: object


@dataclass(slots=True)
class AcknowledgedAll:
    """The remote has ``count`` frames more, among them those that were sent with ``tickets``."""

    transport: ClientTransport
    count: int
    tickets: list[object]


class By(Enum):
    """Whose word it is that a transport is over."""

    REMOTE = auto()
    """The remote's client: the word is authentic."""
    ANYBODY = auto()
    """A CLOSE frame that a server may have made, or the remote, and nobody can tell."""
    HERE = auto()
    """This end, for something that the other did."""


@dataclass(slots=True)
class Closed:
    """``transport`` is over.

    :ivar refused: it never was open.
    :ivar end: what it carried, when it was secure.
    """

    transport: ClientTransport
    reason: int
    refused: bool
    by: By
    end: SecureEnd | None = None

    @property
    def final(self) -> bool:
        """Another transport would end in the same way: no other one is to be looked for.

        Of what was open, only a word that a server may have made leaves hope; of what
        was refused, everything does but the remote's own word and another history of the stream.
        """
        if self.by is By.HERE and self.refused:
            return self.reason == CloseReason.HASH_MISMATCH
        return self.by is not By.ANYBODY


@dataclass(slots=True)
class Ponged:
    """The server answers a PING with its ``payload``."""

    payload: bytes


@dataclass(slots=True)
class Draining:
    """The server leaves in ``seconds``; ``servers`` are others that it knows."""

    seconds: int
    servers: list[PubKey]


@dataclass(slots=True)
class Noticed:
    """The server says something of this client: ``what`` and a text of at most 64 bytes."""

    what: int
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
