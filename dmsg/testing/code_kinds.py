"""Faults and lies from which the plan of a random walk of transfers by codes is drawn, and the faults that wait for a
state of a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from dmsg.testing import faults
from dmsg.testing.code_programs import (
    AGREEING,
    FINISHING,
    OFFERING,
    RECEIVING,
    SENDING,
    STOPPING,
    Program,
    ReceiverProgram,
    SenderProgram,
)
from dmsg.testing.code_strangers import VISITS
from dmsg.testing.lies import KINDS
from dmsg.testing.plan import LIE, Aim, Lie, Plan, Step, draw

STEPS = 60
"""Number of steps of a walk."""
LEFT_OUT = frozenset({"poison", "slow reader", "reader resumes"})
"""Faults that do not apply to transfers by codes."""
INTERCEPT, HONEST = "intercept", "honest"
KILL_SENDER, KILL_RECEIVER = "kill sender", "kill receiver"
INTERRUPT_SENDER, INTERRUPT_RECEIVER = "interrupt sender", "interrupt receiver"
REPLACE, REPLACE_PARTLY_RECEIVED, FULL_DISK = "replace source", "replace partly received", "full disk"
LENGTHEN, OVERWRITE = "lengthen offered file", "overwrite source"
OWN_FAULTS = (
    *("cut", "cut", KILL_SENDER, KILL_RECEIVER, KILL_RECEIVER, INTERRUPT_SENDER, INTERRUPT_RECEIVER),
    *(fault for fault in (REPLACE, REPLACE_PARTLY_RECEIVED, LENGTHEN, OVERWRITE, FULL_DISK) for _ in range(3)),
    *("kill discovery", "tell two", INTERCEPT, HONEST),
)
FAULTS = (*(name for name in faults.BY_NAME if name not in LEFT_OUT), *OWN_FAULTS, *VISITS)
"""Names of the faults of a walk. A fault that is listed twice happens twice as often."""
AIMED_STEPS = 12
"""Number of steps that a walk with aims has for them, in addition to its other steps."""
EVERY_KIND = (*FAULTS, *(f"lie: {kind}" for kind in KINDS))
"""Rows of the coverage table of a walk: all faults and lies."""
MOMENTS: dict[type[Program], tuple[str, ...]] = {
    SenderProgram: (OFFERING, SENDING, FINISHING, STOPPING),
    ReceiverProgram: (AGREEING, RECEIVING, RECEIVING, FINISHING, STOPPING),
}
"""States in which faults end a program, by the class of the program. A state that is listed twice is drawn twice as
often."""
ENDS: dict[str, tuple[type[Program], Callable[[Program], None]]] = {
    KILL_SENDER: (SenderProgram, Program.kill),
    KILL_RECEIVER: (ReceiverProgram, Program.kill),
    INTERRUPT_SENDER: (SenderProgram, Program.interrupt),
    INTERRUPT_RECEIVER: (ReceiverProgram, Program.interrupt),
}
"""For each fault that ends a program: the class of this program, and the function that ends it."""
AMBUSH_FAULTS = frozenset({*ENDS, REPLACE, REPLACE_PARTLY_RECEIVED, LENGTHEN, OVERWRITE, FULL_DISK})
"""Faults that may be planned as an :class:`Ambush`. The coverage counts them when they happen, not when they are
planned."""
AMBUSH_DELAYS = (0.0, 0.003, 0.01, 0.02, 0.3)
"""Possible delays, in seconds, of the fault of an ambush after its state is reached. One of them is drawn for each
ambush. Some are so short that the fault can happen between the last steps of a transfer.
"""


@dataclass(frozen=True, slots=True)
class Ambush:
    """Planned fault, which happens when a program reaches a given state. A fault at a random time would seldom meet a
    short state.

    :ivar kind: name of the fault.
    :ivar side: class of the program.
    :ivar state: state of the program.
    :ivar share: minimum share of the content that the program must have sent or received.
    :ivar delay: seconds between the time at which the program reaches both the state and the share, and the fault.
    :ivar action: function that causes the fault in the program.
    """

    kind: str
    side: type[Program]
    state: str
    share: float
    delay: float
    action: Callable[[Program], object]


def draw_plan(seed: int, steps: int, aims: Sequence[Aim] = ()) -> Plan:
    """Return the plan that is drawn from a seed. In half of the walks, servers lie.

    :param aims: faults and lies that the plan contains more often, each with the state of a program in which it should
        happen.
    """
    plan = draw(seed, steps, FAULTS, list(KINDS) if seed % 2 else ())
    random = Random(f"aims {seed}")
    drawn = list(plan.steps)
    for aim in random.choices(aims, k=AIMED_STEPS) if aims else ():
        lies = (Lie(aim.kind.removeprefix(LIE), 0, random.getrandbits(32)),) if aim.kind.startswith(LIE) else ()
        drawn.insert(random.randrange(len(drawn) + 1), Step((), str(aim), random.getrandbits(32), 0.0, lies))
    return replace(plan, steps=tuple(drawn))
