"""Hosts and TCP in memory, on one Clock.

Each :class:`Host` is the reactor of the entities that run on it: it has timers, listens and connects
(:mod:`dmsg.testing.tcp`). In each direction between two hosts there is a :class:`Path` with delay, bandwidth and
faults. As with real TCP, data arrives in order and without loss while a connection exists, and there is back-pressure.
A test can cause the failures that are possible with TCP. The same seed and the same calls result in the same events in
the same order, if random numbers and time come from the lab, too (:func:`dmsg.testing.lab.repeatable_lab`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import TYPE_CHECKING, TypeVar, cast

from twisted.internet.error import (
    AlreadyCalled,
    AlreadyCancelled,
    CannotListenError,
    TimeoutError,
)
from twisted.internet.interfaces import (
    IConnector,
    IDelayedCall,
    IHostnameResolver,
    IListeningPort,
    IReactorPluggableNameResolver,
    IReactorTCP,
    IReactorTime,
)
from twisted.internet.protocol import ClientFactory, ServerFactory
from twisted.internet.task import Clock
from zope.interface import implementer

from dmsg.net.own_pauses import forget_pauses
from dmsg.net.reactor import Reactor
from dmsg.testing.connectors import Connector, HostNames, Port
from dmsg.testing.determinism import Trace
from dmsg.testing.lab_clock import LabClock
from dmsg.testing.tcp import End, Machine, Path

if TYPE_CHECKING:
    from twisted.internet.protocol import P

_Result = TypeVar("_Result")


class Network:
    """Network of hosts with one common clock.

    :param seed: seed of all random events of the network.
    :param trace: trace that records all events between the hosts.
    :param clock: clock of all hosts; None for a new one.
    """

    def __init__(self, seed: int = 0, trace: Trace | None = None, clock: Clock | None = None) -> None:
        self.clock = clock or LabClock()
        self.trace = trace
        self.random = Random(seed)
        self.hosts: dict[str, Host] = {}
        self.running: Host | None = None
        """Host whose code runs now; None while the test itself runs."""
        self._paths: dict[tuple[str, str], Path] = {}
        self._moves = 0
        """Number of addresses that :meth:`free_address` has returned."""

    def host(self, name: str) -> Host:
        """Return the host of that name. The first call creates the host, with the next address 10.0.0.N."""
        if name not in self.hosts:
            self.hosts[name] = Host(self, name, f"10.0.0.{len(self.hosts) + 1}")
        return self.hosts[name]

    def free_address(self) -> str:
        """Return an address that no host had before, for a host that moves."""
        self._moves += 1
        return f"10.1.{self._moves // 250}.{self._moves % 250 + 1}"

    def ahead(self) -> float:
        """Return by how many seconds the wall clock of the host whose code runs now is ahead of the lab's clock."""
        return 0.0 if self.running is None else self.running.ahead

    def path(self, source: Machine, target: Machine) -> Path:
        """Return the path from one host to another."""
        return self._paths.setdefault((source.name, target.name), Path(self.clock, self.random, self.trace))

    def both_ways(self, first: Machine, second: Machine) -> tuple[Path, Path]:
        """Return the paths from one host to another and back."""
        return self.path(first, second), self.path(second, first)

    def delay_all(self, seconds: float) -> None:
        """Let each packet between two hosts of the network take this number of seconds."""
        hosts = list(self.hosts.values())
        for one in hosts:
            for two in hosts:
                if one is not two:
                    for path in self.both_ways(one, two):
                        path.delay = seconds

    def by_address(self, address: str) -> Host | None:
        """Return the host with an address; None if there is no such host."""
        return next((host for host in self.hosts.values() if host.address == address), None)

    def run(self, seconds: float, step: float = 0.05) -> None:
        """Advance the clock by this number of seconds, from event to event.

        :param step: maximum seconds by which the clock is advanced at once.
        """
        end = self.clock.seconds() + seconds
        while (now := self.clock.seconds()) < end:
            calls = self.clock.getDelayedCalls()  # The calls are in the order of their times.
            following = next((time for call in calls if (time := call.getTime()) > now), end)
            self.clock.advance(max(0.0, min(following, end, now + step) - now) or step)

    def suspend(self, seconds: float) -> None:
        """Advance the clock at once while no code runs, as if all machines were suspended. Then resume the hosts that
        were not paused before."""
        running = [host for host in self.hosts.values() if not host.is_paused]
        for host in running:
            host.pause()
        self.clock.advance(seconds)
        for host in running:
            host.resume()

    def wait_for(self, condition: Callable[[], object], seconds: float, step: float) -> None:
        """Advance the clock in steps until a condition is true, but at most for this number of seconds."""
        end = self.clock.seconds() + seconds
        while not condition() and self.clock.seconds() < end:
            self.run(step)

    def run_until(self, condition: Callable[[], _Result], timeout: float = 120.0) -> _Result:
        """Advance the clock until a condition is true, and return the value of the condition.

        :raises AssertionError: the condition is not true within ``timeout`` seconds of this clock.
        """
        end = self.clock.seconds() + timeout
        while not (result := condition()):
            if self.clock.seconds() >= end:
                raise AssertionError(
                    f"the awaited condition did not become true within {timeout:g} s of the lab's time"
                )
            self.run(0.05)
        return result


