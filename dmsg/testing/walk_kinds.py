"""Faults and lies from which the plan of a random walk is drawn."""

from __future__ import annotations

from dmsg.testing import faults
from dmsg.testing.lies import KINDS
from dmsg.testing.lying_discovery import KINDS as DISCOVERY_KINDS
from dmsg.testing.plan import Plan, draw

STEPS = 60
"""Number of steps of a walk."""
OF_DISCOVERY = {"honest discovery": "", **{f"discovery: {kind}": kind for kind in DISCOVERY_KINDS}}
"""Kinds of lies of discovery, by the name of the fault."""
OF_STRANGERS = ("strangers flood", "strangers resume", "strangers resume", "lying end", "lying end")
FAULTS = (*faults.BY_NAME, "open", "open", "finish", "small pieces", "kill client", "kill discovery")
"""Names of the faults of a walk. A fault that is listed twice happens twice as often."""
# Jumps of the clock are left out, because they affect the bystanders, too: their PINGs time out, and their servers are
# checked.
_CALM = tuple(fault for fault in FAULTS if fault != "clock jump")
FAULTS_WITH_LIES = (*_CALM, *OF_DISCOVERY, *OF_STRANGERS, "honest")
"""Names of the faults of a walk in which servers lie."""
EVERY_FAULT, EVERY_LIE = FAULTS, (*FAULTS_WITH_LIES, *(f"lie: {kind}" for kind in KINDS))
"""Rows of the coverage of a walk without and with lies."""


def draw_plan(seed: int, *, steps: int = STEPS, lies: bool = False) -> Plan:
    """Return the plan that is drawn from a seed.

    :param lies: whether servers may lie.
    """
    if lies:
        return draw(seed, steps, FAULTS_WITH_LIES, list(KINDS))
    return draw(seed, steps, FAULTS)
