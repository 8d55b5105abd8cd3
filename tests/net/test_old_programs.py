"""Programs of 2019 in a network of today: what a client of ours does beside them.

The servers of 2019 stand here as servers of ours that are made to know as
little (:mod:`dmsg.testing.old_relay`).
"""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

from dmsg.clients import servers
from dmsg.errors import ConnectFailed
from dmsg.testing.old_relay import make_old
from dmsg.v2019 import client
from tests.net.support import EntityCase
from tests.support import Accepting, asynchronous


class OldServerTests(EntityCase):
    """Servers of 2019."""

    async def start_old(self, url: str, mark: str = "0.0.1") -> Any:
        """Start an old server; ``mark`` is the version that another program left in its entry."""
        server = await self.start_server(f"--discovery={url}")
        make_old(server, mark)
        server.registration._posted = None
        server.registration._post_soon(0)

        wanted = f'"version":"{mark}"'.encode()
        await self.until(lambda: wanted in self.entry_of(server._key.public.hex()))
        return server

    def entry_of(self, static: str) -> bytes:
        """Return the entry of a key as discovery has it, or nothing."""
        found: list[bytes] = []
        self.discovery._running.store.get(static).addCallbacks(found.append, lambda _: None)
        return found[0] if found else b""

    @asynchronous
    async def test_a_mark_that_an_earlier_program_left(self) -> None:
        """The connection is made again without PING, once; then it is remembered."""
        url = await self.start_discovery()
        server = await self.start_old(url, "0.0.1+relay1")
        client = await self.start_client(url, encryption="prefer", min_servers=1)
        await self.until(lambda: client._plain_servers)
        await self.until(lambda: client.status == "online")
        self.assertEqual((server.factory.connections_opened, server.factory.relay.pings), (2, 1))
        # On another server, the client would send PING at once.
        other = await self.start_client(url, encryption="off", min_servers=1)
        await other.stopService()
        self.assertEqual((client.status, server.factory.relay.pings), ("online", 2))

    @asynchronous
    async def test_between_two_of_ours_streams_are_secure(self) -> None:
        """The streams have ports, whatever the policy; the server passes on only plain REQUESTs."""
        url = await self.start_discovery()
        server = await self.start_old(url)
        for policies in (("require", "require"), ("prefer", "require"), ("require", "prefer")):
            alice, bob = [await self.start_client(url, encryption=one, min_servers=1) for one in policies]
            listener = Accepting()
            bob.listen(listener, 80)
            protocol: Any = await alice.connect(bob.public_key, Accepting(), 80, timeout=10)
            await protocol.transport.send(b"hello" * 100_000, timeout=10)
            self.assertTrue(protocol.transport.secure)
            self.assertEqual(protocol.transport.server, server._key.public)
            self.assertEqual(len(listener.built[0].data), 500_000)
            probe: Any = await alice.probe(bob.public_key, 80)
            await probe.transport.send(b"", timeout=10)
        self.assertEqual(server.factory.relay.pings, 0)

    @asynchronous
    async def test_a_remote_that_takes_no_upgrades(self) -> None:
        """The remote is a client of dmsg 0.1. The error names what both programs can do."""
        url = await self.start_discovery()
        await self.start_old(url)
        alice = await self.start_client(url, min_servers=1)
        with mock.patch.object(client, "UPGRADE_FEATURE", "other"):
            bob = await self.start_client(url, min_servers=1)
        bob.listen(Accepting(), 80)
        with self.assertRaises(ConnectFailed) as caught:
            await alice.connect(bob.public_key, Accepting(), 80, timeout=10)
        text = str(caught.exception)
        self.assertIn("none of its servers carries secure transports", text)
        self.assertIn("like servers of 2019", text)
        self.assertNotIn("--encryption off", text)

    @asynchronous
    async def test_a_stream_goes_on_over_servers_of_both_kinds(self) -> None:
        """The stream moves from a server of 2019 that is killed to a server of today, and back when that one leaves."""
        self.patch(servers, "CHECK_INTERVAL", 0.2)
        url = await self.start_discovery()
        first = await self.start_old(url)
        alice = await self.start_client(url, min_servers=1)
        bob = await self.start_client(url, min_servers=1)
        listener = Accepting()
        bob.listen(listener, 80)
        one: Any = await alice.connect(bob.public_key, Accepting(), 80, timeout=10)
        block, sent = os.urandom(300_000), b""

        async def both_at(server: Any) -> None:
            for one in (alice, bob):
                await self.until(lambda one=one: one.servers == [server._key.public])

        async def say(server: Any) -> None:
            nonlocal sent
            sent += block
            await one.transport.send(block, timeout=15)
            self.assertEqual(one.transport.server, server._key.public)

        await say(first)
        second = await self.start_server(f"--discovery={url}")
        await first.stop_for_test()
        await both_at(second)
        await say(second)
        third = await self.start_old(url)
        await second.stop_for_test()
        await both_at(third)
        await say(third)
        self.assertEqual(listener.built[0].data, sent)
        self.assertIsNone(one.lost)

    @asynchronous
    async def test_plain_clients_communicate_through_an_old_server(self) -> None:
        url = await self.start_discovery()
        await self.start_old(url)
        alice = await self.start_client(url, encryption="off", min_servers=1)
        bob = await self.start_client(url, encryption="off", min_servers=1)
        bob.listen(Accepting())
        protocol: Any = await alice.connect(bob.public_key, Accepting(), timeout=10)
        await protocol.transport.send(b"hello", timeout=10)

    @asynchronous
    async def test_a_server_that_carries_secure_transports_is_found(self) -> None:
        """The clients find a common server, although each needs only one server and has one of 2019."""
        self.patch(servers, "CHECK_INTERVAL", 0.2)
        url = await self.start_discovery()
        old = await self.start_old(url)
        alice = await self.start_client(url, encryption="prefer", min_servers=1)
        bob = await self.start_client(url, encryption="prefer", min_servers=1)
        bob.listen(Accepting())
        new = await self.start_server(f"--discovery={url}")
        for one in (alice, bob):
            await self.until(lambda one=one: new._key.public in one.servers)
        await self.until(lambda: new._key.public.hex().encode() in self.entry_of(bob.public_key.hex()))
        protocol: Any = await alice.connect(bob.public_key, Accepting(), timeout=10)
        await protocol.transport.send(b"hello", timeout=10)
        self.assertEqual(protocol.transport.server, new._key.public)
        self.assertNotEqual(old._key.public, new._key.public)
