"""Long computations in steps between reactor turns.  The total time of such work is unlimited, or limited to half of a
core.

Twisted's own cooperator measures its slices by the wall clock. When that clock is set back, a slice does not end
before the work does, and the program serves nobody else meanwhile. Here slices are measured by the monotonic clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from twisted.internet.interfaces import IDelayedCall
from twisted.internet.task import CooperativeTask, Cooperator

from dmsg.net.reactor import the_reactor

SLICE = 0.01
"""Seconds of a reactor turn for all work of one kind."""
NO_REST = 1e-8
"""Seconds between slices of work that strangers cannot cause with few bytes. It is so short that the next slice runs in
the next turn."""


def _until_slice_ends() -> Callable[[], bool]:
    until = time.monotonic() + SLICE
    return lambda: time.monotonic() >= until


def _cooperator(rest: float) -> Cooperator:
    def schedule(tick: Callable[[], object]) -> IDelayedCall:
        return the_reactor().callLater(rest, tick)

    return Cooperator(_until_slice_ends, schedule)


_whole, _half = _cooperator(NO_REST), _cooperator(SLICE)


def work(steps: Iterator[Any]) -> CooperativeTask[Any]:
    """Run an iterator in steps, for at most ``SLICE`` seconds of each reactor turn."""
    return _whole.cooperate(steps)


def work_for_strangers(steps: Iterator[Any]) -> CooperativeTask[Any]:
    """Run an iterator whose work a peer causes with few bytes. All such work of the program takes at most half of a
    core.
    """
    return _half.cooperate(steps)
