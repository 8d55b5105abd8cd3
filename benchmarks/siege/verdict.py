"""Bounds of a row of the siege, and whether what was measured is within them. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

SLOWER = 3.0
"""Factor by which the p99 of innocent round trips may grow during an attack."""
NOISE = 0.050
"""Seconds by which that p99 may grow in any case. Attacker, entity and innocents share two cores, perhaps with other
programs; a server that stands still for its enemy showed 190 to 320 ms."""
REFUSED = 0.02
"""Part of the newcomers that may be refused."""
CONNECT_WITHIN = 1.0
"""Seconds within which half of the newcomers have what they came for."""
MEMORY_BACK = 1.2
"""Factor of the memory before the attack that may be left after it, besides ``MEMORY_SLACK``."""
MEMORY_SLACK = 24 << 20
"""Bytes that may be left besides, because an allocator keeps some of its arenas."""
SETTLE = 20.0
"""Seconds after the attack within which the memory has to be given back."""
GOES_ON = 2.0
"""Seconds after the end of an attack within which the entity has to be done with what it left."""
CHEAP = 0.75
"""Cores by which an entity may work more than its enemy, beyond what it worked for the innocent before."""
DEARER = 2.0
"""Factor for an attack that is nothing but data: so many times what the entity works for each second of an honest
sender, in the same run. To relay a record costs more than to write one, and an enemy gets less of the machine beside
others: both hold for honest data too."""


@dataclass(frozen=True)
class Bounds:
    """Bounds of one scene where they differ from the usual ones.

    :ivar connect_within: seconds within which half of the newcomers have what they came for.
    :ivar memory_slack: bytes that may be left after the attack, besides 20 % of what there was.
    :ivar settle: seconds within which the memory has to be given back.
    """

    connect_within: float = CONNECT_WITHIN
    memory_slack: int = MEMORY_SLACK
    settle: float = SETTLE

    def is_given_back(self, before: int, after: int) -> bool:
        """Whether memory of ``before`` bytes has shrunk to that again."""
        return after <= before * MEMORY_BACK + self.memory_slack


@dataclass
class Measured:
    """Effect of an attack.

    :ivar p50: median seconds of an innocent client's round trip, before the attack and during it.
    :ivar p99: the same of the 99th percentile.
    :ivar cut: number of times that an innocent connection was ended.
    :ivar connects: seconds that admitted newcomers needed.
    :ivar refused: number of newcomers that were refused.
    :ivar shut_out: whether an innocent address was still refused after the attack.
    :ivar went_on: seconds for which the entity still worked after its attacker had left.
    :ivar memory: resident bytes of the entity before the attack, at most, and after it.
    :ivar honest_load: cores that the entity used for the innocent and for newcomers before the attack.
    :ivar entity_load: cores that the entity used during it, for all clients.
    :ivar entity_waited: share of the time in which the entity was ready to run and had no core.
    :ivar enemy_load: cores that the attacker used.
    """

    p50: tuple[float, float] = (0.0, 0.0)
    p99: tuple[float, float] = (0.0, 0.0)
    cut: int = 0
    connects: list[float] = field(default_factory=list)
    refused: int = 0
    shut_out: bool = False
    went_on: float = 0.0
    memory: tuple[int, int, int] = (0, 0, 0)
    honest_load: float = 0.0
    entity_load: float = 0.0
    entity_waited: float = 0.0
    enemy_load: float = 0.0

    @property
    def price(self) -> float:
        """Seconds that the entity worked for each second of its enemy."""
        return self.entity_load / max(self.enemy_load, 1e-3)

    @property
    def connect(self) -> float:
        """Median seconds of the newcomers who got in; infinite: nobody did."""
        return percentile(self.connects, 50) if self.connects else float("inf")


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the value below which ``percent`` of ``values`` are."""
    ordered = sorted(values)
    return ordered[min(len(ordered) * percent // 100, len(ordered) - 1)]


def faults_of(
    measured: Measured, bounds: Bounds, *, anchor: Measured | None = None, is_anchor: bool = False
) -> list[str]:
    """Return what was beyond its bound, in words; nothing: the entity held.

    :param anchor: what honest data cost, for an attack that is nothing but data.
    :param is_anchor: this is the honest data.
    """
    faults = []
    before, during = measured.p99
    if during > max(SLOWER * before, before + NOISE):
        faults.append("the innocent wait")
    if measured.cut:
        faults.append("the innocent are cut off")
    if measured.refused > REFUSED * (measured.refused + len(measured.connects)):
        faults.append("newcomers are refused")
    elif measured.connect > bounds.connect_within:
        faults.append("newcomers wait")
    if measured.shut_out:
        faults.append("the innocent stay shut out")
    if measured.went_on > GOES_ON:
        faults.append("goes on when its enemy has left")
    if not bounds.is_given_back(measured.memory[0], measured.memory[2]):
        faults.append("memory stays")
    dear = measured.entity_load > measured.honest_load + measured.enemy_load + CHEAP and not is_anchor
    if dear and (anchor is None or measured.price > DEARER * anchor.price):
        faults.append("costs the enemy too little")
    return faults
