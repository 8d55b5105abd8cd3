"""Clients in websockets, and a server in memory that they connect to from chosen addresses."""

from __future__ import annotations

from typing import Any

from twisted.internet.address import IPv4Address
from twisted.internet.protocol import Protocol
from twisted.python.failure import Failure
from twisted.test import iosim
from twisted.trial.unittest import SynchronousTestCase

from dmsg.keys import SecKey
from dmsg.net.links.link import Link
from dmsg.net.websocket.byte_stream import StreamReader
from dmsg.net.websocket.frames import BINARY, NO_MASK, encode
from dmsg.v2019.core.policing import Limits
from tests.support import MemoryNetwork

REQUEST = (
    b"GET /dmsg HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
)


class User:
    """User of a link that never reads nor writes."""

    def link_up(self, link: Link) -> None:
        self.link = link

    def frames_received(self, buffer: bytearray, end: int) -> int:
        return end

    def link_congested(self) -> None:
        """Do nothing: the test sends nothing."""

    link_relieved = link_congested

    def link_lost(self, reason: Failure) -> None:
        """Do nothing: the test has ended the link."""


class Carried(Protocol):
    """Connection of a proxy to the server, with a client inside a websocket.

    :param headers: lines that the proxy adds to the client's request.
    """

    def __init__(self, client: Any, headers: bytes) -> None:
        self.client = client
        self.headers = headers
        self.reader: StreamReader | None = None
        self.received = b""
        self.closed = False

    def connectionMade(self) -> None:
        assert self.transport is not None
        self.transport.write(REQUEST + self.headers + b"\r\n")

    def write(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(encode(BINARY, data, NO_MASK))

    def dataReceived(self, data: bytes) -> None:
        if self.reader is None:
            self.received += data
            head, end, data = self.received.partition(b"\r\n\r\n")
            if not end or b" 101 " not in head:
                return
            self.reader = StreamReader(masked=False)
            self.client.makeConnection(self)
        view, start = memoryview(data), 0
        while start < len(view):
            piece, start = self.reader.read(view, start, len(view))
            if piece:
                self.client.dataReceived(bytes(piece))

    def connectionLost(self, reason: Any = None) -> None:
        self.closed = True
        self.client.connectionLost(reason)


class LinkCase(SynchronousTestCase):
    """A server in memory."""

    limits = Limits(max_connections=20)

    def setUp(self) -> None:
        self.network = MemoryNetwork(limits=self.limits)
        self.factory = self.network.factory
        self.number = 0

    def key(self) -> SecKey:
        self.number += 1
        return SecKey.from_seed(b"link %d" % self.number)

    def join(self, protocol: Any, host: str) -> Any:
        """Connect a protocol from an address; return the server's link, or None."""
        address = IPv4Address("TCP", host, 1)
        link = self.factory.buildProtocol(address)
        if link is None:
            protocol.closed = True
            return None
        server = iosim.FakeTransport(link, isServer=True, peerAddress=address)
        self.network.pumps.append(iosim.connect(link, server, protocol, iosim.makeFakeClient(protocol), greet=False))
        self.network.settle()
        return link
