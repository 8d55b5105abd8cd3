"""Networks of ``dmsg host`` between machines, each a network namespace: ``make long WHICH=lab``.

A machine has its own directories of a user, and reaches the others over the wire of the lab alone.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from pathlib import Path

from twisted.trial.unittest import SkipTest, SynchronousTestCase

from dmsg.cli.output import EXIT_NOBODY
from dmsg.testing.namespaces import NamespaceLab, Running, available
from tests.net.nginx import part, web_server
from tests.testing.certificates import certificate_for
from tests.testing.test_namespaces import DMSG

CODE = r"code: (\d+(?:-\w+)+)"
INVITATION = r"dmsg join (dmsg1[a-z2-7]+)"
FILM = os.urandom(3_000_000)
TINYPROXY = """
Port 3128
Listen {address}
MaxClients 50
Timeout 60
PidFile "{directory}/tinyproxy.pid"
"""
SQUID = """
http_port {address}:3128
visible_hostname proxy
auth_param basic program /usr/lib/squid/basic_fake_auth
acl alice proxy_auth alice
http_access allow alice
http_access deny all
cache deny all
access_log none
cache_log /dev/null
pid_filename none
coredump_dir /
shutdown_lifetime 1 seconds
"""
"""Squid for a user of the name alice, with any password."""
DANTE = """
logoutput: stderr
internal: {address} port = 1080
external: {address}
clientmethod: none
socksmethod: none
user.privileged: root
user.unprivileged: nobody
client pass {{ from: 0.0.0.0/0 to: 0.0.0.0/0 }}
socks pass {{ from: 0.0.0.0/0 to: 0.0.0.0/0 }}
"""
STUNNEL = """
foreground = yes
pid =
[proxy]
accept = {address}:8443
connect = {address}:3128
cert = {directory}/cert.pem
"""


class MachineCase(SynchronousTestCase):
    """Machines, each with its own directories of a user."""

    hosts: tuple[str, ...]
    ipv6 = False

    def setUp(self) -> None:
        if problem := available():
            raise SkipTest(problem)
        self.lab = NamespaceLab(self.hosts, seed=1, ipv6=self.ipv6)
        self.lab.__enter__()
        self.addCleanup(self.lab.__exit__)
        self.environment: dict[str, str] = {}
        (self.lab.directory / "film").write_bytes(FILM)

    def dmsg(self, machine: str, *arguments: str) -> Running:
        """Start a command as the user of a machine."""
        home = self.lab.directory / machine
        home.mkdir(exist_ok=True)
        directories = {f"XDG_{kind}_HOME": str(home / kind) for kind in ("CONFIG", "DATA", "STATE", "CACHE")}
        others = {
            "HOME": str(home),
            "DMSG_AGENT": "off",
            "DMSG_DISCOVERY": "",
            "DMSG_CONFIG": str(home / "config.toml"),
        }
        environment = {**directories, **others, "DMSG_NAMES": str(home / "names"), **self.environment}
        return self.lab.run(machine, *DMSG, *arguments, environment=environment)

    def program(self, machine: str, program: str, *arguments: str) -> Running:
        """Start a program of the system, or skip the test."""
        path = shutil.which(program) or shutil.which(program, path="/usr/sbin:/usr/bin")
        if path is None:
            raise SkipTest(f"there is no {program} here")
        return self.lab.run(machine, path, *arguments)

    def write(self, name: str, text: str) -> str:
        """Write a file into the lab's directory, and return its path."""
        path = self.lab.directory / name
        path.write_text(text)
        return str(path)

    def certify(self, machine: str) -> None:
        """Let the lab's own CA certify a machine, for ``cert.pem``; every user trusts this CA alone."""
        chain, authority = certificate_for(self.lab.addresses[machine])
        self.write("cert.pem", chain)
        self.environment["SSL_CERT_FILE"] = self.write("ca.pem", authority)

    def start_network(self, machine: str, *options: str) -> tuple[Running, str]:
        """Start ``dmsg host``; return the process and its invitation."""
        host = self.dmsg(machine, "host", "--no-qr", *options)
        return host, host.line(INVITATION)[1]

    def join(self, invitation: str, *machines: str) -> None:
        for machine in machines:
            joining = self.dmsg(machine, "join", invitation)
            self.assertEqual(joining.wait(), 0, joining.output)

    def transfer(self, sender: str, receiver: str) -> None:
        """Send the film by a code."""
        sending = self.dmsg(sender, "send", "film", "--no-qr")
        receiving = self.dmsg(receiver, "receive", sending.line(CODE)[1], "--yes", "--dir", f"to-{receiver}")
        self.assertEqual(receiving.wait(), 0, receiving.output + sending.output)
        self.assertEqual(sending.wait(), 0, sending.output)
        arrived: Path = self.lab.directory / f"to-{receiver}" / "film"
        self.assertEqual(arrived.read_bytes(), FILM)
        arrived.unlink()

    def carrier(self, machine: str) -> str:
        """Return what ``dmsg doctor`` says about the server."""
        examined = self.dmsg(machine, "doctor")
        examined.wait()
        found = re.search(r"server [a-z2-7]{8} at .*", examined.output)
        return found[0] if found is not None else examined.output


