"""Senders of small pieces: the limits, the connections that are ended, and those that never are."""

from __future__ import annotations

import ssl
from typing import Any

from twisted.internet import reactor
from twisted.internet.endpoints import TCP4ClientEndpoint, connectProtocol
from twisted.internet.protocol import Protocol
from twisted.trial.unittest import SynchronousTestCase

from dmsg.base.cipher_names import TAG_SIZE
from dmsg.errors import DropReason
from dmsg.keys import SecKey
from dmsg.messaging.core import wire as messaging_wire
from dmsg.net import turn_share
from dmsg.net.links.reading import SMALL_TLS_READ_SIZE, TLS_READ_SIZE
from dmsg.net.links.receiver import COALESCE_TIME, FRAMES_A_READ
from dmsg.net.links.small_pieces import BURST, MAX_COMPENSATED, RATE, SMALL_SIZE, SmallPieces
from dmsg.net.turns import HoldReason
from dmsg.net.websocket.frames import BEGINNING, BINARY, ENDING, MIDDLE, NO_MASK, PING, encode
from dmsg.noise.records import OVERHEAD
from dmsg.testing.raw_client import RawClient
from dmsg.v2019.core.wire import ACCEPT, FWD, HEADER_SIZE, REQUEST, encode_frame
from tests.net.links.support import Carried, LinkCase
from tests.net.support import EntityCase
from tests.net.test_carriers import certificate
from tests.support import SERVER_KEY, asynchronous

RECORD = OVERHEAD + HEADER_SIZE
"""Bytes of the smallest record of 2019, without the two bytes of its length."""
MESSAGE = messaging_wire.HEADER_SIZE + messaging_wire.SEND_OVERHEAD + TAG_SIZE
"""Bytes of the smallest message of a channel of the Messaging System."""


class AccountTests(SynchronousTestCase):
    """The account itself."""

    def test_pieces_of_honest_programs_are_free(self) -> None:
        account = SmallPieces(0.0)
        # The last program writes the length of a record apart.
        for sizes in ((RECORD + 2,), (MESSAGE,), (2, RECORD)):
            for _ in range(20 * BURST):
                for size in sizes:
                    self.assertFalse(account.are_too_many(1, size, 0.0))
            self.assertLess(account.level, 2)

    def test_small_ones_are_too_many_after_the_burst(self) -> None:
        account = SmallPieces(0.0)
        for _ in range(BURST):
            self.assertFalse(account.are_too_many(1, SMALL_SIZE - 1, 0.0))
        self.assertTrue(account.are_too_many(1, 0, 0.0))
        self.assertTrue(account.are_too_many(1, 0, 1 / RATE))
        self.assertFalse(account.are_too_many(1, 0, 3 / RATE))

    def test_nobody_saves_up_for_a_flood(self) -> None:
        account = SmallPieces(0.0)
        for _ in range(1000):
            account.are_too_many(1, 10**6, 0.0)
        self.assertFalse(account.are_too_many(BURST, 0, 0.0))
        account.are_too_many(1, 10**6, 0.0)
        self.assertEqual(account.level, BURST - MAX_COMPENSATED)


def forward(client: RawClient, payload: bytes) -> bytes:
    """Return the record that forwards bytes over the transport of a client."""
    return bytes(client.sealer.seal(encode_frame(FWD, 2, payload)))


class TransportCase(LinkCase):
    """A client with a transport to another one."""

    def other(self, client: RawClient) -> RawClient:
        """Return a client to which the first one has a transport with the id 2."""
        other = RawClient(self.key(), SERVER_KEY.public)
        self.join(other, "198.51.100.7")
        client.take(), other.take()
        keys = bytes(client.key.public + other.key.public)
        client.send(encode_frame(REQUEST, 2, keys))
        self.network.settle()
        (request,) = other.take()
        other.send(encode_frame(ACCEPT, request.id, keys))
        self.network.settle()
        self.assertEqual([frame.type for frame in client.take()], [ACCEPT])
        return other


