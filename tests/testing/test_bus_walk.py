"""Random walks of the message bus through faults."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dmsg.rmb.relay.queue.sqlite import SQLiteQueue
from dmsg.rmb.session.seal import ReplayWindow
from dmsg.testing.bus_calls import (
    ACCEPTED,
    CALLER,
    OTHER_RELAY,
    OTHER_TWIN,
    RECEIVER,
    RECEIVER_RELAY,
    RELAYS,
    STATES,
    TWINS,
    Call,
)
from dmsg.testing.bus_lab import repeatable_bus_lab
from dmsg.testing.bus_walk import FAULTS, WAYS, BusWalk, draw_plan, follow
from dmsg.testing.plan import Aim, Plan, Step, draw
from dmsg.testing.walk_coverage import Cell
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
            self.assertLessEqual(walk.coverage.kinds, set(walk.faults))
        self.assertLessEqual({"kill", "leave", "pause", "reset"}, faults)

    def test_a_fault_happens_in_the_state_and_to_the_party_that_are_aimed_at(
        self,
    ) -> None:
        self.assertEqual(set(WAYS), set(STATES))
        # Without the wait, or without the cut path, this walk never resets the receiver of an accepted call.
        walk, _ = follow(draw_plan(3, 20, [Aim("reset", ACCEPTED, RECEIVER)]))
        self.assertIn(Cell("reset", RECEIVER, ACCEPTED), walk.coverage.reached)
        for state in STATES:
            for cell in (Cell("kill twin", CALLER, state), Cell("reset", RECEIVER_RELAY, state)):
                walk, _ = follow(draw_plan(4, STEPS, [Aim(cell.kind, cell.state, cell.party)]))
                self.assertIn(cell, walk.coverage.reached)

    def test_a_fault_is_not_aimed_at_a_relay_to_which_it_cannot_happen(self) -> None:
        with (
            TemporaryDirectory() as directory,
            repeatable_bus_lab(1, Path(directory)) as lab,
        ):
            walk = BusWalk(lab, Plan(1, ()))
            walk.run()
            call = Call("anna", "ben", 1)
            call.accepted = True
            walk._calls[call.key] = call
            for fault, hosts in (("reset", {"relay-2"}), ("restart", set())):
                self.assertEqual(walk._aimed_hosts(Step(fault=fault, at=ACCEPTED, to=RECEIVER_RELAY)), hosts)
            lab.kill("relay-2")
            for fault, hosts in (("reset", set()), ("restart", {"relay-2"})):
                self.assertEqual(walk._aimed_hosts(Step(fault=fault, at=ACCEPTED, to=RECEIVER_RELAY)), hosts)
            self.assertEqual(walk._aimed_hosts(Step(fault="kill twin", at=ACCEPTED, to=OTHER_TWIN)), {"cleo", "dan"})

    def test_states_of_a_call_and_roles_of_hosts(self) -> None:
        call = Call("anna", "ben", 1)
        found = [call.place.state]
        call.accepted = True
        found.append(call.place.state)
        call.handled = 1
        found.append(call.place.state)
        self.assertEqual(tuple(found), STATES)
        roles = {host: call.place.party_of(host) for host in (*TWINS, *RELAYS)}
        expected = {"anna": CALLER, "ben": RECEIVER, "cleo": OTHER_TWIN, "dan": OTHER_TWIN}
        self.assertEqual(roles, {**expected, "relay-1": OTHER_RELAY, "relay-2": RECEIVER_RELAY})

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
