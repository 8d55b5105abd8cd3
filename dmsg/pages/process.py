"""What any process says of itself on its page."""

from __future__ import annotations

import os
import time

from dmsg.base.units import human_size, human_time
from dmsg.pages.model import Fact


def of_process(started: float) -> list[Fact]:
    """Since when it runs, and the memory that it has, where the system tells (Linux).

    :param started: Unix time.
    """
    clock = time.strftime("%d %b %H:%M", time.localtime(started))
    facts = [Fact("Up for", human_time(max(0.0, time.time() - started))), Fact("Since", clock)]
    size = resident_size()
    return [*facts, Fact("Memory of the process", human_size(size))] if size else facts


def resident_size() -> int:
    """Bytes of this process that are in memory; 0: the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
