"""Reduction of failing plans to small ones, and the tests that are printed of them."""

from __future__ import annotations

from dataclasses import replace

from twisted.trial.unittest import SynchronousTestCase

from dmsg.testing import faults, walk as walk_module
from dmsg.testing.faults import Faults
from dmsg.testing.plan import LIES, Lie, Plan, Shape, Step, draw
from dmsg.testing.promise import PromiseBroken
from dmsg.testing.shrink import Shrinker, as_test, shrink, signature
from dmsg.testing.walk import follow
from dmsg.testing.walk_kinds import draw_plan


class ShrinkTests(SynchronousTestCase):
    """Plans that fail for a known reason."""

    def test_only_what_makes_it_fail_is_left(self) -> None:
        """This plan fails if a reset follows a lie of one kind and the second end sends data in between."""
        plan = draw(3, 60, ("reset", "delay"), ("cut", "flip", "hold"))

        def fails(plan: Plan) -> bool:
            state = 0
            for step in plan.steps:
                if state == 0 and any(lie.kind == "flip" for lie in step.lies):
                    state = 1
                if state == 1 and any(end == 1 for end, _ in step.says):
                    state = 2
                if state == 2 and step.fault == "reset":
                    return True
            return False

        self.assertTrue(fails(plan))
        shrinker = Shrinker(fails)
        small = shrinker.shrink(plan)
        self.assertTrue(fails(small))
        self.assertEqual(small.faults, [LIES, "reset"])
        self.assertEqual([lie.kind for lie in small.lies], ["flip"])
        self.assertLessEqual(len(small.steps), 3)
        self.assertEqual(sum(bool(step.says) for step in small.steps), 1)
        self.assertEqual(sum(step.seconds for step in small.steps), 0)
        self.assertLess(shrinker.tries, 120)

    def test_a_plan_that_does_not_fail_and_too_many_tries(self) -> None:
        plan = draw(4, 40, ("reset",))
        self.assertRaises(ValueError, Shrinker(lambda plan: False).shrink, plan)
        shrinker = Shrinker(lambda plan: True, max_tries=3)
        self.assertLess(len(shrinker.shrink(plan).steps), 40)
        self.assertEqual(shrinker.tries, 3)

    def test_the_printed_test_repeats_the_plan(self) -> None:
        """The source of the printed test runs, and passes the same plan to a walk."""
        steps = (Step(((0, 100),), LIES, 5, 0.3, (Lie("cut", 1, 7, 5),)), Step(fault="reset", chance=9), Step())
        plan = Plan(17, steps, lying=True, keeps_last_lie=True, shape=Shape(1, 12, "lying"))
        followed: list[Plan] = []
        self.patch(walk_module, "follow", followed.append)
        names: dict[str, type[SynchronousTestCase]] = {}
        exec(as_test(plan, "a promise was broken"), names)
        names["FoundTests"]("test_seed_17").test_seed_17()  # type: ignore[attr-defined]
        self.assertEqual(followed, [plan])

    def test_failures_of_one_kind(self) -> None:
        one, other = PromiseBroken("seed 1: byte 5 is not; faults: reset"), PromiseBroken("seed 22: byte 7 is not")
        self.assertEqual(signature(one), signature(other))
        self.assertNotEqual(signature(one), signature(AssertionError("seed 1: byte 5 is not")))

    def test_a_failing_walk_is_shrunk(self) -> None:
        """A fault that breaks the promise is found in a real walk, and is all that is left of it."""

        def broken(faults: Faults) -> None:
            raise PromiseBroken("healing broke it")

        self.patch(faults, "BY_NAME", faults.BY_NAME | {"reset": broken})
        drawn = draw_plan(5, steps=3)
        plan = replace(drawn, shape=Shape(), steps=(*drawn.steps, Step(fault="reset", chance=1)))
        small, error, tries = shrink(plan, follow)
        self.assertEqual((small.faults, error), (["reset"], "seed 5: healing broke it"))
        self.assertLess(tries, 20)
        self.assertRaisesRegex(PromiseBroken, "healing broke it", follow, small)
