"""Faults of a random walk, by name: faults of the network, of servers, of readers and of clocks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from random import Random
from typing import Any, Protocol

from twisted.internet.task import Clock

from dmsg.testing.network import Network
from dmsg.testing.promise import Talker
from dmsg.testing.tcp import Path
from dmsg.v2019.core.wire import DRAIN, Frame

CLOCK_ERRORS = (-400 * 86400.0, -3600.0, -20.0, 0.0, 20.0, 3600.0, 400 * 86400.0)
"""Possible errors of the wall clock of a host, in seconds. The fault ``wall clock`` draws one of them."""
MALFORMED = Frame(DRAIN, 0, b"malformed")
"""Malformed frame that a server sends to a client after the fault ``poison``."""
DRIFTS = (0.0, 0.0, 0.0, -0.05, -0.0005, 0.0005, 0.05)
"""Possible drifts of the wall clock of a host, in seconds per second. The fault ``wall clock`` draws one of them."""

OF_PATHS = ("delay", "loss", "reorder", "bandwidth", "partition")
"""Names of the faults of the path between two hosts. They happen to both hosts."""
KEEPALIVE = 60.0
"""Seconds after which the kernel ends a half-open connection of a program of today: TCP keepalive has three probes 10
seconds apart, after 30 seconds without data."""
OWN_NOTICES = (0.0, KEEPALIVE)
"""Possible seconds until the moved host of the fault ``half-open`` notices that its connections are dead."""
UNTUNED_NOTICES = (0.0, 924.6)
"""Possible seconds until the same moved host notices this if its program sets no keepalive. The kernel of Linux ends a
connection after 924.6 seconds without an acknowledgement of data that it sends again and again."""
OLD_NOTICES = (5.0, KEEPALIVE, 200.0)
"""Possible seconds until a server of 2019, which has no keepalive, notices the same."""


class FaultyLab(Protocol):
    """Interface of a lab whose servers and paths can have faults."""

    network: Network
    clock: Clock

    @property
    def servers(self) -> Mapping[str, Any]:
        """Running servers, by name."""

    def add_server(self, name: str) -> object:
        """Start a server on the host of that name."""

    def kill(self, name: str) -> None:
        """Kill the program on a host, like ``kill -9``."""

    def leave(self, name: str) -> None:
        """Stop a server in an orderly way."""


class Faults:
    """Causes faults in a lab.

    :param servers: names of the servers to which faults may happen.
    :param clients: names of the clients to which faults may happen.
    :param talkers: ends of streams that may stop reading.
    :param others: names of other hosts whose wall clocks may become wrong.
    :param least: minimum number of servers that continue to run. No fault kills or stops a server while only this many
        run.
    :param notices: possible seconds until a moved client notices that its connections are dead.
    :ivar hit: names of the hosts to which the last fault happened; empty if it happened to no particular host, or if
        nothing happened.
    """

    def __init__(
        self,
        lab: FaultyLab,
        servers: Sequence[str],
        clients: Sequence[str],
        talkers: Sequence[Talker],
        *,
        others: Sequence[str] = ("discovery",),
        least: int = 1,
        notices: Sequence[float] = OWN_NOTICES,
    ) -> None:
        self._lab = lab
        self._servers = servers
        self._clients = clients
        self._talkers = talkers
        self._others = others
        self._least = least
        self._notices = notices
        self._random = Random(0)
        self._wanted: Collection[str] = ()
        self.hit: tuple[str, ...] = ()

    def make(self, name: str, random: Random, wanted: Collection[str] = ()) -> None:
        """Cause a fault. Its random numbers come from ``random``.

        :param name: name of the fault, one of :data:`BY_NAME`.
        :param wanted: names of hosts. The fault happens to one of them if it can, otherwise to any host.
        """
        self._random = random
        self._wanted = wanted
        self.hit = ()
        BY_NAME[name](self)

    def repair(self) -> None:
        """Repair everything: restore all paths, resume all processes and readers, and start the servers that do not
        run."""
        self.heal()
        self.proceed()
        self.reader_resumes()
        for name in self._servers:
            if name not in self._lab.servers:
                self._lab.add_server(name)

    @property
    def running(self) -> list[str]:
        """Names of the servers that are running."""
        return [name for name in self._lab.servers if name in self._servers]

    def candidates(self, name: str) -> Sequence[str]:
        """Return the names of the hosts to which a fault can happen now.

        :param name: name of the fault.
        :returns: the names; empty for a fault that happens to no particular host, or that cannot happen now.
        """
        hosts = self._hosts_of(name)
        if name in ("reset", "half-open"):
            present = self._lab.network.hosts
            return [host for host in hosts if host in present and present[host].network_ends()]
        if name == "poison":
            return [host for host in hosts if self._lab.servers[host].factory.relay.peers]
        return hosts

    def _hosts_of(self, name: str) -> Sequence[str]:
        """Return the names of the hosts from which a fault draws one. A fault of connections may draw a host that has
        none, and then happens to no host."""
        running = self.running
        if name in OF_PATHS:
            return [name for name in self._lab.network.hosts if name in self._servers or name in self._clients]
        if name in ("kill", "leave"):
            return running if len(running) > self._least else ()
        if name == "restart":
            return [name for name in self._servers if name not in self._lab.servers]
        hosts: dict[str, Sequence[str]] = {
            "reset": (*self._clients, *running),
            "pause": running,
            "poison": running,
            "half-open": self._clients,
            "wall clock": (*self._clients, *self._servers, *self._others),
        }
        return hosts.get(name, ())

    # --- paths ---

    def _paths(self) -> list[tuple[str, str]]:
        hosts = self._hosts_of(OF_PATHS[0])
        return [(one, two) for one in hosts for two in hosts if one < two]

    def _both_ways(self, one: str, two: str) -> tuple[Path, Path]:
        network = self._lab.network
        return network.both_ways(network.host(one), network.host(two))

    def _random_path(self) -> tuple[Path, Path]:
        paths = self._paths()
        self.hit = self._random.choice([path for path in paths if any(name in self._wanted for name in path)] or paths)
        return self._both_ways(*self.hit)

    def _random_host(self, fault: str) -> str:
        """Draw the host to which a fault happens. Return its name; empty if the fault cannot happen now."""
        names = self._hosts_of(fault)
        if not names:
            return ""
        name = self._random.choice([name for name in names if name in self._wanted] or names)
        self.hit = (name,)
        return name

    def delay(self) -> None:
        seconds = self._random.choice((0.001, 0.02, 0.2))
        for path in self._random_path():
            path.delay = seconds

    def loss(self) -> None:
        for path in self._random_path():
            path.loss = self._random.choice((0.0, 0.05, 0.3))

    def reorder(self) -> None:
        for path in self._random_path():
            path.reorder = self._random.choice((0.0, 0.2))

    def bandwidth(self) -> None:
        for path in self._random_path():
            path.rate = self._random.choice((0.0, 100_000.0, 1e6, 1e8))

    def partition(self) -> None:
        for path in self._random_path():
            path.cut_since = self._lab.clock.seconds()

    def heal(self) -> None:
        for pair in self._paths():
            for path in self._both_ways(*pair):
                path.cut_since = None
                path.loss = path.reorder = 0.0
                path.rate = 0.0

    # --- processes ---

    def reset(self) -> None:
        if not self._lab.network.host(self._random_host("reset")).reset():
            self.hit = ()

    def kill(self) -> None:
        if name := self._random_host("kill"):
            self._lab.kill(name)

    def restart(self) -> None:
        if name := self._random_host("restart"):
            self._lab.add_server(name)

    def leave(self) -> None:
        """Stop a server in an orderly way, so that it drains."""
        if name := self._random_host("leave"):
            # A paused server is resumed first, because a paused server cannot process the request to stop.
            self._lab.network.host(name).resume()
            self._lab.leave(name)

    def pause(self) -> None:
        if name := self._random_host("pause"):
            self._lab.network.host(name).pause()

    def proceed(self) -> None:
        for host in self._lab.network.hosts.values():
            host.resume()

    # --- readers and clocks ---

    def slow_reader(self) -> None:
        if not self._talkers:
            return
        talker = self._random.choice(self._talkers)
        if talker.transport is not None and talker.lost is None:
            talker.transport.pauseProducing()  # type: ignore[attr-defined]

    def reader_resumes(self) -> None:
        for talker in self._talkers:
            if talker.transport is not None:
                talker.transport.resumeProducing()  # type: ignore[attr-defined]

    def half_open(self) -> None:
        """Give a client's host a new address, without a packet to either end of its connections."""
        name = self._random_host("half-open")
        own, old = self._random.choice(self._notices), self._random.choice(OLD_NOTICES)
        old_servers: Collection[str] = getattr(self._lab, "old_servers", ())

        def noticed_after(host: str) -> float:
            if host == name:
                return own
            return old if host in old_servers else KEEPALIVE

        host = self._lab.network.host(name)
        if not host.network_ends():
            self.hit = ()
        host.lose_silently(noticed_after)

    def clock_jump(self) -> None:
        """Advance the clock by seconds or minutes at once, as on a machine that was suspended."""
        self._lab.network.suspend(self._random.choice((5, 60, 600)))

    def wall_clock(self) -> None:
        """Set the wall clock of one host wrong, and sometimes make the clock drift. Timers are not affected."""
        host = self._lab.network.host(self._random_host("wall clock"))
        host.ahead = self._random.choice(CLOCK_ERRORS)
        host.drift(self._random.choice(DRIFTS))

    def poison(self) -> None:
        """Let a server append malformed bytes to the next data that it forwards to a client. The client must end the
        connection."""
        name = self._random_host("poison")
        peers = list(self._lab.servers[name].factory.relay.peers) if name else []
        if peers:
            _MalformedFramePort(self._random.choice(peers))
        else:
            self.hit = ()


