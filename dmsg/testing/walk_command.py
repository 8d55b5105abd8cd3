"""Common part of the random walks of several protocol families: the text of a walk that fails, and the command line."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import NamedTuple, Protocol

from dmsg.base.interpreter import begin_process, keep_modules
from dmsg.testing.determinism import KEPT_EVENTS, Trace
from dmsg.testing.logged_errors import no_logged_errors
from dmsg.testing.plan import Aim, Plan
from dmsg.testing.shrink import report
from dmsg.testing.walk_coverage import WalkCoverage

AIMS = 4
"""Number of aims of a walk that is steered to rare cells of the coverage."""
Planner = Callable[[int, int], Plan]
"""Function that draws the plan of a walk from a seed and a number of steps."""
SteeredPlanner = Callable[[int, int, Sequence[Aim]], Plan]
"""Function that draws the plan of a walk from a seed, a number of steps and aims."""


class Walking(Protocol):
    """Interface of a walk.

    :ivar faults: names of the faults so far, in order.
    """

    faults: list[str]


class Done(NamedTuple):
    """Result of a walk that did not fail.

    :ivar amount: result that the walk counts, for example the number of answered calls.
    :ivar faults: names of its faults, in order.
    :ivar coverage: states in which the faults happened; None if the walk does not count them.
    :ivar lies: number of lies that were told, by kind.
    """

    amount: int
    faults: list[str]
    trace: Trace
    coverage: WalkCoverage | None = None
    lies: Counter[str] = Counter()


@contextmanager
def explained(seed: int, walk: Walking, trace: Trace, more: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Context manager for a walk (a random test run). If the walk fails, the text of its error contains the seed, the
    faults and the last events. The walk also fails if an error was only logged.

    :param more: function that returns a text to insert before the last events.
    """
    try:
        with no_logged_errors():
            yield
    except AssertionError as error:
        last = "\n".join(trace.last[-KEPT_EVENTS:])
        text = f"seed {seed}: {error}; faults: {', '.join(walk.faults)}{more()}; the last events:\n{last}"
        raise type(error)(text) from error


def coverage_text(covered: WalkCoverage) -> str:
    """Return a text for people: the table of the coverage, the cells that can never be reached, and those that no walk
    has reached yet."""
    cells, missing = covered.cells, covered.missing
    text = f"number of faults and lies, by the states at that time:\n{covered.table()}"
    text += f"{len(cells) - len(missing)} of {len(cells)} combinations have happened\n"
    for reason, impossible in covered.impossible.items():
        text += f"can never happen, because {reason}: {', '.join(impossible)}\n"
    if missing:
        text += f"never happened: {', '.join(str(cell) for cell in missing)}\n"
    return text


def counted(lies: Counter[str]) -> str:
    """Return a text with the number of lies of each kind."""
    return ", ".join(f"{kind} {number}" for kind, number in sorted(lies.items()))


