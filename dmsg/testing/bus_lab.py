"""Lab with a complete message bus in memory: relays, their queues in files, and twins, each on a separate host."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import TypeVar, cast

from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import Clock
from zope.interface import implementer

from dmsg.rmb.client import RmbClient
from dmsg.rmb.registry.interface import TwinRegistry
from dmsg.rmb.registry.table import TableRegistry
from dmsg.rmb.relay.queue.sqlite import SQLiteQueue
from dmsg.rmb.relay.server import RmbRelay
from dmsg.rmb.relay.settings import RelaySettings
from dmsg.rmb.twins.identity import Identity
from dmsg.rmb.twins.twin import Twin
from dmsg.testing.determinism import START, Determinism, Trace
from dmsg.testing.lab_clock import LabClock
from dmsg.testing.network import Host, Network

PORT = 8080
KEY_TYPE = "ed25519"
DELAY = 0.01
"""Seconds that a packet between two hosts takes, until a fault changes the delay."""
ANSWER_DELAYS = (0.0, 0.01, 0.1)
"""Possible delays of the registry's answers, in seconds. One of them is drawn for each answer."""

_T = TypeVar("_T")


@implementer(TwinRegistry)
class _SlowRegistry:
    """Registry as one host sees it: the registry that all hosts share, with a delay before each answer."""

    def __init__(self, host: Host, shared: TableRegistry, random: Random) -> None:
        self._host = host
        self._shared = shared
        self._random = random
        self._life = host.life
        self.put = shared.put

    def _later(self, answer: Deferred[_T]) -> Deferred[_T]:
        later: Deferred[_T] = Deferred()
        answer.addBoth(lambda result: self._host.callLater(self._random.choice(ANSWER_DELAYS), later.callback, result))
        return later

    def watch(self, on_change: Callable[[Twin], None]) -> None:
        def changed(twin: Twin) -> None:
            if self._life == self._host.life:  # The change is reported only if the process that watches was not killed.
                self._host.callLater(0, on_change, twin)

        self._shared.watch(changed)

    def get(self, twin: int) -> Deferred[Twin]:
        return self._later(self._shared.get(twin))

    def id_by_account(self, account: bytes) -> Deferred[int]:
        return self._later(self._shared.id_by_account(account))

    def twins(self, after: int, limit: int) -> Deferred[list[Twin]]:
        return self._later(self._shared.twins(after, limit))

    def close(self) -> Deferred[None]:
        return succeed(None)


class BusLab:
    """Network of relays and twins in memory. All hosts share one registry. It is slow, but it never fails.

    :param seed: seed of all random events.
    :param directory: existing directory for the files of the queues.
    """

    def __init__(self, seed: int, directory: Path, *, trace: Trace | None = None, clock: Clock | None = None) -> None:
        self.seed = seed
        self.network = Network(seed, trace, clock)
        self.clock = self.network.clock
        self.servers: dict[str, RmbRelay] = {}
        self._leaving: dict[str, tuple[RmbRelay, Deferred[None]]] = {}
        self.twins: dict[str, RmbClient] = {}
        self.registry = TableRegistry()
        self._directory = directory
        self._random = Random(f"bus {seed}")
        self._known: set[str] = set()

    def now(self) -> float:
        """Return the date of the lab, in seconds since 1970."""
        return START + self.clock.seconds()

    def _registry_of(self, host: Host) -> TwinRegistry:
        return cast(TwinRegistry, _SlowRegistry(host, self.registry, Random(self._random.random())))

    def delay_all(self) -> None:
        """Let each packet between two hosts take ``DELAY`` seconds."""
        self.network.delay_all(DELAY)

    def address(self, relay: str) -> str:
        """Return the address of a relay, as in ``10.0.0.1:8080``."""
        return f"{self.network.host(relay).address}:{PORT}"

    def add_server(self, name: str) -> RmbRelay:
        """Start a relay on the host of that name. If a relay ran there before, the new one opens the same queue."""
        relay, ended = self._leaving.pop(name, (None, None))
        if relay is not None and ended is not None and not ended.called:
            self._end(name, relay)  # The old relay, still stopping, is killed: the new one needs its port and its file.
        host = self.network.host(name)
        host.revive()
        settings = RelaySettings(
            listen=[f"tcp:{PORT}:interface={host.address}"],
            registry="",
            domains=frozenset({f"http://{self.address(name)}"}),
            queue=f"sqlite:{self._directory / name}.db",
        )
        relay = RmbRelay(
            host.reactor,
            settings,
            registry=self._registry_of(host),
            wall_clock=self.now,
            random=Random(self._random.random()),
        )
        relay.startService()
        self.servers[name] = relay
        return relay

    def add_twin(self, name: str, *relays: str) -> RmbClient:
        """Start a program of a twin, connected to these relays. The twin's earlier program must have been killed."""
        host = self.network.host(name)
        host.revive()
        secret = "0x" + Random(f"twin {self.seed} {name}").randbytes(32).hex()
        identity = Identity(secret, KEY_TYPE)
        if name not in self._known:
            self._known.add(name)
            self.registry.put(Twin(0, identity.account, None, None, False, 1).sign(identity))
        client = RmbClient(
            host.reactor,
            secret,
            self._registry_of(host),
            [f"ws://{self.address(relay)}" for relay in relays],
            key_type=KEY_TYPE,
            wall_clock=self.now,
            random=Random(self._random.random()),
        )
        client.startService()
        self.twins[name] = client
        return client

    def settle(self, timeout: float = 60.0) -> None:
        """Advance the clock until all twins are connected to a relay.

        :raises AssertionError: this takes more than ``timeout`` seconds of the lab's time.
        """
        online = [Deferred.fromCoroutine(twin.when_online(timeout)) for twin in self.twins.values()]
        self.network.run_until(lambda: all(one.called for one in online), timeout)

    def kill(self, name: str) -> None:
        """Kill the program on a host, like ``kill -9``: what a relay's queue has not committed is lost."""
        relay = self.servers.pop(name, None)
        if relay is not None:
            self._end(name, relay)
        elif self.twins.pop(name, None) is not None:
            self.network.host(name).kill()

    def leave(self, name: str) -> None:
        """Stop a relay in an orderly way."""
        relay = self.servers.pop(name)
        self._leaving[name] = relay, relay.stopService()

    def _end(self, name: str, relay: RmbRelay) -> None:
        self.network.host(name).kill()
        if relay.switch is not None and isinstance(relay.switch.queue, SQLiteQueue):
            # If a process is killed, the operating system releases its lock on the database. The simulated relay
            # has no process of its own, so closing the database must release the lock.
            with suppress(sqlite3.Error):
                relay.switch.queue._db.rollback()  # noqa: SLF001
            relay.switch.queue._db.close()  # noqa: SLF001

    def stop(self) -> None:
        """Stop all services in an orderly way."""
        stopping = [twin.stopService() for twin in self.twins.values()]
        stopping += [relay.stopService() for relay in self.servers.values()]
        stopping.append(self.registry.close())
        self.network.run_until(lambda: all(one.called for one in stopping), 60)


@contextmanager
def repeatable_bus_lab(seed: int, directory: Path, trace: Trace | None = None) -> Iterator[BusLab]:
    """Context manager with a bus lab whose runs can be repeated, as :func:`dmsg.testing.repeatable_lab` does for the
    family of 2019."""
    clock = LabClock()
    with Determinism(seed, clock) as sources:
        lab = BusLab(seed, directory, trace=trace, clock=clock)
        sources.ahead = lab.network.ahead
        yield lab
