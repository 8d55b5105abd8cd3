"""The lab of real processes: each fault by name does what it says, and streams live through it."""

from __future__ import annotations

import sys
import time

from twisted.trial.unittest import SkipTest, SynchronousTestCase

from dmsg.keys import SecKey, write_key_file
from dmsg.testing.namespaces import NamespaceLab, Running, available
from tests.forking import COMMAND

TWISTD = (sys.executable, "-c", "from twisted.scripts.twistd import run; run()", "-n", "--pidfile=")
DMSG = (sys.executable, "-c", COMMAND)
PING = """
import socket, sys, time
s = socket.create_connection((sys.argv[1], int(sys.argv[2])), 10)
for _ in range(3):
    t = time.monotonic(); s.sendall(b'x'); s.recv(1); print('rtt', time.monotonic() - t, flush=True)
"""
ECHO = """
import socket, sys
s = socket.create_server((sys.argv[1], 5000), family=socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
print('listens', flush=True)
while True:
    c, _ = s.accept()
    try:
        while d := c.recv(65536): c.sendall(d)
    except OSError as error: print('lost', error.strerror, flush=True)
"""


class NamespaceCase(SynchronousTestCase):
    """Discovery and relays, alice and bob, each a namespace."""

    hosts: tuple[str, ...] = ("hub", "relay1", "relay2", "alice", "bob")
    ipv6 = False

    def setUp(self) -> None:
        if problem := available():
            raise SkipTest(problem)
        self.lab = NamespaceLab(self.hosts, seed=1, ipv6=self.ipv6)
        self.lab.__enter__()
        self.addCleanup(self.lab.__exit__)

    def network(self) -> None:
        """The entities; alice and bob are to be started."""
        addresses = self.lab.addresses
        self.discovery = self.lab.run(
            "hub", *TWISTD, "dmsg-discovery", f"--listen=tcp:9090:interface={addresses['hub']}", "--store=memory:"
        )
        self.discovery.line("listens on")
        self.url = f"http://{addresses['hub']}:9090"
        self.relays: dict[str, Running] = {}
        for name in ("relay1", "relay2"):
            self.relays[name] = self.lab.run(
                name,
                *TWISTD,
                "dmsg-server",
                f"--listen=tcp:8080:interface={addresses[name]}",
                f"--key-file={name}.key",
                "--create",
                f"--discovery={self.url}",
            )
        for relay in self.relays.values():
            relay.line("registered")
        self.key = SecKey.generate()
        write_key_file(self.lab.directory / "bob.key", self.key)

    def dmsg(self, host: str, *arguments: str) -> Running:
        return self.lab.run(host, *DMSG, *arguments, environment={"DMSG_DISCOVERY": self.url})


class AddressTests(SynchronousTestCase):
    """Addresses of the hosts of a lab."""

    def addresses(self, number: int, *, ipv6: bool) -> list[str]:
        return list(NamespaceLab([f"host{one}" for one in range(number)], ipv6=ipv6).addresses.values())

    def test_addresses_are_consecutive(self) -> None:
        """IPv6 addresses are hexadecimal, and the last number of an IPv4 address is at most 255."""
        ipv6 = self.addresses(16, ipv6=True)
        self.assertEqual(["fd77::1", "fd77::9", "fd77::a", "fd77::10"], [ipv6[at] for at in (0, 8, 9, 15)])
        ipv4 = self.addresses(256, ipv6=False)
        self.assertEqual(["10.77.0.1", "10.77.0.255", "10.77.1.0"], [ipv4[at] for at in (0, 254, 255)])


class FaultTests(NamespaceCase):
    """Faults on the wire."""

    hosts = ("alice", "bob")

    def echo(self) -> Running:
        echo = self.lab.run("bob", sys.executable, "-c", ECHO, self.lab.addresses["bob"])
        echo.line("listens")
        return echo

    def ping(self) -> list[float]:
        pinging = self.lab.run("alice", sys.executable, "-c", PING, self.lab.addresses["bob"], "5000")
        self.assertEqual(pinging.wait(), 0, pinging.output)
        return [float(line.split()[1]) for line in pinging.output.splitlines()]

    def test_delay_partition_and_reset(self) -> None:
        echo = self.echo()
        self.lab.path("alice", "bob", delay=0.1)
        self.assertTrue(all(seconds >= 0.2 for seconds in self.ping()))
        self.lab.path("alice", "bob", delay=0)
        self.lab.partition("alice", "bob")
        pinging = self.lab.run("alice", sys.executable, "-c", PING, self.lab.addresses["bob"], "5000")
        time.sleep(0.5)
        self.assertEqual(pinging.output, "")
        self.lab.heal("alice", "bob")
        self.assertEqual(pinging.wait(), 0)
        self.lab.reset("bob", 5)
        pinging = self.lab.run("alice", sys.executable, "-c", PING, self.lab.addresses["bob"], "5000")
        self.assertEqual(pinging.wait(), 1)
        self.assertIn("ConnectionResetError", pinging.output)
        del echo


class FaultIPv6Tests(FaultTests):
    """Faults on the wire between hosts that have only IPv6 addresses."""

    ipv6 = True
