"""A discovery, a server and a collector, each a process of its own, and what they survive."""

from __future__ import annotations

import gzip
import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.internet.utils import getProcessOutputAndValue
from twisted.trial.unittest import TestCase

from dmsg.cli.processes import Child, Entities, start_twistd
from dmsg.keylock import hold_key
from dmsg.keys import SecKey, write_key_file
from tests.collector.support import packed, spool_name
from tests.forking import COMMAND
from tests.support import asynchronous

SOON = 60.0
"""Seconds that a busy machine may take for anything, such as the start of a process."""


class ProcessTests(TestCase):
    """No event is lost, and none is stored twice."""

    # With trial's default of 120 s, a busy machine does not finish tests that start up to five processes.
    timeout = 300

    def setUp(self) -> None:
        self.directory = Path(self.mktemp()).absolute()
        self.directory.mkdir()
        self.entities = Entities(reactor, self.directory)
        self.addCleanup(lambda: Deferred.fromCoroutine(self.entities.stop()))
        self.key = SecKey.generate()
        write_key_file(self.directory / "collector.key", self.key)
        self.senders = self.directory / "senders"
        self.senders.write_text("")
        self.root = self.directory / "store"

    async def network(self) -> str:
        """Discovery, and a server that has no telemetry."""
        url = await self.entities.discovery("--store=memory:", "--no-checks")
        await self.soon(self.entities.server("S0", url).line("registered in discovery"))
        return url

    async def collector(self, url: str, *options: str) -> Child:
        child = start_twistd(
            reactor,
            "dmsg-collector",
            f"--discovery={url}",
            f"--store={self.root}",
            f"--senders={self.senders}",
            f"--key-file={self.directory / 'collector.key'}",
            "--reserve=0",
            *options,
            directory=str(self.directory),
        )
        self.entities.children.append(child)
        await self.soon(child.line("can be reached"))
        return child

    def soon(self, deferred: Deferred[Any]) -> Deferred[Any]:
        return deferred.addTimeout(SOON, reactor)

    def server(self, name: str, url: str) -> Child:
        to = f"--telemetry-to={self.key.public}"
        return self.entities.server(
            name, url, f"--telemetry={self.directory / name}", "--telemetry-rotate=1", "--request-rate=0", to
        )

    async def sender_of(self, child: Child) -> str:
        match = await self.soon(child.line(r"are sent to collector \S+ with key ([0-9a-f]{66})"))
        key: str = match[1].decode()
        return key

    async def until(self, condition: Any, what: str) -> None:
        for _ in range(int(SOON / 0.1)):
            if condition():
                return
            await deferLater(reactor, 0.1)
        self.fail(f"not within {SOON} s: {what}")

    def kept(self) -> list[Path]:
        return sorted(self.root.glob("*/*/events-*.jsonl.gz"))

    def numbers(self) -> dict[str, list[int]]:
        """Return the numbers of the events in all stored files, by boot."""
        found: dict[str, list[int]] = {}
        for path in self.kept():
            for line in gzip.decompress(path.read_bytes()).splitlines():
                row = json.loads(line)
                found.setdefault(row["boot"], []).append(row["seq"])
        return {boot: sorted(numbers) for boot, numbers in found.items()}

    @asynchronous
    async def test_killed_servers_and_collectors_lose_no_file(self) -> None:
        url = await self.network()
        server = self.server("S1", url)
        self.senders.write_text(await self.sender_of(server))
        collector = await self.collector(url)
        await self.until(lambda: len(self.kept()) >= 1, "a first file")
        collector.signal("KILL")
        await collector.ended
        part = next(self.root.glob("0*")) / ".part-left"
        part.write_bytes(b"half of one")
        server.signal("KILL")
        await server.ended
        server = self.server("S1", url)  # The second collector starts with the files that the first has left.
        await self.until(lambda: len(list((self.directory / "S1").glob("events-*.gz"))) >= 1, "files that wait")
        await self.collector(url)
        self.assertFalse(part.exists())
        await self.until(lambda: len(self.numbers()) == 2, "files of both boots")
        server.signal("TERM")
        await server.ended
        self.assertEqual(list((self.directory / "S1").glob("*.gz")), [])  # Its last file has arrived, too.
        for boot, found in self.numbers().items():
            self.assertEqual(found, list(range(len(found))), boot)
        said = b"".join(gzip.decompress(path.read_bytes()) for path in self.kept())
        self.assertEqual(said.count(b'"type":"stop"'), 1)

    @asynchronous
    async def test_senders_that_are_not_listed_are_refused(self) -> None:
        url = await self.network()
        collector = await self.collector(url, "--metrics=tcp:0:interface=127.0.0.1")
        match = await self.soon(collector.line(r"health are at \S+ host='127.0.0.1', port=(\d+)"))
        server = self.server("S1", url)
        sender = await self.sender_of(server)
        await self.soon(
            server.line(rf"files of events could not be sent to the collector and wait: .*is {sender} on its list")
        )
        self.assertEqual(self.kept(), [])
        self.senders.write_text(f"{sender}  # S1\n")
        await self.soon(collector.line("list of senders changed and was reloaded: 1 keys"))
        await self.until(lambda: bool(self.kept()), "what had waited")
        await self.soon(server.line("accepts files of events"))

        def asked(path: str) -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{match[1].decode()}{path}", timeout=10) as answer:
                return str(answer.read().decode())

        health = json.loads(await deferToThread(asked, "/health"))
        self.assertEqual((health["status"], list(health["newest_file_seconds"])), ("ok", [sender]))
        metrics = await deferToThread(asked, "/metrics")
        self.assertRegex(metrics, rf'newest_file_timestamp_seconds{{sender="{sender}"}} 1\.')

    @asynchronous
    async def test_discovery_sends_its_files(self) -> None:
        spool = self.directory / "D"
        to = f"--telemetry-to={self.key.public}:17"
        url = await self.entities.discovery(
            "--store=memory:", "--no-checks", f"--telemetry={spool}", "--telemetry-rotate=1", to
        )
        self.senders.write_text(await self.sender_of(self.entities.children[0]))
        await self.soon(self.entities.server("S0", url).line("registered in discovery"))
        await self.collector(url, "--port=17")
        await self.until(lambda: bool(self.kept()), "a file of discovery's")
        row = json.loads(gzip.decompress(self.kept()[0].read_bytes()).splitlines()[0])
        self.assertEqual(row["role"], "discovery")

    @asynchronous
    async def test_analytics_send_delivers_what_a_server_left(self) -> None:
        """``dmsg analytics send`` delivers files that a stopped server has left."""
        url = await self.network()
        spool = self.directory / "old"
        spool.mkdir()
        write_key_file(spool / "sender.key", key := SecKey.generate())
        data = {spool_name(number): packed(count=100) for number in range(3)}
        for name, content in data.items():
            (spool / name).write_bytes(content)

        async def send() -> tuple[str, int]:
            arguments = ("analytics", "send", str(spool), str(self.key.public), "--discovery", url)
            out, err, status = await getProcessOutputAndValue(sys.executable, ["-c", COMMAND, *arguments], env=None)
            return (out + err).decode(), status

        said, status = await send()
        self.assertEqual(status, 3, said)
        self.assertNotIn("Traceback", said)
        self.assertEqual(len(list(spool.glob("*.gz"))), 3)
        self.senders.write_text(str(key.public))
        await self.collector(url)
        said, status = await send()
        self.assertRegex(said, r"\A3 files, [0-9.]+ k?B\n\Z")
        self.assertEqual(status, 0)
        self.assertEqual(list(spool.glob("*.gz")), [])
        self.assertEqual({path.name: path.read_bytes() for path in self.kept()}, data)
        said, status = await send()
        self.assertEqual((said, status), ("there is nothing to be sent\n", 0))
        (spool / spool_name(1)).write_bytes(data[spool_name(1)])
        lock = hold_key(spool / "sender.key", "another")
        self.addCleanup(lock.release)
        said, status = await send()
        self.assertEqual((said, status), (f"dmsg: another process already sends the files of {spool}\n", 1))
