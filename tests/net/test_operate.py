"""A server process as its operator runs it: settings in a file, SIGHUP, lists, a hook."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import treq
from twisted.internet import reactor
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP4ServerEndpoint
from twisted.web.resource import Resource
from twisted.web.server import Site

from dmsg.cli.processes import start_twistd
from dmsg.errors import DmsgTimeout
from dmsg.keys import PubKey, SecKey
from dmsg.net.flush import TurnFlush
from dmsg.net.links.connect import LinkClientEndpoint
from dmsg.net.links.records import record_links
from dmsg.tap import messaging as messaging_tap, server as server_tap
from dmsg.v2019.client import Client
from dmsg.v2019.session import ClientSession
from tests.net.support import LOOPBACK, EntityCase
from tests.support import Accepting, asynchronous


def failregex() -> list[re.Pattern[str]]:
    """The expressions of the filter for fail2ban in the documentation, as fail2ban reads them."""
    page = (Path(__file__).parents[2] / "docs/howto/operate.md").read_text()
    block = page.partition("# /etc/fail2ban/filter.d/dmsg.conf")[2].partition("```")[0]
    lines = block.partition("failregex =")[2].partition("ignoreregex")[0].split("\n")
    return [re.compile(line.strip().replace("<HOST>", r"(?P<host>[0-9a-fA-F:.]+)")) for line in lines if line.strip()]


def lines(child: Any) -> list[str]:
    """Return the output lines of a process."""
    output: bytes = child._output
    return output.decode().splitlines()


class OperateTests(EntityCase):
    """A server process with real signals."""

    async def start_child(self, text: str) -> Any:
        """A server with these settings; the file may be changed."""
        self.url = await self.start_discovery()
        self.directory = Path(self.mktemp()).absolute()
        self.directory.mkdir()
        self.file = self.directory / "server.toml"
        self.file.write_text(f'listen = "{LOOPBACK}"\ndiscovery = "{self.url}"\nkey-file = "server.key"\n{text}')
        child = start_twistd(reactor, "dmsg-server", "--config=server.toml", "--create", directory=str(self.directory))
        self.addCleanup(self._end, child)
        await child.line("registered in discovery")
        return child

    @staticmethod
    def _end(child: Any) -> Any:
        if child.status is None:
            child.signal("KILL")
            return child.ended
        return None

    async def refused(self, key: SecKey) -> str:
        """Return the reason with which a client is refused."""
        client = Client(reactor, key, [self.url])
        client.startService()
        try:
            await client.when_online(3)
        except DmsgTimeout as error:
            return str(error)
        else:
            self.fail("it is online")
        finally:
            await client.stopService()

    @asynchronous
    async def test_lists_change_without_a_restart(self) -> None:
        """The lists change by SIGHUP and by the change of the file alone, also for existing connections."""
        alice, bob = SecKey.generate(), SecKey.generate()
        self.url = await self.start_discovery()
        self.directory = Path(self.mktemp()).absolute()
        self.directory.mkdir()
        (self.directory / "allow").write_text(f"{alice.public}\n")
        child = start_twistd(
            reactor,
            "dmsg-server",
            f"--listen={LOOPBACK}",
            f"--discovery={self.url}",
            "--key-file=server.key",
            "--create",
            "--allow=allow",
            directory=str(self.directory),
        )
        self.addCleanup(self._end, child)
        await child.line("registered in discovery")
        first = await self.start_client(self.url, key=alice)
        self.assertIn("the server does not admit this key", await self.refused(bob))
        (self.directory / "allow").write_text(f"{bob.public}\n")
        child.signal("HUP")
        await child.line("settings and lists were reloaded")
        await self.until(lambda: first.status == "searching")
        await self.start_client(self.url, key=bob)
        # The list is also read without a signal. A broken list is rejected.
        (self.directory / "allow").write_text("nonsense\n")
        await child.line("stays in use: allow, line 1")
        (self.directory / "allow").write_text(f"{bob.public}\n{alice.public}\n")
        await self.until(lambda: first.status == "online")

    @asynchronous
    async def test_settings_change_at_hangup(self) -> None:
        child = await self.start_child("max-transports = 100\n")
        alice, bob = await self.start_client(self.url), await self.start_client(self.url)
        bob.listen(Accepting())
        await alice.connect(bob.public_key, Accepting())
        self.file.write_text(self.file.read_text().replace("100", "1"))
        child.signal("HUP")
        await child.line("settings and lists were reloaded")
        with self.assertRaises(Exception) as caught:
            await alice.connect(bob.public_key, Accepting())
        self.assertIn("too many streams of this key", str(caught.exception))
        good = self.file.read_text()
        self.file.write_text("max-transports = nonsense\n")
        child.signal("HUP")
        await child.line("stay in use: server.toml")
        for line, what in (
            ('max-transports = "many"', "max-transports: 'many' is not a number"),
            ("max_per_pair = 0", "max-per-pair: 0 is not between"),
            ('admission-down = "perhaps"', "admission-down: the value must be"),
            ("no-such = 1", "there is no setting 'no-such'"),
        ):
            self.file.write_text(good + line.replace("max-transports", "\n# not this one = 1\nmax-transports"))
            if "max-transports" in line:
                self.file.write_text(good.replace("max-transports = 1", line))
            number = next(
                index for index, one in enumerate(self.file.read_text().splitlines(), 1) if one.startswith(line[:7])
            )
            child.signal("HUP")
            await child.line(f"stay in use: server.toml, line {number}: {what}")
        self.file.write_text(good + 'metrics = "tcp:0"\ndrain-timeout = 3\n')
        child.signal("HUP")
        await child.line("take effect at the next start: drain-timeout, metrics")

    async def dial(self, child: Any) -> Any:
        """Connect as a client does that has its entry from before."""
        found = await child.line(r"server (\w{66}) listens on .*port=(\d+)")
        turn, key, remote = TurnFlush(reactor), SecKey.generate(), PubKey.from_hex(found[1].decode())
        tcp = TCP4ClientEndpoint(reactor, "127.0.0.1", int(found[2]))
        endpoint = LinkClientEndpoint(reactor, tcp, record_links(reactor, turn, key, remote))
        session = await endpoint.connect(lambda remote: ClientSession(reactor, turn, key.public, remote))
        return await session.established

    @asynchronous
    async def test_a_full_server_says_so(self) -> None:
        """The client is informed, the log has one line, and /health shows it."""
        child = await self.start_child('max-connections = 1\nmetrics = "tcp:0:interface=127.0.0.1"\n')
        metrics = await child.line(r"/metrics and /health are at .*port=(\d+)")
        base = f"http://127.0.0.1:{metrics[1].decode()}"
        response = await treq.get(f"{base}/health", persistent=False)
        self.assertEqual((response.code, (await response.json())["status"]), (200, "ok"))
        first = await self.start_client(self.url)
        for _ in range(3):
            with self.assertRaises(Exception) as caught:
                await self.dial(child)
            self.assertIn("the server is full", str(caught.exception))
        response = await treq.get(f"{base}/health", persistent=False)
        self.assertEqual((response.code, (await response.json())["status"]), (503, "full"))
        text = await (await treq.get(f"{base}/metrics", persistent=False)).text()
        for wanted in (
            'dmsg_server_addresses{connections="1"} 1.0',
            "dmsg_server_queue_bytes 0.0",
            "dmsg_server_relay_seconds_count",
            "process_resident_memory_bytes",
            "process_cpu_seconds_total",
            "process_open_fds",
        ):
            self.assertIn(wanted, text)
        await first.stopService()
        await child.line("the server accepts clients again")
        said = [line for line in lines(child) if "] the server is full" in line]
        self.assertEqual(len(said), 1, said)

    @asynchronous
    async def test_strangers_are_named_summed_up_and_banned(self) -> None:
        """The filter in the documentation matches the log lines."""
        child = await self.start_child("max-per-address = 3\n")
        port = int((await child.line(r"listens on .*port=(\d+)"))[1])
        garbage = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
        for connection in garbage:
            connection.sendall(b"\x00\x31no handshake of ours" * 10)
        await child.line("stranger 127.0.0.1: handshake_failed")
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
        await child.line("stranger 127.0.0.1: too_many_from_address")
        for connection in garbage + silent:
            connection.close()
        await child.line(r"stranger 127.0.0.1: too_many_from_address, \d+ more in 10 s")
        said = [line for line in lines(child) if "stranger" in line]
        self.assertLess(len(said), 8, said)
        expressions = failregex()
        for line in lines(child):
            # Many clients may share an address. So an address is banned only for failures that no proved key accounts
            # for.
            expected = line in said and "handshake_failed" in line
            self.assertIs(any(one.search(line) for one in expressions), expected, line)

    @asynchronous
    async def test_a_wrong_public_address_is_noticed(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as nobody:
            port = nobody.getsockname()[1]
        child = await self.start_child(f'public-address = "127.0.0.1:{port}"\n')
        await child.line(f"cannot connect to its own public address 127.0.0.1:{port}")

    @asynchronous
    async def test_the_address_of_another_server_is_noticed(self) -> None:
        other = await self.start_server()
        port = other.ports[0].getHost().port
        child = await self.start_child(f'public-address = "127.0.0.1:{port}"\n')
        await child.line(f"cannot connect to its own public address 127.0.0.1:{port}")

    @asynchronous
    async def test_the_right_public_address(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        for tap in (server_tap, messaging_tap):
            url = await self.start_discovery()
            server = await self.start_server(
                f"--listen=tcp:{port}:interface=127.0.0.1",
                f"--discovery={url}",
                f"--public-address=127.0.0.1:{port}",
                tap=tap,
            )
            await self.until(lambda server=server: server.reachable is not None)
            self.assertTrue(server.reachable)
            await server.stop_for_test()

    @asynchronous
    async def test_a_hook_over_http(self) -> None:
        asked: list[bytes] = []

        class Answers(Resource):
            isLeaf = True

            def render_POST(self, request: Any) -> bytes:
                asked.append(request.content.read())
                request.setResponseCode(200 if alice.public.hex().encode() in asked[-1] else 403)
                return b""

        alice = SecKey.generate()
        site = Site(Answers())
        site.noisy = False
        port: Any = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(site)
        self.addCleanup(lambda: port.stopListening())
        await self.start_child(f'admission-hook = "http://127.0.0.1:{port.getHost().port}/"\n')
        client = await self.start_client(self.url, key=alice)
        self.assertIn("the server does not admit this key", await self.refused(SecKey.generate()))
        self.assertEqual(client.status, "online")
        self.assertGreaterEqual(len(asked), 2)
