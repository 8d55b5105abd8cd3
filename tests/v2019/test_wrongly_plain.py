"""A server that a client wrongly counts as one that carries plain transports only."""

from __future__ import annotations

from twisted.internet.protocol import Protocol
from twisted.trial.unittest import SynchronousTestCase

from dmsg.net.streams.transports import stream_of
from dmsg.streams.carrier import ClientStream
from dmsg.testing.lab import Lab
from dmsg.v2019.client import PLAIN_TIME
from tests.support import Accepting


class WronglyPlainTests(SynchronousTestCase):
    """The server closed a connection without an answer to PING, as programs of 2019 do."""

    def test_a_stream_is_resumed_through_the_only_server(self) -> None:
        lab = Lab(seed=3)
        lab.add_server("server-1")
        alice, bob = lab.add_client("alice", min_servers=1), lab.add_client("bob", min_servers=1)
        lab.settle()
        bob.listen(Accepting(Protocol), 7)
        stream = stream_of(lab.result(alice.connect(bob.public_key, Accepting(), 7)))
        assert isinstance(stream, ClientStream)
        lab.result(stream.send(b"x"))
        entry = lab.result(lab.lookups(lab.network.host("alice")).entry(alice.servers[0]))
        alice._mark_plain(entry)
        lab.network.host("alice").reset()
        lab.network.run_until(lambda: stream.away_since is not None)
        resumed_within = PLAIN_TIME / 60
        lab.network.run_until(lambda: stream.away_since is None, resumed_within)
        lab.result(stream.send(b"y"))
        self.assertEqual(alice._plain_servers, {})
