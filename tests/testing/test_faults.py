"""Faults of random walks: the hosts to which they can happen."""

from __future__ import annotations

from random import Random

from twisted.trial.unittest import SynchronousTestCase

from dmsg.testing.faults import BY_NAME, Faults
from dmsg.testing.lab import Lab

CLIENTS, SERVERS = ("alice", "bob"), ("server-1", "server-2")


class CandidateTests(SynchronousTestCase):
    """Hosts of a lab with two clients and two servers."""

    def setUp(self) -> None:
        self.lab = Lab(1)
        self.lab.add_servers(2)
        for name in CLIENTS:
            self.lab.add_client(name)
        self.lab.settle()
        self.faults = Faults(self.lab, SERVERS, CLIENTS, [])

    def hits(self, fault: str, *wanted: str) -> tuple[str, ...]:
        """Cause a fault, and return the names of the hosts to which it happened."""
        self.faults.make(fault, Random(1), wanted)
        return self.faults.hit

    def test_each_fault_happens_to_a_host_that_is_wanted_and_possible(self) -> None:
        happened = set()
        for fault in BY_NAME:
            for host in self.faults.candidates(fault)[-1:]:
                self.assertIn(host, self.hits(fault, host))
                happened.add(fault)
                self.setUp()
        alone = {"heal", "continue", "slow reader", "reader resumes", "clock jump", "restart"}
        self.assertEqual(happened, set(BY_NAME) - alone)

    def test_a_server_can_be_stopped_while_another_one_runs(self) -> None:
        for fault in ("kill", "leave"):
            self.assertEqual(self.faults.candidates(fault), ["server-1", "server-2"])
        self.assertEqual(self.faults.candidates("restart"), [])
        self.assertEqual(self.hits("restart"), ())
        self.lab.kill("server-1")
        for fault in ("kill", "leave"):
            self.assertEqual(self.faults.candidates(fault), ())
            self.assertEqual(self.hits(fault), ())
        self.assertEqual(self.faults.candidates("restart"), ["server-1"])
        for fault in ("pause", "poison"):
            self.assertEqual(self.faults.candidates(fault), ["server-2"])
        self.assertNotIn("server-1", self.faults.candidates("reset"))

    def test_a_fault_of_connections_happens_only_to_a_host_that_has_some(self) -> None:
        self.assertEqual(self.faults.candidates("half-open"), ["alice", "bob"])
        self.lab.network.host("bob").kill()
        self.assertEqual(self.faults.candidates("half-open"), ["alice"])
        self.assertEqual(self.faults.candidates("reset"), ["alice", "server-1", "server-2"])
        for fault in ("reset", "half-open"):
            self.assertEqual(self.hits(fault, "alice"), ("alice",))
            self.lab.network.run(10)
        for host in (*CLIENTS, *SERVERS):
            self.lab.network.host(host).kill()
        for fault in ("reset", "half-open"):
            self.assertEqual(self.hits(fault), ())

    def test_a_server_without_clients_sends_no_malformed_bytes(self) -> None:
        for name in CLIENTS:
            self.lab.kill(name)
        self.lab.network.run(1)
        self.assertEqual(self.faults.candidates("poison"), [])
        self.assertEqual(self.hits("poison"), ())
