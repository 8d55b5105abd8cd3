"""Telemetry and the ranking on real TCP: files of entities, files that a killed entity leaves, and servers that
discovery prefers.
"""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

from twisted.internet import reactor

from dmsg.cli.processes import address_of, start_twistd
from dmsg.discovery.service.ranking import sign_ranking
from dmsg.errors import EntryNotFound
from dmsg.keys import SecKey, read_key_file
from dmsg.telemetry.pseudonyms import Pseudonyms, read_secret
from dmsg.telemetry.verify import verify_spool
from tests.net.support import LOOPBACK, EntityCase
from tests.support import Accepting, Recorder, asynchronous


def events(directory: Path) -> list[dict[str, Any]]:
    """Return all events of the finished files."""
    found = []
    for path in sorted(directory.glob("events-*.jsonl.gz")):
        found += [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    return found


def of_type(found: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in found if event["type"] == name]


def being_written(directory: Path, name: str = "") -> list[str]:
    """Return the complete lines of one type in unfinished files."""
    lines = [line for path in directory.glob(".*.open") for line in path.read_text().split("\n")[:-1]]
    return [line for line in lines if not name or f'"type":"{name}"' in line]


class TelemetryTests(EntityCase):
    """Servers and discoveries with ``--telemetry``."""

    def directory(self) -> Path:
        return Path(self.mktemp()).absolute()

    @asynchronous
    async def test_a_network_writes_the_documented_events(self) -> None:
        of_discovery, of_server = self.directory(), self.directory()
        url = await self.start_discovery(f"--telemetry={of_discovery}")
        discovery = self.discovery
        server = await self.start_server(f"--discovery={url}", f"--telemetry={of_server}")
        alice = await self.start_client(url, min_servers=1, receipts=True)
        bob = await self.start_client(url, min_servers=1, receipts=True)
        there = Accepting(Recorder)
        bob.listen(there)
        protocol: Any = await alice.connect(bob.public_key, Accepting())
        await protocol.transport.send(bytes(100_000))
        protocol.transport.loseConnection()
        absent = [SecKey.generate().public, SecKey.generate().public]
        for key in (*absent, absent[0]):
            await self.assertFailure(alice.connect(key, Accepting()), EntryNotFound)
        await self.until(lambda: len(being_written(of_server, "receipt")) == 2)
        await alice.stopService()
        await bob.stopService()
        await server.stop_for_test()
        await self.until(lambda: of_type(events(of_server), "stop"))

        found = events(of_server)
        producer = server._key.public.hex()
        self.assertEqual({event["producer"] for event in found}, {producer})
        numbers = [event["seq"] for event in found if event["type"] != "segment_end"]
        self.assertEqual(numbers, list(range(len(numbers))))
        names = Pseudonyms(read_secret(of_server))
        (opened,), (closed,) = of_type(found, "transport_open"), of_type(found, "transport_close")
        ends = (names.client(alice.public_key), names.client(bob.public_key))
        for event in (opened, closed):
            self.assertEqual((event["src"], event["dst"], event["secure"]), (*ends, True))
        self.assertEqual(closed["total_ab"], 100_000)
        self.assertEqual({event["peer"] for event in of_type(found, "session_open")}, set(ends))
        self.assertEqual(len(of_type(found, "session_close")), 2)
        self.assertEqual(len(of_type(found, "start")), 1)
        text = json.dumps(found)
        for secret in (alice.public_key.hex(), bob.public_key.hex(), "127.0.0.1"):
            self.assertNotIn(secret, text)

        checked = self.directory()
        result = verify_spool(of_server, checked, names)
        self.assertEqual((result.believed, result.refused), (2, 0))
        lines = b"".join(gzip.decompress(path.read_bytes()) for path in checked.glob("receipts-*.gz")).splitlines()
        said = of_type([json.loads(line) for line in lines], "receipt_checked")
        self.assertEqual({(one["signer"], one["partner"]) for one in said}, {ends, ends[::-1]})
        self.assertEqual({one["transport"] for one in said}, {closed["transport"]})
        for one in said:
            self.assertEqual(one["delivered_out"] if one["initiator"] else one["delivered_in"], 100_000)

        await discovery.stopService()
        await self.until(lambda: of_type(events(of_discovery), "stop"))
        entries = of_type(events(of_discovery), "entry")
        self.assertIn((producer, True), {(entry["subject"], entry.get("is_server")) for entry in entries})
        lookups = of_type(events(of_discovery), "lookup_fail")
        self.assertGreaterEqual(sum(one["n"] for one in lookups), len(absent))
        self.assertEqual(len({one["source"] for one in lookups}), 1)
        text = json.dumps(events(of_discovery))
        for secret in (*(key.hex() for key in absent), "127.0.0.1"):
            self.assertNotIn(secret, text)
        # Both clocks are this machine's.
        self.assertTrue(all(-60_000 < entry["clock_ms"] <= 0 for entry in entries if entry.get("is_server")))

    @asynchronous
    async def test_kill_9_of_a_relay(self) -> None:
        """Written events are kept; later events belong to another boot."""
        home, spool = self.directory(), self.directory()
        home.mkdir()
        url = await self.start_discovery()
        arguments = (f"--listen={LOOPBACK}", f"--discovery={url}", f"--telemetry={spool}", "--key-file=key", "--create")
        child = start_twistd(reactor, "dmsg-server", *arguments, directory=str(home))
        self.addCleanup(child.signal, "KILL")
        await address_of(reactor, child)
        await self.until(lambda: (home / "key").exists())
        alice, bob = await self.start_client(url, min_servers=1), await self.start_client(url, min_servers=1)
        bob.listen(Accepting(Recorder))

        for _ in range(20):
            protocol: Any = await alice.connect(bob.public_key, Accepting())
            await protocol.transport.send(b"x")
            protocol.transport.loseConnection()
        await self.until(lambda: len(being_written(spool, "transport_close")) == 20)
        child.signal("KILL")
        await child.ended
        await alice.stopService()
        await bob.stopService()
        before = being_written(spool)

        again = start_twistd(reactor, "dmsg-server", *arguments, directory=str(home))
        self.addCleanup(again.signal, "KILL")
        await address_of(reactor, again)
        await self.until(lambda: events(spool))
        again.signal("TERM")
        await again.ended
        found = events(spool)
        boots = list(dict.fromkeys(event["boot"] for event in found))
        self.assertEqual(len(boots), 2)
        killed = [event for event in found if event["boot"] == boots[0] and event["type"] != "segment_end"]
        if found[0]["ts"] > found[-1]["ts"]:
            killed = [event for event in found if event["boot"] == boots[1] and event["type"] != "segment_end"]
        self.assertGreaterEqual(len(killed), len(before))
        self.assertEqual([event["seq"] for event in killed], list(range(len(killed))))
        self.assertEqual(len(of_type(killed, "transport_close")), 20)
        self.assertEqual({event["producer"] for event in found}, {read_key_file(home / "key").public.hex()})


class RankingTests(EntityCase):
    """Discovery with ``--ranking``."""

    @asynchronous
    async def test_the_better_server_is_named(self) -> None:
        operator = SecKey.generate()
        ranking = Path(self.mktemp()).absolute()
        keys = [Path(self.mktemp()), Path(self.mktemp())]
        url = await self.start_discovery(
            f"--ranking={ranking}", f"--ranking-key={operator.public.hex()}", "--max-servers=1"
        )
        for path in keys:
            await self.start_server(f"--discovery={url}", f"--key-file={path}")
        good, bad = (read_key_file(path).public.hex() for path in keys)
        now = int(time.time())
        weights: list[dict[str, Any]] = [
            {"static": key, "weight": weight, "reasons": []} for key, weight in ((good, 1000), (bad, 0.001))
        ]
        ranking.write_bytes(sign_ranking(weights, operator, now, now + 600))
        self.discovery._settings.ranking.reload()
        client = await self.start_client(url, min_servers=1)
        named = []
        for _ in range(10):
            named += [entry.static for entry in await client._lookups.available_servers()]
        self.assertEqual(set(named), {good})
        stale = sign_ranking(weights, operator, now - 900, now - 600)
        ranking.write_bytes(stale + b"\n")
        self.discovery._settings.ranking.reload()
        named = []
        for _ in range(60):
            named += [entry.static for entry in await client._lookups.available_servers()]
        self.assertEqual(set(named), {good, bad})
