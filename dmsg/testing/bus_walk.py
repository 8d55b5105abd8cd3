"""Random walk of the message bus through faults. It checks the promises of the bus: no program handles a call twice,
and no call that a relay has accepted is lost.

``python -m dmsg.testing.bus_walk --seconds 60`` runs one walk after another, each with another seed, until a walk
fails, and prints the seed of this walk.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from dmsg.rmb.client import Reply
from dmsg.rmb.envelope.envelope_pb2 import Envelope
from dmsg.rmb.session.handlers import Request
from dmsg.testing import faults
from dmsg.testing.bus_calls import ACCEPTED, KILL_TWIN, RELAYS, STATES, TWINS, Call, CallPlace, parties_of
from dmsg.testing.bus_lab import BusLab, repeatable_bus_lab
from dmsg.testing.determinism import Trace
from dmsg.testing.faults import Faults
from dmsg.testing.plan import INSTANT, PATIENCE, Aim, Plan, Step, draw
from dmsg.testing.promise import PromiseBroken
from dmsg.testing.walk_command import Done, explained, run
from dmsg.testing.walk_coverage import WalkCoverage, hosts_in_role, pairs

STEPS = 60
COMMAND = "note"
CALL_TIMEOUT = 1500.0
"""Seconds for which a caller waits. A walk and its recovery take less, so no call may fail."""
SETTLE_TIMEOUT = 400.0
"""Maximum seconds of the lab's time in which everything must recover after the last fault."""
LATE_CALL_TIME = 100.0
"""Seconds of the lab's time after the last answer. A call that is delivered again in this time is noticed."""
MAX_UNANSWERED = 40
"""Maximum number of unanswered calls of a twin. A twin that has so many makes no further call."""
BURST_SIZES = (1, 1, 5)
"""Possible numbers of calls that a twin makes in a step. A walk draws one of them for each step."""
FAULT_DELAYS = (0.0, 0.005, 0.015, 0.03, 0.1)
"""Possible delays, in seconds of the lab's time, between the calls of a step and the fault of this step. A walk draws
one of them."""
LEFT_OUT = frozenset({"poison", "slow reader", "reader resumes", "clock jump", "wall clock"})
"""Faults that do not apply: those of streams, which the bus does not have, and those of clocks, because messages expire
by the date."""
FAULTS = (*(name for name in faults.BY_NAME if name not in LEFT_OUT), KILL_TWIN)
"""Names of the faults of a walk."""
_CALLS = tuple((twin, 100) for twin in range(len(TWINS)))
WAYS: dict[str, Sequence[Step]] = {state: (Step(_CALLS), Step(_CALLS, seconds=0.03)) for state in STATES}
"""Steps of a walk after which a call is often in a state, by the name of the state."""
BEFORE_WAYS = {ACCEPTED: (Step(fault="heal"), Step(fault="partition"))}
"""Steps that happen before those of :data:`WAYS`. A call stays accepted while the path to its receiver is cut."""


