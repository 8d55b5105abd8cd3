"""Base class of tests with entities on real TCP, started by the makeService function that twistd uses."""

from __future__ import annotations

import contextlib
from typing import Any

from twisted.internet import reactor
from twisted.internet.endpoints import TCP4ClientEndpoint, connectProtocol
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from dmsg.discovery.lookup.lookup import Lookup
from dmsg.errors import DiscoveryError
from dmsg.keys import SecKey
from dmsg.tap import discovery as discovery_tap, server as server_tap
from dmsg.testing.raw_client import RawClient
from dmsg.v2019.client import Client

LOOPBACK = "tcp:0:interface=127.0.0.1"
TIMEOUT = 20.0
"""Seconds that a busy machine may take for anything; no test waits for all of them to pass."""


HEALTH = {"status": "ok", "registered": True, "reachable": None, "shared_with": None}
"""Health of a server that is registered and does not know whether its public address can be reached."""


class EntityCase(TestCase):
    """Test case that starts entities, and stops them in reverse order."""

    # With trial's default of 120 s, a busy machine does not finish tests that need 7 s of the processor.
    timeout = 300

    async def start_discovery(self, *options: str) -> str:
        """Start a discovery and return its URL."""
        parsed = discovery_tap.Options()
        parsed.parseOptions([f"--listen={LOOPBACK}", "--store=memory:", "--rate-limit=0", *options])
        service: Any = discovery_tap.makeService(parsed, reactor)
        service.startService()
        self.addCleanup(service.stopService)
        port = (await service.entity.ready)[0]
        self.discovery = service.entity
        return f"http://127.0.0.1:{port.getHost().port}"

    async def start_server(self, *options: str, tap: Any = server_tap) -> Any:
        """Start a server and return its entity, listening, and registered if the server has a discovery."""
        parsed = tap.Options()
        parsed.parseOptions([f"--listen={LOOPBACK}", f"--key-file={self.mktemp()}", "--create", *options])
        service: Any = tap.makeService(parsed, reactor)
        service.startService()
        self.addCleanup(service.stopService)
        server = service.entity
        await server.ready
        server.stop_for_test = service.stopService
        if parsed["discovery"]:
            await self.until(lambda: server.registration.registered_at is not None)
        return server

    async def until_listed(self, url: str, servers: int) -> None:
        """Wait until discovery lists so many servers, because it has reached them at their addresses."""
        lookup = Lookup(reactor, url)
        self.addCleanup(lookup.close)
        while True:
            with contextlib.suppress(DiscoveryError):
                if len(await lookup.available_servers()) >= servers:
                    return

    async def start_client(self, url: str, *, family: Any = Client, **options: Any) -> Any:
        """Start a client that other clients can find."""
        client = family(reactor, options.pop("key", None) or SecKey.generate(), [url], **options)
        client.startService()
        self.addCleanup(client.stopService)
        await client.when_published(TIMEOUT)
        return client

    async def raw_client(self, server: Any, key: SecKey | None = None, source: str = "127.0.0.1") -> RawClient:
        """Return a client of plain frames, connected from this address."""
        port = server.ports[0].getHost().port
        client = RawClient(key or SecKey.generate(), server._key.public)
        endpoint = TCP4ClientEndpoint(reactor, "127.0.0.1", port, bindAddress=(source, 0))
        await connectProtocol(endpoint, client)
        self.addCleanup(lambda: client.transport.abortConnection())  # type: ignore[union-attr]
        await self.until(lambda: bool(client.frames))
        client.take()
        return client

    async def until(self, condition: Any, timeout: float = TIMEOUT) -> Any:
        """Wait for the condition to become true; the condition is checked a hundred times a second."""
        deadline = reactor.seconds() + timeout
        while not (result := condition()):
            if reactor.seconds() > deadline:
                self.fail(f"did not happen within {timeout} s")
            await deferLater(reactor, 0.01)
        return result
