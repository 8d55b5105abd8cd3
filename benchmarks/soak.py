"""``make long WHICH=soak``: a network under load while its servers and discovery are killed and come back.

The promise that is checked: what was acknowledged arrived exactly once and in
order on its transport, and nothing arrived that was not sent; clients are
online again after every fault; the relay's memory does not grow.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import deferLater, react

from dmsg.cli.processes import Child, address_of, start_twistd, stop
from dmsg.errors import DmsgError
from dmsg.keys import SecKey
from dmsg.v2019.client import Client

CLIENTS = 6
RECOVERY = 30.0


class Receiver(Protocol):
    """Knows what was received on one transport; the first 8 bytes say which."""

    def __init__(self, received: dict[bytes, bytearray]) -> None:
        self._received = received
        self._name = b""

    def dataReceived(self, data: bytes) -> None:
        self._name += data
        if len(self._name) >= 8:
            name, data = self._name[:8], self._name[8:]
            self._received[name] = bytearray(data)
            self.dataReceived = self._received[name].extend  # type: ignore[assignment]


async def _soak(reactor: Any, seconds: float, seed: int) -> None:
    rng = random.Random(seed)
    print(f"seed {seed}")
    with tempfile.TemporaryDirectory(prefix="dmsg-soak-") as directory:
        await _Soak(reactor, Path(directory), rng).run(seconds)


class _Soak:
    def __init__(self, reactor: Any, directory: Path, rng: random.Random) -> None:
        self._reactor = reactor
        self._directory = directory
        self._rng = rng
        self._children: dict[str, Child] = {}
        self._ports: dict[str, str] = {}
        self._clients: list[Client] = []
        self._received: dict[bytes, bytearray] = {}
        self._streams = self._bytes = self._broken = 0
        self._running = True

    async def run(self, seconds: float) -> None:
        try:
            await self._start("discovery")
            for name in ("one", "two", "three"):
                await self._start(name)
            for _ in range(CLIENTS):
                client = Client(self._reactor, SecKey.generate(), [f"http://{self._ports['discovery']}"])
                client.listen(Factory.forProtocol(lambda: Receiver(self._received)))
                client.startService()
                self._clients.append(client)
            for client in self._clients:
                await client.when_published(RECOVERY)
            traffic = [Deferred.fromCoroutine(self._traffic(client)) for client in self._clients]
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                await deferLater(self._reactor, 5)
                await self._fault()
                self._report()
            self._running = False
            for one in traffic:
                await one
        finally:
            for client in self._clients:
                await client.stopService()
            for child in self._children.values():
                await stop(self._reactor, child)
        print(
            f"{self._streams} transports, {self._bytes} bytes acknowledged and right, {self._broken} broken by faults"
        )
        if not self._streams:
            raise SystemExit("nothing was carried")

    async def _start(self, name: str) -> None:
        listen = f"tcp:{self._ports.get(name, ':0').rpartition(':')[2]}:interface=127.0.0.1"
        if name == "discovery":
            options = (f"--store=sqlite:{self._directory / 'd.sqlite'}", "--rate-limit=0")
            child = start_twistd(
                self._reactor, "dmsg-discovery", f"--listen={listen}", *options, directory=str(self._directory)
            )
        else:
            child = start_twistd(
                self._reactor,
                "dmsg-server",
                f"--listen={listen}",
                f"--discovery=http://{self._ports['discovery']}",
                f"--key-file={self._directory / name}.key",
                "--create",
                directory=str(self._directory),
            )
        self._ports[name] = await address_of(self._reactor, child)
        self._children[name] = child

    async def _fault(self) -> None:
        name = self._rng.choice(list(self._children))
        how = self._rng.choice(["KILL", "TERM"])
        print(f"{how} {name}")
        child = self._children[name]
        child.signal(how)
        await child.ended
        await deferLater(self._reactor, self._rng.random() * 2)
        await self._start(name)
        for client in self._clients:
            await client.when_online(RECOVERY)

    async def _traffic(self, client: Client) -> None:
        while self._running:
            other = self._rng.choice(self._clients)
            name = self._rng.randbytes(8)
            sent = bytearray()
            acknowledged = 0
            try:
                protocol: Any = await client.connect(other.public_key, Factory.forProtocol(Protocol), timeout=10)
                await protocol.transport.send(name, 10)
                for _ in range(self._rng.randrange(1, 60)):
                    data = self._rng.randbytes(self._rng.randrange(1, 50_000))
                    sent += data
                    await protocol.transport.send(data, 10)
                    acknowledged = len(sent)
                protocol.transport.loseConnection()
                self._streams += 1
            except (DmsgError, OSError):
                self._broken += 1
                await deferLater(self._reactor, 0.2)
            received = self._received.pop(name, bytearray())
            if len(received) < acknowledged or received != sent[: len(received)]:
                raise SystemExit(f"acknowledged {acknowledged}, received {len(received)}, or other bytes")
            self._bytes += acknowledged

    def _report(self) -> None:
        memory = []
        for name, child in self._children.items():
            pid = child.transport.pid  # type: ignore[union-attr]
            memory.append(f"{name} {int(Path(f'/proc/{pid}/statm').read_text().split()[1]) * 4 // 1024} MiB")
        print(
            f"{self._streams} transports, {self._bytes / 1e6:.0f} MB, {self._broken} broken; {', '.join(memory)}",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    given = parser.parse_args()
    react(lambda reactor: Deferred.fromCoroutine(_soak(reactor, given.seconds, given.seed)))
