"""Streams that outlive their server, on real TCP and real processes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any
from unittest import skipUnless

from twisted.internet import reactor
from twisted.internet.error import ConnectionDone

from dmsg.cli.processes import start_twistd
from dmsg.keys import PubKey
from tests.net.support import EntityCase
from tests.support import Accepting, Recorder, asynchronous

MARKER_SIZE = 65536


class Hashing(Recorder):
    """Counts and hashes what comes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.hash = hashlib.sha256()

    def dataReceived(self, data: bytes) -> None:
        self.count += len(data)
        self.hash.update(data)


class ResumeTests(EntityCase):
    """A server dies under a stream."""

    async def start_children(self, url: str, count: int) -> dict[PubKey, Any]:
        """Servers as processes of their own."""
        children = {}
        for _ in range(count):
            directory = Path(self.mktemp())
            directory.mkdir()
            child = start_twistd(
                reactor,
                "dmsg-server",
                "--listen=tcp:0:interface=127.0.0.1",
                f"--discovery={url}",
                "--key-file=server.key",
                "--create",
                directory=str(directory),
            )
            named = await child.line("server ([0-9a-f]{66}) listens")
            await child.line("registered in discovery")
            self.addCleanup(self._kill, child)
            children[PubKey.from_hex(named[1].decode())] = child
        return children

    @staticmethod
    def _kill(child: Any) -> Any:
        if not child.ended.called:
            child.signal("KILL")
        return child.ended.addBoth(lambda _: None)

    async def memory_of(self, child: Any) -> bytes:
        """Return the writable memory of a process, read from outside."""
        parts = []
        with (
            open(f"/proc/{child.transport.pid}/maps") as maps,
            open(f"/proc/{child.transport.pid}/mem", "rb", 0) as memory,
        ):
            for line in maps:
                span, mode, *_ = line.split()
                if not mode.startswith("rw"):
                    continue
                low, high = (int(one, 16) for one in span.split("-"))
                try:
                    memory.seek(low)
                    parts.append(memory.read(high - low))
                except (OSError, OverflowError, ValueError):
                    continue  # Special mappings such as vvar cannot be read.
        return b"".join(parts)

    async def stream(self, url: str) -> tuple[Any, Any]:
        """A stream between two clients: the protocols at its ends."""
        self.alice, self.bob = await self.start_client(url), await self.start_client(url)
        await self.until(lambda: len(self.alice.servers) == len(self.bob.servers) == 2)
        await self.bob.when_published(10)
        accepting = Accepting(Hashing)
        self.bob.listen(accepting, 7)
        one: Any = await self.alice.connect(self.bob.public_key, Accepting(Hashing), port=7)
        await one.transport.send(b"")
        return one, accepting.built[0]

    @asynchronous
    async def test_a_rolling_restart_loses_no_data(self) -> None:
        """Two servers leave one after the other under load; a new server replaces each of them first."""
        url = await self.start_discovery()
        children = await self.start_children(url, 2)
        one, two = await self.stream(url)
        block = os.urandom(1 << 18)
        expected = hashlib.sha256()
        sent = 0
        for old in list(children):
            (new,) = await self.start_children(url, 1)
            await self.until_listed(url, 2)
            child = children[old]
            child.signal("TERM")
            while not child.ended.called:
                await one.transport.send(block, 30)
                await two.transport.send(block, 30)
                expected.update(block)
                sent += len(block)
            self.assertIsNotNone(await child.line("the drain is over: 0 transports"))
            self.assertNotEqual(one.transport.server, old)
            del new
        self.assertEqual((one.count, two.count), (sent, sent))
        self.assertEqual(one.hash.digest(), expected.digest())
        self.assertEqual(two.hash.digest(), expected.digest())
        self.assertIsNone(one.lost)

    @skipUnless(os.path.exists("/proc/self/mem"), "reads the memory of another process through /proc")
    @asynchronous
    async def test_server_memory_has_no_plaintext_of_secure_streams(self) -> None:
        """The server's memory is searched: a plain transport leaves the marker in it, a secure one does not."""
        url = await self.start_discovery()
        ((_, child),) = (await self.start_children(url, 1)).items()
        found = {}
        for encryption in ("require", "off"):
            marker = os.urandom(24).hex().encode()
            alice = await self.start_client(url, encryption=encryption)
            bob = await self.start_client(url, encryption=encryption)
            accepting = Accepting(Hashing)
            bob.listen(accepting)
            one: Any = await alice.connect(bob.public_key, Accepting())
            # The marker is sent as one frame, in many small frames, and at the end of a large frame.
            for data in (marker, marker * 1000, bytes(300_000) + marker, *[marker] * 50):
                await one.transport.send(data)
            memory = await self.memory_of(child)
            self.assertIn(bytes(bob.public_key), memory)  # The key shows that this is the right memory.
            found[encryption] = memory.count(marker)
        self.assertEqual(found["require"], 0)
        self.assertGreater(found["off"], 0)

    @asynchronous
    async def test_kill_9_in_the_middle(self) -> None:
        """Bytes both ways, the server is killed, and the application sees nothing of it."""
        url = await self.start_discovery()
        children = await self.start_children(url, 2)
        one, two = await self.stream(url)
        down, up = os.urandom(1 << 20), os.urandom(1 << 20)
        sendings = []
        for turn in range(24):
            sendings += [one.transport.send(down), two.transport.send(up)]
            if turn == 8:
                await self.until(lambda: two.count > 4 << 20)
                children.pop(one.transport.server).signal("KILL")
        for sending in sendings:
            await sending
        self.assertEqual(two.hash.digest(), hashlib.sha256(down * 24).digest())
        self.assertEqual(one.hash.digest(), hashlib.sha256(up * 24).digest())
        self.assertGreaterEqual(self.alice.streams.resumed, 1)
        one.transport.loseConnection()
        await self.until(lambda: two.lost is not None and one.lost is not None)
        self.assertTrue(two.lost.check(ConnectionDone))