class TwoMachineTests(MachineCase):
    """Alice hosts, and Bob joins."""

    hosts = ("alice", "bob")

    def test_a_network_of_two(self) -> None:
        """The host has no default route. Its interface is found all the same."""
        _, invitation = self.start_network("alice")
        self.join(invitation, "alice", "bob")
        self.transfer("alice", "bob")
        self.transfer("bob", "alice")

    def test_discovery_that_is_reached_only_by_tls_of_a_private_ca(self) -> None:
        self.certify("alice")
        _, invitation = self.start_network(
            "alice", f"--tls={self.lab.directory}/cert.pem,{self.lab.directory}/cert.pem"
        )
        self.join(invitation, "alice", "bob")
        self.transfer("alice", "bob")
        # Whoever does not know the CA does not get in, and is told why.
        del self.environment["SSL_CERT_FILE"]
        stranger = self.dmsg("bob", "join", invitation, "--name", "other")
        self.assertNotEqual(stranger.wait(), 0)
        self.assertIn("SSL_CERT_FILE", stranger.output)


class IPv6Tests(MachineCase):
    """Machines without IPv4."""

    hosts = ("hub", "alice", "bob")
    ipv6 = True

    def test_a_network_of_three_with_ipv6_alone(self) -> None:
        _, invitation = self.start_network("hub")
        self.join(invitation, "alice", "bob")
        self.transfer("alice", "bob")


class ThreeMachineTests(MachineCase):
    """A hub, and two machines behind walls."""

    hosts = ("hub", "alice", "bob")

    def test_a_killed_host_that_is_started_again_has_the_same_network(self) -> None:
        host, invitation = self.start_network("hub")
        self.join(invitation, "alice", "bob")
        self.transfer("alice", "bob")
        for how in (signal.SIGKILL, signal.SIGTERM):
            host.process.send_signal(how)
            host.wait()
            host, again = self.restart()
            self.assertEqual(again, invitation)
            self.transfer("bob", "alice")

    def restart(self) -> tuple[Running, str]:
        """Start the host again, as soon as the processes of the one before have ended."""
        end = time.monotonic() + 30
        while True:
            host = self.dmsg("hub", "host", "--no-qr")
            while host.process.poll() is None and "dmsg join" not in host.output:
                time.sleep(0.05)
            if host.process.poll() is None or time.monotonic() > end:
                return host, host.line(INVITATION)[1]

    def test_a_listening_client_outlives_the_host(self) -> None:
        """After the host is restarted, the client connects to it again and receives files as before."""
        host, invitation = self.start_network("hub")
        self.join(invitation, "alice", "bob")
        receiving = self.dmsg("bob", "receive", "--listen", "--anyone", "-k", "bob.key", "--create", "--dir", "post")
        key = receiving.line(r"receiving at (\w{53})")[1]
        host.kill()
        self.restart()
        # Bob tries the host again after a second at the earliest. Until then Bob is offline, as Alice is told at once.
        end = time.monotonic() + 30
        while True:
            sending = self.dmsg("alice", "send", "film", key, "--timeout", "30")
            if sending.wait() != EXIT_NOBODY or time.monotonic() > end:
                break
        self.assertEqual(sending.wait(), 0, sending.output + receiving.output)
        self.assertEqual((self.lab.directory / "post" / "film").read_bytes(), FILM)

    def test_a_network_that_lets_only_443_through(self) -> None:
        self.certify("hub")
        address, directory = self.lab.addresses["hub"], str(self.lab.directory)
        home = Path(directory)
        text = web_server(home, f"{address}:443", home / "cert.pem", part("discovery", {}), part("server", {}))
        config = self.write("nginx.conf", text)
        nginx = self.program("hub", "nginx", "-c", config)
        options = (f"--public-address={address}", f"--behind-proxy=https://{address}", "--carrier=wss:443")
        _, invitation = self.start_network("hub", *options)
        for machine in ("alice", "bob"):
            self.lab.only_port("hub", machine, 443)
        self.join(invitation, "alice", "bob")
        self.transfer("alice", "bob")
        used = "by wss:443; tcp failed: no answer"
        self.assertIn(used, self.carrier("alice"), nginx.output)
        listening = self.dmsg("bob", "receive", "--listen", "--anyone", "-k", "bob.key", "--create", "--dir", "post")
        tracing = self.dmsg("alice", "trace", listening.line(r"receiving at (\w{53})")[1])
        self.assertEqual(tracing.wait(), 0, tracing.output)
        self.assertIn(used, tracing.output)


