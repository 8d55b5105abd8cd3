"""Codes between machines on one network, without discovery or server: ``make long WHICH=operate``."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence

from twisted.trial.unittest import SkipTest, SynchronousTestCase

from dmsg.apps.codes.stream import MAX_WRONG_GUESSES
from dmsg.apps.codes.words import Code
from dmsg.testing.bridges import BridgeLab
from dmsg.testing.namespaces import Running, available
from tests.testing.test_namespaces import DMSG, TWISTD

CODE = r"code: (\d+(?:-\w+)+)"
CONTENT = bytes(range(256)) * 4000
LIAR = """
# Answers every question for a code with a key and a port of its own, and takes part in the agreement with wrong words,
# or says nothing at all.
import sys
from twisted.internet import reactor
from twisted.internet.protocol import Factory, Protocol
from dmsg.apps.codes.stream import PORT, CodeFactory
from dmsg.apps.codes.words import Code
from dmsg.net.mdns.interfaces import list_interfaces
from dmsg.net.mdns.packets import parse_question
from dmsg.net.reactor import use_monotonic_clock
from dmsg.v2019.lan import answers, peer
from dmsg.v2019.lan.messages import is_for_codes
from base64 import b32decode
from dmsg.keys import PubKey

use_monotonic_clock(reactor)
kind, number = sys.argv[1], 5274

def anybody(name, nameplate):
    label = name[1].upper()
    print("asked", flush=True)
    return PubKey(b32decode(label + b"=" * (-len(label) % 8)))

answers.receiver_of = anybody
if kind == "silent":
    factory = Factory.forProtocol(Protocol)
else:
    factory = CodeFactory(reactor, Code.make(number))
liar = peer.LanPeer(reactor)
reactor.callWhenRunning(lambda: (liar.offer(number, factory, PORT), print("lies", flush=True)))
reactor.run()
"""


SNIFFER = """
# Writes each frame at one end of a cable to standard output, in hexadecimal.
import socket, sys
cable = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
# Room for all frames of the test (SO_RCVBUFFORCE), because they come faster than they are written.
cable.setsockopt(socket.SOL_SOCKET, 33, 1 << 26)
cable.bind((sys.argv[1], 0))
print("sniffs", flush=True)
while True:
    print(cable.recv(65535).hex(), flush=True)
