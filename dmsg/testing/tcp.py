"""TCP between hosts of :mod:`dmsg.testing.network`: listening ports, connectors and the ends of connections."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from twisted.internet.address import IPv4Address
from twisted.internet.defer import Deferred
from twisted.internet.error import (
    ConnectionAborted,
    ConnectionDone,
    ConnectionLost,
    ConnectionRefusedError,
    TimeoutError,
    UserError,
)
from twisted.internet.interfaces import (
    IConnector,
    IDelayedCall,
    IListeningPort,
    IProducer,
    IProtocol,
    IPushProducer,
    ITCPTransport,
)
from twisted.internet.protocol import ClientFactory, ServerFactory
from twisted.python.failure import Failure
from zope.interface import implementer

if TYPE_CHECKING:
    from dmsg.testing.network import Host, Path

SEGMENT = 64 * 1024
"""Bytes that travel together."""
BUFFER = 256 * 1024
"""Bytes on their way in one direction of a connection; a writer with more is paused."""
RETRANSMIT = 0.2
"""Seconds that a lost segment is late."""
USER_TIMEOUT = 30.0
"""Seconds of partition that a connection lives through."""


@implementer(IListeningPort)
class Port:
    def __init__(self, host: Host, number: int, factory: ServerFactory) -> None:
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
    def __init__(self, host: Host, address: str, port: int, factory: ClientFactory[Any], timeout: float) -> None:
        self.host = host
        self._target = (address, port)
        self._factory = factory
        self._timeout = timeout
        self._given_up: IDelayedCall | None = None
        self._started = False
        self.transport: End | None = None
        self.state = "disconnected"

    def getDestination(self) -> IPv4Address:
        return IPv4Address("TCP", *self._target)

    def connect(self) -> None:
        if not self._started:
            self._factory.doStart()
            self._started = True
        self.state = "connecting"
        self._factory.startedConnecting(self)
        self._given_up = self.host.callLater(self._timeout, self._fail, TimeoutError())
        self._try()

    def _try(self) -> None:
        if self.state != "connecting":
            return
        network = self.host.network
        target = network.by_address(self._target[0])
        if target is None:
            self.host.callLater(0, self._fail, ConnectionRefusedError())
            return
        there, back = network.both_ways(self.host, target)
        if there.cut_since is not None or back.cut_since is not None:
            self.host.callLater(1.0, self._try)  # the SYN is sent again
            return
        there_at = there.arrival(network.clock.seconds(), 60, network.random) - network.clock.seconds()
        network.clock.callLater(there_at, target.do, lambda: self._arrived(target, back.delay))
        if not target.alive:
            self.host.callLater(there_at + back.delay, self._fail, ConnectionRefusedError())

    def _arrived(self, target: Host, delay: float) -> None:
        if self.state != "connecting":
            return
        port = target.ports.get(self._target[1])
        source = IPv4Address("TCP", self.host.address, self.host.free_port())
        protocol = port.factory.buildProtocol(source) if port is not None else None
        if protocol is None:
            self.host.network.clock.callLater(delay, self.host.do, lambda: self._fail(ConnectionRefusedError()))
            return
        here = End(self.host, target, source, self.getDestination(), self)
        there = End(target, self.host, self.getDestination(), source, None)
        here.other, there.other = there, here
        self.host.ends[here] = None
        target.ends[there] = None
        there.protocol = protocol
        protocol.makeConnection(there)
        self.host.network.clock.callLater(delay, self.host.do, lambda: self._up(here))

    def _up(self, end: End) -> None:
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
class End:
    """One end of a connection."""

    disconnecting = False
    disconnected = False
    connected = True

    def __init__(
        self, host: Host, peer: Host, here: IPv4Address, there: IPv4Address, connector: Connector | None
    ) -> None:
        self.host = host
        self._peer = peer
        self._addresses = (here, there)
        self._connector = connector
        self.protocol: IProtocol | None = None
        self.other: End
        self.dead = False
        self.gone: Failure | None = None
        self._told = False
        self._unsent: deque[bytes] = deque()
        self._unsent_size = 0
        self.travelling = 0
        self._last_arrival = 0.0
        self.received: deque[bytes | None] = deque()
        self._reading = True
        self._producer: IPushProducer | None = None
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

    def writeSequence(self, data: Iterable[bytes]) -> None:
        self.write(b"".join(data))

    def _transmit(self) -> None:
        network = self.host.network
        path = network.path(self.host, self._peer)
        now = network.clock.seconds()
        while self._unsent and self.travelling < BUFFER:
            data = self._unsent.popleft()
            segment, rest = data[:SEGMENT], data[SEGMENT:]
            if rest:
                self._unsent.appendleft(rest)
            self._unsent_size -= len(segment)
            self.travelling += len(segment)
            self._send(segment, path, now)
        if self.disconnecting and not self._unsent and self.gone is None:
            self._send(None, path, now)
            self._end(ConnectionDone())

    def _send(self, segment: bytes | None, path: Path, now: float) -> None:
        network = self.host.network
        at = max(path.arrival(now, len(segment or b""), network.random), self._last_arrival)
        self._last_arrival = at
        network.clock.callLater(at - now, self._arrive, segment)

    def _arrive(self, segment: bytes | None) -> None:
        """A segment is at the other end, unless the way was cut meanwhile."""
        network = self.host.network
        path = network.path(self.host, self._peer)
        if path.cut_since is not None:
            if network.clock.seconds() - path.cut_since > USER_TIMEOUT:
                for end in (self, self.other):
                    end.reset_by_peer(TimeoutError())
                return
            self._last_arrival = network.clock.seconds() + RETRANSMIT
            network.clock.callLater(RETRANSMIT, self._arrive, segment)
            return
        if self.other.gone is None and not self.other.dead:
            self.other.received.append(segment)
            self._peer.do(self.other.deliver)

    def deliver(self) -> None:
        """Hand what has come to the protocol."""
        while self.received and self._reading and self.protocol is not None and self.gone is None:
            segment = self.received.popleft()
            if segment is None:
                self._end(ConnectionDone())
                return
            self.other.travelling -= len(segment)
            self.protocol.dataReceived(segment)
            self.other.host.do(self.other.sent)

    def sent(self) -> None:
        if self.gone is None:
            self._transmit()
        if self._producer is not None and not self._unsent:
            if not self._streaming:
                self._producer.resumeProducing()
            elif self._producer_paused:
                self._producer_paused = False
                self._producer.resumeProducing()

    # --- producers ---

    def registerProducer(self, producer: IProducer, streaming: bool) -> None:
        if self.gone is not None:
            producer.stopProducing()
            return
        # One that does not stream is never paused.
        self._producer = cast(IPushProducer, producer)
        self._streaming, self._producer_paused = streaming, False
        if not streaming:
            self._producer.resumeProducing()

    def unregisterProducer(self) -> None:
        self._producer = None

    def pauseProducing(self) -> None:
        self._reading = False

    def resumeProducing(self) -> None:
        self._reading = True
        self.host.callLater(0, self.deliver)

    def stopProducing(self) -> None:
        self.loseConnection()

    # --- the end ---

    def loseConnection(self) -> None:
        if self.gone is None and not self.disconnecting:
            self.disconnecting = True
            self.host.callLater(0, self._transmit)

    def abortConnection(self) -> None:
        if self.gone is None:
            self._end(ConnectionAborted())
            network = self.host.network
            network.clock.callLater(network.path(self.host, self._peer).delay, self.other.reset_by_peer)

    def reset_by_peer(self, error: Exception | None = None) -> None:
        """A reset arrives."""
        if self.gone is None and not self.dead:
            self.host.do(lambda: self._end(error or ConnectionLost()))

    def _end(self, error: Exception) -> None:
        if self.gone is not None:
            return
        self.gone = Failure(error)
        self.disconnected = True
        self.connected = False
        self.host.ends.pop(self, None)
        self._unsent.clear()
        self.host.callLater(0, self._tell)

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
