"""A spool's side, with a collector that answers what the test says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest import mock

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.collector.sender import CHECK_INTERVAL, LOG_INTERVAL, REFUSED_INTERVAL, SenderProtocol, SendError, SpoolSender
from dmsg.collector.wire import Answer, Kind, Offer
from dmsg.errors import ConnectFailed
from dmsg.keylock import hold_key
from dmsg.keys import SecKey
from dmsg.net.streams.address import DmsgAddress
from tests.collector.support import packed, spool_name

COLLECTOR = DmsgAddress(SecKey.from_seed(b"collector").public, 900)


class Stream(SenderProtocol):
    """Answers at once."""

    def __init__(self, answer: Callable[[Offer], Answer | None]) -> None:
        super().__init__(Clock())
        self.answer = answer
        self.transport = mock.Mock()

    def offer(self, offer: Offer, file: Any) -> Deferred[Answer]:
        found = self.answer(offer)
        return fail(SendError("the stream has ended")) if found is None else succeed(found)


class SenderTests(SynchronousTestCase):
    """The clock has no threads: what a thread does is done at once."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.spool = Path(self.mktemp())
        self.spool.mkdir()
        self.warned: list[str] = []
        self.sender = SpoolSender(
            cast(Any, self.clock),
            self.spool,
            COLLECTOR,
            lambda: ["http://127.0.0.1:1"],
            on_warning=self.warned.append,
        )
        self.offered: list[str] = []
        self.answers: dict[str, Answer | None] = {}
        self.reached: Callable[[], Any] = lambda: succeed(Stream(self.answered))
        client = mock.Mock(connect=lambda *args, **options: self.reached(), stopService=lambda: succeed(None))
        self.sender._client = client

    def answered(self, offer: Offer) -> Answer | None:
        self.offered.append(offer.name)
        return self.answers.get(offer.name, Answer(Kind.KEPT))

    def add(self, number: int) -> Path:
        path = self.spool / spool_name(number)
        path.write_bytes(packed())
        return path

    def there(self) -> list[str]:
        return sorted(path.name for path in self.spool.glob("*.gz"))

    def round(self) -> None:
        """Advance the clock to the next check of the spool."""
        if not self.sender.running:
            self.sender.startService()
            self.clock.advance(0)
            return
        self.clock.advance(CHECK_INTERVAL)

    def tearDown(self) -> None:
        if self.sender.running:
            self.successResultOf(self.sender.stopService())
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_only_confirmed_files_are_removed(self) -> None:
        (self.spool / "notes.jsonl.gz").write_bytes(b"x")
        (self.spool / f".{spool_name(9)}.part").write_bytes(b"x")
        for number in range(3):
            self.add(number)
        self.round()
        self.assertEqual(self.offered, [spool_name(number) for number in range(3)])
        self.assertEqual(self.there(), ["notes.jsonl.gz"])
        self.assertEqual((self.sender.sent.delivered, self.sender.sent.waiting), (3, 0))
        self.add(5)
        self.round()
        self.assertEqual(self.offered[3:], [spool_name(5)])

    def test_refused_files_stay_in_the_spool(self) -> None:
        self.add(1), self.add(2), self.add(3)
        for number in (1, 3):
            self.answers[spool_name(number)] = Answer(Kind.REFUSED, "not this one")
        self.round()
        self.assertEqual(self.there(), [spool_name(1), spool_name(3)])
        self.assertEqual(len(self.warned), 1, self.warned)
        self.round()
        self.assertEqual(len(self.offered), 3)
        self.answers.clear()
        for _ in range(int(REFUSED_INTERVAL / CHECK_INTERVAL)):
            self.round()
        self.assertEqual(self.there(), [])

    def test_an_unreadable_file_does_not_delay_others(self) -> None:
        self.add(1).unlink()
        (self.spool / spool_name(1)).mkdir()  # Nobody can open a directory as a file, not even root.
        self.add(2), self.add(3)
        unlink = Path.unlink

        def fails(path: Path, missing_ok: bool = False) -> None:
            if path.name == spool_name(2):
                raise PermissionError(13, "Permission denied")
            unlink(path, missing_ok)

        self.patch(Path, "unlink", fails)
        self.round()
        self.assertEqual(self.offered, [spool_name(2), spool_name(3)])
        self.assertEqual(self.there(), [spool_name(1), spool_name(2)])
        self.assertIn("cannot be read: Is a directory", self.warned[0])
        self.assertIn("is with the collector, but cannot be removed: Permission denied", self.warned[1])
        self.round()
        self.assertEqual(len(self.offered), 2)

    def test_a_collector_that_is_not_there_or_has_no_room(self) -> None:
        self.add(1), self.add(2)
        self.reached = lambda: fail(ConnectFailed("nobody", ((COLLECTOR.public_key.hex(), "refused"),)))
        self.round()
        self.assertIn(f"is {self.sender.key.public} on its list?", self.warned[0])
        for _ in range(100):
            self.clock.advance(60)
        self.assertGreater(self.sender.sent.failures, 20)
        self.assertLess(len(self.warned), 2 + 6000 // LOG_INTERVAL)
        self.reached = lambda: succeed(Stream(self.answered))
        self.answers[spool_name(1)] = Answer(Kind.LATER, "full")
        self.clock.advance(600)
        self.assertEqual(set(self.offered), {spool_name(1)})
        self.assertTrue(any("the collector cannot accept files now: full" in line for line in self.warned), self.warned)
        self.answers[spool_name(1)] = None
        self.clock.advance(600)
        self.answers.clear()
        self.clock.advance(600)
        self.assertEqual(self.there(), [])

    def test_the_last_file_goes_before_the_service_ends(self) -> None:
        self.add(1)
        self.round()
        self.add(2)
        self.successResultOf(self.sender.stopService())
        self.assertEqual(self.there(), [])

    def test_stopping_does_not_wait_for_ever(self) -> None:
        self.add(1)
        self.round()
        self.add(2)
        self.reached = Deferred
        stopped = self.sender.stopService()
        self.assertNoResult(stopped)
        self.clock.advance(10)
        self.successResultOf(stopped)
        self.assertEqual(self.there(), [spool_name(2)])

    def test_send_once_sends_all_files_and_ends(self) -> None:
        self.add(1)
        self.assertEqual(self.successResultOf(Deferred.fromCoroutine(self.sender.send_once())).delivered, 1)
        other = SpoolSender(cast(Any, self.clock), self.spool, COLLECTOR, list)
        self.add(2)
        lock = hold_key(self.spool / "sender.key", "another process")
        self.addCleanup(lock.release)
        with mock.patch("dmsg.keylock._held", {}):
            self.failureResultOf(Deferred.fromCoroutine(other.send_once()), SendError)
