"""Implementation of ``dmsg demo``: a whole network on this machine."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from twisted.internet.defer import maybeDeferred
from twisted.internet.interfaces import IProtocolFactory
from twisted.internet.protocol import Factory, Protocol

from dmsg.apps.parcels.destination import Destination
from dmsg.apps.parcels.receiver import ParcelReceiver
from dmsg.apps.parcels.sender import FilesSender, SentParcel
from dmsg.apps.parcels.walk import walk
from dmsg.base.units import human_size, milliseconds
from dmsg.cli.peers.bench_run import round_trips
from dmsg.cli.processes import Child, Entities, address_of
from dmsg.cli.screen import Screen, print_table
from dmsg.errors import DmsgError
from dmsg.keys import PubKey, SecKey
from dmsg.net.deadlines import no_answer, wait_until
from dmsg.net.reactor import Reactor
from dmsg.net.streams.transports import stream_of
from dmsg.v2019.client import Client

NAMES = ("alice", "bob", "carol")
STEP_TIMEOUT = 20.0
"""Seconds that each step may take."""
CHECK_INTERVAL = 0.05
"""Seconds between two checks whether a client is connected to all servers."""


@dataclass
class _Row:
    sender: str
    receiver: str
    server: str
    done: SentParcel
    round_trip: float


class Demo:
    def __init__(self, reactor: Reactor, directory: Path, size: int) -> None:
        self._reactor = reactor
        self._directory = directory
        self._size = size
        self._console = Screen()
        self._entities = Entities(reactor, directory)
        self._servers: dict[PubKey, tuple[str, Child]] = {}
        self._clients: dict[str, Client] = {}
        self._rows: list[_Row] = []

    def _say(self, text: str) -> None:
        self._console.print(f"[bold]*[/bold] {text}", highlight=False, soft_wrap=True)

    async def run(self) -> None:
        started = time.monotonic()
        try:
            url = await self._start_discovery()
            for number in (1, 2):
                await self._start_server(f"S{number}", url)
            await self._start_clients(url)
            servers = list(self._servers)
            for server in servers:
                await self._transfer("alice", "bob", server)
                await self._transfer("bob", "alice", server)
            await self._kill_in_the_middle(servers[0])
            await self._transfer("carol", "alice", servers[1])
        finally:
            await self._stop()
        self._print_table(time.monotonic() - started)

    async def _start_discovery(self) -> str:
        url = await self._entities.discovery(f"--store=sqlite:{self._directory / 'discovery.sqlite'}")
        self._say(f"discovery at {url}, entries in SQLite")
        return url

    async def _start_server(self, name: str, url: str) -> None:
        child = self._entities.server(name, url)
        key = PubKey.from_hex((await child.line(r"server ([0-9a-f]{66}) listens"))[1].decode())
        address = await address_of(self._reactor, child)
        await child.line("registered in discovery")
        self._servers[key] = (name, child)
        self._say(f"server {name} ({key.short}...) at {address}")

    async def _start_clients(self, url: str) -> None:
        for name in NAMES:
            client = Client(self._reactor, SecKey.generate(), [url])
            self._clients[name] = client
            client.startService()
        for name, client in self._clients.items():
            await client.when_published(STEP_TIMEOUT)
            await self._on_both_servers(client)
            self._say(f"client {name} ({client.public_key.short}...) is connected to both servers")

    async def _on_both_servers(self, client: Client) -> None:
        if not await wait_until(
            self._reactor, lambda: len(client.servers) == len(self._servers), STEP_TIMEOUT, CHECK_INTERVAL
        ):
            raise DmsgError(f"a client did not connect to all servers: {client.last_error}")

    async def _transfer(self, sender: str, receiver: str, server: PubKey) -> None:
        path = self._make_file(f"{sender}-to-{receiver}")
        inbox = Path(tempfile.mkdtemp(dir=self._directory, prefix=f"{receiver}-"))
        incoming = ParcelReceiver(Destination(inbox), lambda offer: None)
        port = self._clients[receiver].listen(_factory(incoming))
        outgoing = FilesSender(walk([path]))
        try:
            await self._clients[sender].connect(
                self._clients[receiver].public_key, _factory(outgoing), timeout=STEP_TIMEOUT, via=server
            )
            done = await outgoing.done.addTimeout(STEP_TIMEOUT, self._reactor, no_answer)
            await incoming.done
        finally:
            await maybeDeferred(port.stopListening)
        digest = hashlib.sha256((inbox / path.name).read_bytes()).hexdigest()
        if digest != hashlib.sha256(path.read_bytes()).hexdigest():
            raise DmsgError(f"{path.name} arrived changed or incomplete")
        round_trip = await self._round_trip(sender, receiver, server)
        name = self._servers[server][0]
        self._rows.append(_Row(sender, receiver, name, done, round_trip))
        self._say(f"{sender} sent {human_size(done.size)} to {receiver} through {name}, SHA-256 is equal")

    def _make_file(self, name: str) -> Path:
        path = self._directory / f"{name}-{len(self._rows)}.bin"
        path.write_bytes(os.urandom(self._size))
        return path

    async def _round_trip(self, sender: str, receiver: str, server: PubKey) -> float:
        port = self._clients[receiver].listen(_factory(Protocol()))
        protocol = Protocol()
        try:
            await self._clients[sender].connect(
                self._clients[receiver].public_key, _factory(protocol), timeout=STEP_TIMEOUT, via=server
            )
            times = await round_trips(stream_of(protocol), 50)
        finally:
            await maybeDeferred(port.stopListening)
        protocol.transport.loseConnection()  # type: ignore[union-attr]
        return times[len(times) // 2]

    async def _kill_in_the_middle(self, server: PubKey) -> None:
        """Kill a server during a transfer, and check that the transfer continues through the other server."""
        name, child = self._servers[server]
        path = self._make_file("carol-to-bob")
        inbox = Path(tempfile.mkdtemp(dir=self._directory, prefix="bob-"))
        incoming = _Interrupted(inbox, self._size // 4, lambda: child.signal("KILL"))
        bob, carol = self._clients["bob"], self._clients["carol"]
        port = bob.listen(_factory(incoming))
        outgoing = FilesSender(walk([path]))
        await carol.connect(bob.public_key, _factory(outgoing), timeout=STEP_TIMEOUT, via=server)
        done = await outgoing.done.addTimeout(STEP_TIMEOUT, self._reactor, no_answer)
        await incoming.done
        await maybeDeferred(port.stopListening)
        await child.ended
        if (inbox / path.name).read_bytes() != path.read_bytes() or not carol.streams.resumed:
            raise DmsgError(f"server {name} was killed and {path.name} arrived changed or incomplete")
        del self._servers[server]
        (other,) = self._servers
        other_name = self._servers[other][0]
        round_trip = await self._round_trip("carol", "bob", other)
        self._rows.append(_Row("carol", "bob", f"{name}, {other_name}", done, round_trip))
        self._say(
            f"server {name} was killed (SIGKILL) while carol sent to bob: the transfer went on through {other_name}, "
            f"the longest pause was {incoming.longest_pause:.2f} s, SHA-256 is equal"
        )

    async def _stop(self) -> None:
        for client in self._clients.values():
            await client.stopService()
        await self._entities.stop()

    def _print_table(self, seconds: float) -> None:
        table = Table(
            "from", "to", "through", "size", "seconds", "rate", "round trip", title="who sent what through whom"
        )
        for row in self._rows:
            table.add_row(
                row.sender,
                row.receiver,
                row.server,
                human_size(row.done.size),
                f"{row.done.seconds:.2f}",
                f"{human_size(row.done.rate)}/s",
                milliseconds(row.round_trip),
            )
        print_table(self._console, table)
        self._say(f"all files arrived as they were sent; {seconds:.1f} s in all")


class _Interrupted(ParcelReceiver):
    """Receiver that calls ``interrupt`` after ``after`` bytes.

    :ivar longest_pause: longest time in seconds between two arrivals of data.
    """

    def __init__(self, directory: Path, after: int, interrupt: Callable[[], object] | None) -> None:
        super().__init__(Destination(directory), lambda offer: None)
        self._after = after
        self._interrupt = interrupt
        self._seen = 0
        self._last = time.monotonic()
        self.longest_pause = 0.0

    def dataReceived(self, data: bytes) -> None:
        now = time.monotonic()
        if self._seen:
            self.longest_pause = max(self.longest_pause, now - self._last)
        self._last = now
        self._seen += len(data)
        if self._seen >= self._after and self._interrupt is not None:
            interrupt, self._interrupt = self._interrupt, None
            interrupt()
        super().dataReceived(data)


def _factory(protocol: Protocol) -> IProtocolFactory:
    """Return a factory whose only protocol is ``protocol``."""
    factory = Factory.forProtocol(lambda: protocol)
    factory.noisy = False
    return factory