BY_NAME: dict[str, Callable[[Faults], None]] = {
    "delay": Faults.delay,
    "loss": Faults.loss,
    "reorder": Faults.reorder,
    "bandwidth": Faults.bandwidth,
    "partition": Faults.partition,
    "heal": Faults.heal,
    "reset": Faults.reset,
    "kill": Faults.kill,
    "restart": Faults.restart,
    "leave": Faults.leave,
    "pause": Faults.pause,
    "continue": Faults.proceed,
    "slow reader": Faults.slow_reader,
    "reader resumes": Faults.reader_resumes,
    "clock jump": Faults.clock_jump,
    "poison": Faults.poison,
    "wall clock": Faults.wall_clock,
    "half-open": Faults.half_open,
}
"""Faults by name."""


class _MalformedFramePort:
    """Replacement for the port of a client in a relay, which sends a malformed frame after the next data, and then
    removes itself."""

    def __init__(self, peer: Any) -> None:
        self._peer = peer
        self._port = peer.port
        peer.port = self

    def __getattr__(self, name: str) -> object:
        return getattr(self._port, name)

    def send(self, data: bytes | bytearray | memoryview) -> None:
        """Send the data, and then a malformed frame."""
        self._port.send(data)
        self._port.send(MALFORMED.encode())
        if self._peer.port is self:
            self._peer.port = self._port
