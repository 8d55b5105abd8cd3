"""The pipeline on events of real servers, while clients send data of known size: one server is killed, one receiver is
too slow, and one server reports 3 % too much.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import socket
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import skipUnless

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import LoopingCall, deferLater
from twisted.trial.unittest import SynchronousTestCase, TestCase

from dmsg.analytics.jobs import Pipeline
from dmsg.analytics.listing import receipts_source, spool_source
from dmsg.cli.processes import Child, Entities
from dmsg.keys import SecKey, read_key_file
from dmsg.net.turns import HoldReason
from dmsg.streams.core.secure import MAX_WINDOW
from dmsg.telemetry.pseudonyms import Pseudonyms
from dmsg.telemetry.verify import verify_spool
from dmsg.v2019.client import Client
from tests.analytics.support import spark
from tests.support import asynchronous

MB = 1_000_000
WHOLE, SHORT = 60 * MB, 4 * MB
SOON = 60.0
LONG_PATH = SOON
"""Round trip in seconds that the slow receiver assumes. As on a long path, its window then grows to the maximum. The
server's queue and the buffers of TCP hold only a part of so much data."""
SMALL_BUFFER = 1024 * 1024
"""Size in bytes of the slow receiver's socket buffers. By itself, Linux enlarges each of them to up to 32 MB, so that
one can hold all data in flight."""
LIE = 1.03
WRITTEN = 1.5
"""Seconds after which a server has written its events."""


class _Taking(Protocol):
    """Protocol that counts the bytes that it receives.

    :ivar has_full_window: fires when the receive window has grown to its maximum.
    """

    transport: Any

    def __init__(self) -> None:
        self.received = 0
        self.has_full_window: Deferred[None] = Deferred()

    def dataReceived(self, data: bytes) -> None:
        self.received += len(data)
        if self.transport.secure_end.window == MAX_WINDOW and not self.has_full_window.called:
            self.has_full_window.callback(None)


