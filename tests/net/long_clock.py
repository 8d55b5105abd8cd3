"""The system's clock is set while a whole network runs: ``make long WHICH=operate``.

Each process has libfaketime before libc, which takes the date from one file, so that the test can set the clock of all
of them at once.  Only the date: the monotonic clocks are the kernel's.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP4ServerEndpoint, connectProtocol
from twisted.internet.protocol import Factory
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import SkipTest, TestCase

from dmsg.cli.processes import Child
from dmsg.keys import SecKey, write_key_file
from tests.cli.test_tools import Shout
from tests.forking import COMMAND
from tests.support import Recorder, asynchronous

LIBRARIES = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
HOUR = 3600
STEPS = (-HOUR, +2 * HOUR, -24 * HOUR)
REFRESH = 2.0
"""Seconds between POSTs of a server here."""
TTL = 8
"""Seconds after which discovery lists a server no longer that posts no more."""
PRELUDE = f"import dmsg.servers.registration as it; it.REFRESH_INTERVAL = {REFRESH}; "
TWISTD = PRELUDE + "from twisted.scripts.twistd import run; run()"
SOON = 40.0
"""Seconds that anything may take on a busy machine."""


class SteppedClockTests(TestCase):
    """A discovery, two servers, a collector and two clients, and one clock that is set again and again."""

    timeout = 300

    def setUp(self) -> None:
        if not LIBRARIES:
            raise SkipTest("libfaketime is not installed (Debian: faketime)")
        self.directory = Path(self.mktemp()).absolute()
        self.directory.mkdir()
        self.clock = self.directory / "clock"
        self.offset = 0
        self.step(0)
        self.children: list[Child] = []

    def step(self, seconds: int) -> None:
        """Set the clock of all processes."""
        self.offset += seconds
        new = self.clock.with_suffix(".new")
        new.write_text(f"{self.offset:+d}\n")
        new.replace(self.clock)

    def run_child(self, name: str, program: str, *arguments: str, **more: str) -> Child:
        child = Child(name)
        environment = {
            **os.environ,
            "LD_PRELOAD": str(LIBRARIES[0]),
            "FAKETIME_TIMESTAMP_FILE": str(self.clock),
            "FAKETIME_NO_CACHE": "1",
            "DONT_FAKE_MONOTONIC": "1",
            "DMSG_CONFIG": "config.toml",
            "DMSG_AGENT": "off",
            **more,
        }
        spawn: Any = reactor.spawnProcess
        argv = [sys.executable, "-c", program, *arguments]
        process = spawn(child, sys.executable, argv, env=environment, path=str(self.directory))

        def end() -> Deferred[Any] | None:
            if child.status is not None:
                return None
            process.signalProcess("KILL")
            return child.ended

        self.addCleanup(end)
        self.children.append(child)
        return child

    def twistd(self, name: str, *options: str) -> Child:
        return self.run_child(name, TWISTD, "--nodaemon", "--pidfile=", name, *options)

    def soon(self, deferred: Deferred[Any]) -> Deferred[Any]:
        return deferred.addTimeout(SOON, reactor)

    async def until(self, what: str, condition: Any) -> None:
        for _ in range(int(SOON / 0.1)):
            if condition():
                return
            await deferLater(reactor, 0.1)
        self.fail(f"not within {SOON} s: {what}")

    async def server(self, number: int, *options: str) -> Child:
        child = self.twistd(
            "dmsg-server",
            "--listen=tcp:0:interface=127.0.0.1",
            f"--discovery={self.url}",
            f"--key-file=server-{number}.key",
            "--create",
            "--drain-timeout=2",
            *options,
        )
        await self.soon(child.line("registered in discovery"))
        return child

    async def listed(self) -> int:
        def ask() -> Any:
            with urllib.request.urlopen(f"{self.url}/dmsg-discovery/available_servers", timeout=10) as answer:
                return json.load(answer)

        return len(await deferToThread(ask))

    def kept(self) -> list[Path]:
        return sorted((self.directory / "store").glob("*/*/events-*.jsonl.gz"))

    async def network(self) -> None:
        discovery = self.twistd(
            "dmsg-discovery", "--listen=tcp:0:interface=127.0.0.1", "--store=sqlite:entries", f"--server-ttl={TTL}"
        )
        found = await self.soon(discovery.line(r"listens on IPv4Address\(type='TCP', host='127.0.0.1', port=(\d+)\)"))
        self.url = f"http://127.0.0.1:{found[1].decode()}"
        write_key_file(self.directory / "collector.key", collector := SecKey.generate())
        (self.directory / "senders").write_text("")
        telemetry = (f"--telemetry={self.directory / 'events'}", "--telemetry-rotate=1")
        self.first = await self.server(1, *telemetry, f"--telemetry-to={collector.public}")
        found = await self.soon(self.first.line(r"are sent to collector \S+ with key ([0-9a-f]{66})"))
        (self.directory / "senders").write_text(found[1].decode() + "\n")
        await self.server(2)
        collecting = self.twistd(
            "dmsg-collector",
            f"--discovery={self.url}",
            "--store=store",
            "--senders=senders",
            "--key-file=collector.key",
            "--reserve=0",
        )
        await self.soon(collecting.line("can be reached"))

    async def stream(self) -> Recorder:
        """A TCP connection over the network that stays; ``self.bob`` is at its other end."""
        shouting: Any = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(Factory.forProtocol(Shout))
        self.addCleanup(shouting.stopListening)
        write_key_file(self.directory / "bob.key", bob := SecKey.generate())
        self.bob = str(bob.public)
        port = str(shouting.getHost().port)
        exposing = self.run_child("expose", COMMAND, "expose", port, "-p", "7", "-k", "bob.key", "-d", self.url)
        await self.soon(exposing.line("leads to"))
        forwarding = self.run_child("forward", COMMAND, "forward", "0", f"{self.bob}:7", "-d", self.url)
        found = await self.soon(forwarding.line(r"127\.0\.0\.1:(\d+) leads to"))
        talking = Recorder()
        await connectProtocol(TCP4ClientEndpoint(reactor, "127.0.0.1", int(found[1])), talking)
        self.addCleanup(lambda: talking.transport.abortConnection())  # type: ignore[union-attr]
        return talking

    async def answers(self, stream: Recorder, text: bytes) -> None:
        before = len(stream.data)
        stream.transport.write(text)  # type: ignore[union-attr]
        await self.until(f"{text!r} comes back", lambda: stream.data[before:] == text.upper())

    async def reaches_bob(self) -> None:
        """Assert that a new client can reach Bob."""
        pinging = self.run_child("ping", COMMAND, "ping", self.bob, "-c", "1", "-d", self.url)
        self.assertEqual(await self.soon(pinging.ended), 0, pinging._output)

    def times_go_on(self) -> set[str]:
        """Events whose ``mono`` is before that of the event before them, or of more than the time of this test."""
        rows = [json.loads(line) for path in self.kept() for line in gzip.decompress(path.read_bytes()).splitlines()]
        rows.sort(key=lambda row: row["seq"])
        self.assertGreater(len(rows), 10)
        self.assertGreater(max(row["ts"] for row in rows) - min(row["ts"] for row in rows), HOUR * 1000)
        pairs = zip(rows, rows[1:], strict=False)
        return {str((one, after)) for one, after in pairs if not one["mono"] <= after["mono"] < self.timeout * 1000}

    @asynchronous
    async def test_a_key_whose_clock_was_ahead_comes_back(self) -> None:
        """A client's and a server's, after a clean stop."""
        self.step(+24 * HOUR)
        await self.network()
        await self.stream()
        exposing = self.children[-2]
        for child in (exposing, self.first):
            child.signal("INT")
            await self.soon(child.ended)
        self.step(-24 * HOUR)
        back = await self.server(1)
        self.assertRegex(back._output.decode(), r"deleted by a machine whose clock was (23 h 59 min|1 d 0 h) ahead")
        again = self.run_child("expose", COMMAND, "expose", "1", "-p", "7", "-k", "bob.key", "-d", self.url)
        await self.soon(again.line("leads to"))
        await self.reaches_bob()

    @asynchronous
    async def test_a_network_outlives_steps(self) -> None:
        await self.network()
        stream = await self.stream()
        await self.answers(stream, b"before")
        agent = self.run_child(
            "agent", COMMAND, "up", "-f", "-k", "agent.key", "--create", "-d", self.url, DMSG_AGENT="agent"
        )
        await self.soon(agent.line("agent of"))
        entities = [*self.children[:4], agent]
        for number, step in enumerate(STEPS):
            self.step(step)
            kept = set(self.kept())
            # This is longer than discovery lists a server that no longer posts.
            for second in range(int(TTL * 1.5)):
                self.assertEqual(await self.listed(), 2, f"{second} s after a step by {step} s")
                await self.answers(stream, b"step %d second %d" % (number, second))
                await deferLater(reactor, 1.0)
            await self.until("a file of events comes", lambda kept=kept: bool(set(self.kept()) - kept))
            await self.reaches_bob()
        for child in entities:
            said = child._output.decode()
            words = ("set back by 1 h 0 min", "set forward by 2 h 0 min", "set back by 1 d 0 h")
            self.assertEqual([said.count(one) for one in words], [1, 1, 1], (child.name, said[-3000:]))
            self.assertNotIn("Traceback", said)
        self.assertEqual(self.times_go_on(), set())
        # A server shuts down, and its clients move to the other one.
        self.first.signal("TERM")
        self.assertEqual(await self.soon(self.first.ended), 128 + 15, self.first._output[-2000:])
        await self.answers(stream, b"after the drain")
        self.assertEqual(await self.listed(), 1)
        await self.reaches_bob()
