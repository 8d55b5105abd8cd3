"""Facts about the entity's process (uptime, memory), which every status page shows."""

from __future__ import annotations

import time

from dmsg.base.memory import resident
from dmsg.base.units import human_size, human_time
from dmsg.net.reactor import monotonic
from dmsg.pages.model import Fact

_BEGAN = monotonic()
"""Start time of this process by the monotonic clock, in seconds."""


def process_facts(started: float) -> list[Fact]:
    """Return uptime, start time and memory of the process.

    :param started: start time of the entity, in seconds since 1970.
    """
    return [
        Fact("Uptime", human_time(monotonic() - _BEGAN)),
        Fact("Started", time.strftime("%d %b %H:%M", time.localtime(started))),
        Fact("Memory of the process", human_size(resident())),
    ]
