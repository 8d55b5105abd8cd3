"""Long computations of simulated hosts: each host runs its own, in the time of the lab.

A program splits a long computation into steps, which it runs on the global reactor (:mod:`dmsg.net.background`). In a
lab, that reactor does not run. While :func:`work_on_hosts` is in effect, each step is a timer of the simulated host
whose code started the computation. When a host is killed, its computations end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from twisted.internet.interfaces import IDelayedCall
from twisted.internet.task import CooperativeTask, Cooperator

from dmsg.net import background
from dmsg.testing.network import Host, Network

STEP_SECONDS = 0.002
"""Seconds of the lab's time between two steps of a computation, so that faults can happen between them."""


class _HostWork:
    """Replacement for the cooperators of :mod:`dmsg.net.background`. It has one cooperator for each
    run of a program on a simulated host, because a kill cancels the timers of the old cooperator."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._cooperators: dict[tuple[str, int], Cooperator] = {}

    def cooperate(self, steps: Iterator[Any]) -> CooperativeTask[Any]:
        """Run an iterator step by step, as timers of the host whose code is running."""
        host = self._network.running
        if host is None:
            raise RuntimeError("a long computation was started by code that belongs to no host")
        place = host.name, host.life
        if place not in self._cooperators:
            self._cooperators[place] = _cooperator(host)
        return self._cooperators[place].cooperate(steps)


def _cooperator(host: Host) -> Cooperator:
    def schedule(tick: Callable[[], object]) -> IDelayedCall:
        return host.callLater(STEP_SECONDS, tick)

    # Each timer runs one step of the computation. If a timer ran steps for a limited time, it would never end, because
    # the clock of the lab does not advance while a timer runs.
    return Cooperator(lambda: lambda: True, schedule)


@contextmanager
def work_on_hosts(network: Network) -> Iterator[None]:
    """Context manager: while it is entered, each long computation runs as timers of the simulated host that starts it.
    Otherwise the computation would run on the global reactor.

    :param network: simulated network of the hosts.
    """
    before = background._whole, background._half  # noqa: SLF001  # The functions of the module use only these two.
    replacement: Any = _HostWork(network)
    background._whole = background._half = replacement  # noqa: SLF001
    try:
        yield
    finally:
        background._whole, background._half = before  # noqa: SLF001