class ProxyTests(MachineCase):
    """A machine that reaches only a proxy."""

    hosts = ("hub", "proxy", "alice", "bob")

    def start(self, program: str = "tinyproxy", config: str = TINYPROXY, *options: str) -> None:
        """Start a proxy and a network, which Alice reaches only through the proxy."""
        address, directory = self.lab.addresses["proxy"], str(self.lab.directory)
        path = self.write("proxy.conf", config.format(address=address, directory=directory))
        self.program("proxy", program, *(options or ("-d", "-c")), path)
        _, invitation = self.start_network("hub")
        self.join(invitation, "bob")
        self.lab.partition("hub", "alice")
        self.lab.partition("bob", "alice")
        self.invitation = invitation

    def test_a_network_that_lets_only_a_proxy_through(self) -> None:
        self.start()
        self.environment["HTTPS_PROXY"] = f"http://{self.lab.addresses['proxy']}:3128"
        self.join(self.invitation, "alice")
        self.transfer("alice", "bob")
        self.transfer("bob", "alice")

    def test_squid_lets_a_user_through_who_is_named_and_nobody_else(self) -> None:
        self.start("squid", SQUID, "-N", "-f")
        address = self.lab.addresses["proxy"]
        self.environment["HTTPS_PROXY"] = f"http://{address}:3128"
        refused = self.dmsg("alice", "join", self.invitation)
        self.assertEqual(refused.wait(), 1)
        self.assertIn("407", refused.output)
        self.environment["HTTPS_PROXY"] = f"http://alice:secret@{address}:3128"
        self.join(self.invitation, "alice")
        self.transfer("alice", "bob")

    def test_dante_leads_out_by_socks(self) -> None:
        self.start("danted", DANTE, "-p", str(self.lab.directory / "danted.pid"), "-f")
        self.environment["ALL_PROXY"] = f"socks5://{self.lab.addresses['proxy']}:1080"
        self.join(self.invitation, "alice")
        self.transfer("alice", "bob")
        self.transfer("bob", "alice")

    def test_a_proxy_that_is_reached_by_tls(self) -> None:
        self.certify("proxy")
        address, directory = self.lab.addresses["proxy"], str(self.lab.directory)
        self.program(
            "proxy", "stunnel4", self.write("stunnel.conf", STUNNEL.format(address=address, directory=directory))
        )
        self.start()
        self.environment["HTTPS_PROXY"] = f"https://{address}:8443"
        self.join(self.invitation, "alice")
        self.transfer("alice", "bob")


class FiveMachineTests(MachineCase):
    """A hub and four that join."""

    hosts = ("hub", "alice", "bob", "carol", "dave")

    def test_one_sends_to_three_by_one_code(self) -> None:
        _, invitation = self.start_network("hub")
        self.join(invitation, *self.hosts[1:])
        sending = self.dmsg("alice", "send", "film", "--no-qr", "--to-many", "--receivers=3")
        code = sending.line(CODE)[1]
        arguments = ("receive", code, "--yes", "--dir")
        receiving = {one: self.dmsg(one, *arguments, f"to-{one}") for one in ("bob", "carol", "dave")}
        for name, one in receiving.items():
            self.assertEqual(one.wait(), 0, one.output + sending.output)
            self.assertEqual((self.lab.directory / f"to-{name}" / "film").read_bytes(), FILM)
        self.assertEqual(sending.wait(), 0, sending.output)
