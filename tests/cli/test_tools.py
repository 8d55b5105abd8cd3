"""The tools over a real network: forward, expose, socks, serve, curl, nc, cp, iperf, trace, name."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import Any, cast
from unittest import skipUnless

from twisted.internet import reactor, threads
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.interfaces import IHalfCloseableProtocol
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.utils import getProcessOutputAndValue
from zope.interface import directlyProvides

from dmsg.apps.partial_files import PART_SUFFIX, part_name, part_of
from dmsg.apps.paths import path_inside
from dmsg.apps.transfer import TransferError
from dmsg.cli.processes import start_twistd
from dmsg.clients.address_book import AddressBook, UnknownName
from dmsg.keys import SecKey, write_key_file
from tests.apps.test_parcels import described, let_go, planted
from tests.cli.test_commands import Command, CommandCase
from tests.support import asynchronous

SSHD = shutil.which("sshd")


class Shout(Protocol):
    """Gives back what it gets, in capitals."""

    def dataReceived(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(data.upper())


def talk(port: int, data: bytes, answer: int) -> bytes:
    """Send to a local port and read ``answer`` bytes; in a thread."""
    with socket.create_connection(("127.0.0.1", port), 20) as connection:
        connection.sendall(data)
        got = b""
        with contextlib.suppress(ConnectionResetError):
            while len(got) < answer and (more := connection.recv(65536)):
                got += more
        return got


def work(child: Any) -> int:
    """Ticks of CPU that a process has used."""
    fields = Path(f"/proc/{child.transport.pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


class AnswersAtTheEnd(Protocol):
    """Answers with the size of what came, when no more comes; then it closes."""

    def __init__(self) -> None:
        self.size = 0

    def dataReceived(self, data: bytes) -> None:
        self.size += len(data)

    def readConnectionLost(self) -> None:
        assert self.transport is not None
        self.transport.write(b"got %d" % self.size)
        self.transport.loseConnection()

    def writeConnectionLost(self) -> None:
        """Record that the other end has closed."""


class EndsFirst(AnswersAtTheEnd):
    """Protocol that sends its data and its end at once, and continues to read."""

    def connectionMade(self) -> None:
        self.transport.write(b"hello")  # type: ignore[union-attr]
        self.transport.loseWriteConnection()  # type: ignore[union-attr]

    def readConnectionLost(self) -> None:
        self.transport.loseConnection()  # type: ignore[union-attr]


def half_close(port: int, data: bytes, first: bytes = b"") -> bytes:
    """Send to a local port, end that, and read all of the answer; in a thread.

    :param first: read before anything is sent.
    """
    with socket.create_connection(("127.0.0.1", port), 20) as connection:
        got = b""
        while len(got) < len(first):
            got += connection.recv(len(first) - len(got))
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while more := connection.recv(65536):
            got += more
        return got


class ToolCase(CommandCase):
    """A network, and a key whose name is alice."""

    async def network(self) -> None:
        self.url = await self.start_discovery()
        await self.start_server(f"--discovery={self.url}")
        await self.until_listed(self.url, 1)
        self.key = SecKey.generate()
        write_key_file(self.directory / "alice.key", self.key)
        self.environment = {"DMSG_DISCOVERY": self.url, "DMSG_NAMES": "names"}
        status, _, err = await self.run_command("name", "add", "alice", self.key.public.hex(), **self.environment)
        self.assertEqual((status, err), (0, ""))

    def tool(self, *arguments: str) -> Command:
        return self.start(*arguments, **self.environment)

    async def said(self, command: Command, pattern: str) -> re.Match[str]:
        def look() -> Any:
            text = (command.out + command.err).decode()
            if command.ended.called and not re.search(pattern, text):
                self.fail(f"it ended: {text}")
            return re.search(pattern, text)

        return await self.until(look)

    async def shouting(self) -> int:
        """The port of a TCP server."""
        port: Any = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(Factory.forProtocol(Shout))
        self.addCleanup(port.stopListening)
        number: int = port.getHost().port
        return number


class ForwardTests(ToolCase):
    """TCP over dmsg."""

    @asynchronous
    async def test_expose_forward_and_socks_carry_tcp(self) -> None:
        await self.network()
        shouting = await self.shouting()
        exposing = self.tool("expose", str(shouting), "--port", "7", "-k", "alice.key", "--create")
        await self.said(exposing, "leads to 127.0.0.1")
        forwarding = self.tool("forward", "0", "alice:7")
        local = int((await self.said(forwarding, r"127\.0\.0\.1:(\d+) leads to"))[1])
        big = b"x" * 300_000
        for data in (b"hello", big):
            self.assertEqual(await threads.deferToThread(talk, local, data, len(data)), data.upper())
        proxy = self.tool("socks", "--listen", "0")
        port = int((await self.said(proxy, r"SOCKS5 at 127\.0\.0\.1:(\d+)"))[1])
        for host in (b"alice.dmsg", self.key.public.hex().encode() + b".dmsg"):
            request = b"\5\1\0" + b"\5\1\0\3" + bytes((len(host),)) + host + b"\0\7" + b"hi"
            answer = await threads.deferToThread(talk, port, request, 14)
            self.assertEqual(answer, b"\5\0" + b"\5\0\0\1" + bytes(6) + b"HI")
        for host, number, code in ((b"example.org", 7, 2), (b"nobody.dmsg", 7, 4), (b"alice.dmsg", 9, 5)):
            request = b"\5\1\0" + b"\5\1\0\3" + bytes((len(host),)) + host + number.to_bytes(2, "big")
            answer = await threads.deferToThread(talk, port, request, 12)
            self.assertEqual(answer[3], code, host)
        self.assertEqual(await threads.deferToThread(talk, port, b"GET / HTTP/1.1\r\n\r\n", 1), b"")
        self.assertEqual(await threads.deferToThread(talk, port, b"\5\1\2", 2), b"\5\xff")

    @asynchronous
    async def test_a_target_that_refuses_is_named(self) -> None:
        await self.network()
        closed = socket.create_server(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        closed.close()
        exposing = self.tool("expose", str(port), "--port", "7", "-k", "alice.key", "--create")
        await self.said(exposing, "leads to 127.0.0.1")
        forwarding = self.tool("forward", "0", "alice:7")
        local = int((await self.said(forwarding, r"127\.0\.0\.1:(\d+) leads to"))[1])
        self.assertEqual(await threads.deferToThread(talk, local, b"hi", 2), b"")
        await self.said(exposing, f"dmsg: cannot connect to 127.0.0.1:{port}: ")

    @asynchronous
    async def test_a_peer_that_is_away_is_named(self) -> None:
        await self.network()
        exposing = self.tool("expose", str(await self.shouting()), "--port", "7", "-k", "alice.key", "--create")
        await self.said(exposing, "leads to 127.0.0.1")
        forwarding = self.tool("forward", "0", "alice:7")
        local = int((await self.said(forwarding, r"127\.0\.0\.1:(\d+) leads to"))[1])
        waiting = socket.create_connection(("127.0.0.1", local))
        self.addCleanup(waiting.close)
        waiting.sendall(b"hi")
        self.assertEqual(await threads.deferToThread(waiting.recv, 2), b"HI")
        exposing.transport.signalProcess("KILL")  # type: ignore[union-attr]
        await self.said(forwarding, "dmsg: alice is away; its connections wait for it until")
        # The new process has the same key, but does not know the connections of the killed one.
        again = self.tool("expose", str(await self.shouting()), "--port", "7", "-k", "alice.key")
        await self.said(again, "leads to 127.0.0.1")
        newer = socket.create_connection(("127.0.0.1", local))
        self.addCleanup(newer.close)
        newer.sendall(b"hi")
        self.assertEqual(await threads.deferToThread(newer.recv, 2), b"HI")
        await self.said(forwarding, "dmsg: alice is back; the connections that waited for it have ended\n")
        self.assertNotIn(b"did not come back", forwarding.err)
        again.transport.signalProcess("KILL")  # type: ignore[union-attr]
        await self.said(forwarding, r"(?s)is away.*is away")
        third = self.tool("expose", str(await self.shouting()), "--port", "7", "-k", "alice.key")
        await self.said(third, "leads to 127.0.0.1")
        await self.said(forwarding, "dmsg: the connections that waited for alice have ended\n")

    @asynchronous
    async def test_each_direction_of_a_forward_can_end_on_its_own(self) -> None:
        """Request, end of data, answer; and a service that ends first and reads on."""
        await self.network()
        built: list[Any] = []
        for number, kind in ((7, AnswersAtTheEnd), (8, EndsFirst)):
            factory = Factory()

            def build(kind: Any = kind) -> Any:
                protocol = kind()
                directlyProvides(protocol, IHalfCloseableProtocol)
                built.append(protocol)
                return protocol

            factory.protocol = build
            service: Any = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(factory)
            self.addCleanup(service.stopListening)
            key = f"{number}.key"
            write_key_file(self.directory / key, SecKey.from_seed(key.encode()))
            exposing = self.tool("expose", str(service.getHost().port), "--port", str(number), "-k", key)
            await self.said(exposing, "leads to 127.0.0.1")
        data = b"x" * 200_000
        ports = {}
        for number in (7, 8):
            to = f"{SecKey.from_seed(f'{number}.key'.encode()).public.hex()}:{number}"
            forwarding = self.tool("forward", "0", to)
            ports[number] = int((await self.said(forwarding, r"127\.0\.0\.1:(\d+) leads to"))[1])
        self.assertEqual(await threads.deferToThread(half_close, ports[7], data), b"got 200000")
        self.assertEqual(await threads.deferToThread(half_close, ports[8], data, b"hello"), b"hello")
        await self.until(lambda: built[-1].size == len(data))
        piping = self.tool("nc", SecKey.from_seed(b"7.key").public.hex() + ":7")
        piping.transport.write(data)  # type: ignore[union-attr]
        piping.transport.closeStdin()  # type: ignore[union-attr]
        self.assertEqual((await piping.ended, piping.out), (0, b"got 200000"))

    @asynchronous
    async def test_peers_that_are_not_allowed_are_refused(self) -> None:
        await self.network()
        shouting = await self.shouting()
        other = SecKey.generate()
        write_key_file(self.directory / "friend.key", other)
        exposing = self.tool(
            "expose", str(shouting), "-p", "7", "-k", "alice.key", "--create", "--allow", other.public.hex()
        )
        await self.said(exposing, "leads to")
        for options, expected in ((("-k", "friend.key", "--create"), b"HI"), ((), b"")):
            forwarding = self.tool("forward", "0", "alice:7", *options)
            local = int((await self.said(forwarding, r"127\.0\.0\.1:(\d+) leads to"))[1])
            self.assertEqual(await threads.deferToThread(talk, local, b"hi", 2), expected)


class UnreadTests(ToolCase):
    """Commands whose standard output is a pipe that nobody reads."""

    @asynchronous
    async def test_one_signal_ends_a_command_that_waits_in_a_write(self) -> None:
        await self.network()
        listening = self.tool("nc", "-l", "7", "-k", "alice.key", "--create")
        await self.said(listening, "listening")
        pings = "ping", "alice", "--count=100000", "--interval=0", "--min-servers=1"
        for name, status in (("INT", 130), ("TERM", 143)):
            pinging, is_full = self.start_with_full_pipe(*pings, **self.environment)
            await self.until(is_full)
            pinging.transport.signalProcess(name)  # type: ignore[union-attr]
            self.assertEqual((await pinging.ended, pinging.err), (status, b""))

    @asynchronous
    async def test_one_ctrl_c_ends_curl_whose_output_is_not_read(self) -> None:
        await self.network()
        public = self.directory / "public"
        public.mkdir()
        content = os.urandom(1_000_000)
        (public / "film").write_bytes(content)
        serving = self.tool("serve", "public", "-k", "alice.key", "--create")
        await self.said(serving, "is at dmsg://")
        url = "dmsg://alice/film"
        curling, is_full = self.start_with_full_pipe("curl", url, **self.environment)
        await self.until(is_full)
        curling.transport.signalProcess("INT")  # type: ignore[union-attr]
        self.assertEqual((await curling.ended, curling.err), (130, b""))
        curling = self.tool("curl", url, "--write-out", "%{size_download}")
        self.assertEqual((await curling.ended, curling.out), (0, content + b"1000000"))
        with Path("/dev/full").open("wb") as full:
            curling = self.start("curl", url, stdout=full.fileno(), **self.environment)
        said = b"dmsg: standard output: No space left on device\n"
        self.assertEqual((await curling.ended, curling.err), (1, said))


class WebTests(ToolCase):
    """HTTP over dmsg."""

    @asynchronous
    async def test_serve_and_curl(self) -> None:
        await self.network()
        public = self.directory / "public"
        public.mkdir()
        content = b"text" + os.urandom(499_996)
        (public / "film").write_bytes(content)
        (self.directory / "secret").write_text("not for you")
        (public / "link").symlink_to(self.directory.absolute() / "secret")
        serving = self.tool("serve", "public", "-k", "alice.key", "--create")
        await self.said(serving, "is at dmsg://")
        curl = self.run_command
        self.assertEqual(
            (await self.fetch("dmsg://alice/film", "-o", "copy"), (self.directory / "copy").read_bytes()), (0, content)
        )
        (self.directory / "copy").write_bytes(content[:123_456])
        self.assertEqual(await self.fetch("dmsg://alice/film", "-o", "copy", "-C", "-"), 0)
        self.assertEqual((self.directory / "copy").read_bytes(), content)
        status, _, err = await curl("curl", "dmsg://alice/film", "-o", "copy", "-C", "-", **self.environment)
        self.assertEqual(status, 0, "it is whole")
        self.assertIn("complete already", err)
        status, out, _ = await curl("curl", "-i", "-r", "0-3", f"dmsg://{self.key.public}:80/film", **self.environment)
        self.assertEqual(status, 0)
        self.assertIn("206", out.splitlines()[0])
        # As in curl, - stands for standard output.
        status, out, err = await curl(
            "curl", "-r", "0-3", f"dmsg://{self.key.public}:80/film", "-o", "-", **self.environment
        )
        self.assertEqual((status, out, err), (0, "text", ""))
        self.assertFalse((self.directory / "-").exists())
        status, out, _ = await curl("curl", "dmsg://alice/", **self.environment)
        self.assertIn("film", out)
        (public / "a b").mkdir()
        (public / "a b" / "\u00fc b.txt").write_text("as it is typed")
        status, out, err = await curl("curl", "dmsg://alice/a b/\u00fc b.txt", **self.environment)
        self.assertEqual((status, out), (0, "as it is typed"), err)
        for path in ("link", "../secret", "%2e%2e/secret", "nothing"):
            status, out, err = await curl("curl", "--fail", f"dmsg://alice/{path}", **self.environment)
            self.assertEqual((status, out), (22, ""), path)
        for url, text, expected in (
            ("http://x/", "not a URL", 2),
            ("dmsg://nobody/", "nor a name", 2),
            ("dmsg://alice:x/", "not a URL", 2),
        ):
            status, out, err = await curl("curl", url, **self.environment)
            self.assertEqual(status, expected)
            self.assertIn(text, err)
        self.assertRegex(serving.out.decode(), r"[a-z2-7]{8} GET /film 206")
        os.mkfifo(self.directory / "pipe")
        status, _, err = await curl("curl", "dmsg://alice/film", "-o", "pipe", **self.environment)
        self.assertEqual((status, err.splitlines()[-1]), (1, "dmsg: pipe: no program reads this pipe"))
        for path in ("film", "a b/\u00fc b.txt"):  # The second is written only when the file is closed.
            (self.directory / "full").unlink(missing_ok=True)
            (self.directory / "full").symlink_to("/dev/full")
            status, _, err = await curl("curl", f"dmsg://alice/{path}", "-o", "full", **self.environment)
            self.assertEqual((status, err.splitlines()[-1]), (1, "dmsg: full: No space left on device"))

    async def fetch(self, *arguments: str) -> int:
        status, _, err = await self.run_command("curl", *arguments, **self.environment)
        return status


class PipeTests(ToolCase):
    """``dmsg nc`` by hand and under ssh."""

    @asynchronous
    async def test_nc_connects_standard_input_and_output(self) -> None:
        await self.network()
        listening = self.tool("nc", "-l", "7", "-k", "alice.key", "--create")
        await self.said(listening, "listening: ")
        calling = self.tool("nc", "alice:7")
        await self.said(calling, "connected: ")
        calling.transport.write(b"over there")  # type: ignore[union-attr]
        await self.until(lambda: listening.out == b"over there")
        calling.transport.closeStdin()  # type: ignore[union-attr]
        listening.transport.closeStdin()  # type: ignore[union-attr]  # it may still have something to say
        self.assertEqual((await calling.ended, await listening.ended), (0, 0))
        status, _, err = await self.run_command("nc", **self.environment)
        self.assertEqual(status, 2)

    @skipUnless(SSHD and shutil.which("ssh") and shutil.which("scp"), "needs the OpenSSH client and server")
    @asynchronous
    async def test_ssh_and_scp_run_over_nc(self) -> None:
        """OpenSSH with ``dmsg nc`` as its ProxyCommand, an sshd of our own behind ``dmsg expose``."""
        await self.network()
        here = self.directory.absolute()
        for name in ("host", "user"):
            await getProcessOutputAndValue("ssh-keygen", ["-q", "-t", "ed25519", "-N", "", "-f", str(here / name)])
        shutil.copy(here / "user.pub", here / "authorized")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        (here / "sshd_config").write_text(
            f"Port {port}\nListenAddress 127.0.0.1\nHostKey {here}/host\nAuthorizedKeysFile {here}/authorized\n"
            f"PidFile none\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\n"
            f"Subsystem sftp internal-sftp\n"
        )
        if os.geteuid() == 0:
            os.makedirs("/run/sshd", exist_ok=True)  # sshd drops its privileges in this directory.
        daemon = Command()
        process = reactor.spawnProcess(
            daemon, str(SSHD), [str(SSHD), "-D", "-e", "-f", str(here / "sshd_config")], env=os.environ
        )
        self.addCleanup(lambda: process.signalProcess("KILL") or daemon.ended.addBoth(lambda _: None))
        await self.said(daemon, "Server listening")
        exposing = self.tool("expose", str(port), "-p", "22", "-k", "alice.key", "--create")
        await self.said(exposing, "leads to")
        proxy = f"{sys.executable} -c 'from dmsg.cli.entry import entry; entry()' nc %h:22"
        options = []
        for option in (
            f"ProxyCommand={proxy}",
            f"IdentityFile={here}/user",
            "StrictHostKeyChecking=no",
            f"UserKnownHostsFile={here}/known",
            "IdentitiesOnly=yes",
            "LogLevel=ERROR",
        ):
            options += ["-o", option]
        environment = {**os.environ, **self.environment, "DMSG_NAMES": str(here / "names")}
        out, err, status = await getProcessOutputAndValue("ssh", [*options, "alice", "echo $((6*7))"], env=environment)
        self.assertEqual((out, status), (b"42\n", 0), err)
        (here / "film").write_bytes(os.urandom(2_000_000))
        out, err, status = await getProcessOutputAndValue(
            "scp", [*options, str(here / "film"), f"alice:{here}/copy"], env=environment
        )
        self.assertEqual(status, 0, err)
        self.assertEqual((here / "copy").read_bytes(), (here / "film").read_bytes())


class TreeTests(ToolCase):
    """``dmsg cp -r``."""

    @asynchronous
    async def test_a_tree_is_copied_there_and_back(self) -> None:
        await self.network()
        for name in ("shared", "back"):
            (self.directory / name).mkdir()
        self.addCleanup(let_go, self.directory)
        tree = planted(self.directory)
        listening = self.tool("cp", "-l", "shared", "--writable", "--anyone", "-k", "alice.key", "--create")
        await self.said(listening, "is at")
        status, out, err = await self.run_command("cp", "-r", "tree", "alice:", **self.environment)
        self.assertEqual(status, 0, err)
        self.assertRegex(out, r"^tree: \d+\.\d MB in ")
        status, out, err = await self.run_command("cp", "-r", "tree/", "alice:deep/er/", "--json", **self.environment)
        self.assertEqual((status, json.loads(out)["copied"]), (0, "tree"), err)
        status, _, err = await self.run_command("cp", "-r", "alice:deep/er/tree", "back", **self.environment)
        self.assertEqual(status, 0, err)
        for copy in ("shared/tree", "shared/deep/er/tree", "back/tree"):
            self.assertEqual(described(self.directory / copy), described(tree), copy)
        status, _, err = await self.run_command("cp", "-r", "tree", "alice:", **self.environment)
        self.assertEqual(status, 4)
        self.assertIn("tree exists already", err)
        self.assertIn(b"tree, 3.", listening.out)

    @asynchronous
    async def test_a_tree_copy_resumes_with_the_next_listener(self) -> None:
        """The copy continues with the next listener, at the byte where it was."""
        await self.network()
        (self.directory / "shared").mkdir()
        self.addCleanup(let_go, self.directory)
        tree = planted(self.directory)
        (tree / "plain" / "large").write_bytes(os.urandom(1_000_000) * 80)
        options = ("cp", "-l", "shared", "--writable", "--anyone", "-k", "alice.key", "--create")
        listening = self.tool(*options)
        await self.said(listening, "is at")
        copying = self.tool("cp", "-r", "tree", "alice:", "--resume=1")
        part = self.directory / "shared" / part_name("tree") / "plain" / "large"
        await self.until(lambda: part.exists() and part.stat().st_size > 1_000_000)
        transport: Any = listening.transport
        transport.signalProcess("KILL")
        await listening.ended
        listening = self.tool(*options)
        self.assertEqual(await copying.ended, 0, copying.err)
        self.assertEqual(described(self.directory / "shared" / "tree"), described(tree))
        moved = float(re.search(rb"tree: (\d+\.\d) MB", copying.out)[1])  # type: ignore[index]
        self.assertLess(moved, 79 + 4)

    @asynchronous
    async def test_two_copies_to_one_name_do_not_end_each_other(self) -> None:
        """A directory and a file, from two connections: the one that comes second does not end the first."""
        await self.network()
        for name in ("shared", "one/film", "two"):
            (self.directory / name).mkdir(parents=True)
        large = os.urandom(1_000_000) * 24
        (self.directory / "one" / "film" / "large").write_bytes(large)
        (self.directory / "two" / "film").write_bytes(large)
        write_key_file(self.directory / "again.key", SecKey.generate())
        listening = self.tool("cp", "-l", "shared", "--writable", "--anyone", "-k", "alice.key")
        await self.said(listening, "is at")
        part = self.directory / "shared" / part_name("film")
        for first, second, begun in (
            (("-r", "one/film"), ("two/film",), part / "large"),
            (("two/film",), ("-r", "one/film"), part),
        ):
            copying = self.tool("cp", *first, "alice:")
            await self.until(lambda begun=begun: begun.exists() and begun.stat().st_size > 1_000_000)
            copying.transport.signalProcess("STOP")  # type: ignore[union-attr]
            # Another key belongs to another person.
            status, _, err = await self.run_command(
                "cp", *second, "alice:", "--retry=0", "-k", "again.key", **self.environment
            )
            self.assertEqual(status, 5, err)
            self.assertIn("film is being received from another connection", err)
            copying.transport.signalProcess(signal.SIGCONT)  # type: ignore[union-attr]
            self.assertEqual(await copying.ended, 0, copying.err)
            there = self.directory / "shared" / "film"
            self.assertEqual((there / "large" if there.is_dir() else there).read_bytes(), large)
            shutil.rmtree(there) if there.is_dir() else there.unlink()
            self.assertEqual(list((self.directory / "shared").iterdir()), [])

    @asynchronous
    async def test_an_older_listener_is_reported_without_a_hang(self) -> None:
        """The listener answers that it does not know the request; the command ends."""
        await self.network()
        (self.directory / "shared").mkdir()
        self.addCleanup(let_go, self.directory)
        planted(self.directory)
        listening = self.tool("cp", "-l", "shared", "-k", "alice.key", "--create")
        await self.said(listening, "is at")
        status, _, err = await self.run_command("cp", "-r", "tree", "alice:", **self.environment)
        self.assertEqual(status, 4)
        self.assertIn("this peer accepts no files", err)


class CopyTests(ToolCase):
    """``dmsg cp``."""

    @asynchronous
    async def test_a_file_is_copied_there_and_back(self) -> None:
        await self.network()
        (self.directory / "shared").mkdir()
        content = os.urandom(1_000_000)
        (self.directory / "film").write_bytes(content)
        (self.directory / "empty").write_bytes(b"")
        (self.directory / "other").write_bytes(bytes(1_000_000))
        listening = self.tool("cp", "-l", "shared", "--writable", "--anyone", "-k", "alice.key", "--create")
        await self.said(listening, "is at")
        status, out, err = await self.run_command("cp", "film", "empty", "alice:sub/", **self.environment)
        self.assertEqual(status, 0, err)
        self.assertIn(hashlib.sha256(content).hexdigest(), out)
        self.assertEqual((self.directory / "shared/sub/film").read_bytes(), content)
        self.assertEqual((self.directory / "shared/sub/empty").read_bytes(), b"")
        status, out, err = await self.run_command("cp", "film", "alice:sub/", **self.environment)
        self.assertEqual((status, out.split(" in ")[0], err), (0, "film: 0 B", ""), "it is there already, and the same")
        status, _, err = await self.run_command("cp", "alice:sub/film", "back", **self.environment)
        self.assertEqual((status, (self.directory / "back").read_bytes()), (0, content))
        for arguments, text in (
            (("-r", "shared", "alice:sub/empty"), "a target that ends in : or /"),
            (("-r", "alice:nothing", "."), "refused by the other side: there is no file nothing"),
            (("-r", "alice:", "."), "names no file and no directory"),
            (("film", "shared/sub/film", "alice:"), "two sources have this name"),
            (("alice:film", "alice:sub/film", "."), "two sources have this name"),
            (("-r", "alice:sub", "nowhere"), "no such directory"),
            (("-r", "alice:../shared", "."), "leads out"),
            (("-r", "shared", "alice:../"), "leads out"),
            (("film", "alice:sub/empty"), "exists already"),
            (("other", "alice:sub/film"), "exists already"),
            (("film", "alice:../film"), "leads out"),
            (("alice:../alice.key", "x"), "leads out"),
            (("alice:nothing", "x"), "no file"),
            (("film", "back"), "at a peer"),
            (("nothing", "alice:"), "nothing: No such file or directory"),
            (("alice:.", "x"), "names no file"),
            (("alice:film", "nowhere/"), "no such directory"),
            (("alice:film", "nowhere/x"), "nowhere: there is no such directory"),
            ((".", "alice:"), ".: is a directory; use -r to copy it"),
            (("film", "bob:"), "nor a name"),
        ):
            status, _, err = await self.run_command("cp", *arguments, **self.environment)
            self.assertIn(text, err)
            # A malformed name is a usage error. An error that the other side reports is a refusal.
            refused = "by the other side" in err or "the other side gave up" in err
            wrong = text in ("nor a name", "at a peer")
            self.assertEqual(status, 2 if wrong else 4 if refused else 1, arguments)
        status, out, err = await self.run_command("cp", "-r", "alice:sub/film", ".", **self.environment)
        self.assertEqual((status, (self.directory / "film").read_bytes()), (0, content), err)

    @asynchronous
    async def test_copies_preserve_modes_and_times(self) -> None:
        """A user who could not read a file cannot read its copy."""
        await self.network()
        there = self.directory / "shared"
        there.mkdir()
        private, script = self.directory / "private", self.directory / "script"
        for path, mode, at in ((private, 0o600, 10**18), (script, 0o755, 981173106 * 10**9)):
            path.write_bytes(b"x")
            path.chmod(mode)
            os.utime(path, ns=(at, at))
        await self.said(
            self.tool("cp", "-l", "shared", "--writable", "--anyone", "-k", "alice.key", "--create"), "is at"
        )
        await self.run_command("cp", "private", "script", "alice:", **self.environment)
        (self.directory / "back").mkdir()
        await self.run_command("cp", "alice:private", "alice:script", "back", **self.environment)
        for one in (private, script):
            for copy in (there / one.name, self.directory / "back" / one.name):
                self.assertEqual(copy.stat().st_mode, one.stat().st_mode, copy)
                self.assertEqual(copy.stat().st_mtime_ns, one.stat().st_mtime_ns, copy)

    @asynchronous
    async def test_a_part_is_private_and_replaces_another_kind(self) -> None:
        """The part belongs to this user alone, and a file of another kind with its name is replaced; a long name has a
        part, too.
        """
        await self.network()
        there = self.directory / "shared"
        there.mkdir()
        long = "n" * 250
        (self.directory / long).write_bytes(b"x")
        (self.directory / "film").write_bytes(os.urandom(30_000_000))
        (self.directory / "film").chmod(0o600)
        for place in (there, self.directory):
            part = part_of(place / "film")
            (part / "inside").mkdir(parents=True)
        listening = self.tool("cp", "-l", "shared", "--writable", "--anyone", "-k", "alice.key", "--create")
        await self.said(listening, "is at")
        copying = self.tool("cp", "film", "alice:")
        part = part_of(there / "film")
        await self.until(lambda: part.is_file() and part.stat().st_size > 100_000 or (there / "film").exists())
        found = part if part.exists() else there / "film"
        self.assertEqual(found.stat().st_mode & 0o777, 0o600)
        self.assertEqual(await copying.ended, 0, copying.err)
        (self.directory / "film").unlink()
        for copy in (("alice:film", "film"), (long, "alice:"), (f"alice:{long}", "back")):
            status, _, err = await self.run_command("cp", *copy, **self.environment)
            self.assertEqual((status, err), (0, ""), copy)
        self.assertFalse(part_of(self.directory / "film").exists())

    @asynchronous
    async def test_devices_and_pipes_at_the_target_are_not_replaced(self) -> None:
        """Devices and pipes are not replaced, and links are followed. The new file grants no new read permission."""
        await self.network()
        (self.directory / "shared").mkdir()
        (self.directory / "shared" / "film").write_bytes(b"new")
        os.mkfifo(self.directory / "fifo")
        os.mkfifo(self.directory / "shared" / "fifo")
        (self.directory / "secret").write_bytes(b"old")
        (self.directory / "secret").chmod(0o600)
        (self.directory / "link").symlink_to("secret")
        (self.directory / "null").symlink_to("/dev/null")
        listening = self.tool("cp", "-l", "shared", "--writable", "--anyone", "-k", "alice.key", "--create")
        await self.said(listening, "is at")
        for target in ("fifo", "null"):
            status, _, err = await self.run_command("cp", "alice:film", target, **self.environment)
            self.assertEqual((status, err.count("\n")), (1, 1), err)
            self.assertIn("not a regular file", err)
        self.assertTrue((self.directory / "fifo").is_fifo())
        status, _, err = await self.run_command("cp", "secret", "alice:fifo", **self.environment)
        self.assertEqual(status, 4)
        self.assertTrue((self.directory / "shared" / "fifo").is_fifo())
        status, _, err = await self.run_command("cp", "alice:film", "link", **self.environment)
        self.assertEqual(status, 0, err)
        self.assertTrue((self.directory / "link").is_symlink())
        self.assertEqual((self.directory / "secret").read_bytes(), b"new")
        self.assertEqual((self.directory / "secret").stat().st_mode & 0o777, 0o600)

    @asynchronous
    async def test_a_copy_resumes_after_both_ends_were_killed(self) -> None:
        await self.network()
        (self.directory / "shared").mkdir()
        content = os.urandom(24_000_000)
        (self.directory / "film").write_bytes(content)
        arguments = ("cp", "-l", "shared", "--writable", "--anyone", "-k", "alice.key", "--create")
        listening = self.tool(*arguments)
        await self.said(listening, "is at")
        sending = self.tool("cp", "film", "alice:")
        part = part_of(self.directory / "shared" / "film")
        await self.until(lambda: part.exists() and part.stat().st_size > 2_000_000)
        for command in (sending, listening):
            command.transport.signalProcess("KILL")  # type: ignore[union-attr]
            await command.ended
        arrived = part.stat().st_size
        self.assertLess(arrived, len(content))
        listening = self.tool(*arguments)
        await self.said(listening, "is at")
        status, out, err = await self.run_command("cp", "film", "alice:", **self.environment)
        self.assertEqual(status, 0, err)
        self.assertEqual((self.directory / "shared" / "film").read_bytes(), content)
        self.assertFalse(part.exists())
        moved = float(re.search(r"film: ([\d.]+) MB", out)[1])  # type: ignore[index]
        self.assertLess(moved, (len(content) - arrived) / 1e6 + 0.2)

    @asynchronous
    async def test_two_listeners_in_one_directory_give_a_file_one_writer(self) -> None:
        """The listeners have two keys, and thus two locks; each file still has one writer, also a file that is
        fetched.
        """
        await self.network()
        for name in ("shared", "given"):
            (self.directory / name).mkdir()
        content = os.urandom(1_000_000) * 24
        (self.directory / "given" / "film").write_bytes(content)
        write_key_file(self.directory / "bob.key", bob := SecKey.generate())
        await self.run_command("name", "add", "bob", bob.public.hex(), **self.environment)
        for arguments in (
            ("shared", "--writable", "--anyone", "-k", "alice.key"),
            ("shared", "--writable", "--anyone", "-k", "bob.key"),
        ):
            await self.said(self.tool("cp", "-l", *arguments), "is at")
        for first, second, where, expected in (
            (("given/film", "alice:"), ("given/film", "bob:"), "shared", 5),
            (("alice:film", "."), ("bob:film", "."), "", 1),
        ):
            part = part_of(self.directory / where / "film")
            copying = self.tool("cp", *first)
            await self.until(lambda part=part: part.exists() and part.stat().st_size > 1_000_000)
            copying.transport.signalProcess("STOP")  # type: ignore[union-attr]
            status, _, err = await self.run_command("cp", *second, "--retry=0", **self.environment)
            self.assertEqual(status, expected, err)
            self.assertIn("film is being received from another connection", err)
            copying.transport.signalProcess(signal.SIGCONT)  # type: ignore[union-attr]
            self.assertEqual(await copying.ended, 0, copying.err)
            self.assertEqual((self.directory / where / "film").read_bytes(), content)

    @asynchronous
    async def test_100_megabytes_over_a_server_that_is_killed(self) -> None:
        """The file arrives whole over the other server, and nobody does anything."""
        await self.network()
        children = {}
        for number in (1, 2):
            child = start_twistd(
                reactor,
                "dmsg-server",
                "--listen=tcp:0:interface=127.0.0.1",
                f"--discovery={self.url}",
                f"--key-file={number}.key",
                "--create",
                directory=str(self.directory),
            )
            self.addCleanup(
                cast(Any, lambda child=child: child.status is None and (child.signal("KILL"), child.ended)[1])
            )
            key = (await child.line(r"server ([0-9a-f]{66}) listens"))[1].decode()
            await child.line("registered in discovery")
            children[key] = child
        only = [word for key in children for word in ("--only", key)]
        (self.directory / "shared").mkdir()
        digest = hashlib.sha256()
        with (self.directory / "film").open("wb") as film:
            for _ in range(25):
                block = os.urandom(4_000_000)
                digest.update(block)
                film.write(block)
        listening = self.tool("cp", "-l", "shared", "--writable", "--anyone", "-k", "alice.key", "--create", *only)
        await self.said(listening, "is at")
        idle = {key: work(child) for key, child in children.items()}
        sending = self.tool("--verbose", "cp", "film", "alice:", *only)
        part = part_of(self.directory / "shared" / "film")
        await self.until(lambda: part.exists() and part.stat().st_size > 20_000_000)
        carrying = children[max(children, key=lambda key: work(children[key]) - idle[key])]
        carrying.signal("KILL")
        self.assertEqual(await sending.ended, 0, sending.err)
        self.assertIn(b"goes on", sending.err)
        self.assertIn(b"film: 100.0 MB in", sending.out)
        self.assertIn(digest.hexdigest().encode(), sending.out)
        copied = hashlib.sha256((self.directory / "shared" / "film").read_bytes())
        self.assertEqual(copied.digest(), digest.digest())

    @asynchronous
    async def test_files_with_different_contents_are_sent_again(self) -> None:
        await self.network()
        shared = self.directory / "shared"
        shared.mkdir()
        (self.directory / "film").write_bytes(b"right" * 1000)
        part_of(shared / "film").write_bytes(b"wrong" * 10)
        listening = self.tool("cp", "-l", "shared", "--writable", "--anyone", "-k", "alice.key", "--create")
        await self.said(listening, "is at")
        status, _, err = await self.run_command("cp", "film", "alice:", **self.environment)
        self.assertEqual((status, (shared / "film").read_bytes()), (0, b"right" * 1000), err)

    def test_odd_file_names_are_copied(self) -> None:
        self.assertEqual(path_inside(self.directory, "a/b").name, "b")
        for text in (
            "",
            "..",
            "/etc/passwd",
            "a/../../b",
            "x/",
            "\0",
            "\x1b[31m",
            "a\nb",
            7,
            None,
            "a" * 5000,
            f".x{PART_SUFFIX}",
        ):
            self.assertRaises(TransferError, path_inside, self.directory, text)


class MeasureTests(ToolCase):
    """``dmsg iperf`` and ``dmsg trace``."""

    @asynchronous
    async def test_iperf_measures_throughput(self) -> None:
        await self.network()
        serving = self.tool("iperf", "--serve", "-k", "alice.key", "--create")
        await self.said(serving, "measured at")
        for streams, options in (
            ("1 stream", ("-t", "0.3")),
            ("1 stream", ("-t", "0.3", "-R")),
            ("2 streams", ("-t", "0.3", "-P", "2")),
        ):
            status, out, err = await self.run_command("iperf", "alice", *options, **self.environment)
            self.assertEqual(status, 0, err)
            self.assertIn(f", {streams}, round trip ", out)
            self.assertRegex(out.splitlines()[-1], r"^[\d.]+ [kMG]?B in [\d.]+ s, [\d.]+ [kMG]?B/s$")

    @asynchronous
    async def test_trace_shows_servers_and_round_trips(self) -> None:
        await self.network()
        serving = self.tool("iperf", "--serve", "-k", "alice.key", "--create")
        await self.said(serving, "measured at")
        status, out, err = await self.run_command("trace", "alice", "--port", "5201", **self.environment)
        self.assertEqual(status, 0, err)
        self.assertIn("(alice) offers secure transports", out)
        self.assertRegex(out, r"\* +[a-z2-7]{8}\.\.\. +127\.0\.0\.1:\d+ +\d+ +tcp +[\d.]+ ms +[\d.]+ ms")
        # Without a port, nobody has to listen. With a port, somebody must listen, and the cell contains a short error.
        status, out, err = await self.run_command("trace", "alice", **self.environment)
        self.assertEqual((status, err), (0, ""))
        status, out, err = await self.run_command("trace", "alice:7", **self.environment)
        self.assertEqual(status, 1)
        self.assertIn("nobody listens at", err)
        self.assertRegex(out, r"ms +nobody listens there *\n")


class NameTests(CommandCase):
    """The address book."""

    @asynchronous
    async def test_names_and_groups_are_added_listed_and_removed(self) -> None:
        environment = {"DMSG_NAMES": "book"}
        one, two = str(SecKey.generate().public), SecKey.generate().public.text
        for arguments, status in (
            (("add", "alice", one), 0),
            (("add", "alice", one), 0),
            (("add", "alice", two), 1),
            (("add", "alice", two, "--replace"), 0),
            (("add", "no name", two), 2),
            (("add", "bob", "02ab"), 2),
            (("remove", "bob"), 2),
            (("show", "bob"), 2),
        ):
            self.assertEqual((await self.run_command("name", *arguments, **environment))[0], status, arguments)
        self.assertEqual((await self.run_command("name", "show", "alice", **environment))[1].strip(), two)
        self.assertEqual((await self.run_command("name", "list", **environment))[1].strip(), f"alice {two}")
        self.assertEqual((await self.run_command("name", "remove", "alice", **environment))[0], 0)
        self.assertEqual((await self.run_command("name", "list", **environment))[1], "")

    def test_a_damaged_address_book_is_one_line(self) -> None:
        path = self.directory / "names"
        for text in ("alice\n", "alice 02ab\n", "alice " + "zz" * 33, "\x00"):
            path.write_text(text)
            with self.assertRaises(UnknownName) as caught:
                AddressBook(path).find("alice")
            self.assertIn("line 1", str(caught.exception))
        path.write_bytes(b"\xff\xfe")
        self.assertRaises(UnknownName, AddressBook(path).all)
        self.assertRaises(UnknownName, AddressBook(self.directory).all)
        AddressBook(Path(self.directory / "new" / "names")).add("x", SecKey.generate().public)
