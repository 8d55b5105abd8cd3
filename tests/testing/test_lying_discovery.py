"""Discovery that lies to a client, which must notice it or come to no harm."""

from __future__ import annotations

from random import Random
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from dmsg.clients.servers import MAX_AWAY
from dmsg.discovery.entries.entry import Entry
from dmsg.errors import DiscoveryError, EntryNotFound
from dmsg.testing.lab import Lab
from dmsg.testing.lying_discovery import ADDRESS, KINDS, LATE_ANSWER, LyingDiscovery


class LyingDiscoveryTests(SynchronousTestCase):
    """Lies to one look-up of another client's entry."""

    def setUp(self) -> None:
        self.lab = Lab(6)
        assert self.lab.discovery is not None
        self.discovery = LyingDiscovery(self.lab.network.host("discovery"), self.lab.discovery)
        self.lab.add_servers(2)
        self.alice, self.bob = self.lab.add_client("alice"), self.lab.add_client("bob")
        self.lab.settle()
        self.lookups = self.lab.lookups(self.lab.network.host("alice"))
        self.entry = self.look_up()
        self.lab.result(self.lookups.entry(self.alice.public_key))

    def look_up(self) -> Entry:
        found: Entry = self.lab.result(self.lookups.entry(self.bob.public_key))
        return found

    def test_the_truth(self) -> None:
        self.discovery.lie("", Random(1))
        self.assertEqual(self.look_up(), self.entry)

    def test_lies_about_an_entry(self) -> None:
        """The client gets the true entry or none, and no other one."""
        for number, kind in enumerate(KINDS):
            for chance in range(4):
                with self.subTest(kind):
                    self.discovery.lie(kind, Random(number * 10 + chance))
                    try:
                        found = self.look_up()
                    except DiscoveryError:
                        continue
                    self.assertEqual(found.key, self.bob.public_key)
                    self.assertEqual(found, self.entry)

    def test_invented_servers_cost_a_client_and_an_honest_discovery_little(self) -> None:
        """The client wants one more server than there is, so it tries those that the second discovery invents."""
        lab = Lab(7)
        second = LyingDiscovery(lab.network.host("discovery-2"), lab.add_discovery("discovery-2"))
        lab.add_server("server-1")
        second.lie("wrong servers", Random(1))
        alice = lab.add_client("alice")
        lab.network.run(60)
        host: Any = lab.network.host("alice")
        connect, targets = host.connectTCP, []

        def connect_and_count(address: str, *arguments: Any, **options: Any) -> Any:
            targets.append(address)
            return connect(address, *arguments, **options)

        self.patch(host, "connectTCP", connect_and_count)
        lab.network.run(300)
        invented = targets.count(ADDRESS.partition(":")[0])
        asked = targets.count(lab.network.host("discovery").address)
        self.assertLessEqual(len(alice._set.links), 2 * MAX_AWAY)
        self.assertLess(invented, 400)
        self.assertLess(asked, 100)
        self.assertEqual((alice.status, len(alice.servers)), ("online", 1))
        # The links to invented servers stay, and fail again and again. This does not make the client search each time,
        # not even after it has connected to its server again.
        second.lie("", Random(1))
        lab.network.host("server-1").reset()
        lab.network.run(120)
        targets.clear()
        lab.network.run(300)
        self.assertEqual((alice.status, len(alice.servers)), ("online", 1))
        self.assertLess(targets.count(lab.network.host("discovery").address), 30)
        lab.add_server("server-2")
        lab.network.run_until(lambda: len(alice.servers) == 2, 200)

    def test_each_lie_does_something(self) -> None:
        self.discovery.lie("no entries", Random(1))
        self.assertRaises(EntryNotFound, self.look_up)
        self.assertEqual(self.lab.result(self.lookups.available_servers()), [])
        self.discovery.lie("slow", Random(1))
        before = self.lab.clock.seconds()
        self.look_up()
        self.assertGreaterEqual(self.lab.clock.seconds() - before, LATE_ANSWER)
        for kind in ("endless entries", "changed entries"):
            self.discovery.lie(kind, Random(1))
            self.assertRaises(DiscoveryError, self.look_up)
        self.discovery.lie("wrong servers", Random(1))
        servers = self.lab.result(self.lookups.available_servers())
        real = {server._key.public for server in self.lab.servers.values()}
        self.assertTrue(servers and not real & {server.key for server in servers})