"""


class LanCase(SynchronousTestCase):
    """Machines on bridges; there is nothing else."""

    networks: Mapping[str, Sequence[str]] = {"home": ("alice", "bob", "carol")}
    ipv4 = True

    def setUp(self) -> None:
        if problem := available():
            raise SkipTest(problem)
        self.lab = BridgeLab(self.networks, ipv4=self.ipv4)
        self.lab.__enter__()
        self.addCleanup(self.lab.__exit__)
        (self.lab.directory / "film").write_bytes(CONTENT)
        self.environment = {"DMSG_DISCOVERY": "", "DMSG_CONFIG": "none.toml"}

    def dmsg(self, host: str, *arguments: str) -> Running:
        return self.lab.run(host, *DMSG, *arguments, environment=self.environment)

    def sends(self, *arguments: str, host: str = "alice", lan: str = "only") -> tuple[Running, str]:
        sender = self.dmsg(host, "send", "--lan", lan, "--no-qr", *(arguments or ("film",)))
        return sender, sender.line(CODE)[1]

    def receives(self, code: str, *arguments: str, host: str = "bob", lan: str = "only") -> Running:
        return self.dmsg(host, "receive", "--lan", lan, code, "--yes", "--dir", f"at-{host}", *arguments)

    def check_arrived(self, *running: Running, host: str = "bob") -> None:
        for one in running:
            self.assertEqual(one.wait(), 0, one.output)
        self.assertEqual((self.lab.directory / f"at-{host}" / "film").read_bytes(), CONTENT)

    def sockets(self, host: str) -> str:
        """Ports that are open on a host."""
        listing = self.lab.run(host, "cat", "/proc/net/udp", "/proc/net/udp6", "/proc/net/tcp", "/proc/net/tcp6")
        listing.wait()
        return "\n".join(line for line in listing.output.splitlines() if "local_address" not in line)


class OneNetworkTests(LanCase):
    """Machines in one network."""

    def test_a_file_arrives_and_no_port_stays_open(self) -> None:
        sender, code = self.sends()
        self.assertIn(":14E9 ", self.sockets("alice"), "the sender waits for questions at port 5353")
        self.check_arrived(self.receives(code), sender)
        self.assertNotIn(":14E9 ", self.sockets("alice"))

    def test_a_directory_and_a_text_arrive(self) -> None:
        (self.lab.directory / "notes").mkdir()
        (self.lab.directory / "notes" / "one").write_text("first")
        sender, code = self.sends("notes", "film")
        self.check_arrived(self.receives(code), sender)
        self.assertEqual((self.lab.directory / "at-bob" / "notes" / "one").read_text(), "first")
        sender, code = self.sends("--text", "the door is open")
        receiver = self.receives(code)
        self.assertEqual((receiver.wait(), sender.wait()), (0, 0), receiver.output + sender.output)
        self.assertIn("the door is open", receiver.output)

    def guard(self, host: str, *rules: str) -> None:
        """Let a firewall on a host drop all packets but answers and those that rules accept."""
        accepted = "\n".join(("ct state established accept", "iif lo accept", *rules))
        chain = f"chain in {{\ntype filter hook input priority 0; policy drop;\n{accepted}\n}}"
        (self.lab.directory / "rules").write_text(f"flush ruleset\ntable inet guard {{\n{chain}\n}}\n")
        loading = self.lab.run(host, "nft", "-f", "rules")
        if loading.wait() and "Operation not permitted" in loading.output:
            raise SkipTest("nft may set no rules here")
        self.assertEqual((loading.wait(), loading.output), (0, ""))

    def test_firewalls_let_a_transfer_through_by_the_documented_rules(self) -> None:
        if shutil.which("nft") is None:
            raise SkipTest("nft is not installed")
        self.guard("alice", "udp dport 5353 accept", "tcp dport 32768-60999 accept")
        self.guard("bob")
        sender, code = self.sends()
        refused = self.receives(code, "--timeout", "4")
        self.assertEqual(refused.wait(), 3)
        self.assertIn("nobody on this network offers this code", refused.output)
        self.guard("bob", "udp sport 5353 ip saddr 10.0.0.0/8 accept")
        self.check_arrived(self.receives(code), sender)

    def test_the_receiver_may_be_first(self) -> None:
        """The receiver asks again and again, so the order in which two people press Enter does not matter."""
        sender, code = self.sends()
        sender.pause()
        receiver = self.receives(code)
        time.sleep(1.5)
        self.assertIsNone(receiver.process.poll(), receiver.output)
        sender.resume()
        self.check_arrived(receiver, sender)

    def test_two_codes_at_once(self) -> None:
        one, first = self.sends()
        two, second = self.sends("--text", "another", host="carol")
        text = self.receives(second)
        self.check_arrived(self.receives(first), one)
        self.assertEqual((text.wait(), two.wait()), (0, 0), text.output)
        self.assertIn("another", text.output)

    def test_one_machine_offers_two_codes_and_takes_one_itself(self) -> None:
        one, first = self.sends()
        two, second = self.sends("--text", "another")
        self.check_arrived(self.receives(first), one)
        text = self.receives(second, host="alice")
        self.assertEqual((text.wait(), two.wait()), (0, 0), text.output)
        self.assertIn("another", text.output)

    def test_what_the_network_sees(self) -> None:
        """The sender is silent before it is asked, and no packet has a name, a word or the number."""
        (self.lab.directory / "sniffer.py").write_text(SNIFFER)
        sniffer = self.lab.run("switch", sys.executable, "sniffer.py", "home-0")
        sniffer.line("sniffs")
        (self.lab.directory / "holiday-film.mkv").write_bytes(CONTENT)
        sender, code = self.sends("holiday-film.mkv", "film")
        time.sleep(1.0)
        self.assertEqual(self.mdns(sniffer.output), [])
        self.check_arrived(self.receives(code), sender)
        until = time.monotonic() + 20.0
        while len(sniffer.output) < 2 * 2 * len(CONTENT) and time.monotonic() < until:
            time.sleep(0.2)
        packets = self.mdns(sniffer.output)
        self.assertTrue(any(b"_dmsg-code" in packet for packet in packets))
        # Alice answers Bob alone: in addresses of groups the lowest bit of the first byte is set.
        self.assertTrue(all(not packet[0] & 1 for packet in packets if packet[6:12] == self.mac("alice")))
        whole = b"".join(bytes.fromhex(line) for line in sniffer.output.splitlines()[1:])
        self.assertGreater(len(whole), 2 * len(CONTENT))
        # Shorter strings, such as one word, can stand in encrypted data by chance.
        for secret in (code.encode(), code.partition("-")[2].encode(), b"holiday-film", CONTENT[:256]):
            self.assertNotIn(secret, whole)

    def mac(self, host: str) -> bytes:
        reading = self.lab.run(host, "cat", "/sys/class/net/home/address")
        reading.wait()
        return bytes.fromhex(reading.output.strip().replace(":", ""))

    @staticmethod
    def mdns(frames: str) -> list[bytes]:
        """Frames with UDP from or to port 5353."""
        found = []
        for line in frames.splitlines()[1:]:
            frame = bytes.fromhex(line)
            ports = {b"\x08\x00": frame[34:38], b"\x86\xdd": frame[54:58]}.get(frame[12:14], b"")
            is_udp = {b"\x08\x00": frame[23:24], b"\x86\xdd": frame[20:21]}.get(frame[12:14]) == b"\x11"
            if is_udp and (5353).to_bytes(2, "big") in (ports[:2], ports[2:]):
                found.append(frame)
        return found

    def test_one_code_for_two_receivers(self) -> None:
        sender, code = self.sends("--to-many", "--receivers", "2", "film")
        receivers = [self.receives(code, host=host) for host in ("bob", "carol")]
        self.check_arrived(*receivers, sender)
        self.assertEqual((self.lab.directory / "at-carol" / "film").read_bytes(), CONTENT)

    def test_nobody_offers_the_code(self) -> None:
        began = time.monotonic()
        receiver = self.receives("5274-guitar-alpha-juice", "--timeout", "3")
        self.assertEqual(receiver.wait(), 3, receiver.output)
        self.assertLess(time.monotonic() - began, 10)
        self.assertRegex(receiver.output, "nobody on this network offers this code.*--lan")

    def test_ctrl_c_on_both_sides(self) -> None:
        sender, _ = self.sends()
        receiver = self.receives("5274-guitar-alpha-juice")
        time.sleep(1.0)
        for one in (sender, receiver):
            one.process.send_signal(signal.SIGINT)
            self.assertEqual(one.wait(10), 130, one.output)
            self.assertNotIn("Traceback", one.output)
        self.assertNotIn(":14E9 ", self.sockets("alice"))

    def test_wrong_words_are_counted_and_end_the_code(self) -> None:
        sender, code = self.sends()
        for _ in range(MAX_WRONG_GUESSES):
            wrong = self.receives(str(Code.make(Code.parse(code).nameplate)), host="carol")
            self.assertEqual(wrong.wait(), 4, wrong.output)
        self.assertNotEqual(sender.wait(), 0)
        self.assertRegex(sender.output, "after 4 more wrong tries")
        self.assertRegex(sender.output, "wrong codes were tried 5 times")
        self.assertFalse((self.lab.directory / "at-carol" / "film").exists())

    def test_a_liar_who_answers_for_every_code(self) -> None:
        """The liar gets at most one wrong guess, and the sender's file still arrives."""
        (self.lab.directory / "liar.py").write_text(LIAR)
        for kind in ("guesses", "silent"):
            liar = self.lab.run("carol", sys.executable, "liar.py", kind, environment=self.environment)
            liar.line("lies")
            (self.lab.directory / "at-bob" / "film").unlink(missing_ok=True)
            sender, code = self.sends()
            sender.pause()  # So the liar is the first to answer.
            receiver = self.receives(code)
            liar.line("asked")
            sender.resume()
            self.check_arrived(receiver, sender)
            self.assertNotIn(code.partition("-")[2], liar.output)
            liar.kill()


