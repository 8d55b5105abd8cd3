"""Full disk under a relay's queue: nothing is delivered twice, and every caller gets an answer."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.rmb.errors import QueueUnavailable
from dmsg.rmb.relay.queue import removals, reserve, sqlite
from dmsg.rmb.relay.queue.interface import QueuedMessage
from dmsg.rmb.relay.queue.removals import Removals
from dmsg.rmb.relay.queue.reserve import Reserve
from dmsg.rmb.relay.queue.sqlite import RETRY_EVERY, SQLiteQueue
from dmsg.rmb.relay.server import QUEUE_NOT_WRITABLE
from dmsg.rmb.twins.address import Session
from tests.rmb.network import RmbCase
from tests.rmb.support import fail_statements
from tests.support import asynchronous


class SQLiteTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.queue = SQLiteQueue(":memory:", self.clock)
        self.addCleanup(self.queue.close)
        self.disk = fail_statements(self.queue)
        self.ids = []
        for number in range(5):
            appended = self.queue.append("1", b"%d" % number, 100.0)
            self.clock.advance(0)
            self.ids.append(self.successResultOf(appended))

    def read(self, after: Any = None) -> list[bytes]:
        return [one.data for one in self.successResultOf(self.queue.read("1", after))]

    def test_delivered_messages_are_not_read_again(self) -> None:
        """Whether deleting it fails at once or when it is committed; it is deleted when there is room."""
        for full in (("DELETE",), ("COMMIT",)):
            self.disk.full = full
            self.queue.remove("1", self.ids[:2])
            self.clock.advance(0)
            self.assertEqual((self.read(), self.queue.trouble), ([b"2", b"3", b"4"], "database or disk is full"))
            self.assertEqual(len(self.queue), 5)
            self.clock.advance(RETRY_EVERY)
            self.assertEqual(self.read(), [b"2", b"3", b"4"])
            self.disk.full = ()
            self.clock.advance(RETRY_EVERY)
            self.clock.advance(0)
            self.assertEqual((self.queue.trouble, len(self.queue), len(self.queue._removals)), (None, 3, 0))
            self.ids = [*self.ids[2:], *(self.more() for _ in range(2))]
            self.queue.remove("1", self.ids)
            self.clock.advance(0)
            self.ids = [self.more(b"%d" % number) for number in range(5)]

    def more(self, data: bytes = b"x") -> Any:
        appended = self.queue.append("1", data, 100.0)
        self.clock.advance(0)
        return self.successResultOf(appended)

    def test_a_full_disk_accepts_no_messages(self) -> None:
        """The reserve is left for removing delivered messages."""
        self.disk.full = ("INSERT",)
        self.failureResultOf(self.queue.append("1", b"x", 100.0), QueueUnavailable)
        self.disk.full = ("DELETE",)
        self.failureResultOf(self.queue.append("1", b"x", 100.0), QueueUnavailable)
        self.queue.remove("1", self.ids)
        self.clock.advance(RETRY_EVERY)
        self.assertEqual(self.read(), [])
        self.disk.full = ()
        self.clock.advance(RETRY_EVERY)
        self.more(b"again")
        self.assertEqual(self.read(), [b"again"])

    def test_expired_messages_are_reported_once(self) -> None:
        self.disk.full = ("DELETE",)
        self.assertEqual(len(self.successResultOf(self.queue.expired(200.0))), 5)
        for _ in range(3):
            self.clock.advance(RETRY_EVERY)
            self.assertEqual(self.successResultOf(self.queue.expired(200.0)), [])

    def test_messages_behind_undeletable_ones_are_read(self) -> None:
        self.patch(self.queue, "_removals", Removals())
        self.queue._removals.add("1", self.ids[:4])
        self.patch(sqlite, "BATCH", 2)
        self.assertEqual(self.read(), [b"4"])

    def test_pending_deletions_are_done_at_close(self) -> None:
        """Deletions that failed are tried again at the end."""
        path = self.mktemp()
        queue = SQLiteQueue(path, self.clock)
        ids = [queue.append("1", b"x", 100.0) for _ in range(2)]
        self.clock.advance(0)
        disk = fail_statements(queue)
        disk.full = ("DELETE",)
        queue.remove("1", [self.successResultOf(one) for one in ids])
        disk.full = ()
        queue.close()
        again = SQLiteQueue(path, self.clock)
        self.assertEqual(len(again), 0)
        again.close()
        self.assertEqual(os.listdir(os.path.dirname(path) or "."), [os.path.basename(path)])


class PartsTests(SynchronousTestCase):
    def test_removals_have_a_limit(self) -> None:
        self.patch(removals, "MAX_REMOVALS", 3)
        one = Removals()
        one.add("1", range(4))
        self.assertEqual((len(one), one.forgotten, one.has("1", 0), one.has("1", 3)), (3, 1, False, True))
        self.assertEqual(
            one.without_removed("1", [QueuedMessage(0, b""), QueuedMessage(1, b"")]), [QueuedMessage(0, b"")]
        )
        self.assertEqual(one.without_removed("2", [QueuedMessage(1, b"")]), [QueuedMessage(1, b"")])
        one.done("1", [1, 2, 3])
        self.assertEqual(one.oldest(), {})

    def test_the_reserve_lets_deletions_succeed(self) -> None:
        path = self.mktemp()
        one = Reserve(path, 10_000)
        self.assertTrue(one.take())
        self.assertEqual(os.path.getsize(path + reserve.SUFFIX), 10_000)
        one.release()
        self.assertEqual(os.path.getsize(path + reserve.SUFFIX), 0)
        self.assertTrue(one.take())
        one.remove()
        self.assertFalse(os.path.exists(path + reserve.SUFFIX))
        self.assertFalse(Reserve("/dev/null/nowhere").take())


class DiskTests(RmbCase):
    """A relay whose queue is on a small file system that is full."""

    if os.geteuid() != 0:
        skip = "only root can mount a small file system"

    @asynchronous
    async def test_a_queue_recovers_when_its_disk_has_room(self) -> None:
        directory = Path(self.mktemp()).absolute()
        directory.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(directory)]
        if subprocess.run(command, capture_output=True).returncode:
            self.skip = "nothing can be mounted here"
            return
        self.addCleanup(subprocess.run, ["umount", "-l", str(directory)])
        self.patch(reserve, "RESERVE", 512 * 1024)
        self.patch(removals, "MAX_BATCH", 50)
        relay = await self.named_relay(queue=f"sqlite:{directory}/queue")
        # The log stays as small a part of the reserve as usual.
        relay.switch.queue._db.execute("PRAGMA wal_autocheckpoint=50")
        self.twin("A", relay.domain), self.twin("B", relay.domain)
        a = await self.raw("A", relay)
        taken = 0
        while relay.switch.queue.trouble is None:
            for _ in range(20):
                a.send(a.envelope(Session(self.ids["B"]), uid=str(taken), payload=bytes(2000)), self.now())
                taken += 1
            a.socket.ping(b"settled?")
            await a.pongs.get()
        kept = len(relay.switch.queue)
        self.assertLess(kept, taken)
        # Another program takes the remaining space.
        with contextlib.suppress(OSError), open(directory / "other", "wb", buffering=0) as other:
            while True:
                other.write(bytes(4096))
        status, text = await self.status_of(f"{relay.domain}/health")
        self.assertEqual((status, json.loads(text)["status"]), (503, QUEUE_NOT_WRITABLE))
        b = await self.raw("B", relay)
        got = {(await b.messages.get()).uid for _ in range(kept)}
        await self.until(lambda: not len(relay.switch.queue))
        self.assertEqual(len(got), kept)
        await b.drop()
        os.unlink(directory / "other")
        await self.until(lambda: relay.switch.queue.trouble is None)
        b = await self.raw("B", relay)
        a.send(a.envelope(b.session, uid="after"), self.now())
        self.assertEqual((await b.messages.get()).uid, "after")
        self.assertEqual(200, (await self.status_of(f"{relay.domain}/health"))[0])
