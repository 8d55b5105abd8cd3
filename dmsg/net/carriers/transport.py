"""Transport of a link inside a websocket, which sends the link's bytes in binary messages."""

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
"""Seconds between websocket pings of a client. Common proxies close a connection after 60 seconds without traffic."""
MAX_UNREAD = 64 * 1024
"""Number of unsent bytes above which pings are not answered, because the other end does not read."""


class TCPTransport(ITCPTransport, IPushProducer):
    """Transport of a TCP connection, or of TLS over a TCP connection."""


class IUnpacks(Interface):
    """Marker interface for protocols that parse websocket frames themselves. Such a protocol receives the bytes of TCP
    directly, and its transport is a :class:`WebSocketTransport`."""


def tcp_of(transport: object) -> object:
    """Return the TCP transport below a websocket transport. Return any other transport unchanged."""
    return transport.tcp if isinstance(transport, WebSocketTransport) else transport


@implementer(IPushProducer)
class WebSocketTransport:
    """Transport that wraps written bytes in websocket frames and passes every other call on to TCP.

    Received bytes bypass this class: the link receives them from TCP, and parses the frames with ``reader``.

    :param tcp: transport of the TCP connection.
    :param client: whether this is the client's end, which masks its frames and sends pings.
    :param encrypted: whether the link writes ciphertext. If so, the mask is zero, which saves its computation. A mask
        protects intermediaries from bytes that an attacker chose, and nobody can choose ciphertext.
    :ivar reader: parser of the frames from the other end.
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
        """Answer the newest ping that was parsed, unless more than ``MAX_UNREAD`` bytes are unsent."""
        answer = self.reader.take_answer(self._key())
        if answer and not self._closed and (queued_bytes(self.tcp) or 0) < MAX_UNREAD:
            write_now(self.tcp, answer)

    def stop(self) -> None:
        """Stop sending pings and frames, because the connection has ended or is being closed."""
        self._closed = True
        pinging, self._pinging = self._pinging, None
        cancel_call(pinging)

    # --- methods of a transport that links call ---

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send ``data`` in a binary message."""
        if data and not self._closed:
            write_now(self.tcp, encode(BINARY, data, self._key()))

    def writeSequence(self, iovec: Iterable[bytes]) -> None:
        """Send the pieces in one binary message."""
        self.write(b"".join(iovec))

    def loseConnection(self, code: int = NORMAL) -> None:
        """Send a close frame, and close the TCP connection once everything is sent."""
        self._send_close(code)
        self.tcp.loseConnection()

    def end_writing(self) -> None:
        """Send a close frame, and half-close the TCP connection once everything is sent. TCP's transport must support
        half-close."""
        self._send_close(NORMAL)
        self.tcp.loseWriteConnection()

    def _send_close(self, code: int) -> None:
        """Send a close frame, unless one was sent already. No frame may follow a close frame."""
        if not self._closed:
            write_now(self.tcp, close_frame(code, self._key()))
        self.stop()

    def abortConnection(self) -> None:
        """Close the TCP connection at once."""
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
        """Close the connection; the same as :meth:`loseConnection`."""
        self.loseConnection()

    def getPeer(self) -> IAddress:
        """Return the address of the other end of the TCP connection."""
        return self.tcp.getPeer()

    def getHost(self) -> IAddress:
        """Return the address of this end of the TCP connection."""
        return self.tcp.getHost()
