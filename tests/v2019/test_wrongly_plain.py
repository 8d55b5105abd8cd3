"""A server that a client wrongly counts as one that carries plain transports only."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred, succeed
from twisted.internet.protocol import Protocol
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import NOBODY_LISTENS, ConnectFailed
from dmsg.keys import PubKey
from dmsg.net.streams.transports import stream_of
from dmsg.streams.carrier import ClientStream
from dmsg.streams.core.agreement import FEATURE
from dmsg.testing.lab import Lab
from dmsg.v2019.client import PLAIN_TIME, Client
from tests.support import Accepting

SERVER = "server-1"


class WronglyPlainTests(SynchronousTestCase):
    """The server closed a connection without an answer to PING, as programs of 2019 do. It is the only server."""

    def setUp(self) -> None:
        self.lab = Lab(seed=3)
        self.lab.add_server(SERVER)
        self.alice, self.bob = [self.lab.add_client(name, min_servers=1) for name in ("alice", "bob")]
        self.lab.settle()
        self.bob.listen(Accepting(Protocol), 7)
        self.alice.listen(Accepting(Protocol), 7)

    def mark_plain(self, name: str) -> None:
        """Let a client count the server as one of 2019, and connect again."""
        client = self.lab.clients[name]
        entry = self.lab.result(self.lab.lookups(self.lab.network.host(name)).entry(self.lab.key(SERVER).public))
        client._mark_plain(entry)
        self.lab.network.host(name).reset()
        self.lab.network.run_until(lambda: not client.servers)
        self.lab.network.run_until(lambda: bool(client.servers))
        self.lab.settle()

    def session(self, client: Client) -> Any:
        return self.lab.result(client.server_session(self.lab.key(SERVER).public))

    def connect(self, one: Client, other: Client) -> Any:
        return self.lab.result(one.connect(other.public_key, Accepting(), 7))

    def test_a_stream_is_resumed(self) -> None:
        stream = stream_of(self.connect(self.alice, self.bob))
        assert isinstance(stream, ClientStream)
        self.lab.result(stream.send(b"x"))
        self.mark_plain("alice")
        resumed_within = PLAIN_TIME / 60
        self.lab.network.run_until(lambda: stream.away_since is None, resumed_within)
        self.lab.result(stream.send(b"y"))
        self.assertEqual(self.alice._plain_servers, {})

    def test_a_stream_is_opened(self) -> None:
        self.mark_plain("alice")
        self.lab.result(self.connect(self.alice, self.bob).transport.send(b"x"))
        self.assertEqual(self.alice._plain_servers, {})

    def test_a_probe_is_answered(self) -> None:
        self.mark_plain("alice")
        probe: Any = self.lab.result(self.alice.probe(self.bob.public_key, 7))
        self.lab.result(probe.transport.send(b""))
        self.assertEqual(self.alice._plain_servers, {})

    def test_a_port_without_listener_is_told(self) -> None:
        self.mark_plain("alice")
        opening = self.alice.connect(self.bob.public_key, Accepting(), 8)
        with self.assertRaisesRegex(ConnectFailed, NOBODY_LISTENS):
            self.lab.result(opening)

    def test_a_client_that_gets_a_stream_sends_pings_again(self) -> None:
        self.mark_plain("bob")
        self.connect(self.alice, self.bob)
        self.lab.network.run_until(lambda: self.session(self.bob).pings.answered)
        self.assertEqual(self.bob._plain_servers, {})

    def test_a_client_that_opens_a_stream_sends_pings_again(self) -> None:
        self.mark_plain("alice")
        self.connect(self.alice, self.bob)
        self.lab.network.run_until(lambda: self.session(self.alice).pings.answered)

    def test_both_clients_are_wrong(self) -> None:
        """Their streams are upgraded, as over a server of 2019."""
        self.mark_plain("alice")
        self.mark_plain("bob")
        self.lab.result(self.connect(self.alice, self.bob).transport.send(b"x"))


class RightlyPlainTests(SynchronousTestCase):
    """The server is one of 2019."""

    def test_a_refusal_changes_nothing(self) -> None:
        """The remote refuses a plain transport for another reason, because it has an old entry of the client."""
        lab = Lab(seed=3)
        lab.old_servers.add(SERVER)
        lab.add_server(SERVER)
        alice, bob = lab.add_client("alice", min_servers=1), lab.add_client("bob", min_servers=1)
        lab.settle()
        bob.listen(Accepting(Protocol), 7)
        features_of, bob.streams.features_of = bob.streams.features_of, lambda remote: succeed(frozenset({FEATURE}))
        with self.assertRaises(ConnectFailed) as caught:
            lab.result(alice.connect(bob.public_key, Accepting(), 7))
        self.assertIn("only secure transports", str(caught.exception))
        bob.streams.features_of = features_of
        lab.result(lab.result(alice.connect(bob.public_key, Accepting(), 7)).transport.send(b"x"))
        session = lab.result(alice.server_session(lab.key(SERVER).public))
        self.assertFalse(session.pings.known)

    def test_a_resumed_stream_is_upgraded_again(self) -> None:
        """The remote first refuses, because it has an old entry of the client."""
        lab = Lab(seed=3)
        lab.old_servers.add(SERVER)
        lab.add_server(SERVER)
        alice, bob = lab.add_client("alice", min_servers=1), lab.add_client("bob", min_servers=1)
        lab.settle()
        bob.listen(Accepting(Protocol), 7)
        stream = stream_of(lab.result(alice.connect(bob.public_key, Accepting(), 7)))
        assert isinstance(stream, ClientStream)
        features_of = bob.streams.features_of
        assert features_of is not None
        asked: list[PubKey] = []

        def refusing(remote: PubKey) -> Deferred[frozenset[str]]:
            asked.append(remote)
            return succeed(frozenset({FEATURE})) if len(asked) < 3 else features_of(remote)

        bob.streams.features_of = refusing
        alice._mark_plain(lab.result(lab.lookups(lab.network.host("alice")).entry(lab.key(SERVER).public)))
        lab.network.host("alice").reset()
        lab.network.run_until(lambda: stream.away_since is not None)
        lab.network.run_until(lambda: stream.away_since is None)
        lab.result(stream.send(b"x"))
        self.assertNotEqual(alice._plain_servers, {})
