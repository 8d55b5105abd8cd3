"""Hosts and TCP in memory, on one Clock.

Each :class:`Host` is a reactor to what runs on it: it has timers, listens and
connects.  Between two hosts lies a :class:`Path` with delay, bandwidth and faults.
What TCP promises holds (order, nothing lost while the connection lives, back-pressure);
what it does not promise can be made to happen.  With the same seed and the same
calls everything happens again in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

from twisted.internet.address import IPv4Address
from twisted.internet.error import (
    CannotListenError,
    ConnectionAborted,
    ConnectionDone,
    ConnectionLost,
    ConnectionRefusedError,
    TimeoutError,
    UserError,
)
from twisted.internet.interfaces import (
    IConnector,
    IListeningPort,
    IReactorTCP,
    IReactorTime,
    ITCPTransport,
)
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from zope.interface import implementer

SEGMENT = 64 * 1024
"""Bytes that travel together."""
BUFFER = 256 * 1024
"""Bytes on their way in one direction of a connection; a writer with more is paused."""
RETRANSMIT = 0.2
"""Seconds that a lost segment is late."""
USER_TIMEOUT = 30.0
"""Seconds of partition that a connection lives through."""


class Path:
    """One direction between two hosts.

    :ivar delay: seconds.  :ivar rate: bytes a second, 0 for as fast as you like.
    :ivar loss: share of segments that TCP has to send again.
    :ivar reorder: share of segments that are overtaken, and so late by as much again.
    :ivar cut_since: when it was cut, or None.
    """

    def __init__(self) -> None:
        self.delay = 0.0
        self.rate = 0.0
        self.loss = 0.0
        self.reorder = 0.0
        self.cut_since: float | None = None
        self._free_at = 0.0

    def arrival(self, now: float, size: int, random: Random) -> float:
        """When a segment that is sent now is there."""
        start = max(now, self._free_at)
        self._free_at = start + (size / self.rate if self.rate else 0.0)
        late = RETRANSMIT if self.loss and random.random() < self.loss else 0.0
        late += self.delay if self.reorder and random.random() < self.reorder else 0.0
        return self._free_at + self.delay + late


class Network:
    """All hosts, and the time.

    :param seed: of everything that happens by chance.
    """

    def __init__(self, seed: int = 0) -> None:
        self.clock = Clock()
        self.random = Random(seed)
        self.hosts: dict[str, Host] = {}
        self._paths: dict[tuple[str, str], Path] = {}

    def host(self, name: str) -> Host:
        """The host of that name, made at first use; its address is 10.0.0.N."""
        if name not in self.hosts:
            self.hosts[name] = Host(self, name, f"10.0.0.{len(self.hosts) + 1}")
        return self.hosts[name]

    def path(self, source: Host, target: Host) -> Path:
        """The way from one to the other."""
        return self._paths.setdefault((source.name, target.name), Path())

    def both_ways(self, one: Host, two: Host) -> tuple[Path, Path]:
        """The way there and the way back."""
        return self.path(one, two), self.path(two, one)

    def by_address(self, address: str) -> Host | None:
        """Whose address that is."""
        return next((host for host in self.hosts.values() if host.address == address), None)

    def run(self, seconds: float, step: float = 0.05) -> None:
        """Let time pass, from event to event."""
        end = self.clock.seconds() + seconds
        while (now := self.clock.seconds()) < end:
            calls = [call.getTime() for call in self.clock.getDelayedCalls()]
            following = min((one for one in calls if one > now), default=end)
            self.clock.advance(max(0.0, min(following, end, now + step) - now) or step)

    def run_until(self, condition: Callable[[], Any], patience: float = 120.0) -> Any:
        """Let time pass until something is true.

        :raises AssertionError: it is not within ``patience`` seconds of this clock.
        """
        end = self.clock.seconds() + patience
        while not (result := condition()):
            if self.clock.seconds() >= end:
                raise AssertionError(f"did not happen within {patience:g} s of the lab's time")
            self.run(0.05)
        return result


@implementer(IReactorTCP, IReactorTime)
class Host:
    """The reactor of what runs on one host."""

    def __init__(self, network: Network, name: str, address: str) -> None:
        self.network = network
        self.name = name
        self.address = address
        self.alive = True
        self._paused: list[Callable[[], object]] | None = None
        self._life = 0
        self._ports: dict[int, _Port] = {}
        self._ends: dict[_End, None] = {}  # in order: chance has no part in it
        self._next_port = 40_000

    # --- IReactorTime, and what else is asked of a reactor ---

    def seconds(self) -> float:
        return self.network.clock.seconds()

    def callLater(self, delay: float, callable: Callable[..., object], *args: Any, **kw: Any) -> Any:
        life = self._life

        def call() -> None:
            if life == self._life:
                self.do(lambda: callable(*args, **kw))

        return self.network.clock.callLater(max(0.0, delay), call)

    def getDelayedCalls(self) -> Any:
        return self.network.clock.getDelayedCalls()

    def callFromThread(self, callable: Callable[..., object], *args: Any, **kw: Any) -> None:
        self.callLater(0, callable, *args, **kw)

    def addSystemEventTrigger(self, *args: Any, **kw: Any) -> None:
        """The lab's hosts are killed or have their services stopped."""

    def do(self, action: Callable[[], object]) -> None:
        """Run something as this host: later when it is paused."""
        if self._paused is not None:
            self._paused.append(action)
        elif self.alive:
            action()

    # --- IReactorTCP ---

    def listenTCP(self, port: int, factory: Any, backlog: int = 50, interface: str = "") -> IListeningPort:
        if port == 0:
            port = self.free_port()
        if port in self._ports:
            raise CannotListenError(interface, port, OSError("address is in use"))
        listening = _Port(self, port, factory)
        listening.startListening()
        return listening

    def connectTCP(
        self, host: str, port: int, factory: Any, timeout: float = 30, bindAddress: Any = None
    ) -> IConnector:
        connector = _Connector(self, host, port, factory, timeout)
        connector.connect()
        return connector

    def free_port(self) -> int:
        """A port that was not used before."""
        self._next_port += 1
        return self._next_port

    # --- faults ---

    def kill(self) -> None:
        """As ``kill -9``: nothing here is told, the others get a reset."""
        self.alive = False
        self._life += 1
        self._paused = None
        self._ports.clear()
        ends, self._ends = self._ends, {}
        for end in ends:
            end.dead = True
            end.other.reset_by_peer()

    def revive(self) -> None:
        """An empty host again, at the same address."""
        self.alive = True

    def pause(self) -> None:
        """As ``SIGSTOP``: connections stay, nothing is done."""
        if self._paused is None:
            self._paused = []

    def resume(self) -> None:
        """As ``SIGCONT``."""
        waiting, self._paused = self._paused or [], None
        for action in waiting:
            self.do(action)

    def reset(self) -> int:
        """Every connection of this host is reset, at both ends; how many there were."""
        ends = list(self._ends)
        for end in ends:
            end.reset_by_peer()
            end.other.reset_by_peer()
        return len(ends)


