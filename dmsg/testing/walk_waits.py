"""Deferreds on which the programs of a random walk wait. Each of them must fire soon after all faults are repaired."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from random import Random
from typing import NamedTuple

from twisted.internet.defer import Deferred

from dmsg.testing.lab import Lab
from dmsg.testing.promise import PromiseBroken
from dmsg.v2019.client import Client

WAIT_TIMEOUT = 200.0
"""Maximum seconds of the lab's time between the repair of all faults and the firing of every Deferred. Clients wait for
up to 80 seconds between two attempts to reach discovery or a server."""


class Wait(NamedTuple):
    """Deferred on which the program of a client waits.

    :ivar client: name of the client.
    :ivar call: name of the method that returned the Deferred.
    """

    client: str
    call: str
    deferred: Deferred[None]


class Waits:
    """Deferreds of :meth:`~dmsg.v2019.client.Client.when_online` and
    :meth:`~dmsg.v2019.client.Client.when_published` on which programs wait.

    :param clients: running clients, by name. The walk changes this dictionary when it restarts a client.
    :ivar fired: number of Deferreds that have fired.
    """

    def __init__(self, lab: Lab, clients: Mapping[str, Client]) -> None:
        self._lab = lab
        self._clients = clients
        self._waiting: list[Wait] = []
        self.fired = 0

    def begin(self, name: str) -> None:
        """Let the program of a client wait until the client is online, and until its entry is published."""
        client = self._clients[name]
        for call in (client.when_online, client.when_published):
            wait = Wait(name, call.__name__, call())
            self._waiting.append(wait)
            wait.deferred.addCallback(partial(self._has_fired, wait))

    def begin_any(self, random: Random) -> None:
        """Let the program of a random client wait."""
        self.begin(random.choice(sorted(self._clients)))

    def _has_fired(self, wait: Wait, _: object) -> None:
        self.fired += 1
        # The Deferreds of a killed client are not in the list any more, but may still fire.
        if wait in self._waiting:
            self._waiting.remove(wait)

    def client_was_killed(self, name: str) -> None:
        """Forget the Deferreds of a client that was killed."""
        self._waiting[:] = [wait for wait in self._waiting if wait.client != name]

    def check(self, timeout: float = WAIT_TIMEOUT) -> None:
        """Run the lab until all Deferreds have fired.

        :param timeout: maximum seconds of the lab's time.
        :raises PromiseBroken: a Deferred has not fired in this time.
        """
        network = self._lab.network
        end = network.clock.seconds() + timeout
        while self._waiting:
            if network.clock.seconds() >= end:
                late = ", ".join(f"{wait.call} of {wait.client}" for wait in self._waiting)
                raise PromiseBroken(f"programs still wait {timeout:g} s after all faults were repaired: {late}")
            network.run(0.05)
