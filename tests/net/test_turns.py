"""Work in turns, and who holds back reading."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.net.turn_share import MAX_SHARE, TurnShare
from dmsg.net.turns import HeldReading, HoldReason, TurnTaker


class Reader(HeldReading):
    """Protocol that records when reading is paused and resumed."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def _stop_reading(self) -> None:
        self.told.append("stop")

    def _read_on(self) -> None:
        self.told.append("read on")


class HoldTests(SynchronousTestCase):
    def test_reading_resumes_when_no_holder_is_left(self) -> None:
        one = Reader()
        one.release(HoldReason.TURN)
        for why in (HoldReason.TURN, HoldReason.TURN, HoldReason.CONGESTED):
            one.hold(why)
        self.assertEqual((one.told, one.is_reading_paused), (["stop"], True))
        self.assertEqual(one.held_by, {HoldReason.TURN, HoldReason.CONGESTED})
        one.release(HoldReason.TURN)
        self.assertEqual(one.told, ["stop"])
        one.release(HoldReason.CONGESTED)
        self.assertEqual((one.told, one.is_reading_paused), (["stop", "read on"], False))


class Worker(TurnTaker):
    """Worker with ``pieces`` pieces of work, of 1 ms each."""

    _waits = False
    owner = "somebody"

    def __init__(self, clock: Clock, share: TurnShare | None, pieces: int) -> None:
        self._clock, self.share, self.pieces = clock, share, pieces
        self.over = 0
        self.done: list[int] = []

    def _later(self, call: Callable[[], None]) -> None:
        self._clock.callLater(0, call)

    def _on_work_left(self) -> None:
        self.over += 1

    def _is_idle(self) -> bool:
        return not self.pieces

    def _work(self) -> None:
        self.done.append(0)
        while self.pieces and self._may_work():
            self._spend(self._piece)
        if self.pieces:
            self._next_turn()
            self._next_turn()  # The second call has no effect.

    def _piece(self) -> None:
        self._clock.rightNow += 0.001
        self.pieces -= 1
        self.done[-1] += 1


class TurnsTests(SynchronousTestCase):
    def test_a_part_of_each_turn(self) -> None:
        clock = Clock()
        worker = Worker(clock, TurnShare(clock), 5)
        worker.proceed()
        for _ in range(5):
            clock.advance(0)
        each = round(MAX_SHARE / 0.001)
        self.assertEqual((worker.done, worker.over), ([each, each, 5 - 2 * each], 2))
        self.assertEqual(clock.getDelayedCalls(), [])

    def test_work_without_a_share_continues_in_the_next_turn(self) -> None:
        clock = Clock()
        worker = Worker(clock, None, 3)
        worker._next_turn()
        worker._next_turn()
        self.assertEqual(len(clock.getDelayedCalls()), 1)
        clock.advance(0)
        self.assertEqual((worker.done, worker.over), ([3], 1))

    def test_work_finished_meanwhile_is_not_repeated(self) -> None:
        """A reader whose data were processed in another way does nothing in the next turn."""
        clock = Clock()
        worker = Worker(clock, TurnShare(clock), 3)
        worker._next_turn()
        worker.pieces = 0
        clock.advance(0)
        self.assertEqual(worker.done, [])