@implementer(IListeningPort)
class _Port:
    def __init__(self, host: Host, number: int, factory: Any) -> None:
        self._host = host
        self._number = number
        self.factory = factory

    def startListening(self) -> None:
        self._host._ports[self._number] = self
        self.factory.doStart()

    def stopListening(self) -> Any:
        if self._host._ports.get(self._number) is self:
            del self._host._ports[self._number]
            self.factory.doStop()
        return None

    def getHost(self) -> IPv4Address:
        return IPv4Address("TCP", self._host.address, self._number)


@implementer(IConnector)
class _Connector:
    def __init__(self, host: Host, address: str, port: int, factory: Any, timeout: float) -> None:
        self._host = host
        self._target = (address, port)
        self._factory = factory
        self._timeout = timeout
        self._given_up: Any = None
        self._started = False
        self.transport: _End | None = None
        self.state = "disconnected"

    def getDestination(self) -> IPv4Address:
        return IPv4Address("TCP", *self._target)

    def connect(self) -> None:
        if not self._started:
            self._factory.doStart()
            self._started = True
        self.state = "connecting"
        self._factory.startedConnecting(self)
        self._given_up = self._host.callLater(self._timeout, self._fail, TimeoutError())
        self._try()

    def _try(self) -> None:
        if self.state != "connecting":
            return
        network = self._host.network
        target = network.by_address(self._target[0])
        if target is None:
            self._host.callLater(0, self._fail, ConnectionRefusedError())
            return
        there, back = network.both_ways(self._host, target)
        if there.cut_since is not None or back.cut_since is not None:
            self._host.callLater(1.0, self._try)  # the SYN is sent again
            return
        there_at = there.arrival(network.clock.seconds(), 60, network.random) - network.clock.seconds()
        network.clock.callLater(there_at, target.do, lambda: self._arrived(target, back.delay))
        if not target.alive:
            self._host.callLater(there_at + back.delay, self._fail, ConnectionRefusedError())

    def _arrived(self, target: Host, delay: float) -> None:
        if self.state != "connecting":
            return
        port = target._ports.get(self._target[1])
        source = IPv4Address("TCP", self._host.address, self._host.free_port())
        protocol = port.factory.buildProtocol(source) if port is not None else None
        if protocol is None:
            self._host.network.clock.callLater(delay, self._host.do, lambda: self._fail(ConnectionRefusedError()))
            return
        here = _End(self._host, target, source, self.getDestination(), self)
        there = _End(target, self._host, self.getDestination(), source, None)
        here.other, there.other = there, here
        self._host._ends[here] = None
        target._ends[there] = None
        there.protocol = protocol
        protocol.makeConnection(there)
        self._host.network.clock.callLater(delay, self._host.do, lambda: self._up(here))

    def _up(self, end: _End) -> None:
        if self.state != "connecting":
            end.abortConnection()
            return
        self._cancel_timer()
        if end.gone is not None:
            self._fail(ConnectionRefusedError())
            return
        protocol = self._factory.buildProtocol(self.getDestination())
        if protocol is None:
            end.abortConnection()
            return
        self.state = "connected"
        self.transport = end
        end.protocol = protocol
        protocol.makeConnection(end)
        end.deliver()

    def _cancel_timer(self) -> None:
        if self._given_up is not None and self._given_up.active():
            self._given_up.cancel()

    def _fail(self, error: Exception) -> None:
        if self.state != "connecting":
            return
        self.state = "disconnected"
        self._cancel_timer()
        self._factory.clientConnectionFailed(self, Failure(error))
        self._stop()

    def _stop(self) -> None:
        if self.state == "disconnected" and self._started:
            self._started = False
            self._factory.doStop()

    def stopConnecting(self) -> None:
        self._fail(UserError())

    def disconnect(self) -> None:
        if self.state == "connecting":
            self.stopConnecting()
        elif self.transport is not None:
            self.transport.loseConnection()

    def lost(self, reason: Failure) -> None:
        """The connection is over."""
        self.state = "disconnected"
        self._factory.clientConnectionLost(self, reason)
        self._stop()


