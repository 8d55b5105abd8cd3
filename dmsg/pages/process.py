"""What any process says of itself on its page."""

from __future__ import annotations

import time

from dmsg.base.memory import resident
from dmsg.base.units import human_size, human_time
from dmsg.net.reactor import monotonic
from dmsg.pages.model import Fact

_BEGAN = monotonic()
"""When this process began, by a clock that nobody can set."""


def of_process(started: float) -> list[Fact]:
    """Since when it runs, and the memory that it has.  :param started: Unix time."""
    return [
        Fact("Up for", human_time(monotonic() - _BEGAN)),
        Fact("Since", time.strftime("%d %b %H:%M", time.localtime(started))),
        Fact("Memory of the process", human_size(resident())),
    ]