def run(
    module: str,
    description: str | None,
    steps: int,
    plan: Planner,
    follow: Callable[[Plan], Done],
    amount: str,
    guarantee: str,
    *,
    steered: SteeredPlanner | None = None,
    lying: SteeredPlanner | None = None,
) -> None:
    """Run random walks for ``--seconds`` seconds, or until a walk fails. With ``--seed``, run only the walk of this
    seed; with ``--shrink``, reduce its plan to a small test.

    :param module: name of the module that is run. It has a function ``follow``, which runs the walk of a plan.
    :param steps: default number of steps of a walk.
    :param plan: function that draws the plan of a seed with a number of steps.
    :param follow: function that runs the walk of a plan.
    :param amount: text that says what the walks count. It follows the number.
    :param guarantee: text that follows ``amount`` after walks that did not fail.
    :param steered: like ``plan``, for walks with aims; None if the walks cannot be steered to rare cells of the
        coverage.
    :param lying: like ``steered``, for walks with ``--lies``; None if the walks do not have this option.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seconds", type=float, default=60.0, help="Seconds for which to run walks.")
    parser.add_argument("--seed", type=int, help="Run only the walk of this seed.")
    parser.add_argument("--steps", type=int, default=steps, help="Number of steps of each walk.")
    parser.add_argument("--shrink", action="store_true", help="Reduce the failing walk of --seed to a small test.")
    if steered is not None:
        help_text = "Let this fault happen more often in this state, to this party: KIND@STATE or KIND@PARTY@STATE."
        parser.add_argument("--aim", action="append", default=[], type=Aim.parse, help=help_text)
    if lying is not None:
        parser.add_argument("--lies", action="store_true", help="Let servers lie, too.")
    arguments = parser.parse_args()
    lies = lying is not None and arguments.lies
    planner = lying if lies else steered

    def planned(seed: int, aims: Sequence[Aim]) -> Plan:
        return plan(seed, arguments.steps) if planner is None else planner(seed, arguments.steps, aims)

    aims: list[Aim] = [] if steered is None else arguments.aim
    if arguments.shrink:
        if arguments.seed is None:
            parser.error("--shrink needs --seed")
        try:
            sys.stdout.write(report(planned(arguments.seed, aims), follow, module))
        except ValueError:
            parser.error(f"the walk of seed {arguments.seed} does not fail")
    elif arguments.seed is not None:
        done = follow(planned(arguments.seed, aims))
        sys.stdout.write(
            f"seed {arguments.seed}: {done.amount} {amount}; faults: {', '.join(done.faults)}; "
            f"lies: {counted(done.lies) or 'none'}\n{done.trace.count} events, hash {done.trace.digest()}\n"
        )
    else:
        # A walk ends with a full garbage collection, which takes a third of the time if it leaves out modules.
        begin_process()
        keep_modules()
        options = f" --steps {arguments.steps}" + " --lies" * lies
        many = _Walks(f"python -m {module}{options}", planned, follow, aims, is_steered=steered is not None)
        many.walk(arguments.seconds)
        sys.stdout.write(many.text(f"{amount}{guarantee}"))


class _Walks:
    """Walks of successive seeds.

    :param command: command that does one of the walks, without its seed and aims.
    :param aims: aims of all walks; if empty and ``is_steered``, each walk is steered to rare cells of the coverage.
    """

    def __init__(
        self,
        command: str,
        planned: Callable[[int, Sequence[Aim]], Plan],
        follow: Callable[[Plan], Done],
        aims: Sequence[Aim],
        *,
        is_steered: bool,
    ) -> None:
        self._command = command
        self._planned = planned
        self._follow = follow
        self._aims = aims
        self._is_steered = is_steered
        self._first = int.from_bytes(os.urandom(4), "big")
        self._count = self._amount = 0
        self._cpu_seconds = 0.0
        self._told: Counter[str] = Counter()
        self._covered: WalkCoverage | None = None

    def walk(self, seconds: float) -> None:
        """Run walks for some seconds, or until one fails; then print the command that repeats this walk."""
        end, before = time.monotonic() + seconds, time.process_time()
        while time.monotonic() < end:
            seed = self._first + self._count
            aims = self._aims
            if self._is_steered and not aims and self._covered is not None:
                aims = self._covered.aims(Random(f"aims {seed}"), AIMS)
            try:
                done = self._follow(self._planned(seed, aims))
            except BaseException:
                aimed = "".join(f" --aim {shlex.quote(str(aim))}" for aim in aims)
                sys.stdout.write(f"failed: {self._command} --seed {seed}{aimed} --shrink\n")
                raise
            self._add(done)
        self._cpu_seconds = time.process_time() - before

    def _add(self, done: Done) -> None:
        self._count += 1
        self._amount += done.amount
        self._told += done.lies
        if self._covered is None:
            self._covered = done.coverage
        elif done.coverage is not None:
            self._covered.add(done.coverage)

    def text(self, amount: str) -> str:
        """Return a summary of all walks.

        :param amount: unit of the number that the walks count, followed by the guarantee that they check.
        """
        last = self._first + self._count - 1
        text = f"{self._count} walks, seeds {self._first} to {last}: {self._amount} {amount}\n"
        text += f"{self._count / max(self._cpu_seconds, 1e-3):.2f} walks a second of processor time\n"
        if self._told:
            text += f"lies told: {counted(self._told)}\n"
        return text if self._covered is None else text + coverage_text(self._covered)
