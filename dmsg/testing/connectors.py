"""Connection attempts and listening ports of simulated hosts, and the resolution of their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from twisted.internet.address import IPv4Address
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionRefusedError, TimeoutError, UserError
from twisted.internet.interfaces import (
    IAddress,
    IConnector,
    IDelayedCall,
    IHostnameResolver,
    IHostResolution,
    IListeningPort,
    IResolutionReceiver,
)
from twisted.internet.protocol import ClientFactory, ServerFactory
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.testing.tcp import End, Machine, Path


class ConnectingNetwork(Protocol):
    """Interface of a network for connection attempts."""

    clock: Clock

    def by_address(self, address: str) -> ConnectingMachine | None:
        """Return the host with an address; None if there is no such host."""

    def both_ways(self, first: Machine, second: Machine) -> tuple[Path, Path]:
        """Return the paths from one host to another and back."""


class ConnectingMachine(Machine, Protocol):
    """Interface of a host for its ports and connection attempts."""

    address: str
    alive: bool
    life: int
    ports: dict[int, Port]
    accepted: int

    @property
    def network(self) -> ConnectingNetwork:
        """Network of the host."""

    def free_port(self) -> int:
        """Return a port that was not used before."""


@implementer(IListeningPort)
class Port:
    def __init__(self, host: ConnectingMachine, number: int, factory: ServerFactory) -> None:
        self.host = host
        self._number = number
        self.factory = factory

    def startListening(self) -> None:
        self.host.ports[self._number] = self
        self.factory.doStart()

    def stopListening(self) -> Deferred[None] | None:
        if self.host.ports.get(self._number) is self:
            del self.host.ports[self._number]
            self.factory.doStop()
        return None

    def getHost(self) -> IPv4Address:
        return IPv4Address("TCP", self.host.address, self._number)


@implementer(IConnector)
class Connector:
    def __init__(
        self, host: ConnectingMachine, address: str, port: int, factory: ClientFactory[Any], timeout: float | None
    ) -> None:
        self.host = host
        self._target = (address, port)
        self._factory = factory
        self._timeout = timeout
        self._given_up: IDelayedCall | None = None
        self._started = False
        self._life = host.life
        self.transport: End | None = None
        self.state = "disconnected"

    @property
    def _is_connecting(self) -> bool:
        """Whether the connector waits for a connection, and its process was not killed."""
        return self.state == "connecting" and self._life == self.host.life

    def getDestination(self) -> IPv4Address:
        return IPv4Address("TCP", *self._target)

    def connect(self) -> None:
        if not self._started:
            self._factory.doStart()
            self._started = True
        self.state = "connecting"
        self._factory.startedConnecting(self)
        if self._timeout is not None:  # As in Twisted, None means that the reactor does not end the attempt.
            self._given_up = self.host.callLater(self._timeout, self._fail, TimeoutError())
        self._try()

    def _try(self) -> None:
        if not self._is_connecting:
            return
        network = self.host.network
        target = network.by_address(self._target[0])
        if target is None:
            self._refuse(0.0)
            return
        there, back = network.both_ways(self.host, target)
        if there.cut_since is not None or back.cut_since is not None:
            network.clock.callLater(
                1.0, self._try
            )  # The path is interrupted, so the SYN is lost, and TCP sends another.
            return
        there_at = there.arrival(60) - network.clock.seconds()
        network.clock.callLater(there_at, target.do, lambda: self._arrived(target, there, back))
        if not target.alive:
            self._refuse(there_at + back.delay)

    def _refuse(self, delay: float) -> None:
        """Let a refusal arrive after this number of seconds."""
        clock = self.host.network.clock
        clock.callLater(delay, self.host.do, lambda: self._fail(ConnectionRefusedError()))

    def _arrived(self, target: ConnectingMachine, outward: Path, back: Path) -> None:
        if not self._is_connecting:
            return
        port = target.ports.get(self._target[1])
        source = IPv4Address("TCP", self.host.address, self.host.free_port())
        protocol = port.factory.buildProtocol(source) if port is not None else None
        if protocol is None:
            self._refuse(back.delay)
            return
        here = End(self.host, target, outward, source, self.getDestination(), self.lost)
        there = End(target, self.host, back, self.getDestination(), source)
        here.other, there.other = there, here
        self.host.ends[here] = None
        target.ends[there] = None
        target.accepted += 1
        there.protocol = protocol
        protocol.makeConnection(there)
        self.host.network.clock.callLater(back.delay, self.host.do, lambda: self._up(here))

    def _up(self, end: End) -> None:
        if not self._is_connecting:
            end.abortConnection()
            return
        self._cancel_timer()
        if end.loss_reason is not None:
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
        if not self._is_connecting:
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
        """Report to the factory that the connection has ended."""
        self.state = "disconnected"
        self._factory.clientConnectionLost(self, reason)
        self._stop()


@implementer(IHostResolution)
class _Resolution:
    """Result of resolving a name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def cancel(self) -> None:
        """Do nothing, because the resolution is already complete."""


@implementer(IHostnameResolver)
class HostNames:
    """Resolver of host names. It resolves only IP addresses, because the hosts have no other names."""

    def resolveHostName(
        self,
        resolutionReceiver: IResolutionReceiver,
        hostName: str,
        portNumber: int = 0,
        addressTypes: Sequence[type[IAddress]] | None = None,
        transportSemantics: str = "TCP",
    ) -> IHostResolution:
        resolution = _Resolution(hostName)
        resolutionReceiver.resolutionBegan(resolution)
        resolutionReceiver.addressResolved(IPv4Address("TCP", hostName, portNumber))
        resolutionReceiver.resolutionComplete()
        return resolution
