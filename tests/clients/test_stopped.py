"""A client that stops while it connects."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import ConnectFailed
from dmsg.testing.lab import Lab
from tests.support import Accepting


class StoppedTests(SynchronousTestCase):
    """A client that stops while it connects to a peer on another server."""

    def setUp(self) -> None:
        self.lab = lab = Lab(5)
        lab.add_servers(2)
        one, two = (lab.key(name).public for name in ("server-1", "server-2"))
        self.alice = lab.add_client("alice", only=[one], min_servers=1)
        self.bob = lab.add_client("bob", only=[two], min_servers=1)
        lab.settle()
        for path in lab.network.both_ways(lab.network.host("alice"), lab.network.host("server-2")):
            path.cut_since = lab.clock.seconds()

    def test_connecting_fails_with_an_error_of_dmsg(self) -> None:
        failures: list[Any] = []
        for _ in range(2):
            self.alice.connect(self.bob.public_key, Accepting(), 7).addErrback(failures.append)
        self.lab.network.run(1)
        self.assertEqual(failures, [])
        self.lab.result(self.alice.stopService())
        self.lab.network.run(1)
        self.assertEqual([failure.type for failure in failures], [ConnectFailed] * 2)
        self.assertIn("the client is stopped", failures[0].getErrorMessage())

    def test_a_stopped_client_connects_to_no_server(self) -> None:
        self.lab.result(self.alice.stopService())
        failures: list[Any] = []
        self.alice.connect(self.bob.public_key, Accepting(), 7).addErrback(failures.append)
        # Without a connection to wait for, the answer comes at once.
        self.lab.network.run(1)
        self.assertEqual([failure.type for failure in failures], [ConnectFailed])
