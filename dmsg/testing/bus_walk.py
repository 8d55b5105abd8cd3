"""Random walk of the message bus through faults. Its promises are checked at every step: no call is handled twice, and
none is lost.

``python -m dmsg.testing.bus_walk --seconds 60`` does one walk after another, each with another seed, until a walk
fails, and prints the seed of this walk.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from dmsg.rmb.session.handlers import Request
from dmsg.testing import faults
from dmsg.testing.bus_lab import BusLab, repeatable_bus_lab
from dmsg.testing.determinism import Trace
from dmsg.testing.faults import Faults
from dmsg.testing.logged_errors import no_logged_errors
from dmsg.testing.plan import Plan, Step, draw
from dmsg.testing.promise import PromiseBroken

RELAYS = ("relay-1", "relay-2")
TWINS = {"anna": ("relay-1",), "ben": ("relay-2",), "cleo": ("relay-1", "relay-2"), "dan": ("relay-2",)}
"""Twins, and the relays to which each is connected."""
STEPS = 60
COMMAND = "note"
EXPIRES = 1500.0
"""Seconds for which a caller waits. A walk and its recovery take less, so no call may fail."""
PATIENCE = 400.0
"""Maximum seconds of the lab's time in which everything must recover after the last fault."""
UNANSWERED = 40
"""Maximum number of unanswered calls of a twin with which it makes another call."""
LEFT_OUT = frozenset({"poison", "slow reader", "reader goes on", "clock jump", "wall clock"})
"""Faults that do not apply: the bus has no streams, and its messages expire by the date."""
FAULTS = tuple(name for name in faults.BY_NAME if name not in LEFT_OUT)
"""Names of the faults of a walk."""


class BusWalk:
    """Random walk of a bus with two relays, which federate, and four twins.

    :param lab: lab of the bus, in which nothing runs yet.
    :param plan: plan of the walk. In each step, its ends are the numbers of the twins that make a call.
    :ivar faults: names of the faults so far, in order.
    :ivar answered: number of calls that were answered.
    """

    def __init__(self, lab: BusLab, plan: Plan) -> None:
        self.lab = lab
        self.plan = plan
        self.faults: list[str] = []
        self.answered = 0
        self._faults = Faults(lab, RELAYS, tuple(TWINS), [])
        self._names = list(TWINS)
        self._calls: dict[bytes, str] = {}
        """Unanswered calls: the caller, by the unique beginning of the payload."""
        self._handled: Counter[bytes] = Counter()
        self._broken: list[str] = []
        self._count = 0

    def run(self) -> None:
        """Do the walk, repair all faults, and check that every call is answered.

        :raises PromiseBroken: the bus has broken a promise.
        :raises AssertionError: the bus has not recovered.
        """
        for name in RELAYS:
            self.lab.add_server(name)
        for name, relays in TWINS.items():
            self.lab.add_twin(name, *relays).serve(COMMAND, self._handle)
        self.lab.settle()
        for step in self.plan.steps:
            self._do(step)
        self._faults.repair()
        try:
            self.lab.network.run_until(lambda: not self._calls, PATIENCE)
        except AssertionError as error:
            left = ", ".join(f"{key.decode()} (handled {self._handled[key]} times)" for key in list(self._calls)[:5])
            raise AssertionError(f"{error}: {len(self._calls)} calls have no answer: {left}") from error
        self.check()

    def check(self) -> None:
        """Check the promises.

        :raises PromiseBroken: a call was handled twice, failed, or got the answer of another call.
        """
        self._broken += [f"{key.decode()} was handled {n} times" for key, n in self._handled.items() if n > 1]
        if self._broken:
            raise PromiseBroken("; ".join(self._broken[:5]))

    def _do(self, step: Step) -> None:
        for number, size in step.says:
            if number < len(self._names):
                self._call(self._names[number], size, Random(f"{step.chance} {number}"))
        if step.fault:
            self.faults.append(step.fault)
            self._faults.make(step.fault, Random(step.chance))
        self.lab.network.run(step.seconds)
        self.check()

    def _call(self, caller: str, size: int, random: Random) -> None:
        if sum(one == caller for one in self._calls.values()) >= UNANSWERED:
            return
        receiver = random.choice([name for name in self._names if name != caller])
        self._count += 1
        key = f"call {self._count} from {caller} to {receiver}".encode()
        self._calls[key] = caller
        twin = self.lab.twins[receiver].twin
        assert twin is not None
        calling = self.lab.twins[caller].call(
            twin.id, COMMAND, key + b"\n" + random.randbytes(size), timeout=EXPIRES, keep=True
        )
        Deferred.fromCoroutine(calling).addCallbacks(self._answered, self._failed, (key,), errbackArgs=(key,))

    def _handle(self, request: Request) -> bytes:
        key = request.payload.partition(b"\n")[0]
        self._handled[key] += 1
        return key

    def _answered(self, reply: object, key: bytes) -> None:
        del self._calls[key]
        self.answered += 1
        payload = getattr(reply, "payload", None)
        if payload != key:
            self._broken.append(f"{key.decode()} got the answer {payload!r}")
        if not self._handled[key]:
            self._broken.append(f"{key.decode()} was answered and not handled")

    def _failed(self, failure: Failure, key: bytes) -> None:
        del self._calls[key]
        self._broken.append(f"{key.decode()} failed: {type(failure.value).__name__}: {failure.getErrorMessage()}")


def follow(plan: Plan) -> tuple[BusWalk, Trace]:
    """Do the walk of a plan.

    :raises AssertionError: the walk fails. Its text contains the seed, the faults and the last events.
    """
    trace = Trace()
    with (
        tempfile.TemporaryDirectory(prefix="dmsg-bus-walk-") as directory,
        repeatable_bus_lab(plan.seed, Path(directory), trace) as lab,
    ):
        walk = BusWalk(lab, plan)
        try:
            with no_logged_errors():
                walk.run()
                lab.stop()
        except AssertionError as error:
            last = "\n".join(trace.last)
            text = f"seed {plan.seed}: {error}; faults: {', '.join(walk.faults)}; the last events:\n{last}"
            raise type(error)(text) from error
    return walk, trace


def main() -> None:
    """Do random walks for ``--seconds`` seconds, or until a walk fails. With ``--seed``, do only the walk of this
    seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each walk")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        walk, trace = follow(draw(arguments.seed, arguments.steps, FAULTS))
        sys.stdout.write(
            f"seed {arguments.seed}: {walk.answered} calls answered; faults: {', '.join(walk.faults)}\n"
            f"{trace.count} events, hash {trace.digest()}\n"
        )
        return
    end = time.monotonic() + arguments.seconds
    first = int.from_bytes(os.urandom(4), "big")
    count = answered = 0
    while time.monotonic() < end:
        try:
            answered += follow(draw(first + count, arguments.steps, FAULTS))[0].answered
        except BaseException:
            sys.stdout.write(
                f"failed: python -m dmsg.testing.bus_walk --seed {first + count} --steps {arguments.steps}\n"
            )
            raise
        count += 1
    sys.stdout.write(f"{count} walks, seeds {first} to {first + count - 1}: {answered} calls, each handled once\n")


if __name__ == "__main__":
    main()