@implementer(ITCPTransport)
class _End:
    """One end of a connection."""

    disconnecting = False
    disconnected = False
    connected = True

    def __init__(
        self, host: Host, peer: Host, here: IPv4Address, there: IPv4Address, connector: _Connector | None
    ) -> None:
        self._host = host
        self._peer = peer
        self._addresses = (here, there)
        self._connector = connector
        self.protocol: Any = None
        self.other: _End
        self.dead = False
        self.gone: Failure | None = None
        self._told = False
        self._unsent: deque[bytes] = deque()
        self._unsent_size = 0
        self._travelling = 0
        self._last_arrival = 0.0
        self._received: deque[bytes | None] = deque()
        self._reading = True
        self._producer: Any = None
        self._streaming = False
        self._producer_paused = False

    # --- writing ---

    def write(self, data: bytes) -> None:
        if not data or self.gone is not None or self.disconnecting:
            return
        self._unsent.append(bytes(data))
        self._unsent_size += len(data)
        self._transmit()
        if self._producer is not None and self._streaming and self._unsent_size > BUFFER and not self._producer_paused:
            self._producer_paused = True
            self._producer.pauseProducing()

    def writeSequence(self, data: Any) -> None:
        self.write(b"".join(data))

    def _transmit(self) -> None:
        network = self._host.network
        path = network.path(self._host, self._peer)
        now = network.clock.seconds()
        while self._unsent and self._travelling < BUFFER:
            data = self._unsent.popleft()
            segment, rest = data[:SEGMENT], data[SEGMENT:]
            if rest:
                self._unsent.appendleft(rest)
            self._unsent_size -= len(segment)
            self._travelling += len(segment)
            self._send(segment, path, now)
        if self.disconnecting and not self._unsent and self.gone is None:
            self._send(None, path, now)
            self._end(ConnectionDone())

    def _send(self, segment: bytes | None, path: Path, now: float) -> None:
        network = self._host.network
        at = max(path.arrival(now, len(segment or b""), network.random), self._last_arrival)
        self._last_arrival = at
        network.clock.callLater(at - now, self._arrive, segment)

    def _arrive(self, segment: bytes | None) -> None:
        """A segment is at the other end, unless the way was cut meanwhile."""
        network = self._host.network
        path = network.path(self._host, self._peer)
        if path.cut_since is not None:
            if network.clock.seconds() - path.cut_since > USER_TIMEOUT:
                for end in (self, self.other):
                    end.reset_by_peer(TimeoutError())
                return
            self._last_arrival = network.clock.seconds() + RETRANSMIT
            network.clock.callLater(RETRANSMIT, self._arrive, segment)
            return
        if self.other.gone is None and not self.other.dead:
            self.other._received.append(segment)
            self._peer.do(self.other.deliver)

    def deliver(self) -> None:
        """Hand what has come to the protocol."""
        while self._received and self._reading and self.protocol is not None and self.gone is None:
            segment = self._received.popleft()
            if segment is None:
                self._end(ConnectionDone())
                return
            self.other._travelling -= len(segment)
            self.protocol.dataReceived(segment)
            self.other._host.do(self.other._sent)

    def _sent(self) -> None:
        if self.gone is None:
            self._transmit()
        if self._producer is not None and not self._unsent:
            if not self._streaming:
                self._producer.resumeProducing()
            elif self._producer_paused:
                self._producer_paused = False
                self._producer.resumeProducing()

    # --- producers ---

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        if self.gone is not None:
            producer.stopProducing()
            return
        self._producer, self._streaming, self._producer_paused = producer, streaming, False
        if not streaming:
            producer.resumeProducing()

    def unregisterProducer(self) -> None:
        self._producer = None

    def pauseProducing(self) -> None:
        self._reading = False

    def resumeProducing(self) -> None:
        self._reading = True
        self._host.callLater(0, self.deliver)

    def stopProducing(self) -> None:
        self.loseConnection()

    # --- the end ---

    def loseConnection(self) -> None:
        if self.gone is None and not self.disconnecting:
            self.disconnecting = True
            self._host.callLater(0, self._transmit)

    def abortConnection(self) -> None:
        if self.gone is None:
            self._end(ConnectionAborted())
            network = self._host.network
            network.clock.callLater(network.path(self._host, self._peer).delay, self.other.reset_by_peer)

    def reset_by_peer(self, error: Exception | None = None) -> None:
        """A reset arrives."""
        if self.gone is None and not self.dead:
            self._host.do(lambda: self._end(error or ConnectionLost()))

    def _end(self, error: Exception) -> None:
        if self.gone is not None:
            return
        self.gone = Failure(error)
        self.disconnected = True
        self.connected = False
        self._host._ends.pop(self, None)
        self._unsent.clear()
        self._host.callLater(0, self._tell)

    def _tell(self) -> None:
        if self._told or self.protocol is None or self.gone is None:
            return
        self._told = True
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.stopProducing()
        self.protocol.connectionLost(self.gone)
        if self._connector is not None:
            self._connector.lost(self.gone)

    # --- ITCPTransport ---

    def getHost(self) -> IPv4Address:
        return self._addresses[0]

    def getPeer(self) -> IPv4Address:
        return self._addresses[1]

    def getTcpNoDelay(self) -> bool:
        return True

    def setTcpNoDelay(self, enabled: bool) -> None:
        pass

    def getTcpKeepAlive(self) -> bool:
        return True

    def setTcpKeepAlive(self, enabled: bool) -> None:
        pass

    def loseWriteConnection(self) -> None:
        self.loseConnection()