@implementer(IReactorTCP, IReactorTime, IReactorPluggableNameResolver)
class Host:
    """Simulated host, which is the reactor of the entities that run on it.

    In a :func:`~dmsg.testing.lab.repeatable_lab`, the wall clock of a host may be wrong: see :attr:`ahead` and
    :meth:`drift`.
    Timers use a monotonic clock, and are not affected.

    :ivar accepted: number of connections that this host has accepted.
    :ivar idle_limit: seconds without data after which the router of this host forgets a connection; 0 for never.
    """

    def __init__(self, network: Network, name: str, address: str) -> None:
        self.network = network
        self.name = name
        self.address = address
        self.alive = True
        self._ahead = self._drift = self._ahead_at = 0.0
        self._paused: list[Callable[[], object]] | None = None
        self._due: list[Callable[[], object]] = []
        self.life = 0
        self.ports: dict[int, Port] = {}
        # Dictionaries are used as sets, because their order is that of insertion. So runs with the same seed are equal.
        self.ends: dict[End, None] = {}
        self.timers: dict[Timer, None] = {}
        self._rest_of_wait = 0.0
        self.accepted = 0
        self.idle_limit = 0.0
        self._next_port = 40_000
        self.nameResolver: IHostnameResolver = HostNames()

    def installNameResolver(self, resolver: IHostnameResolver) -> IHostnameResolver:
        before, self.nameResolver = self.nameResolver, resolver
        return before

    @property
    def reactor(self) -> Reactor:
        """The host itself, with the type that entities expect. Entities use only the parts of the reactor that a host
        has."""
        return cast(Reactor, self)

    # --- wall clock ---

    @property
    def ahead(self) -> float:
        """Seconds by which the wall clock of this host is ahead of the lab's clock. Setting it also ends a drift."""
        return self._ahead + self._drift * (self.seconds() - self._ahead_at)

    @ahead.setter
    def ahead(self, seconds: float) -> None:
        self._ahead, self._drift, self._ahead_at = seconds, 0.0, self.seconds()

    def drift(self, rate: float) -> None:
        """Let the wall clock of this host drift from now on.

        :param rate: seconds that the wall clock gains in each second; negative for a clock that loses time.
        """
        self.ahead = self.ahead
        self._drift = rate

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context manager for a test that starts an entity on this host: the code in it runs as code of this host, with
        the host's wall clock."""
        before, self.network.running = self.network.running, self
        try:
            yield
        finally:
            self.network.running = before

    # --- IReactorTime, and other methods of a reactor ---

    def seconds(self) -> float:
        return self.network.clock.seconds()

    def callLater(self, delay: float, callable: Callable[..., object], *args: object, **kw: object) -> IDelayedCall:
        return Timer(self, max(0.0, delay), lambda: callable(*args, **kw))

    def getDelayedCalls(self) -> Sequence[IDelayedCall]:
        return self.network.clock.getDelayedCalls()

    def callFromThread(self, callable: Callable[..., object], *args: object, **kw: object) -> None:
        self.callLater(0, callable, *args, **kw)

    def addSystemEventTrigger(self, *args: object, **kw: object) -> None:
        """Do nothing, because a host is never shut down as a reactor: its process is killed, or its services are
        stopped."""

    def do(self, action: Callable[[], object]) -> None:
        """Call a function as code of this host, because something has arrived. If the host is paused, call it after the
        pause and after the timers that are due then. If the host is dead, do nothing."""
        if self._paused is not None:
            self._paused.append(action)
        else:
            self._run(action)

    def do_due(self, action: Callable[[], object]) -> None:
        """Call the function of a timer that is due. If the host is paused, call it after the pause."""
        if self._paused is not None:
            self._due.append(action)
        else:
            self._run(action)

    def _run(self, action: Callable[[], object]) -> None:
        if self.alive:
            before, self.network.running = self.network.running, self
            try:
                action()
            finally:
                self.network.running = before

    # --- IReactorTCP ---

    def listenTCP(self, port: int, factory: ServerFactory, backlog: int = 50, interface: str = "") -> IListeningPort:
        if port == 0:
            port = self.free_port()
        if port in self.ports:
            raise CannotListenError(interface, port, OSError("address is in use"))
        listening = Port(self, port, factory)
        listening.startListening()
        return listening

    def connectTCP(
        self,
        host: str,
        port: int,
        factory: ClientFactory[P],
        timeout: float | None = 30,
        bindAddress: tuple[str, int] | None = None,
    ) -> IConnector:
        connector = Connector(self, host, port, factory, timeout)
        connector.connect()
        return connector

    def free_port(self) -> int:
        """Return a port that was not used before."""
        self._next_port += 1
        return self._next_port

    # --- faults ---

    def kill(self) -> None:
        """Kill the host's process, like ``kill -9``. The process is not notified, and the other ends of its connections
        get a reset."""
        self.alive = False
        self.life += 1
        self._paused = None
        self._due.clear()
        self.timers.clear()
        forget_pauses(self)
        self.ports.clear()
        ends, self.ends = self.ends, {}
        for end in ends:
            end.dead = True
            end.other.reset_by_peer()

    def revive(self) -> None:
        """Make a killed host usable again, without any process."""
        self.alive = True

    @property
    def is_paused(self) -> bool:
        """Whether the host's process is paused."""
        return self._paused is not None

    def pause(self) -> None:
        """Pause the host's process, like ``SIGSTOP``. Its connections stay open, but its code does not run. Do nothing
        if the process was killed, because the next process is not paused when it starts."""
        if self.alive and self._paused is None:
            self._paused = []

    def resume(self) -> None:
        """Resume the host's process, like ``SIGCONT``.

        As in Twisted's reactors, the timers that are due run first. Only then is read what has arrived.
        """
        due, self._due = self._due, []
        waiting, self._paused = self._paused or [], None
        for action in due:
            self.do_due(action)
        for action in waiting:
            self.do(action)

    def suspend(self) -> None:
        """Suspend the machine, as a laptop whose lid is closed. No code runs, but the clock continues."""
        due = min((timer.getTime() for timer in self.timers), default=self.seconds())
        self._rest_of_wait = max(0.0, due - self.seconds())
        self.pause()

    def wake(self) -> None:
        """Resume the suspended machine. As with ``epoll_wait(2)``, the process first waits for as long as it would have
        waited for its next timer without the suspension.
        """
        self.network.clock.callLater(self._rest_of_wait, self.resume)

    def network_ends(self) -> list[End]:
        """Return the ends of the host's connections that use the network."""
        return list(self.ends)

    def forget_connections(self) -> int:
        """Make routers forget all connections of this host, without notifying either end. Return the number of
        connections."""
        ends = self.network_ends()
        for end in ends:
            end.is_forgotten = end.other.is_forgotten = True
        return len(ends)

    def lose_silently(self, noticed_after: Callable[[str], float]) -> None:
        """Give this host a new address, as when a laptop changes its network. Its connections become half-open: no
        packet arrives at either end any more, not even a reset, and each end notices this later, by a timeout.

        :param noticed_after: returns the seconds after which the kernel of a host ends its ends of these connections;
            its argument is the name of the host.
        """
        ends = self.network_ends()
        self.forget_connections()
        self.address = self.network.free_address()
        for end in (one for here in ends for one in (here, here.other)):
            self.network.clock.callLater(noticed_after(end.host.name), end.reset_by_peer, TimeoutError())

    def reset(self) -> int:
        """Reset all connections of this host at both ends, and return their number."""
        ends = self.network_ends()
        for end in ends:
            end.reset_by_peer()
            end.other.reset_by_peer()
        return len(ends)


