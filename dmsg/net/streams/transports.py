"""Transports as applications use them: a TCP connection of Twisted and a stream of dmsg have the same methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol as Interface, cast

from twisted.internet.interfaces import IAddress, IProducer, IProtocol
from twisted.internet.protocol import Protocol

if TYPE_CHECKING:
    from dmsg.net.streams.stream import StreamTransport


class ApplicationTransport(Interface):
    """Methods that the transport of an application's protocol has, whatever kind of transport it is."""

    def write(self, data: bytes) -> None:
        """Queue bytes to be sent."""

    def loseConnection(self) -> None:
        """Close the connection when the bytes that were written have been sent."""

    def abortConnection(self) -> None:
        """Close the connection now."""

    def loseWriteConnection(self) -> None:
        """Close the direction that is written to, when the bytes that were written have been sent."""

    def registerProducer(self, producer: IProducer, streaming: bool) -> None:
        """Pause ``producer`` while the transport has enough to send."""

    def unregisterProducer(self) -> None:
        """Forget the producer."""

    def pauseProducing(self) -> None:
        """Read no more for now."""

    def resumeProducing(self) -> None:
        """Read again."""

    def getPeer(self) -> IAddress:
        """Return the address of the other end."""


def transport_of(protocol: Protocol) -> ApplicationTransport:
    """Return the transport of a connected protocol, with the methods that ``ITransport`` does not name."""
    return cast(ApplicationTransport, protocol.transport)


def stream_of(protocol: IProtocol) -> StreamTransport:
    """Return the stream of a protocol that a client of dmsg has connected."""
    return cast("StreamTransport", cast(Protocol, protocol).transport)
