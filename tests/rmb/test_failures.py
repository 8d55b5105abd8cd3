"""Errors in the middle of things: nothing is confirmed that was not taken, and nobody else's message is lost."""

from __future__ import annotations

import gc
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
from dmsg.rmb.peer.files import FileUploads
from dmsg.rmb.relay.queue.interface import QueueLimits
from dmsg.rmb.relay.queue.sqlite import SQLiteQueue
from dmsg.rmb.session.seal import ReceivedMessage
from dmsg.rmb.session.uplink import Uplink, report_outcome
from dmsg.rmb.twins.address import Session
from tests.rmb.relay.queue.test_sqlite import Watcher
from tests.rmb.relay.test_delivery import FakeSocket


class QueueTests(SynchronousTestCase):
    """A queue that cannot make room: what was inserted is kept, and every caller hears so."""

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

    def say(self, command: str, payload: bytes, tags: str = "") -> None:
        envelope = Envelope(uid="upload", tags=tags, signature=os.urandom(65))
        received = ReceivedMessage(envelope, "request", Session(7), payload)

        def answer(data: bytes, error: Any = None, **others: Any) -> None:
            self.answers.append((data, error))

        self.successResultOf(Deferred.fromCoroutine(self.files.requested(received, command, answer)))

    def descriptors(self) -> int:
        gc.collect()  # Garbage of earlier tests may hold descriptors.
        return len(os.listdir("/proc/self/fd"))

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
            if step == "close":  # the descriptor goes, and says that something is wrong
                real = os.close
                self.patch(os, step, lambda number: (real(number), fail()))
            else:
                self.patch(os, step, fail)
                if step == "rename":  # a hard link would make it unnecessary
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