@implementer(IDelayedCall)
class Timer:
    """Delayed call of a simulated host.

    A delayed call of a killed host is dropped. A call that becomes due while its host is paused is made after the
    pause. Until a call is made, it can be cancelled, even by another call that is made after the same pause.
    """

    def __init__(self, host: Host, delay: float, action: Callable[[], object]) -> None:
        self._host = host
        self._life = host.life
        self._action = action
        self._made = self._cancelled = False
        host.timers[self] = None
        self._call = host.network.clock.callLater(delay, self._due)

    def _due(self) -> None:
        if self._life == self._host.life:
            due = self._call
            self._host.do_due(lambda: self._make(due))

    def _make(self, due: IDelayedCall) -> None:
        if self.active() and due is self._call:
            self._made = True
            self._host.timers.pop(self, None)
            trace = self._host.network.trace
            if trace is not None:
                trace.note(self._host.seconds(), self._host.name, "timer")
            self._action()

    def getTime(self) -> float:
        return self._call.getTime()

    def active(self) -> bool:
        return not (self._made or self._cancelled)

    def cancel(self) -> None:
        self._check()
        self._cancelled = True
        self._host.timers.pop(self, None)
        if self._call.active():
            self._call.cancel()

    def reset(self, secondsFromNow: float) -> None:
        self._check()
        if self._call.active():
            self._call.cancel()
        self._call = self._host.network.clock.callLater(secondsFromNow, self._due)

    def delay(self, secondsLater: float) -> None:
        self.reset(self.getTime() + secondsLater - self._host.seconds())

    def _check(self) -> None:
        if self._cancelled:
            raise AlreadyCancelled
        if self._made:
            raise AlreadyCalled
