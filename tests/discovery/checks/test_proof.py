"""Servers prove their keys, at real ports."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet import reactor
from twisted.internet.defer import Deferred, TimeoutError
from twisted.internet.protocol import Factory, Protocol
from twisted.trial.unittest import TestCase

from dmsg.discovery.checks import proof
from dmsg.discovery.checks.proof import reach
from dmsg.discovery.checks.schedule import (
    ServerChecks,
)
from dmsg.discovery.entries.entry import Entry, ServerMeta
from dmsg.discovery.store.sqlite import SQLiteStore
from dmsg.errors import HandshakeError
from dmsg.keys import SecKey
from dmsg.messaging.proofs import OPENINGS
from dmsg.messaging.server import Server as MessagingServer
from dmsg.v2019.server import Server
from tests.discovery.checks.test_schedule import server
from tests.support import asynchronous

TTL = 120.0


class ProofTests(TestCase):
    """Proofs over real ports."""

    def looks(self, **options: Any) -> ServerChecks:
        return ServerChecks(reactor, SQLiteStore(":memory:"), lambda: 0.0, TTL, openings=OPENINGS, **options)

    def start(self, kind: Any, key: SecKey) -> Any:
        server = kind(reactor, key, ["tcp:0:interface=127.0.0.1"])
        server.startService()
        self.addCleanup(server.stopService)
        return server

    async def why_not(self, server: Any, key: SecKey, version: str) -> str:
        port = server.ports[0].getHost().port
        entry = Entry(version, 0, 1, key.public.hex(), server=ServerMeta(f"127.0.0.1:{port}", 1))
        return await self.looks()._reason_against(entry, "127.0.0.1", True)

    @asynchronous
    async def test_servers_of_each_family_prove_their_key(self) -> None:
        """The entry may contain the server's own description, or nothing, as entries of 2019."""
        key, other = SecKey.from_seed(b"prover"), SecKey.from_seed(b"another")
        for kind, feature in ((Server, "relay1"), (MessagingServer, "messaging-seed")):
            server = self.start(kind, key)
            await server.ready
            for version in ("0.0.1", f"0.0.1+{feature}"):
                self.assertEqual(await self.why_not(server, key, version), "")
                self.assertNotEqual(await self.why_not(server, other, version), "", (kind, version))

    @asynchronous
    async def test_a_wrong_or_missing_answer_fails_the_proof(self) -> None:
        """A server that sends nothing fails the proof, too."""

        class Chatty(Protocol):
            def connectionMade(self) -> None:
                assert self.transport is not None
                self.transport.write(b"HTTP/1.1 200 OK\r\n\r\n" * 100)

        for kind in (Chatty, Protocol):
            port: Any = reactor.listenTCP(0, cast(Any, Factory.forProtocol(kind)), interface="127.0.0.1")
            self.addCleanup(port.stopListening)
            address = port.getHost()
            opening = OPENINGS["relay1"](SecKey.from_seed(b"prover").public)
            if kind is Protocol:
                self.patch(proof, "PROOF_TIMEOUT", 0.05)
                result = Deferred.fromCoroutine(reach(reactor, address.host, address.port, opening))
                await self.assertFailure(result, TimeoutError)
            else:
                await self.assertFailure(
                    Deferred.fromCoroutine(reach(reactor, address.host, address.port, opening)), HandshakeError
                )

    @asynchronous
    async def test_a_connection_without_an_opening_sends_no_data(self) -> None:
        got: list[bytes] = []
        lost: Deferred[None] = Deferred()

        class Server(Protocol):
            def dataReceived(self, data: bytes) -> None:
                got.append(data)

            def connectionLost(self, reason: Any = None) -> None:
                lost.callback(None)

        port: Any = reactor.listenTCP(0, cast(Any, Factory.forProtocol(Server)), interface="127.0.0.1")
        self.addCleanup(port.stopListening)
        await reach(reactor, "127.0.0.1", port.getHost().port, None)
        await lost
        self.assertEqual(got, [])

    @asynchronous
    async def test_names_of_private_addresses_are_not_connected(self) -> None:
        """``localhost`` always means this machine, whoever wrote it into an entry."""
        looks = self.looks()
        entry = server(1, "localhost:1")
        self.assertIn(
            "a network from which its entry was not posted", await looks._reason_against(entry, "1.1.1.1", True)
        )
        self.assertEqual(looks.attempts, 0)
        self.assertNotEqual(await looks._reason_against(entry, "127.0.0.1", True), "")
        self.assertEqual(looks.attempts, 1)
