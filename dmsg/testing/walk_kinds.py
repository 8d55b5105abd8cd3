"""Faults and lies from which the plan of a random walk is drawn, and the shapes of its network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from dmsg.testing import faults
from dmsg.testing.lies import KINDS
from dmsg.testing.lying_discovery import KINDS as DISCOVERY_KINDS
from dmsg.testing.plan import LIE, SECOND_DISCOVERY, Aim, Plan, Shape, Step, draw
from dmsg.testing.stream_places import OTHER_CLIENT, OTHER_SERVER

STEPS = 60
"""Number of steps of a walk."""
SERVERS, CLIENTS = (1, 2, 3, 3, 4, 6), (2, 2, 2, 2, 2, 3, 3, 4, 6, 12)
"""Numbers of servers and clients of a walk. Large networks are rarer, because their walks take longer."""
DELAYS = (0.0, 0.002, 0.02)
"""Seconds that a packet between a client and a server of a walk takes at first."""
SHORT_STATES = frozenset({"opening", "moving", "suspended", "closing"})
"""States that often last for a round trip only."""
SHORT_STATE_DELAY = 0.02
"""Minimum seconds that a packet takes at first in a walk that aims at one of these states."""
OLD_PROGRAMS_PROBABILITY = 0.3
"""Fraction of the walks in which programs of 2019 take part."""
DISCOVERY_LIE_OF_FAULT = {"honest discovery": "", **{f"discovery: {kind}": kind for kind in DISCOVERY_KINDS}}
"""Kind of lies that discovery tells after each of these faults, by the name of the fault. After the fault with an empty
kind, discovery is honest again."""
STRANGER_FAULTS = ("strangers flood", "strangers resume", "strangers resume", "lying end", "lying end")
FAULTS = (
    *faults.BY_NAME,
    *("open", "open", "finish", "small pieces"),
    *("kill client", "kill discovery", "lost last frame"),
)
"""Names of the faults of a walk. A fault that is listed twice happens twice as often."""
# Walks with lies have no jumps of the clock, because a jump also affects the bystanders: their PINGs time out, and
# their servers are checked.
_CALM = tuple(fault for fault in FAULTS if fault != "clock jump")
FAULTS_WITH_LIES = (*_CALM, *DISCOVERY_LIE_OF_FAULT, *STRANGER_FAULTS, "honest")
"""Names of the faults of a walk in which servers lie."""
EVERY_FAULT, EVERY_LIE = FAULTS, (*FAULTS_WITH_LIES, *(f"{LIE}{kind}" for kind in KINDS))
"""Rows of the coverage table. The first tuple is for walks without lies, and names all their faults. The second is for
walks with lies, and names all their faults and lies."""
_BOTH = ((0, 300_000), (1, 300_000), (2, 300_000), (3, 300_000))
WAYS: dict[str, Sequence[Step]] = {
    "opening": (Step(fault="open", seconds=0.0005), Step(fault="open")),
    "idle": (Step(seconds=12.0),),
    "in flight": (Step(_BOTH, seconds=0.0005), Step(_BOTH, seconds=0.002)),
    "paused": (Step(_BOTH, "slow reader", seconds=0.3),),
    "moving": (Step(_BOTH, "leave", seconds=0.002), Step(_BOTH, "kill", seconds=0.01), Step(fault="leave")),
    "suspended": (Step(_BOTH, "reset", seconds=0.0005), Step(_BOTH, "partition", seconds=30.0)),
    "closing": (Step(fault="finish"), Step(fault="finish", seconds=0.0005)),
}
"""Steps of a walk after which a stream is often in a state, by the name of the state."""
BEFORE_WAYS: dict[str, Sequence[Step]] = {
    "moving": (Step(fault="restart", seconds=1.0),),
    "closing": (Step(fault="open", seconds=1.0),),
}
"""Steps before those of :data:`WAYS`, by the name of the state. A stream moves only if another server runs, and a walk
closes only streams that it has opened itself, and that are open."""


def draw_plan(seed: int, steps: int = STEPS, aims: Sequence[Aim] = (), *, lies: bool = False) -> Plan:
    """Return the plan that is drawn from a seed.

    :param aims: faults and lies that the plan contains more often, each with the state of a stream in which it should
        happen.
    :param lies: whether servers may lie.
    """
    random = Random(f"shape {seed}")
    shape = Shape(
        random.choice(SERVERS),
        random.choice(CLIENTS),
        random.choice(SECOND_DISCOVERY),
        random.random() < OLD_PROGRAMS_PROBABILITY,
        random.choice(DELAYS),
    )
    kinds = list(KINDS) if lies else []
    shape = _fit(shape, aims)
    plan = draw(seed, steps, FAULTS_WITH_LIES if lies else FAULTS, kinds, aims=aims, ways=WAYS, before_ways=BEFORE_WAYS)
    # In a network with one server, the server must become honest. Otherwise streams might never recover.
    return replace(plan, shape=shape, keeps_last_lie=plan.keeps_last_lie and shape.servers > 1)


def _fit(shape: Shape, aims: Sequence[Aim]) -> Shape:
    """Return the shape with what its aims need: hosts with the roles of the aims, and enough delay for states that last
    for a round trip."""
    parties = {aim.party for aim in aims}
    return replace(
        shape,
        clients=max(shape.clients, 3 if OTHER_CLIENT in parties else 2),
        servers=max(shape.servers, 2 if OTHER_SERVER in parties else 1),
        delay=max(shape.delay, SHORT_STATE_DELAY if any(aim.state in SHORT_STATES for aim in aims) else 0.0),
    )
