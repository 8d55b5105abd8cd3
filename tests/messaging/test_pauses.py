"""Clients and servers of the Messaging System whose processes are paused."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import DropReason
from dmsg.messaging.client import Client
from dmsg.messaging.core.wire import Profile
from dmsg.messaging.server import Server
from dmsg.servers.settings import ServerSettings
from dmsg.testing.lab import SERVER_PORT, Lab
from tests.support import Accepting


class SuspendedTests(SynchronousTestCase):
    """All machines are suspended at once, while requests, data and answers are on their way.

    Nobody is to blame, so nobody is blamed: no channel ends, and no connection is closed.
    """

    def setUp(self) -> None:
        self.lab = Lab(3)
        self.addCleanup(self.lab.stop)

    def add_server(self, name: str, profile: Profile) -> Server:
        host = self.lab.network.host(name)
        settings = ServerSettings(
            public_address=f"{host.address}:{SERVER_PORT}",
            discovery=self.lab.lookups(host),
            random=self.lab.random,
        )
        listen = [f"tcp:{SERVER_PORT}:interface={host.address}"]
        server = Server(host.reactor, self.lab.key(name), listen, settings, profile=profile)
        server.startService()
        self.lab.servers[name] = server  # type: ignore[assignment]  # The lab only stops it.
        return server

    def add_client(self, name: str, profile: Profile, accepting: Accepting) -> Client:
        host = self.lab.network.host(name)
        client = Client(
            host.reactor,
            self.lab.key(name),
            self.lab.lookups(host),
            profile=profile,
            random=self.lab.random,
            min_servers=2,
        )
        client.startService()
        client.listen(accepting)
        self.lab.clients[name] = client  # type: ignore[assignment]  # The lab only stops it.
        return client

    def check(self, seconds: float, profile: Profile) -> None:
        lab, accepting = self.lab, Accepting()
        servers = [self.add_server(name, profile) for name in ("server-1", "server-2")]
        clients = [self.add_client(name, profile, accepting) for name in ("alice", "bob", "carol")]
        lab.settle()
        lab.network.delay_all(0.1)
        pairs = [(one, two) for one in clients for two in clients if one is not two]
        connections = [[id(session) for session in client.sessions()] for client in clients]
        streams: list[Any] = []
        for number in range(30):
            one, two = pairs[number % len(pairs)]
            opening = one.connect(two.public_key, Accepting())
            for stream in streams:
                stream.transport.write(bytes(20_000))
            lab.network.run(0.013 * number)
            lab.network.suspend(seconds)
            streams.append(lab.result(opening, 3.0))
        lab.network.run(10.0)
        self.assertEqual([stream.lost for stream in (*streams, *accepting.built)], [None] * 60)
        self.assertEqual([[id(session) for session in client.sessions()] for client in clients], connections)
        for server in servers:
            # Discovery checks servers from time to time, and ends its connection during the handshake.
            self.assertLessEqual(set(server.factory.relay.drops), {DropReason.HANDSHAKE_ABANDONED})

    def test_for_seconds(self) -> None:
        self.check(5.0, Profile.SEED)

    def test_for_a_minute(self) -> None:
        self.check(60.0, Profile.SKYWIRE)

    def test_for_ten_minutes(self) -> None:
        self.check(600.0, Profile.SEED)
