"""Plan of a random walk: for each step, the data that ends of streams send, and the faults and lies that happen.

A plan is drawn from a seed before the walk begins. Each fault and each lie has a separate seed, so that leaving out one
of them does not change the others (:mod:`dmsg.testing.shrink`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

LIES = "lies"
"""Name of the fault by which a server begins to lie."""
SIZES = (1, 100, 10_000, 300_000)
"""Numbers of bytes that an end of a stream may send in a step."""
PAUSES = (0.0, 0.01, 0.3, 3.0, 12.0)
"""Possible pauses between two steps, in seconds of the lab's time. The plan draws one of them."""
SHORT_PAUSES = (0.0, 0.0005, 0.002, 0.01)
"""Short pauses, in seconds. In half of the cases, a fault of :data:`MOVING_FAULTS` is followed by one of them. All
other pauses are drawn from :data:`PAUSES`. After a short pause, the next fault happens while a stream opens, closes, or
moves to another server.
"""
LIE = "lie: "
"""Prefix of the name of a lie in the coverage of a walk."""
AIM_PROBABILITY = 0.3
"""Probability that a plan with aims continues with one of its aims. It then gets one or more steps that lead to the
state of the aim, and one with the fault or lie of the aim."""
PATIENCE, INSTANT = 2.0, 0.0005
"""Maximum seconds of the lab's time for which a fault waits for a state, and seconds between two checks of the state.
Some states last only for a round trip."""
MOVING_FAULTS = frozenset({"open", "finish", "kill", "reset", "leave", "poison", LIES})
"""Faults after which a stream may open, close or move."""
LIES_AT_ONCE = 6
"""Maximum number of lies in one step."""
SECOND_DISCOVERY = ("", "", "honest", "down", "lying")
"""Possible states of a second discovery. The plan of a walk draws one of them. An empty text stands for a network with
one discovery. A second discovery that is down or lies stays so until the walk ends."""
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
    :ivar at: state of an end of a stream for which the fault waits, at most :data:`PATIENCE` seconds; empty for a fault
        that does not wait.
    :ivar to: role, for the stream in that state, of the host to which the fault happens; empty for any host.
    """

    says: tuple[tuple[int, int], ...] = ()
    fault: str = ""
    chance: int = 0
    seconds: float = 0.0
    lies: tuple[Lie, ...] = ()
    at: str = ""
    to: str = ""


BEFORE_FAULTS: dict[str, Sequence[Step]] = {
    **dict.fromkeys(("kill", "leave", "pause", "poison", "reset"), (Step(fault="restart", seconds=1.0),)),
    "restart": (Step(fault="kill", seconds=1.0),),
}
"""Steps that a plan has before the steps that lead to an aim, by the name of the aim's fault. A server can be stopped
only while another one runs. Only a server that does not run can be started, and only one that runs can be paused."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Hosts of the network of a walk.

    :ivar servers: number of servers to which faults happen. A walk in which servers may lie has one more server,
        which is honest and has no faults.
    :ivar clients: number of clients between which streams are opened.
    :ivar second: state of a second discovery, one of :data:`SECOND_DISCOVERY`; empty for a network with one
        discovery.
    :ivar old: whether two clients of 2019 use the network. In a walk in which no server lies, the first of several
        servers follows the rules of 2019, too.
    :ivar delay: seconds that a packet between a client and a server takes at first. Without a delay, states that last
        for a round trip end at once, so that no fault meets them.
    """

    servers: int = 3
    clients: int = 2
    second: str = ""
    old: bool = False
    delay: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of one walk.

    :ivar seed: seed of the lab.
    :ivar shape: hosts of the network.
    :ivar lying: whether servers may lie. A walk with lies has bystanders (:mod:`dmsg.testing.bystanders`).
    :ivar keeps_last_lie: whether the last server that began to lie continues to lie when everything else is repaired.
    """

    seed: int
    steps: tuple[Step, ...]
    lying: bool = False
    keeps_last_lie: bool = False
    shape: Shape = Shape()

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


class Aim(NamedTuple):
    """Aim of a walk: a fault or lie that should happen while a stream or an entry is in a given state.

    :ivar kind: name of the fault, or ``lie:`` and the name of the lie.
    :ivar party: role of the host to which the fault or lie should happen; empty for any host.
    """

    kind: str
    state: str
    party: str = ""

    def __str__(self) -> str:
        return "@".join((self.kind, *([self.party] if self.party else []), self.state))

    @classmethod
    def parse(cls, text: str) -> Aim:
        """Parse the text that ``str()`` of an aim returns: ``KIND@STATE`` or ``KIND@PARTY@STATE``."""
        kind, *party, state = text.split("@")
        return cls(kind, state, "".join(party))


def draw(
    seed: int,
    steps: int,
    faults: Sequence[str],
    kinds: Sequence[str] = (),
    *,
    aims: Sequence[Aim] = (),
    ways: Mapping[str, Sequence[Step]] | None = None,
    before_ways: Mapping[str, Sequence[Step]] | None = None,
) -> Plan:
    """Draw the plan of a walk.

    :param faults: names of the faults from which to draw.
    :param kinds: names of the lies from which to draw; empty for a walk without lies.
    :param aims: faults and lies that the plan contains more often, each with the state in which it should happen.
    :param ways: maps each state to steps. After any of these steps, the state is often reached.
    :param before_ways: maps states to steps that have to happen before any of ``ways``.
    """
    random = Random(f"plan {seed}")
    drawn: list[Step] = []
    while len(drawn) < steps:
        if aims and random.random() < AIM_PROBABILITY:
            aim = random.choice(aims)
            way = random.choice((ways or {})[aim.state])
            first = (*BEFORE_FAULTS.get(aim.kind, ()), *(before_ways or {}).get(aim.state, ()))
            drawn += [replace(step, chance=random.getrandbits(32)) for step in (*first, way)]
            drawn.append(_draw_aimed(random, aim))
            continue
        says = tuple((end, random.choice(SIZES)) for end in range(ENDS) if random.random() < 0.5)
        fault = random.choice(faults) if random.random() < 0.6 else ""
        if kinds and random.random() < 0.35:
            fault = LIES
        lies = tuple(_draw_lie(random, kinds) for _ in range(random.randint(1, LIES_AT_ONCE))) if fault == LIES else ()
        pauses = SHORT_PAUSES if fault in MOVING_FAULTS and random.random() < 0.5 else PAUSES
        drawn.append(Step(says, fault, random.getrandbits(32), random.choice(pauses), lies))
    return Plan(seed, tuple(drawn), lying=bool(kinds), keeps_last_lie=bool(kinds) and random.random() < 0.5)


def _draw_aimed(random: Random, aim: Aim) -> Step:
    kind = aim.kind.removeprefix(LIE)
    seconds = random.choice(SHORT_PAUSES)
    if kind == aim.kind:
        return Step((), kind, random.getrandbits(32), seconds, at=aim.state, to=aim.party)
    lies = (Lie(kind, 0, random.getrandbits(32)),)
    # A server that does not carry the stream of the aim tells the lie about another stream, so all ends send.
    return Step(
        tuple((end, 100) for end in range(ENDS)), LIES, random.getrandbits(32), seconds, lies, aim.state, aim.party
    )


def _draw_lie(random: Random, kinds: Sequence[str]) -> Lie:
    after = random.choice((0, 0, 0, 1, 3, 20))
    again = random.choice((5, 50)) if random.random() < 0.2 else 0
    return Lie(random.choice(kinds), after, random.getrandbits(32), again)
