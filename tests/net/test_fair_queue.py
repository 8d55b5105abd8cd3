"""A queue in which nobody waits because somebody else has much to do."""

from __future__ import annotations

from hypothesis import given, strategies as st
from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase

from dmsg.net.fair_queue import FairQueue, QueueCrowded

CROWD = [f"2600:1:0:{number:x}::1" for number in range(200)]
HOSTS = ["8.8.8.8", "8.8.8.9", "8.8.4.4", "", "a name", *CROWD[::40], "2600:2::1"]


class FairQueueTests(SynchronousTestCase):
    """Ten at a time, of one address four, of a wide block six."""

    def setUp(self) -> None:
        self.queue = FairQueue(10, 4, 6, 100, 8)

    def ask(self, host: str) -> Deferred[None]:
        turn = self.queue.acquire(host)
        self.addCleanup(turn.addErrback, lambda failure: None)
        return turn

    def test_a_crowd_leaves_places_for_others(self) -> None:
        for host in CROWD[:30]:
            self.ask(host)
        self.assertEqual((self.queue.running, self.queue.waiting, self.queue.is_scarce), (6, 24, True))
        self.successResultOf(self.ask("8.8.8.8"))

    def test_others_have_the_next_turn(self) -> None:
        """Another block gets the next turn, however many blocks a crowd is spread over."""
        for number in range(10):
            self.successResultOf(self.ask(f"9.9.{number}.9"))
        crowd = [self.ask(host) for host in CROWD]
        # The limit is four times that of one address, because all addresses are in one /56.
        self.assertEqual(self.queue.waiting, 32)
        self.failureResultOf(crowd[-1], QueueCrowded)
        honest = [self.ask("8.8.8.8"), self.ask("8.8.4.4")]
        for number in range(3):
            self.queue.release(f"9.9.{number}.9")
        for one in honest:
            self.successResultOf(one)
        self.assertEqual(sum(one.called for one in crowd[:32]), 1)

    def test_the_oldest_of_a_block_is_first(self) -> None:
        turns = [self.ask("8.8.8.8") for _ in range(6)]
        self.assertEqual([turn.called for turn in turns], [True] * 4 + [False] * 2)
        self.queue.release("8.8.8.8")
        self.assertEqual([turn.called for turn in turns], [True] * 5 + [False])

    def test_the_owner_of_most_waiting_items_loses_the_oldest(self) -> None:
        self.queue = FairQueue(1, 1, 1, 20, 20)
        self.ask("9.9.9.9")
        crowd = [self.ask("8.8.8.8") for _ in range(20)]
        honest = self.ask("8.8.4.4")
        self.failureResultOf(crowd[-1], QueueCrowded)
        self.failureResultOf(self.ask("8.8.8.8"), QueueCrowded)
        self.queue.release("9.9.9.9")
        self.queue.release("8.8.8.8")
        self.successResultOf(honest)

    def test_cancelled_items_are_skipped(self) -> None:
        turns = [self.ask("8.8.8.8") for _ in range(6)]
        turns[4].cancel()
        self.failureResultOf(turns[4], CancelledError)
        self.queue.release("8.8.8.8")
        self.successResultOf(turns[5])
        self.assertEqual(self.queue.waiting, 0)

    @given(st.lists(st.tuples(st.sampled_from(HOSTS), st.sampled_from(["ask", "done", "cancel"])), max_size=150))
    def test_every_item_is_served(self, steps: list[tuple[str, str]]) -> None:
        self.setUp()
        running: list[str] = []
        waiting: list[tuple[str, Deferred[None]]] = []

        def look() -> None:
            for one in list(waiting):
                if one[1].called:
                    waiting.remove(one)
                    running.append(one[0])

        for host, step in steps:
            if step == "ask":
                turn = self.ask(host)
                turn.addErrback(lambda failure: failure.trap(QueueCrowded, CancelledError) and None)
                before = self.queue.running + self.queue.waiting
                if before > len(running) + len(waiting):
                    waiting.append((host, turn))
            elif step == "done" and host in running:
                running.remove(host)
                self.queue.release(host)
            elif step == "cancel" and (mine := [one for one in waiting if one[0] == host]):
                waiting.remove(mine[-1])
                mine[-1][1].cancel()
            look()
            self.assertEqual((self.queue.running, self.queue.waiting), (len(running), len(waiting)))
        while running:
            self.queue.release(running.pop())
            look()
        self.assertEqual(waiting, [])
        self.assertEqual(len(self.queue._levels), 0)