class BusWalk:
    """Random walk of a bus with two relays, which federate, and four twins.

    :param lab: lab of the bus, in which nothing runs yet.
    :param plan: plan of the walk. In its steps, the number of an end stands for the twin that makes calls.
    :ivar faults: names of the faults so far, in order.
    :ivar answered: number of calls that were answered.
    :ivar coverage: states of the calls in which faults happened, and the roles of the hosts to which they happened.
    """

    def __init__(self, lab: BusLab, plan: Plan) -> None:
        self.coverage = WalkCoverage(FAULTS, STATES, parties_of)
        self.lab = lab
        self.plan = plan
        self.faults: list[str] = []
        self.answered = 0
        self._faults = Faults(lab, RELAYS, tuple(TWINS), [])
        self._names = list(TWINS)
        self._calls: dict[bytes, Call] = {}
        self._ids: dict[str, int] = {}
        self._broken: list[str] = []

    def run(self) -> None:
        """Run the walk, repair all faults, and check that every call is answered.

        :raises PromiseBroken: the bus has broken a promise.
        :raises AssertionError: the bus has not recovered.
        """
        for name in RELAYS:
            self.lab.add_server(name)
        for name in TWINS:
            self._start(name)
        self.lab.settle()
        self._ids = {name: twin.twin.id for name, twin in self.lab.twins.items() if twin.twin is not None}
        self.lab.delay_all()
        for step in self.plan.steps:
            self._do(step)
        self._faults.repair()
        try:
            self.lab.network.run_until(lambda: not any(call.is_open for call in self._calls.values()), SETTLE_TIMEOUT)
        except AssertionError as error:
            left = [str(call) for call in self._calls.values() if call.is_open]
            raise AssertionError(f"{error}: {len(left)} calls are lost: {'; '.join(left[:5])}") from error
        self.lab.network.run(LATE_CALL_TIME)
        self.check()

    def check(self) -> None:
        """Check the promises.

        :raises PromiseBroken: a program handled a call twice, or a caller got an error or the answer of another call.
        """
        if self._broken:
            raise PromiseBroken("; ".join(self._broken[:5]))

    def _start(self, name: str) -> None:
        """Start a program of a twin. The new program remembers no earlier calls."""
        client = self.lab.add_twin(name, *TWINS[name])
        handled: set[bytes] = set()

        def handle(request: Request) -> bytes:
            key = request.payload.partition(b"\n")[0]
            if key in handled:
                self._broken.append(f"{key.decode()} was handled twice by one program")
            handled.add(key)
            self._calls[key].handled += 1
            return key

        client.serve(COMMAND, handle)
        send = client._bus.send  # noqa: SLF001  # Only there the acceptance by a relay is reported.

        def send_and_note(envelope: Envelope, payload: bytes | None, *arguments: Any) -> Deferred[None]:
            sent = send(envelope, payload, *arguments)
            call = self._calls.get((payload or b"").partition(b"\n")[0]) if envelope.HasField("request") else None
            return sent if call is None else sent.addCallback(self._accepted, call)

        client._bus.send = send_and_note  # type: ignore[assignment, method-assign]  # noqa: SLF001

    def _do(self, step: Step) -> None:
        random = Random(step.chance)
        for number, size in step.says:
            if number < len(self._names):
                for _ in range(random.choice(BURST_SIZES)):
                    self._call(self._names[number], size, random)
        delay = random.choice(FAULT_DELAYS)
        if step.at:
            self.lab.network.wait_for(
                lambda: self._aimed_hosts(step) if step.to else any(place.state == step.at for place in self._places()),
                PATIENCE,
                INSTANT,
            )
        else:
            # The clock is advanced before the fault, so that messages are in transit when the fault happens.
            self.lab.network.run(delay)
        if step.fault:
            self.faults.append(step.fault)
            places = list(self._places())
            self.coverage.note(step.fault, pairs(places, self._make(step, random)))
        self.lab.network.run(step.seconds)
        self.check()

    def _make(self, step: Step, random: Random) -> Sequence[str]:
        """Cause a fault. Return the names of the hosts to which it happened."""
        aimed = self._aimed_hosts(step)
        if step.fault == KILL_TWIN:
            name = random.choice([name for name in self._names if name in aimed] or self._names)
            self._kill_twin(name)
            return (name,)
        self._faults.make(step.fault, random, aimed)
        return self._faults.hit

    def _aimed_hosts(self, step: Step) -> set[str]:
        """Return the names of the hosts that have the role ``step.to`` for a call in the state ``step.at``, and to
        which the fault of the step can happen."""
        hosts = self._names if step.fault == KILL_TWIN else self._faults.candidates(step.fault)
        return hosts_in_role(self._places(), step.at, step.to, hosts)

    def _places(self) -> Iterator[CallPlace]:
        """Yield the states and twins of all open calls."""
        return (call.place for call in self._calls.values() if call.is_open)

    def _kill_twin(self, name: str) -> None:
        """Kill the program of a twin, and start another one. What a relay has accepted must still be handled."""
        for call in self._calls.values():
            if name in (call.caller, call.receiver):
                call.is_due = False
        self.lab.kill(name)
        self._start(name)

    def _call(self, caller: str, size: int, random: Random) -> None:
        if sum(call.caller == caller and call.is_open for call in self._calls.values()) >= MAX_UNANSWERED:
            return
        receiver = random.choice([name for name in self._names if name != caller])
        call = Call(caller, receiver, len(self._calls) + 1)
        self._calls[call.key] = call
        payload = call.key + b"\n" + random.randbytes(size)
        calling = self.lab.twins[caller].call(self._ids[receiver], COMMAND, payload, timeout=CALL_TIMEOUT, keep=True)
        Deferred.fromCoroutine(calling).addCallbacks(self._answered, self._failed, (call,), errbackArgs=(call,))

    def _accepted(self, result: None, call: Call) -> None:
        call.accepted = True

    def _answered(self, reply: Reply, call: Call) -> None:
        call.answered = True
        self.answered += 1
        if reply.payload != call.key:
            self._broken.append(f"{call} got the answer {reply.payload!r}")
        if not call.handled:
            self._broken.append(f"{call} was answered")

    def _failed(self, failure: Failure, call: Call) -> None:
        if call.is_due:
            self._broken.append(f"{call} failed: {type(failure.value).__name__}: {failure.getErrorMessage()}")


def draw_plan(seed: int, steps: int = STEPS, aims: Sequence[Aim] = ()) -> Plan:
    """Return the plan that is drawn from a seed.

    :param aims: faults that the plan contains more often, each with the state of a call in which it should happen.
    """
    return draw(seed, steps, FAULTS, aims=aims, ways=WAYS, before_ways=BEFORE_WAYS)


def follow(plan: Plan) -> tuple[BusWalk, Trace]:
    """Run the walk of a plan.

    :raises AssertionError: the walk fails. Its text contains the seed, the faults and the last events.
    """
    trace = Trace()
    with (
        tempfile.TemporaryDirectory(prefix="dmsg-bus-walk-") as directory,
        repeatable_bus_lab(plan.seed, Path(directory), trace) as lab,
    ):
        walk = BusWalk(lab, plan)
        with explained(plan.seed, walk, trace):
            walk.run()
            lab.stop()
    return walk, trace


def main() -> None:
    """Run random walks with the options of the command line."""

    def done(plan: Plan) -> Done:
        walk, trace = follow(plan)
        return Done(walk.answered, walk.faults, trace, walk.coverage)

    run(
        "dmsg.testing.bus_walk",
        __doc__,
        STEPS,
        draw_plan,
        done,
        "calls answered",
        "; none was lost or handled twice",
        steered=draw_plan,
    )


if __name__ == "__main__":
    main()
