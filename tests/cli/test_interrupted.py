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
    async def test_a_signal(self) -> None:
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
