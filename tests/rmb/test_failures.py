"""Errors in the middle of things: nothing is confirmed that was not taken, and nobody else's message is lost."""

from __future__ import annotations

import gc
import json
import os
import sqlite3
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import DmsgError
from dmsg.rmb.envelope.envelope_pb2 import Envelope
from dmsg.rmb.errors import Drop
from dmsg.rmb.peer import files as files_module
from dmsg.rmb.peer.files import FileUploads
from dmsg.rmb.relay.queue.interface import QueueLimits
from dmsg.rmb.relay.queue.sqlite import SQLiteQueue
from dmsg.rmb.session.seal import ReceivedMessage
from dmsg.rmb.session.uplink import Uplink, report_outcome
from dmsg.rmb.twins.address import Session
from tests.rmb.relay.queue.test_sqlite import Watcher
from tests.rmb.relay.test_delivery import FakeSocket


class QueueTests(SynchronousTestCase):
    """The queue cannot make room. Inserted messages are kept, and every caller gets the error."""

    def test_making_room_fails(self) -> None:
        clock = Clock()
        queue = SQLiteQueue(":memory:", clock, QueueLimits(messages=2))
        self.addCleanup(queue.close)

        def fail(session: str, sizes: list[int]) -> None:
            raise sqlite3.OperationalError("disk I/O error")

        queue._drop_oldest = fail  # type: ignore[method-assign]
        kept = [queue.append("1", b"%d" % number, 100.0) for number in range(4)]
        clock.advance(0)
        self.assertEqual([self.successResultOf(one) for one in kept], [1, 2, 3, 4])
        self.assertEqual(len(self.flushLoggedErrors(sqlite3.OperationalError)), 2)
        self.assertEqual([one.data for one in self.successResultOf(queue.read("1", None))], [b"0", b"1", b"2", b"3"])

    def test_a_failing_drop_callback_is_contained(self) -> None:
        clock = Clock()
        queue = SQLiteQueue(":memory:", clock, QueueLimits(messages=1))
        self.addCleanup(queue.close)

        class Failing(Watcher):
            def dropped(self, session: str, number: int) -> None:
                raise RuntimeError("who is told")

        queue.watch(Failing([]))
        kept = [queue.append("1", b"%d" % number, 100.0) for number in range(3)]
        clock.advance(0)
        self.assertEqual([self.successResultOf(one) for one in kept], [1, 2, 3])
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 2)


class TakingTests(SynchronousTestCase):
    """A relay's ping is answered for what was taken, and for nothing else."""

    def take(self, error: BaseException | None) -> tuple[list[bool], Counter[Drop]]:
        said: list[bool] = []
        drops: Counter[Drop] = Counter()

        async def taking() -> None:
            if error is not None:
                raise error

        Deferred.fromCoroutine(report_outcome(taking(), said.append, drops)).addErrback(lambda _: None)
        return said, drops

    def test_failures_of_the_store_are_reported(self) -> None:
        self.assertEqual(self.take(None), ([True], Counter()))
        self.assertEqual(self.take(DmsgError("Redis is away")), ([False], Counter()))
        self.assertEqual(self.take(KeyError("ours")), ([True], Counter({Drop.NOT_HANDLED: 1})))
        self.assertEqual(len(self.flushLoggedErrors(KeyError)), 1)
        self.assertEqual(self.take(GeneratorExit()), ([False], Counter()))

    def test_the_relay_sends_unconfirmed_messages_again(self) -> None:
        """The connection is ended, so that the relay keeps it."""
        clock = Clock()
        done: list[Any] = []
        uplink = Uplink(clock, ["ws://127.0.0.1:1"], lambda: "", lambda data, ready: done.append(ready), clock.seconds)
        (link,) = uplink.links
        link._stopped = False
        socket = Aborting()
        link.opened(socket)  # type: ignore[arg-type]
        link.received(b"taken")
        link.received(b"not taken")
        link.ping_received(b"both....")
        done[0](True)
        self.assertFalse(socket.aborted)
        done[1](False)
        self.assertEqual((socket.aborted, socket.pongs), (True, []))


class Aborting(FakeSocket):
    """Keeps that it was dropped."""

    aborted = False

    def abort(self) -> None:
        self.aborted = True


