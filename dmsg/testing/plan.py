"""Plan of a random walk: for each step, the data that ends of streams send, and the faults and lies that happen.

A plan is drawn from a seed before the walk begins. Each fault and each lie has a separate seed, so that leaving out one
of them does not change the others (:mod:`dmsg.testing.shrink`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

LIES = "lies"
"""Name of the fault by which a server begins to lie."""
SIZES = (1, 100, 10_000, 300_000)
"""Numbers of bytes that an end of a stream may send in a step."""
PAUSES = (0.0, 0.01, 0.3, 3.0, 12.0)
"""Possible seconds of the lab's time between two steps."""
SHORT = (0.0, 0.0005, 0.002, 0.01)
"""Possible seconds until the next step after one of :data:`MOVES`, in half of the cases. So the next fault happens
while a stream opens, closes, or moves to another server.
"""
MOVES = frozenset({"open", "finish", "kill", "reset", "leave", "poison", LIES})
"""Faults after which a stream may open, close or move."""
LIES_AT_ONCE = 6
"""Maximum number of lies in one step."""
ENDS = 8
"""Number of ends of streams that may send in a step."""


@dataclass(frozen=True, slots=True)
class Lie:
    """Lie that a server tells once or repeatedly.

    :ivar kind: name of the kind of lie.
    :ivar after: number of frames that the server sends before the lie.
    :ivar chance: seed of the random numbers of the lie.
    :ivar again: number of frames after which the lie is repeated; 0 for a lie that is told once.
    """

    kind: str
    after: int
    chance: int
    again: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """Step of a walk.

    :ivar says: pairs of the number of an end and the number of bytes that it sends.
    :ivar fault: name of the fault that happens; empty for none.
    :ivar chance: seed of the random numbers of the fault.
    :ivar seconds: seconds of the lab's time until the next step.
    :ivar lies: lies that a server tells from this step on, if the fault is :data:`LIES`.
    """

    says: tuple[tuple[int, int], ...] = ()
    fault: str = ""
    chance: int = 0
    seconds: float = 0.0
    lies: tuple[Lie, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of one walk.

    :ivar seed: seed of the lab.
    :ivar lying: whether servers may lie. A walk with lies has bystanders (:mod:`dmsg.testing.bystanders`).
    :ivar unrepentant: whether the last server that began to lie continues to lie when everything else is repaired.
    """

    seed: int
    steps: tuple[Step, ...]
    lying: bool = False
    unrepentant: bool = False

    @property
    def faults(self) -> list[str]:
        """Names of the faults, in order."""
        return [step.fault for step in self.steps if step.fault]

    @property
    def lies(self) -> list[Lie]:
        """Planned lies, in order."""
        return [lie for step in self.steps for lie in step.lies]

    def with_step(self, number: int, step: Step) -> Plan:
        """Return the plan with one step replaced."""
        return replace(self, steps=(*self.steps[:number], step, *self.steps[number + 1 :]))


def draw(seed: int, steps: int, faults: Sequence[str], kinds: Sequence[str] = ()) -> Plan:
    """Draw the plan of a walk.

    :param faults: names of the faults from which to draw.
    :param kinds: names of the lies from which to draw; empty for a walk without lies.
    """
    random = Random(f"plan {seed}")
    drawn = []
    for _ in range(steps):
        says = tuple((end, random.choice(SIZES)) for end in range(ENDS) if random.random() < 0.5)
        fault = random.choice(faults) if random.random() < 0.6 else ""
        if kinds and random.random() < 0.35:
            fault = LIES
        lies = tuple(_draw_lie(random, kinds) for _ in range(random.randint(1, LIES_AT_ONCE))) if fault == LIES else ()
        pauses = SHORT if fault in MOVES and random.random() < 0.5 else PAUSES
        drawn.append(Step(says, fault, random.getrandbits(32), random.choice(pauses), lies))
    return Plan(seed, tuple(drawn), lying=bool(kinds), unrepentant=bool(kinds) and random.random() < 0.5)


def _draw_lie(random: Random, kinds: Sequence[str]) -> Lie:
    after = random.choice((0, 0, 0, 1, 3, 20))
    again = random.choice((5, 50)) if random.random() < 0.2 else 0
    return Lie(random.choice(kinds), after, random.getrandbits(32), again)
