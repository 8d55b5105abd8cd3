"""Reduction of a failing plan to a smaller one that still fails, by delta debugging.

First steps are left out, then faults, lies and data of the remaining steps. Each fault and each lie has its own random
numbers, so leaving out one of them does not change the others. ``python -m dmsg.testing.walk --seed N --shrink`` prints
the result as a test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from dmsg.testing.plan import Plan, Shape, Step

MAX_TRIES = 400
"""Maximum number of walks that are run to reduce one plan."""

_Part = TypeVar("_Part")


class Shrinker:
    """Reduces one plan.

    :param fails: function that returns whether the walk of a plan fails in the same way as that of the original plan.
    :ivar tries: number of walks so far.
    """

    def __init__(self, fails: Callable[[Plan], bool], *, max_tries: int = MAX_TRIES) -> None:
        self._fails = fails
        self._max_tries = max_tries
        self.tries = 0

    def shrink(self, plan: Plan) -> Plan:
        """Return a small plan that still fails.

        :raises ValueError: the walk of ``plan`` does not fail.
        """
        if not self._still_fails(plan):
            raise ValueError("this plan does not fail")
        plan = self._fewer_steps(plan)
        for number in range(len(plan.steps)):
            plan = self._less(plan, number)
        # Some steps may have been necessary only for faults that are now left out, so steps are left out once more.
        return self._fewer_steps(plan)

    def _still_fails(self, plan: Plan) -> bool:
        if self.tries >= self._max_tries:
            return False
        self.tries += 1
        return self._fails(plan)

    def _fewer_steps(self, plan: Plan) -> Plan:
        steps = self._fewer(plan.steps, lambda kept: replace(plan, steps=kept))
        return replace(plan, steps=steps)

    def _fewer(self, parts: tuple[_Part, ...], made: Callable[[tuple[_Part, ...]], Plan]) -> tuple[_Part, ...]:
        """Return a small subset of ``parts`` with which the walk still fails, by the algorithm ddmin of Zeller and
        Hildebrandt.

        :param made: returns the plan with a subset of the parts.
        """
        chunks = 2
        while parts:
            size = max(1, len(parts) // chunks)
            for start in range(0, len(parts), size):
                kept = (*parts[:start], *parts[start + size :])
                if self._still_fails(made(kept)):
                    parts, chunks = kept, max(chunks - 1, 2)
                    break
            else:
                if size == 1:
                    break
                chunks = min(len(parts), chunks * 2)
        return parts

    def _less(self, plan: Plan, number: int) -> Plan:
        """Return the plan with as much of one step removed as possible, so that the walk still fails."""
        step = plan.steps[number]
        for simpler in (
            replace(step, fault="", chance=0, lies=(), at="", to=""),
            replace(step, at="", to=""),
            replace(step, to=""),
            replace(step, says=()),
            replace(step, seconds=0.0),
        ):
            if simpler != step and self._still_fails(smaller := plan.with_step(number, simpler)):
                return self._less(smaller, number)
        if len(step.lies) > 1:
            lies = self._fewer(step.lies, lambda kept: plan.with_step(number, replace(step, lies=kept)))
            plan = plan.with_step(number, replace(step, lies=lies))
        return plan


def shrink(plan: Plan, follow: Callable[[Plan], object]) -> tuple[Plan, str, int]:
    """Reduce a plan whose walk fails to a smaller plan whose walk fails in the same way.

    :param follow: function that runs the walk of a plan.
    :returns: the smaller plan, the text of its failure, and the number of walks that were needed.
    :raises ValueError: the walk of ``plan`` does not fail.
    """
    found: list[AssertionError] = []

    def fails(plan: Plan) -> bool:
        try:
            follow(plan)
        except AssertionError as error:
            if found and signature(error) != signature(found[0]):
                return False
            found.append(error)
            return True
        return False

    shrinker = Shrinker(fails)
    small = shrinker.shrink(plan)
    return small, str(found[-1]).split("; faults:")[0], shrinker.tries


def as_test(plan: Plan, error: str, module: str = "dmsg.testing.walk") -> str:
    """Return the source code of a test that repeats the walk of a plan.

    :param error: text of the failure, for the docstring of the test.
    :param module: name of the module whose ``follow`` runs the walk.
    """
    steps = "".join(f"                {_source(step)},\n" for step in plan.steps)
    names = ["Lie"] * bool(plan.lies) + ["Plan"] + ["Shape"] * (plan.shape != Shape()) + ["Step"]
    options = f"lying={plan.lying}, keeps_last_lie={plan.keeps_last_lie}"
    if plan.shape != Shape():
        options += f", shape={plan.shape!r}"
    return (
        "from twisted.trial.unittest import SynchronousTestCase\n\n"
        f"from dmsg.testing.plan import {', '.join(names)}\n"
        f"from {module} import follow\n\n\n"
        "class FoundTests(SynchronousTestCase):\n"
        f"    def test_seed_{plan.seed}(self) -> None:\n"
        f'        """{error}"""\n'
        f"        plan = Plan(\n            {plan.seed},\n            (\n{steps}            ),\n"
        f"            {options},\n        )\n"
        "        follow(plan)\n"
    )


def report(plan: Plan, follow: Callable[[Plan], object], module: str = "dmsg.testing.walk") -> str:
    """Reduce a plan whose walk fails, and return the result as a test, with a comment about the reduction.

    :raises ValueError: the walk of ``plan`` does not fail.
    """
    small, error, tries = shrink(plan, follow)
    return (
        f"# {len(plan.faults)} faults and {len(plan.lies)} lies became {len(small.faults)} and {len(small.lies)} "
        f"in {tries} walks\n{as_test(small, error, module)}"
    )


def _source(step: Step) -> str:
    """Return a Python expression for a step, without the fields that have their default values."""
    fields = []
    if step.says:
        fields.append(f"says={step.says!r}")
    if step.fault:
        fields.append(f"fault={step.fault!r}, chance={step.chance}")
    if step.seconds:
        fields.append(f"seconds={step.seconds!r}")
    if step.lies:
        fields.append(f"lies={step.lies!r}")
    if step.at:
        fields.append(f"at={step.at!r}")
    if step.to:
        fields.append(f"to={step.to!r}")
    return f"Step({', '.join(fields)})"


def signature(error: BaseException) -> Sequence[str]:
    """Return a pair that is equal for failures of the same kind: the name of the error's class, and the start of its
    message without digits."""
    text = str(error).split("; faults:")[0].split(": sent,")[0]
    text = "".join(letter for letter in text if not letter.isdigit())
    return type(error).__name__, text[:80]
