"""Random walks of the message bus through faults."""

from __future__ import annotations

from functools import partial
from typing import Any

from dmsg.rmb.relay.queue.sqlite import SQLiteQueue
from dmsg.rmb.session.seal import ReplayWindow
from dmsg.testing.bus_walk import FAULTS, follow
from dmsg.testing.plan import Plan, draw
from tests.testing.walks import WalkCase

SEEDS = range(2)
STEPS = 25


def plan(seed: int) -> Plan:
    return draw(seed, STEPS, FAULTS)


WALKS = [partial(follow, plan(seed)) for seed in SEEDS]


class BusWalkTests(WalkCase):
    """Walks with fixed seeds."""

    def test_each_call_is_handled_once(self) -> None:
        faults = set()
        for seed in SEEDS:
            walk, _ = follow(plan(seed))
            self.assertGreater(walk.answered, 20)
            faults.update(walk.faults)
        self.assertLessEqual({"kill", "leave", "pause", "reset"}, faults)

    def test_a_receiver_that_forgets_what_it_handled_is_found(self) -> None:
        self.patch(ReplayWindow, "add", lambda *_: True)
        self.found("was handled twice by one program", WALKS)

    def test_a_relay_that_deletes_unconfirmed_messages_is_found(self) -> None:
        read = SQLiteQueue.read

        def forget(queue: SQLiteQueue, session: str, after: Any) -> Any:
            batch = read(queue, session, after)
            queue._db.execute("DELETE FROM messages")
            return batch

        self.patch(SQLiteQueue, "read", forget)
        self.found("calls are lost", WALKS)
