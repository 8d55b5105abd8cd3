"""A server that is killed while it carries: its clients hand their receipts in when it is back."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from dmsg.cli.processes import Child, Entities
from dmsg.keys import SecKey
from dmsg.telemetry.receipts import parse_receipt
from dmsg.telemetry.spool import OPEN_SUFFIX
from dmsg.v2019.client import Client
from tests.support import asynchronous

SOON = 30.0
SENT = 300_000


class _Echo(Protocol):
    def dataReceived(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(data)


class _Count(Protocol):
    def __init__(self) -> None:
        self.received = 0

    def dataReceived(self, data: bytes) -> None:
        self.received += len(data)


class LostReceiptTests(TestCase):
    """Real processes."""

    timeout = 120

    def setUp(self) -> None:
        self.directory = Path(self.mktemp()).absolute()
        self.directory.mkdir()
        self.entities = Entities(reactor, self.directory)
        self.addCleanup(lambda: Deferred.fromCoroutine(self.entities.stop()))

    async def server(self, url: str) -> Child:
        child = self.entities.server("S1", url, f"--telemetry={self.directory / 'spool'}", "--request-rate=0")
        await child.line("registered in discovery").addTimeout(SOON, reactor)
        return child

    def client(self, url: str) -> Any:
        client = Client(reactor, SecKey.generate(), [url], min_servers=1, receipts=True)
        self.addCleanup(client.stopService)
        client.startService()
        return client

    def events(self, prefix: str) -> list[dict[str, Any]]:
        found = []
        for path in sorted((self.directory / "spool").glob(f"{prefix}-*.gz")):
            found += [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
        return found

    def is_opening_written(self) -> bool:
        """Whether the server has written the opening of a transport into its file of events, as it does each second."""
        paths = self.directory.joinpath("spool").glob(f".events-*{OPEN_SUFFIX}")
        return any(b'"type":"transport_open"' in path.read_bytes() for path in paths)

    @asynchronous
    async def test_both_ends_send_receipts_for_a_lost_transport(self) -> None:
        url = await self.entities.discovery("--store=memory:", "--no-checks")
        server = await self.server(url)
        a, b = self.client(url), self.client(url)
        b.listen(Factory.forProtocol(_Echo), 7)
        for client in (a, b):
            await client.when_published(SOON)
        stream = await a.connect(b.public_key, Factory.forProtocol(_Count), port=7)
        stream.transport.write(bytes(SENT))
        await self.until(lambda: stream.received == SENT, "an echo")
        await self.until(self.is_opening_written, "the opening of the transport in the open file of events")
        server.signal("KILL")
        await server.ended
        await self.until(lambda: all(len(one.streams.kept_receipts) == 1 for one in (a, b)), "what could not be said")
        server = await self.server(url)
        for client in (a, b):
            await self.until(lambda client=client: not len(client.streams.kept_receipts), "receipts handed in")
            await client.when_published(SOON)
        await deferLater(reactor, 0.5)
        server.signal("TERM")
        await server.ended
        opened = [row for row in self.events("events") if row["type"] == "transport_open"]
        # The order of the files is undefined, because their names begin with the boot id.
        killed = min(opened, key=lambda row: row["ts"])
        self.assertNotIn(
            killed["transport"],
            [row.get("transport") for row in self.events("events") if row["type"].endswith("close")],
        )
        said = [row for row in self.events("receipts") if row["type"] == "receipt"]
        words = [(row["boot"], parse_receipt(bytes.fromhex(row["receipt"]))) for row in said]
        ours = [(boot, word) for boot, word in words if word.transport.hex() == killed["transport"]]
        self.assertEqual({word.signer for _, word in ours}, {a.public_key, b.public_key})
        self.assertNotIn(killed["boot"], {boot for boot, _ in ours})
        self.assertEqual({(word.delivered_out, word.delivered_in) for _, word in ours}, {(SENT, SENT)})

    async def until(self, condition: Any, what: str) -> None:
        for _ in range(int(SOON / 0.1)):
            if condition():
                return
            await deferLater(reactor, 0.1)
        self.fail(f"not within {SOON} s: {what}")