class UploadTests(SynchronousTestCase):
    """A file that cannot be finished leaves nothing behind."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        self.clock = Clock()
        self.files = FileUploads(self.clock, self.directory, None, None, self.clock.seconds)  # type: ignore[arg-type]
        self.answers: list[tuple[bytes, Any]] = []

    def say(self, command: str, payload: bytes, tags: str = "", *, twin: int = 7, uid: str = "upload") -> None:
        envelope = Envelope(uid=uid, tags=tags, signature=os.urandom(65))
        received = ReceivedMessage(envelope, "request", Session(twin), payload)

        def answer(data: bytes, error: Any = None, **others: Any) -> None:
            self.answers.append((data, error))

        self.successResultOf(Deferred.fromCoroutine(self.files.requested(received, command, answer)))

    def descriptors(self) -> int:
        gc.collect()  # Garbage of earlier tests may hold descriptors.
        return len(os.listdir("/proc/self/fd"))

    def begin(self, twin: int, number: int, size: int = 3) -> str | None:
        """Offer an upload of a twin, and return the error with which it is refused."""
        self.say("negotiate", b'{"size": %d}' % size, twin=twin, uid=f"of-{twin}-{number}")
        error = self.answers[-1][1]
        return None if error is None else str(error[1])

    def test_a_few_twins_cannot_keep_all_others_out(self) -> None:
        """Four twins with four silent uploads each: each other twin gets a place from the one with most."""
        for twin in range(1, 5):
            self.assertEqual([self.begin(twin, number) for number in range(4)], [None] * 4)
        self.assertEqual(self.begin(1, 5), "too many uploads at once")
        self.assertIsNone(self.begin(8, 0))
        self.assertNotIn((1, "of-1-3"), self.files._incoming)
        self.assertFalse((self.directory / "of-1-3.part").exists())
        self.say("write", b"abc", "offset=0", twin=8, uid="of-8-0")
        self.say("close", b"", twin=8, uid="of-8-0")
        self.assertEqual((self.directory / "of-8-0").read_bytes(), b"abc")
        for twin in range(9, 17):
            self.begin(twin, 0)
        counts = Counter(twin for twin, _ in self.files._incoming)
        self.assertEqual((len(self.files._incoming), max(counts.values())), (16, 2))
        for key in list(self.files._incoming):
            self.files._give_up(key)

    def test_many_finished_uploads_of_one_twin_are_forgotten_before_those_of_another(self) -> None:
        self.patch(files_module, "MAX_OUTCOMES", 10)

        def upload(twin: int, number: int) -> None:
            self.begin(twin, number)
            uid = f"of-{twin}-{number}"
            self.say("write", b"abc", "offset=0", twin=twin, uid=uid)
            self.say("close", b"", twin=twin, uid=uid)
            self.assertIsNone(self.answers[-1][1])

        upload(8, 0)
        for number in range(20):
            upload(7, number)
        self.assertEqual(len(self.files._outcomes), 10)
        self.say("close", b"", twin=8, uid="of-8-0")
        self.assertEqual(self.answers[-1], (json.dumps(str(self.directory / "of-8-0")).encode(), None))
        self.say("close", b"", twin=7, uid="of-7-0")
        self.assertEqual(self.answers[-1][1][1], "there is no such upload")

    def test_uploads_together_leave_space_on_the_disk(self) -> None:
        """An upload may use at most half of what the present ones leave."""
        self.patch(files_module, "free_bytes", lambda path: 1000)
        self.assertEqual([self.begin(1, 0, 500), self.begin(2, 0, 250)], [None, None])
        self.assertIn("at most half of the free 250 B", str(self.begin(3, 0, 126)))
        self.assertIsNone(self.begin(3, 1, 125))
        self.say("write", bytes(400), "offset=0", twin=1, uid="of-1-0")
        self.patch(files_module, "free_bytes", lambda path: 600)
        self.assertIn("at most half of the free 125 B", str(self.begin(3, 2, 63)))
        for key in list(self.files._incoming):
            self.files._give_up(key)

    def test_the_sender_hears_of_a_file_whose_name_is_on_the_disk(self) -> None:
        """Otherwise a power failure could take the name back, although the sender keeps no copy."""
        synced: list[tuple[int, list[str], int]] = []
        real = os.fsync

        def fsync(descriptor: int) -> None:
            real(descriptor)
            synced.append((os.fstat(descriptor).st_ino, sorted(os.listdir(self.directory)), len(self.answers)))

        self.patch(os, "fsync", fsync)
        self.say("negotiate", b'{"size": 3}')
        self.say("write", b"abc", "offset=0")
        before = len(self.answers)
        self.say("close", b"")
        self.assertEqual((self.directory.stat().st_ino, ["upload"], before), synced[-1])
        self.assertIsNone(self.answers[-1][1])

    def test_the_name_cannot_be_synced(self) -> None:
        real = os.fsync

        def fsync(descriptor: int) -> None:
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(5, "Input/output error")
            real(descriptor)

        self.patch(os, "fsync", fsync)
        self.say("negotiate", b'{"size": 3}')
        self.say("write", b"abc", "offset=0")
        self.say("close", b"")
        self.assertEqual((0, "Input/output error"), self.answers[-1][1])
        self.assertEqual([], os.listdir(self.directory))
        self.assertEqual({}, self.files._incoming)

    def test_the_last_step_fails(self) -> None:
        for step in ("fsync", "rename", "close"):
            before = self.descriptors()
            self.say("negotiate", b'{"size": 3}')

            def fail(*arguments: Any, **options: Any) -> None:
                raise OSError(28, "No space left on device")

            self.say("write", b"abc", "offset=0")
            if step == "close":  # The descriptor is closed, although an error is reported.
                real = os.close
                self.patch(os, step, lambda number: (real(number), fail()))
            else:
                self.patch(os, step, fail)
                if step == "rename":  # A hard link would make the rename unnecessary.
                    self.patch(os, "link", fail)
            self.say("close", b"")
            self.doCleanups()
            self.assertEqual(self.descriptors(), before, step)
            self.assertEqual(self.clock.getDelayedCalls(), [])
            names = [path.name for path in self.directory.iterdir()]
            if step == "close":
                self.assertEqual(names, ["upload"])
            else:
                self.assertEqual(names, [], step)
                self.assertEqual(self.answers[-1][1], (0, "No space left on device"))
                self.assertEqual(self.files._incoming, {})