class RealTests(TestCase):
    """The pipeline's tables match what the servers and clients did."""

    timeout = 300

    def setUp(self) -> None:
        self.directory = Path(self.mktemp()).absolute()
        self.directory.mkdir()
        self.entities = Entities(reactor, self.directory)
        self.addCleanup(lambda: Deferred.fromCoroutine(self.entities.stop()))
        self.taking: list[_Taking] = []
        self.sent = 0

    async def server(self, url: str, name: str) -> tuple[Child, str]:
        child = self.entities.server(
            name, url, f"--telemetry={self.directory / 'spool' / name}", "--telemetry-rotate=2", "--request-rate=0"
        )
        await child.line("registered in discovery").addTimeout(SOON, reactor)
        return child, self.key_of(name)

    async def until(self, condition: Any, what: str) -> None:
        for _ in range(int(SOON / 0.05)):
            if condition():
                return
            await deferLater(reactor, 0.05)
        self.fail(f"not within {SOON} s: {what}")

    def client(self, url: str) -> Client:
        client = Client(reactor, SecKey.generate(), [url], min_servers=2, receipts=True)
        self.addCleanup(client.stopService)
        client.startService()
        return client

    def build(self, address: Any) -> Protocol:
        self.taking.append(_Taking())
        return self.taking[-1]

    async def send(self, a: Client, b: Client, size: int) -> tuple[Any, _Taking]:
        before = len(self.taking)
        stream: Any = await a.connect(b.public_key, Factory.forProtocol(Protocol), port=7)
        stream.transport.write(bytes(size))
        self.sent += size
        while len(self.taking) == before:
            await deferLater(reactor, 0)
        return stream, self.taking[before]

    async def provoke_full_queue(self, a: Client, b: Client) -> None:
        """Send to a receiver that stops reading until the server has ended the transport, because its queue for the
        receiver is full. The stream is resumed over another transport."""
        links: dict[Any, Any] = {session.server: session._link for session in b.sessions()}
        for link in links.values():
            link.transport.getHandle().setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        slow, taken = await self.send(a, b, WHOLE)
        taken.transport.secure_end.round_trip = LONG_PATH
        link = links[slow.transport.server]

        def is_ended() -> bool:
            return bool(a.streams.suspended or a.streams.resumed)

        def stop_reading(_: object) -> None:
            # On a busy machine, the receiver is often too slow even while it reads.
            if not is_ended():
                link.hold(HoldReason.UNREAD)

        taken.has_full_window.addCallback(stop_reading)
        await self.until(is_ended, "the server ends the transport")
        link.release(HoldReason.UNREAD)
        await self.until(lambda: taken.received == WHOLE, "all of it")
        self.assertTrue(a.streams.resumed)
        slow.transport.loseConnection()

    @asynchronous
    async def test_nobody_who_is_honest_is_called_a_liar(self) -> None:
        url = await self.entities.discovery("--store=memory:", "--no-checks")
        servers = dict([(await self.server(url, name))[::-1] for name in ("S1", "S2")])
        a, b = self.client(url), self.client(url)
        taking = Factory()
        taking.buildProtocol = self.build  # type: ignore[method-assign,assignment]
        b.listen(taking, 7)
        for client in (a, b):
            await self.until(lambda client=client: len(client.servers) == 2, "two servers")
            await client.when_published(SOON)

        await self.provoke_full_queue(a, b)

        # A server that is killed while it carries a stream.
        stream, taken = await self.send(a, b, MB)
        sent = MB

        def more() -> None:
            nonlocal sent
            sent += MB
            stream.transport.write(bytes(MB))

        trickle = LoopingCall(more)
        trickle.start(0.05, now=False)
        await deferLater(reactor, WRITTEN)
        killed = str(stream.transport.server)
        servers[killed].signal("KILL")
        await servers[killed].ended
        await deferLater(reactor, 0.5)
        trickle.stop()
        stream.transport.write(bytes(WHOLE - sent))
        self.sent += WHOLE - MB
        await self.until(lambda: taken.received == WHOLE, "all of it")
        stream.transport.loseConnection()

        name = next(child_name for child_name in ("S1", "S2") if self.key_of(child_name) == killed)
        child, _ = await self.server(url, name)
        for client in (a, b):
            await self.until(lambda client=client: not len(client.streams.kept_receipts), "receipts handed in")
        # Enough streams that end in order for both servers to be judged.
        for _ in range(12):
            stream, taken = await self.send(a, b, SHORT)
            await self.until(lambda taken=taken: taken.received == SHORT, "a short one")
            stream.transport.loseConnection()
        await deferLater(reactor, 0.5)
        for one in (child, *(servers[key] for key in servers if key != killed)):
            one.signal("TERM")
            await one.ended
        self.judge(killed, "")
        # The same files again, with a server that reports 3 % more.
        honest = next(key for key in servers if key != killed)
        self.judge(killed, honest)

    def key_of(self, name: str) -> str:
        return str(read_key_file(self.directory / f"{name}.key").public)

    def judge(self, killed: str, liar: str) -> None:
        spool = self.directory / "spool"
        if liar:
            self.lie(spool, liar)
        checked, out = (self.directory / f"{what}{liar[:4]}" for what in ("checked", "out"))
        found = verify_spool(spool, checked, Pseudonyms(bytes(32)))
        self.assertEqual(found.refused, 0, found.reasons)
        pipeline = Pipeline(spark(), str(out), now=datetime.now(UTC) + timedelta(minutes=1))
        pipeline.run([spool_source(str(spool)), receipts_source(str(checked))])
        state = pipeline.lake.state()

        def rows(name: str) -> list[dict[str, Any]]:
            return [row.asDict() for row in pipeline.lake.read("gold", name, state).collect()]

        settled: dict[str, list[str]] = {}
        for row in rows("settlement_day"):
            settled.setdefault(row["server"], []).append(row["verdict"])
            self.assertLessEqual(row["conflict"], row["transports"] if row["server"] == liar else 0, row)
        named = {server for server, verdicts in settled.items() if any("claims more" in one for one in verdicts)}
        self.assertEqual(named, {liar} if liar else set(), settled)
        reasons = {row["reason"] for row in rows("close_day")}
        self.assertIn("queue_full", reasons)
        ended = [row["ended"] for row in rows("boot") if row["producer"] == killed]
        self.assertEqual(sorted(ended), ["crashed", "stopped"])
        lost = rows("lost_transport")
        self.assertEqual({row["server"] for row in lost}, {killed})
        witnessed = [row for row in lost if row["words"] == 2]
        self.assertTrue(witnessed, lost)
        self.assertTrue(all(2 * MB <= row["most_bytes"] <= WHOLE for row in witnessed), lost)
        # All bytes that arrived were carried and reported by a server: exactly for transports that ended in order,
        # between two values for the others.
        least, most = (sum(row[name] for row in witnessed) for name in ("least_bytes", "most_bytes"))
        credited, uncertain = (
            sum(row[name] for row in rows("settlement_day")) for name in ("credited_bytes", "uncertain_bytes")
        )
        if not liar:
            self.assertLessEqual(least + credited, self.sent)
            self.assertGreaterEqual(most + credited + uncertain, self.sent)

    def lie(self, spool: Path, liar: str) -> None:
        """Change the server's files to what the server would have written if it reported too much."""
        for path in spool.glob("*/events-*.gz"):
            lines = []
            for line in gzip.decompress(path.read_bytes()).splitlines():
                row = json.loads(line)
                if row["producer"] == liar and row["type"] == "transport_close":
                    row |= {name: int(row[name] * LIE) for name in ("total_ab", "total_ba") if name in row}
                lines.append(json.dumps(row).encode() + b"\n")
            path.write_bytes(gzip.compress(b"".join(lines)))


@skipUnless(os.geteuid() == 0 and shutil.which("unshare"), "needs root and unshare, for a host name of its own")
class HostNameTests(SynchronousTestCase):
    """A machine whose host name cannot be resolved, as in many containers and on many laptops."""

    def test_spark_starts(self) -> None:
        program = "from dmsg.analytics.session import make_session; print(make_session('local[1]').range(3).count())"
        command = f'hostname no-such-host.invalid && exec {sys.executable} -c "{program}"'
        environment = {name: value for name, value in os.environ.items() if name != "SPARK_LOCAL_IP"}
        done = subprocess.run(
            ["unshare", "--uts", "sh", "-c", command], capture_output=True, text=True, env=environment, check=False
        )
        self.assertEqual((done.returncode, done.stdout), (0, "3\n"), done.stderr)