class WebsocketTests(TransportCase):
    """Frames of a websocket."""

    def come(self) -> tuple[RawClient, Carried, Any]:
        client = RawClient(self.key(), SERVER_KEY.public)
        carried = Carried(client, b"")
        return client, carried, self.join(carried, "203.0.113.9")

    def flood(self, data: bytes, times: int) -> Any:
        """Return the link of a client that sends the same bytes again and again, or only once."""
        _, carried, link = self.come()
        for _ in range(times):
            if carried.closed:
                break
            carried.transport.write(data)  # type: ignore[union-attr]
            self.network.settle()
        return link

    def test_frames_without_bytes_end_the_connection_for_a_reason_of_their_own(self) -> None:
        one, many = encode(BINARY, b"a", NO_MASK), 2 * BURST
        for name, frame in (
            ("of one byte", one),
            ("empty", encode(BINARY, b"", NO_MASK)),
            ("pings", encode(PING, bytes(125), b"abcd")),
            (
                "fragments",
                encode(BEGINNING, b"", NO_MASK) + encode(MIDDLE, b"", NO_MASK) + encode(ENDING, b"", NO_MASK),
            ),
        ):
            for data, times in ((frame * many, 1), (frame, many)):
                with self.subTest(frames=name, times=times):
                    before = self.factory.relay.drops[DropReason.SMALL_PIECES]
                    link = self.flood(data, times)
                    # The bytes may themselves break the protocol above; then that is the reason.
                    self.assertIn(link.ended_for, (DropReason.SMALL_PIECES, DropReason.BAD_RECORD))
                    if link.ended_for is DropReason.SMALL_PIECES:
                        self.assertEqual(self.factory.relay.drops[DropReason.SMALL_PIECES], before + 1)
        self.assertGreaterEqual(self.factory.relay.drops[DropReason.SMALL_PIECES], 7)

    def test_a_record_in_frames_of_one_byte_arrives(self) -> None:
        client, carried, link = self.come()
        other = self.other(client)
        record = forward(client, b"x" * 300)
        carried.transport.write(b"".join(encode(BINARY, record[at : at + 1], NO_MASK) for at in range(len(record))))  # type: ignore
        self.network.settle()
        self.assertEqual([frame.payload for frame in other.take()], [b"x" * 300])
        self.assertIsNone(link.ended_for)

    def test_mixed_frames_arrive_in_order(self) -> None:
        client, carried, link = self.come()
        other = self.other(client)
        stream = b"".join(forward(client, bytes([number]) * number * 5) for number in range(1, 100))
        sizes, at, frames = (1, 3000, 7, 1024, 1023, 500), 0, []
        for number in range(len(stream)):
            size = sizes[number % len(sizes)]
            frames.append(encode(BINARY, stream[at : at + size], b"\1\2\3\4" if number % 4 else NO_MASK))
            at += size
            if at >= len(stream):
                break
        carried.transport.write(b"".join(frames))  # type: ignore[union-attr]
        self.network.settle()
        self.assertEqual([frame.payload for frame in other.take()], [bytes([one]) * one * 5 for one in range(1, 100)])
        self.assertIsNone(link.ended_for)

    def test_few_frames_of_one_read_are_processed_in_a_turn(self) -> None:
        _, carried, link = self.come()
        link.dataReceived(encode(PING, b"", NO_MASK) * (FRAMES_A_READ + 10))
        self.assertEqual(len(link._held), 1)
        self.assertIn(HoldReason.TURN, link.held_by)


class PlainTests(TransportCase):
    """Segments of plain TCP, which the kernel joins while nobody reads them."""

    def test_tiny_segments_are_read_seldom_and_nothing_is_lost(self) -> None:
        client = RawClient(self.key(), SERVER_KEY.public)
        link = self.join(client, "203.0.113.9")
        other = self.other(client)
        record = forward(client, bytes(4 * BURST))
        for at in range(BURST + 1):
            self.assertNotIn(HoldReason.COALESCE, link.held_by)
            link.dataReceived(record[at : at + 1])
        self.assertIn(HoldReason.COALESCE, link.held_by)
        link.dataReceived(record[BURST + 1 :])
        self.network.clock.advance(COALESCE_TIME)
        self.assertNotIn(HoldReason.COALESCE, link.held_by)
        self.network.settle()
        self.assertEqual([len(frame.payload) for frame in other.take()], [4 * BURST])
        self.assertIsNone(link.ended_for)


