"""Command ``dmsg analytics demo``: runs real servers under load, and then the pipeline over the events that they wrote.

Discovery, three servers and a collector run as processes of their own.  Discovery and two servers send their events
to the collector.  The last events go through the third server, because these two servers have stopped by then.
Clients in this process send messages, get refusals and sign receipts.  One server is killed and restarted.  At the end,
the demo runs the commands that a user would type: run, rank, report and top.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from twisted.internet.defer import Deferred, DeferredList
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import deferLater

from dmsg.cli.processes import Entities
from dmsg.cli.screen import Screen
from dmsg.collector.sender import KEY_FILE
from dmsg.errors import DmsgError
from dmsg.keys import SecKey, load_or_create_key, read_key_file, write_key_file
from dmsg.net.deadlines import no_answer
from dmsg.net.reactor import Reactor
from dmsg.net.streams.transports import stream_of
from dmsg.v2019.client import Client

CLIENTS = 6
CONCURRENT_TRANSPORTS = 4
"""Number of transports that are open at a time."""
MAX_MESSAGE_SIZE = 2 * 1024 * 1024
"""Maximum bytes of one message."""
ONLINE_TIMEOUT = 20.0


class _Sink(Protocol):
    def dataReceived(self, data: bytes) -> None:
        pass


def _factory(protocol: Callable[[], Protocol]) -> Factory[Protocol]:
    factory: Factory[Protocol] = Factory()
    factory.protocol = protocol
    factory.noisy = False
    return factory


class PipelineDemo:
    """Network of the demo, whose entities write events.  The Deferred of :meth:`run` fires when all entities have
    stopped.
    """

    def __init__(self, reactor: Reactor, directory: Path, seconds: float) -> None:
        self._reactor = reactor
        self._directory = directory
        self._seconds = seconds
        self._console = Screen()
        self._entities = Entities(reactor, directory)
        self._key = SecKey.generate()
        self._senders: list[str] = []
        self._clients: list[Client] = []
        self._random = Random(1)
        self._transport_count = self._byte_count = self._failed_count = 0

    def say(self, text: str) -> None:
        """Print a line about the demo's progress."""
        self._console.print(f"[bold]*[/bold] {text}", highlight=False, soft_wrap=True)

    async def run(self) -> None:
        """Start all entities, send messages for some time, and stop all entities."""
        try:
            url = await self._start()
            until = time.monotonic() + self._seconds
            half = time.monotonic() + self._seconds / 2
            senders = DeferredList([self._send_until(until) for _ in range(CONCURRENT_TRANSPORTS)])
            await deferLater(self._reactor, max(0.0, half - time.monotonic()))
            self.say("server S2 is killed (SIGKILL) and restarted")
            victim = self._entities.children.pop()
            victim.signal("KILL")
            await victim.ended
            await self._start_server("S2", url)
            await senders
        finally:
            for client in self._clients:
                await client.stopService()
            await self._entities.stop()
        self.say(
            f"{self._transport_count} transports carried {self._byte_count / 1e6:.1f} MB, "
            f"{self._failed_count} requests went to clients that do not exist"
        )

    def _telemetry(self, name: str) -> tuple[str, ...]:
        """Return the options with which an entity writes events and sends them to the collector.

        The key with which the entity will send is created, and noted for the collector's list of senders.
        """
        place = self._directory / "machines" / name
        place.mkdir(parents=True, exist_ok=True)
        sender = load_or_create_key(place / KEY_FILE)
        if str(sender.public) not in self._senders:
            self._senders.append(str(sender.public))
        return f"--telemetry={place}", "--telemetry-rotate=5", f"--telemetry-to={self._key.public}"

    async def _start_collector(self, url: str) -> None:
        lists, key = self._directory / "senders", self._directory / "collector.key"
        lists.write_text("".join(f"{sender}\n" for sender in self._senders))
        write_key_file(key, self._key)
        options = (f"--store={self._directory / 'spool'}", f"--senders={lists}", f"--key-file={key}", "--reserve=0")
        child = self._entities.start("dmsg-collector", f"--discovery={url}", *options)
        await child.line("can be reached").addTimeout(ONLINE_TIMEOUT, self._reactor, no_answer)

    async def _start(self) -> str:
        url = await self._entities.discovery("--store=memory:", *self._telemetry("discovery"))
        await self._entities.server("S0", url).line("registered in discovery")
        options = {name: self._telemetry(name) for name in ("S1", "S2")}
        await self._start_collector(url)
        # Entities are stopped in reverse order of this list. The collector must stop last, to receive the last events.
        self._entities.children.reverse()
        for name in options:
            await self._start_server(name, url)
        told = [read_key_file(self._directory / f"{name}.key").public for name in options]
        for _ in range(CLIENTS):
            client = Client(self._reactor, SecKey.generate(), [url], only=told, receipts=True)
            client.listen(_factory(_Sink))
            client.startService()
            self._clients.append(client)
        for client in self._clients:
            await client.when_published(ONLINE_TIMEOUT)
        self.say(
            f"a discovery, three servers, {CLIENTS} clients and a collector run; the collector stores events in "
            f"{self._directory / 'spool'}"
        )
        return url

    async def _start_server(self, name: str, url: str) -> None:
        child = self._entities.server(name, url, *self._telemetry(name))
        await child.line("registered in discovery")

    def _send_until(self, until: float) -> Deferred[None]:
        return Deferred.fromCoroutine(self._send(until))

    async def _send(self, until: float) -> None:
        while time.monotonic() < until:
            source, target = self._random.sample(self._clients, 2)
            nobody = self._random.random() < 0.1
            key = SecKey.generate().public if nobody else target.public_key
            size = int(MAX_MESSAGE_SIZE * self._random.random() ** 4)
            try:
                protocol = await source.connect(key, _factory(Protocol), timeout=5.0)
            except DmsgError:
                self._failed_count += nobody
                await deferLater(self._reactor, 0.05)
                continue
            transport = stream_of(protocol)
            transport.write(os.urandom(size))
            transport.loseConnection()
            self._transport_count += 1
            self._byte_count += size
            await deferLater(self._reactor, 0.02 + 0.1 * self._random.random())


def compute(demo: PipelineDemo, directory: Path) -> None:
    """Run the pipeline's commands on the events of the demo, as a user would."""
    out = ["--out", str(directory / "tables")]
    for arguments in (
        ["run", "--spool", str(directory / "spool"), *out],
        ["rank", *out, "-k", str(directory / "operator.key"), "--create", "--ranking", str(directory / "ranking.json")],
        ["report", *out, "--html", str(directory / "report.html")],
        ["top", "settlement_day", *out],
    ):
        demo.say("dmsg analytics " + " ".join(arguments))
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
        command = [sys.executable, "-P", "-c", "from dmsg.cli.entry import entry; entry()", "analytics", *arguments]
        if subprocess.run(command, check=False).returncode:
            raise DmsgError(f"dmsg analytics {arguments[0]} failed")
    demo.say(f"open {directory / 'report.html'} in a browser")
