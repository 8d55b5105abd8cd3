"""Programs of 2019 in a network of today: what a client of ours does beside them.

The servers of 2019 stand here as servers of ours that are made to know as
little: their relay ends a connection for PING, and refuses a REQUEST of
another length than 66 bytes without a reason.
"""

from __future__ import annotations

from typing import Any

from dmsg.clients import servers
from dmsg.errors import ConnectFailed, DropReason, RemoteProtocolError
from dmsg.v2019.core.relay import Relay
from dmsg.v2019.core.wire import HANDSHAKE_PAYLOAD_SIZE, PING, REQUEST, encode_close
from tests.net.support import EntityCase
from tests.support import Accepting, asynchronous


class OldRelay(Relay):
    """What the server of 2019 knows."""

    pings = 0

    def _receive_control(self, peer: Any, frame_type: int, own_id: int, payload: bytes) -> None:
        if frame_type == PING:
            self.pings += 1
            raise RemoteProtocolError(DropReason.UNKNOWN_FRAME)
        if frame_type == REQUEST and len(payload) != HANDSHAKE_PAYLOAD_SIZE:
            self._answer(peer, encode_close(own_id, 0))
            return
        super()._receive_control(peer, frame_type, own_id, payload)


class OldServerTests(EntityCase):
    """Servers of 2019."""

    async def start_old(self, url: str, mark: str = "0.0.1") -> Any:
        """One; ``mark`` is what its entry says, as far as a program before it left something there."""
        server = await self.start_server(f"--discovery={url}")
        server.factory.relay.__class__ = OldRelay
        server.registration._mark = lambda version: mark
        server.registration._posted = None
        server.registration._soon(0)

        wanted, kept = f'"version":"{mark}"'.encode(), self.discovery._running.store._kept
        static = server._key.public.hex()
        await self.until(lambda: static in kept and wanted in kept[static].json)
        return server

    @asynchronous
    async def test_a_mark_that_an_earlier_program_left(self) -> None:
        """The connection is made again without PING, once; then it is remembered."""
        url = await self.start_discovery()
        server = await self.start_old(url, "0.0.1+relay1")
        client = await self.start_client(url, encryption="prefer", min_servers=1)
        await self.until(lambda: client._plain_servers)
        await self.until(lambda: client.status == "online")
        self.assertEqual((server.factory.connections_opened, server.factory.relay.pings), (2, 1))
        # it would speak PING to another server at once
        other = await self.start_client(url, encryption="off", min_servers=1)
        await other.stopService()
        self.assertEqual((client.status, server.factory.relay.pings), ("online", 2))

    @asynchronous
    async def test_between_two_that_prefer_there_is_only_a_server_of_2019(self) -> None:
        url = await self.start_discovery()
        await self.start_old(url)
        alice = await self.start_client(url, encryption="prefer", min_servers=1)
        bob = await self.start_client(url, encryption="prefer", min_servers=1)
        bob.listen(Accepting())
        with self.assertRaises(ConnectFailed) as caught:
            await alice.connect(bob.public_key, Accepting(), timeout=10)
        text = str(caught.exception)
        self.assertIn("none of its servers carries secure transports", text)
        self.assertIn("--encryption off", text)
        self.assertIn("as those of 2019 do", text)

    @asynchronous
    async def test_with_encryption_off_they_speak_through_it(self) -> None:
        url = await self.start_discovery()
        await self.start_old(url)
        alice = await self.start_client(url, encryption="off", min_servers=1)
        bob = await self.start_client(url, encryption="off", min_servers=1)
        bob.listen(Accepting())
        protocol: Any = await alice.connect(bob.public_key, Accepting(), timeout=10)
        await protocol.transport.send(b"hello", timeout=10)

    @asynchronous
    async def test_a_server_that_carries_secure_transports_is_found(self) -> None:
        """Though each client is content with one server, and has one of 2019."""
        self.patch(servers, "CHECK_INTERVAL", 0.2)
        url = await self.start_discovery()
        old = await self.start_old(url)
        alice = await self.start_client(url, encryption="prefer", min_servers=1)
        bob = await self.start_client(url, encryption="prefer", min_servers=1)
        bob.listen(Accepting())
        new = await self.start_server(f"--discovery={url}")
        for client in (alice, bob):
            await self.until(lambda client=client: new._key.public in client.servers)
        await self.until(
            lambda: new._key.public.hex().encode() in self.discovery._running.store._kept[bob.public_key.hex()].json
        )
        protocol: Any = await alice.connect(bob.public_key, Accepting(), timeout=10)
        await protocol.transport.send(b"hello", timeout=10)
        self.assertEqual(protocol.transport.server, new._key.public)
        self.assertNotEqual(old._key.public, new._key.public)
