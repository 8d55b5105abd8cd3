"""Transport for a link inside a websocket: sends the link's bytes in binary messages."""

from __future__ import annotations

import os
from collections.abc import Iterable

from twisted.internet.interfaces import IAddress, IDelayedCall, IPushProducer, IReactorTime, ITCPTransport
from zope.interface import Interface, implementer

from dmsg.net.reactor import cancel_call
from dmsg.net.socketopts import queued_bytes, write_now
from dmsg.net.websocket.byte_stream import NORMAL, StreamReader, close_frame
from dmsg.net.websocket.frames import BINARY, NO_MASK, PING, encode

PING_INTERVAL = 25.0
"""Seconds between pings of a client. Common proxies cut a connection after 60 silent seconds."""
MAX_UNREAD = 64 * 1024
"""Number of unsent bytes above which no ping is answered, because the other end does not read."""


class TCPTransport(ITCPTransport, IPushProducer):
    """Transport of a TCP connection, or of TLS over one."""


class IUnpacks(Interface):
    """Marker interface for protocols that unpack the frames of a websocket themselves: TCP delivers its bytes to them,
    and their transport is a :class:`WebSocketTransport`.
    """


def tcp_of(transport: object) -> object:
    """Return the TCP transport below a transport, or the transport itself."""
    return transport.tcp if isinstance(transport, WebSocketTransport) else transport


@implementer(IPushProducer)
class WebSocketTransport:
    """Transport that wraps written bytes in websocket frames and passes every other call on to TCP.

    Received bytes bypass this class: the link gets them from TCP, and unpacks them with ``reader``.

    :param tcp: transport of the connection.
    :param client: whether this is the client's end, which masks its frames and sends pings.
    :param encrypted: whether the link writes ciphertext. Then the mask is zero, which costs nothing: a mask protects
        intermediaries from bytes that a third party chose, and nobody can choose ciphertext.
    :ivar reader: reader of the frames of the other end.
    """

    def __init__(self, reactor: IReactorTime, tcp: TCPTransport, *, client: bool, encrypted: bool) -> None:
        self.tcp = tcp
        self.reader = StreamReader(masked=not client)
        self._client = client
        self._encrypted = encrypted
        self._reactor = reactor
        self._pinging: IDelayedCall | None = None
        self._closed = False
        if client:
            self._pinging = reactor.callLater(PING_INTERVAL, self._ping)

    def _key(self) -> bytes | None:
        if not self._client:
            return None
        return NO_MASK if self._encrypted else os.urandom(4)

    def _ping(self) -> None:
        self._pinging = self._reactor.callLater(PING_INTERVAL, self._ping)
        write_now(self.tcp, encode(PING, b"", self._key()))

    def answer(self) -> None:
        """Answer the newest ping that was read, unless the other end does not read."""
        answer = self.reader.take_answer(self._key())
        if answer and not self._closed and (queued_bytes(self.tcp) or 0) < MAX_UNREAD:
            write_now(self.tcp, answer)

    def stop(self) -> None:
        """Stop the pings: the connection has ended."""
        self._closed = True
        pinging, self._pinging = self._pinging, None
        cancel_call(pinging)

    # --- interface of a transport that links use ---

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send ``data`` in a binary message."""
        if data and not self._closed:
            write_now(self.tcp, encode(BINARY, data, self._key()))

    def writeSequence(self, iovec: Iterable[bytes]) -> None:
        """Send the pieces in one binary message."""
        self.write(b"".join(iovec))

    def loseConnection(self, code: int = NORMAL) -> None:
        """Send a close frame, and end the connection when everything is sent."""
        self._send_close(code)
        self.tcp.loseConnection()

    def end_writing(self) -> None:
        """Send a close frame, and end the direction to the peer when everything is sent. The TCP transport must support
        half-close."""
        self._send_close(NORMAL)
        self.tcp.loseWriteConnection()

    def _send_close(self, code: int) -> None:
        """Send a close frame, unless one was sent. Nothing is sent after a close frame."""
        if not self._closed:
            write_now(self.tcp, close_frame(code, self._key()))
        self.stop()

    def abortConnection(self) -> None:
        """End the connection at once."""
        self.stop()
        self.tcp.abortConnection()

    def registerProducer(self, producer: IPushProducer, streaming: bool) -> None:
        """Register the producer at the TCP transport."""
        self.tcp.registerProducer(producer, streaming)  # type: ignore[attr-defined]

    def unregisterProducer(self) -> None:
        """Remove the producer from the TCP transport."""
        self.tcp.unregisterProducer()  # type: ignore[attr-defined]

    def pauseProducing(self) -> None:
        """Stop reading from TCP."""
        self.tcp.pauseProducing()

    def resumeProducing(self) -> None:
        """Read from TCP again."""
        self.tcp.resumeProducing()

    def stopProducing(self) -> None:
        """End the connection."""
        self.loseConnection()

    def getPeer(self) -> IAddress:
        """Return the address of the other end of the TCP connection."""
        return self.tcp.getPeer()

    def getHost(self) -> IAddress:
        """Return the address of this end of the TCP connection."""
        return self.tcp.getHost()
