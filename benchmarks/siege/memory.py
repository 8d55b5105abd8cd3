"""Memory of a program whose peers leave much behind; it has to be given back within a minute."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from functools import partial
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import deferLater

from benchmarks.machine import Entity, begin_child
from benchmarks.siege.enemies import reactor, run_clients
from benchmarks.siege.peer import Peer
from benchmarks.siege.programs import Program
from benchmarks.siege.scene import LOST, ready, until
from benchmarks.siege.verdict import Bounds
from dmsg.keys import PubKey
from dmsg.v2019.client import Client

OF_CHILD = 1000
"""Streams of one client that is killed."""
STREAMS, SENT, READ = 32, 8 << 20, 2 << 20
"""Streams with large windows; bytes that are sent over each, to be echoed; bytes that are read of what comes back."""
HELD_FOR = 3.0
"""Seconds for which those streams stay as they are."""
FRAGMENTED = 8 << 20
"""Bytes that may be left besides 20 %.  CPython returns an arena of 1 MiB only when nothing is in it.  After 25,000
streams, what 64 of those that wait still hold keeps as many arenas from being returned as what 4,096 of them hold:
14 to 17 MiB, of which half is free for whatever comes next."""
ECHO = r"""
import sys
from pathlib import Path
from twisted.internet import reactor
from twisted.internet.protocol import Factory, Protocol
from dmsg.keys import read_key_file
from dmsg.v2019.client import Client

class Echo(Protocol):
    def dataReceived(self, data):
        self.transport.write(data)

client = Client(reactor, read_key_file(Path(sys.argv[2])), [sys.argv[1]], min_servers=1)
client.listen(Factory.forProtocol(Echo), 80)
client.startService()
client.when_online().addCallback(lambda _: print("online", flush=True))
reactor.run()
"""


def _open_streams(seconds: float, victim: str, url: str) -> None:
    """Open streams over one client, say when they are open, and hold them."""

    async def act(clients: list[Client]) -> None:
        key, factory = PubKey.from_hex(victim), Factory.forProtocol(Protocol)
        for _ in range(OF_CHILD):
            try:
                await clients[0].connect(key, factory, port=80)
            except LOST:
                break
        print("open", flush=True)
        await deferLater(reactor, seconds)

    run_clients(seconds, url, 1, act)


def _suspended(seconds: float, host: str, port: str, server: str, victim: str, url: str) -> None:
    """Clients with a thousand streams each that are killed: their streams wait to be resumed."""
    ready()
    goes_on = until(seconds)
    code = f"from benchmarks.siege.memory import _open_streams; _open_streams(60.0, {victim!r}, {url!r})"
    while goes_on():
        children = [
            subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, preexec_fn=begin_child)
            for _ in range(2)
        ]
        for child in children:
            assert child.stdout is not None
            while (line := child.stdout.readline()) and line != b"open\n":
                pass
            child.kill()
            child.wait()
            child.stdout.close()


class _Greedy(Protocol):
    """Reads until windows have grown, then not any more; what it sends comes back, as far as it is let."""

    def __init__(self) -> None:
        self._read = 0

    def connectionMade(self) -> None:
        self.transport.write(bytes(SENT))  # type: ignore[union-attr]

    def dataReceived(self, data: bytes) -> None:
        self._read += len(data)
        if self._read >= READ:
            self.transport.pauseProducing()  # type: ignore[union-attr]


def _windows(seconds: float, host: str, port: str, server: str, victim: str, url: str) -> None:
    """Streams whose windows have grown, and on which nothing is read any more."""

    async def act(clients: list[Client]) -> None:
        connect = partial(clients[0].connect, PubKey.from_hex(victim), Factory.forProtocol(_Greedy), port=80)
        while True:
            opened: list[Any] = []
            with suppress(*LOST):
                while len(opened) < STREAMS:
                    opened += [await connect()]
            waited: Deferred[None] = deferLater(reactor, HELD_FOR)
            await waited
            for one in opened:
                one.transport.abortConnection()

    run_clients(seconds, url, 1, act)


class MemoryScene(Peer):
    """A client that measures round trips to a program that echoes, and strangers that connect."""

    attacks = {"streams of clients that die": _suspended, "large windows, nothing read": _windows}
    prepared = frozenset(attacks)
    bounds = Bounds(memory_slack=FRAGMENTED, settle=60.0)

    def _start(self) -> Entity:
        program = Program("-c", ECHO, self._url, str(self._key_file))
        program.wait_for("online")
        return program
