"""Cooperative execution of long computations, in short steps between reactor turns.

There are two kinds of work: :func:`work` may use a whole processor core, and :func:`work_for_strangers` at most half of
one.

Twisted's own cooperator measures its slices with the wall clock. If that clock is set back, a slice lasts until the
whole computation has finished, and the program serves nobody meanwhile. This module measures slices with the monotonic
clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from twisted.internet.interfaces import IDelayedCall
from twisted.internet.task import CooperativeTask, Cooperator

from dmsg.net.reactor import the_reactor

TURN_SLICE = 0.01
"""Maximum seconds of one reactor turn for all computations started by :func:`work` together. The computations started
by :func:`work_for_strangers` together have the same maximum."""
NO_REST = 1e-8
"""Seconds between two slices of :func:`work`, so short that the next slice runs in the next reactor turn."""


def _until_slice_ends() -> Callable[[], bool]:
    until = time.monotonic() + TURN_SLICE
    return lambda: time.monotonic() >= until


def _cooperator(rest: float) -> Cooperator:
    def schedule(tick: Callable[[], object]) -> IDelayedCall:
        return the_reactor().callLater(rest, tick)

    return Cooperator(_until_slice_ends, schedule)


_whole, _half = _cooperator(NO_REST), _cooperator(TURN_SLICE)


def work(steps: Iterator[Any]) -> CooperativeTask[Any]:
    """Run an iterator in steps, for at most ``TURN_SLICE`` seconds of each reactor turn."""
    return _whole.cooperate(steps)


def work_for_strangers(steps: Iterator[Any]) -> CooperativeTask[Any]:
    """Run an iterator in steps, for work that a peer can cause by sending a few bytes. All such work of the process
    together takes at most half of a processor core."""
    return _half.cooperate(steps)
