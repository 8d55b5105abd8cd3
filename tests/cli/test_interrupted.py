"""Connections through a command that a signal ends: neither program takes the end for the end of the data."""

from __future__ import annotations

import socket
from typing import Any

from twisted.internet import reactor, threads
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import Factory, Protocol
from twisted.python.failure import Failure

from tests.cli.test_agent import AgentCase
from tests.cli.test_commands import Command
from tests.support import asynchronous

GREETING = b"hello"


class _Service(Protocol):
    """TCP service that greets, and keeps why its connection ended."""

    def __init__(self) -> None:
        self.got = b""
        self.lost: Failure | None = None

    def connectionMade(self) -> None:
        assert self.transport is not None
        self.transport.write(GREETING)

    def dataReceived(self, data: bytes) -> None:
        self.got += data

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        self.lost = reason


def _connected(port: int, request: bytes = b"") -> socket.socket:
    """Open a connection through a tunnel over which data have gone both ways."""
    connection = socket.create_connection(("127.0.0.1", port))
    connection.settimeout(20)
    connection.sendall(request + GREETING)
    expected = len(GREETING) + (12 if request else 0)
    while expected:
        expected -= len(connection.recv(expected))
    return connection


def _how_it_ends(connection: socket.socket) -> str:
    with connection:
        try:
            return repr(connection.recv(1))
        except ConnectionResetError:
            return "reset"


class TunnelTests(AgentCase):
    """``forward``, ``expose`` and ``socks``: both TCP programs see a reset."""

    async def service(self) -> tuple[int, list[_Service]]:  # type: ignore[override]
        built: list[_Service] = []

        def build() -> _Service:
            built.append(_Service())
            return built[-1]

        port: Any = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(Factory.forProtocol(build))
        self.addCleanup(port.stopListening)
        return port.getHost().port, built

    async def check(self, signals: list[tuple[str, str]], *expose_options: str) -> None:
        """Interrupt each command in turn with its signal, with a connection open through it.

        A killed command without an agent has no chance to tell its peer, which waits for it to resume.
        """
        target, built = await self.service()
        to = str(self.key.public)
        commands = {
            "expose": (("expose", str(target), "--port", "7", *expose_options), r"leads to 127.0.0.1()"),
            "forward": (("forward", "0", f"{to}:7"), r"127\.0\.0\.1:(\d+) leads to"),
            "socks": (("socks", "--listen", "0"), r"SOCKS5 at 127\.0\.0\.1:(\d+)"),
        }
        running: dict[str, tuple[Command, str]] = {}
        for interrupted, signal in signals:
            way = "socks" if interrupted == "socks" else "forward"
            for name in ("expose", way):
                if name not in running:
                    arguments, says = commands[name]
                    command = self.tool(*arguments)
                    running[name] = command, (await self.said(command, says))[1]
            host = f"{to}.dmsg".encode()
            request = b"\5\1\0\5\1\0\3" + bytes((len(host),)) + host + b"\0\7" if way == "socks" else b""
            connection = await threads.deferToThread(_connected, int(running[way][1]), request)
            self.addCleanup(connection.close)
            there = built[-1]
            await self.until(lambda there=there: there.got == GREETING)
            command = running.pop(interrupted)[0]
            command.transport.signalProcess(signal)  # type: ignore[union-attr]
            await command.ended
            what = interrupted, signal
            if signal != "KILL" or self.through_agent or interrupted != "expose":
                self.assertEqual(await threads.deferToThread(_how_it_ends, connection), "reset", what)
            if signal != "KILL" or self.through_agent or interrupted == "expose":
                await self.until(lambda there=there: there.lost)
                assert there.lost is not None
                self.assertFalse(there.lost.check(ConnectionDone), what)

    through_agent = False

    @asynchronous
    async def test_a_signal_closes_the_tunnel(self) -> None:
        await self.network()
        signals = [("forward", "INT"), ("expose", "TERM"), ("socks", "INT"), ("forward", "KILL"), ("expose", "KILL")]
        await self.check(signals, "-k", "alice.key")

    @asynchronous
    async def test_a_signal_behind_the_agent(self) -> None:
        self.through_agent = True
        await self.network()
        await self.up("-k", "alice.key")
        await self.check(
            [("forward", "INT"), ("expose", "INT"), ("socks", "TERM"), ("forward", "KILL"), ("expose", "KILL")]
        )


class PipeTests(AgentCase):
    """``nc`` through the agent: the caller hears that the listener did not end its data."""

    @asynchronous
    async def test_the_program_or_the_agent_ends(self) -> None:
        await self.network()
        for what in ("INT", "KILL", "down"):
            await self.up("-k", "alice.key")
            listening = self.tool("nc", "-l", "5")
            await self.said(listening, "listening:")
            calling = self.tool("nc", "alice:5", "--no-agent")
            await self.said(calling, "connected:")
            for one, other in ((listening, calling), (calling, listening)):
                one.transport.write(GREETING)  # type: ignore[union-attr]
                await self.until(lambda other=other: other.out == GREETING)
            if what == "down":
                await self.take_down()
                self.assertEqual(await listening.ended, 1)
            else:
                listening.transport.signalProcess(what)  # type: ignore[union-attr]
                await listening.ended
            self.assertEqual(await calling.ended, 1, what)
            self.assertIn(b"the remote ended it early", calling.err, what)


class TransferTests(AgentCase):
    """Copies and downloads that a signal ends in the middle fail at the other end."""

    @asynchronous
    async def test_the_sender_or_the_receiver_ends(self) -> None:
        await self.network()
        with (self.directory / "big").open("wb") as file:
            file.truncate(2_000_000_000)
        got = self.directory / "got"
        got.mkdir()

        def under_way() -> bool:
            return any(path.stat().st_size > 500_000 for path in got.iterdir())

        key = ("-k", "alice.key")
        for offering, asking, at_the_end in (
            (("serve", ".", *key), ("curl", "-o", "got/x", "dmsg://alice/big"), b"the remote ended it early"),
            (
                ("receive", "--listen", "--anyone", "--dir", "got", *key),
                ("send", "big", "alice"),
                b"the other side gave up; what has arrived is kept",
            ),
        ):
            one = self.tool(*offering)
            await self.said(one, "open to anyone")
            two = self.tool(*asking)
            await self.until(under_way)
            one.transport.signalProcess("INT")  # type: ignore[union-attr]
            self.assertEqual((await one.ended, await two.ended), (130, 1), two.err)
            self.assertIn(at_the_end, two.err)
            for path in got.iterdir():
                path.unlink()
        listening = self.tool("cp", "--listen", "got", "--writable", "--anyone", *key)
        await self.said(listening, "open to anyone")
        copying = self.tool("cp", "big", "alice:")
        await self.until(under_way)
        copying.transport.signalProcess("INT")  # type: ignore[union-attr]
        self.assertEqual(await copying.ended, 130)
        await self.said(listening, "the connection was lost: the remote ended it early")
        self.assertEqual([path.name for path in got.iterdir()], [".big.dmsg-part"])
