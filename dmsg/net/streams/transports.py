"""Common interface of Twisted's TCP connections and dmsg's streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol as Interface, cast

from twisted.internet.interfaces import IAddress, IProducer, IProtocol
from twisted.internet.protocol import Protocol

if TYPE_CHECKING:
    from dmsg.net.streams.stream import StreamTransport


class ApplicationTransport(Interface):
    """Interface of the transport of an application's protocol, which is a TCP connection or a stream."""

    def write(self, data: bytes) -> None:
        """Queue bytes to send."""

    def loseConnection(self) -> None:
        """Close the connection once the written bytes are sent."""

    def abortConnection(self) -> None:
        """Close the connection now."""

    def loseWriteConnection(self) -> None:
        """Half-close the connection once the written bytes are sent."""

    def registerProducer(self, producer: IProducer, streaming: bool) -> None:
        """Register a producer, which is paused while too much is queued."""

    def unregisterProducer(self) -> None:
        """Remove the producer."""

    def pauseProducing(self) -> None:
        """Stop reading from the connection."""

    def resumeProducing(self) -> None:
        """Resume reading from the connection."""

    def getPeer(self) -> IAddress:
        """Return the address of the other end."""


def transport_of(protocol: Protocol) -> ApplicationTransport:
    """Return the transport of a connected protocol, with a type that includes the methods that ``ITransport`` lacks."""
    return cast(ApplicationTransport, protocol.transport)


def stream_of(protocol: IProtocol) -> StreamTransport:
    """Return the stream that is the transport of a protocol connected by a dmsg client."""
    return cast("StreamTransport", cast(Protocol, protocol).transport)