class Secret(Protocol):
    """Client of TLS that decides itself how many bytes are in a record."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        self.tls = context.wrap_bio(self.incoming, self.outgoing)
        self.shaken = self.closed = False

    def connectionMade(self) -> None:
        self._shake()

    def _shake(self) -> None:
        try:
            self.tls.do_handshake()
            self.shaken = True
        except ssl.SSLWantReadError:
            pass
        self._flush()
        if self.shaken:
            self.inner.makeConnection(self)

    def _flush(self) -> None:
        assert self.transport is not None
        self.transport.write(self.outgoing.read())

    def write(self, data: bytes, size: int = 16384) -> None:
        for at in range(0, len(data), size):
            self.tls.write(data[at : at + size])
        self._flush()

    def dataReceived(self, data: bytes) -> None:
        self.incoming.write(data)
        if not self.shaken:
            self._shake()
        try:
            while self.shaken:
                self.inner.dataReceived(self.tls.read(65536))
        except ssl.SSLWantReadError:
            pass

    def connectionLost(self, reason: Any = None) -> None:
        self.closed = True


class SecureTests(EntityCase):
    """Records of TLS over real TCP."""

    async def come(self, server: Any) -> tuple[RawClient, Secret]:
        client = RawClient(SecKey.generate(), server._key.public)
        secret = Secret(client)
        await connectProtocol(TCP4ClientEndpoint(reactor, "127.0.0.1", server.ports[-1].getHost().port), secret)
        self.addCleanup(lambda: secret.closed or secret.transport.abortConnection())  # type: ignore[union-attr]
        await self.until(lambda: client.frames)
        client.take()
        return client, secret

    async def start_tls(self) -> Any:
        path = self.mktemp()
        with open(path, "w") as file:
            file.write(certificate())
        return await self.start_server(f"--listen=ssl:0:privateKey={path}:interface=127.0.0.1")

    @asynchronous
    async def test_records_of_one_byte_end_the_connection(self) -> None:
        server = await self.start_tls()
        client, secret = await self.come(server)
        secret.write(forward(client, bytes(4 * BURST)), 1)
        await self.until(lambda: secret.closed)
        await self.until(lambda: server.drops()[DropReason.SMALL_PIECES] == 1)

    @asynchronous
    async def test_small_records_make_reads_small_until_a_large_one_comes(self) -> None:
        # Reads become small when the time of a turn is used up. A fast machine opens 64 KiB of such records in the
        # whole share of 2 ms, but none does so in a tenth of it.
        self.patch(turn_share, "MAX_SHARE", turn_share.MAX_SHARE / 10)
        server = await self.start_tls()
        (client, secret), (other, _) = await self.come(server), await self.come(server)
        keys = bytes(client.key.public + other.key.public)
        client.send(encode_frame(REQUEST, 2, keys))
        await self.until(lambda: other.frames)
        other.send(encode_frame(ACCEPT, other.take()[0].id, keys))
        await self.until(lambda: client.take())
        link = next(one.link for one in server.factory.sessions if one.link.remote == client.key.public)
        secret.write(b"".join(forward(client, bytes(50_000)) for _ in range(5)), SMALL_SIZE)
        await self.until(lambda: link._tcp.transport.bufferSize == SMALL_TLS_READ_SIZE)
        await self.until(lambda: len(other.frames) == 5)
        secret.write(forward(client, bytes(49_000)))  # No record of TLS in it is small.
        await self.until(lambda: len(other.frames) == 6)
        self.assertEqual(link._tcp.transport.bufferSize, TLS_READ_SIZE)
        self.assertIsNone(link.ended_for)