class IPv6Tests(LanCase):
    """A network without IPv4."""

    ipv4 = False

    def test_a_file_arrives(self) -> None:
        sender, code = self.sends()
        self.check_arrived(self.receives(code), sender)


class SeveralNetworksTests(LanCase):
    """A machine in two networks, and one that joins later."""

    networks: Mapping[str, Sequence[str]] = {"office": ("alice", "carol"), "home": ("alice", "bob")}

    def test_the_code_is_offered_on_each_network(self) -> None:
        for host in ("carol", "bob"):
            sender, code = self.sends()
            self.check_arrived(self.receives(code, host=host), sender, host=host)

    def test_a_network_that_is_joined_later(self) -> None:
        for network in self.networks:
            self.lab.unplug(network, "alice")
        sender, code = self.sends()
        self.assertIn("this machine is in no network now", sender.output)
        receiver = self.receives(code, "--timeout", "30")
        time.sleep(1.0)
        self.lab.plug("home", "alice")
        self.check_arrived(receiver, sender)


class BothWaysTests(LanCase):
    """Machines that also reach discovery and a server, or only one of them does."""

    networks: Mapping[str, Sequence[str]] = {"home": ("alice", "bob"), "world": ("alice", "bob", "hub")}

    def setUp(self) -> None:
        super().setUp()
        address = self.lab.addresses["world", "hub"]
        hub = self.lab.run(
            "hub", *TWISTD, "dmsg-discovery", f"--listen=tcp:9090:interface={address}", "--store=memory:"
        )
        hub.line("listens on")
        url = f"http://{address}:9090"
        server = self.lab.run(
            "hub",
            *TWISTD,
            "dmsg-server",
            f"--listen=tcp:8080:interface={address}",
            "--key-file=server.key",
            "--create",
            f"--discovery={url}",
        )
        server.line("registered")
        self.server = server
        self.environment["DMSG_DISCOVERY"] = url

    def also(self, *arguments: str) -> tuple[Running, str]:
        return self.sends("--min-servers", "1", "film", *arguments, lan="also")

    def test_the_network_is_used_and_the_server_carries_nothing(self) -> None:
        sender, code = self.also()
        before = self._carried()
        self.check_arrived(self.receives(code, "--min-servers", "1", lan="also"), sender)
        self.assertLess(self._carried() - before, len(CONTENT) // 2)

    def _carried(self) -> int:
        """Bytes that left the hub."""
        found = self.lab.run("hub", "cat", "/sys/class/net/world/statistics/tx_bytes")
        found.wait()
        return int(found.output)

    def test_each_side_may_use_the_server_only(self) -> None:
        sender, code = self.also()
        self.check_arrived(self.receives(code, "--min-servers", "1", lan="off"), sender)
        (self.lab.directory / "at-bob" / "film").unlink()
        sender, code = self.sends("--min-servers", "1", "film", lan="off")
        self.check_arrived(self.receives(code, "--min-servers", "1", lan="also"), sender)

    def test_one_side_may_use_the_network_only(self) -> None:
        sender, code = self.also()
        self.check_arrived(self.receives(code, lan="only"), sender)

    def test_two_places_of_a_code_are_not_taken_by_one_receiver(self) -> None:
        sender = self.dmsg(
            "alice", "send", "--lan", "also", "--min-servers=1", "--no-qr", "--to-many", "--receivers=2", "film"
        )
        code = sender.line(CODE)[1]
        for directory in ("first", "second"):
            receiver = self.receives(code, "--min-servers", "1", "--dir", directory, lan="also")
            self.assertEqual(receiver.wait(), 0, receiver.output)
        self.assertEqual(sender.wait(), 0, sender.output)
        self.assertEqual(len([line for line in sender.output.splitlines() if line.startswith("sent ")]), 2)

    def test_without_a_server_the_code_works_on_the_network(self) -> None:
        """A sender that finds no server says so, and offers the code where it can."""
        self.server.kill()
        self.environment["DMSG_DISCOVERY"] = "http://127.0.0.1:9"
        sender = self.dmsg("alice", "send", "--lan", "also", "--no-qr", "film")
        code = sender.line(CODE, 40)[1]
        self.assertIn("only receivers on this network can use the code", sender.output)
        self.check_arrived(self.receives(code, lan="also"), sender)
