"""Simulated TCP between hosts of :mod:`dmsg.testing.network`: the ends of connections, and the paths between hosts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from random import Random
from typing import Protocol, cast

from twisted.internet.address import IPv4Address
from twisted.internet.error import (
    ConnectionAborted,
    ConnectionDone,
    ConnectionLost,
    TimeoutError,
)
from twisted.internet.interfaces import (
    IDelayedCall,
    IProducer,
    IProtocol,
    IPushProducer,
    ITCPTransport,
)
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.testing.determinism import Trace

SEGMENT = 64 * 1024
"""Maximum size of a segment in bytes."""
BUFFER = 256 * 1024
"""Limit in bytes for one direction of a connection, which applies twice. While this many bytes are in flight, no
further segment is sent. While more than this many bytes wait to be sent, the producer is paused."""
RETRANSMIT = 0.2
"""Seconds until a lost segment is sent again. A loss is simulated by this delay."""
USER_TIMEOUT = 30.0
"""Seconds of an interruption after which a connection is lost."""


class Path:
    """Path of one direction between two hosts.

    :ivar delay: seconds that each segment takes.
    :ivar rate: bytes per second; 0 for no limit.
    :ivar loss: share of segments that are lost once and sent again.
    :ivar reorder: share of segments that are delayed, so that segments of other connections overtake them. Such a
        segment takes twice the delay.
    :ivar cut_since: time at which the path was interrupted; None while it works.
    :ivar reset_after: number of bytes after which the connection that sends the last of them is reset; None for never.
    """

    def __init__(self, clock: Clock, random: Random, trace: Trace | None = None) -> None:
        self.clock = clock
        self.trace = trace
        self._random = random
        self.delay = 0.0
        self.rate = 0.0
        self.loss = 0.0
        self.reorder = 0.0
        self.cut_since: float | None = None
        self.reset_after: int | None = None
        self._free_at = 0.0

    def arrival(self, size: int) -> float:
        """Return the time at which a segment of this size arrives if it is sent now."""
        start = max(self.clock.seconds(), self._free_at)
        self._free_at = start + (size / self.rate if self.rate else 0.0)
        late = RETRANSMIT if self.loss and self._random.random() < self.loss else 0.0
        late += self.delay if self.reorder and self._random.random() < self.reorder else 0.0
        return self._free_at + self.delay + late


class Machine(Protocol):
    """Interface of a host for the ends of its connections."""

    name: str
    ends: dict[End, None]
    idle_limit: float

    def callLater(self, delay: float, callable: Callable[..., object], *args: object, **kw: object) -> IDelayedCall:
        """Call a function later, unless this host was killed before."""

    def do(self, action: Callable[[], object]) -> None:
        """Call a function as code of this host, because something has arrived. If the host is paused, call it after the
        pause."""


@implementer(ITCPTransport)
class End:
    """One end of a simulated TCP connection, which is the transport of a protocol."""

    disconnecting = False
    disconnected = False
    connected = True

    def __init__(
        self,
        host: Machine,
        peer: Machine,
        path: Path,
        own_address: IPv4Address,
        peer_address: IPv4Address,
        on_lost: Callable[[Failure], None] | None = None,
    ) -> None:
        self.host = host
        self._peer = peer
        self._path = path
        self._addresses = (own_address, peer_address)
        self._names = tuple(f"{address.host}:{address.port}" for address in self._addresses)
        """The two addresses as texts for the trace."""
        self._lost = on_lost
        self.protocol: IProtocol | None = None
        self.other: End
        self.dead = False
        self.is_forgotten = False
        """Whether routers have forgotten the connection. Then no segment of this end arrives at the other end any
        more."""
        self.loss_reason: Failure | None = None
        self._is_end_reported = False
        self._unsent: deque[bytes] = deque()
        self._unsent_size = 0
        self.travelling = 0
        self._last_arrival = 0.0
        self._held_back: deque[bytes | None] = deque()
        """Segments that have not arrived because the path is interrupted, in the order in which they were sent."""
        self.last_sent = path.clock.seconds()
        self.received: deque[bytes | None] = deque()
        self._reading = True
        self._producer: IPushProducer | None = None
        self._streaming = False
        self._producer_paused = False

    # --- writing ---

    def write(self, data: bytes) -> None:
        if not data or self.loss_reason is not None or self.disconnecting:
            return
        data = bytes(data)
        # Data is split here, because splitting it again after each segment would copy the rest each time.
        self._unsent.extend(data[start : start + SEGMENT] for start in range(0, len(data), SEGMENT))
        self._unsent_size += len(data)
        self._transmit()
        if self._producer is not None and self._streaming and self._unsent_size > BUFFER and not self._producer_paused:
            self._producer_paused = True
            self._producer.pauseProducing()

    def writeSequence(self, data: Iterable[bytes]) -> None:
        self.write(b"".join(data))

    def _transmit(self) -> None:
        while self._unsent and self.travelling < BUFFER:
            segment = self._unsent.popleft()
            self._unsent_size -= len(segment)
            self.travelling += len(segment)
            self._send(segment)
        if self.disconnecting and not self._unsent and self.loss_reason is None:
            self._send(None)
            self._end(ConnectionDone())

    def _send(self, segment: bytes | None) -> None:
        clock = self._path.clock
        self._check_routers(clock.seconds())
        left = self._path.reset_after
        if segment is not None and left is not None:
            segment = segment[:left]
            self._path.reset_after = left - len(segment) or None
        self._note("sends", b"" if segment is None else segment)
        self._last_arrival = max(self._path.arrival(len(segment or b"")), self._last_arrival)
        clock.callLater(self._last_arrival - clock.seconds(), self._arrive, segment)
        if left is not None and self._path.reset_after is None:
            clock.callLater(self._last_arrival - clock.seconds(), self.reset_by_peer)
            clock.callLater(self._last_arrival - clock.seconds(), self.other.reset_by_peer)

    def _check_routers(self, now: float) -> None:
        """Mark the connection as forgotten if neither end has sent anything for longer than a router stores idle
        connections."""
        idle = now - max(self.last_sent, self.other.last_sent)
        if any(0 < machine.idle_limit < idle for machine in (self.host, self._peer)):
            self.is_forgotten = self.other.is_forgotten = True
        self.last_sent = now

    def _arrive(self, segment: bytes | None) -> None:
        """Deliver a segment to the other end. If the path is interrupted, hold the segment back.

        :param segment: data; None for the end of the connection.
        """
        if self.is_forgotten:
            self._path.clock.callLater(USER_TIMEOUT, self.reset_by_peer, TimeoutError())
            return
        # A segment that arrives after an interruption must not overtake those that are still held back.
        if self._path.cut_since is not None or self._held_back:
            self._held_back.append(segment)
            if len(self._held_back) == 1:
                self._retry_later()
            return
        self._hand_over(segment)

    def _retry_later(self) -> None:
        clock = self._path.clock
        self._last_arrival = max(self._last_arrival, clock.seconds() + RETRANSMIT)
        clock.callLater(RETRANSMIT, self._retry)

    def _retry(self) -> None:
        """Deliver the segments that were held back, in their order. If the path is still interrupted, try again later,
        and end the connection after :data:`USER_TIMEOUT`."""
        clock, cut_since = self._path.clock, self._path.cut_since
        if cut_since is None:
            held_back, self._held_back = self._held_back, deque()
            for segment in held_back:
                self._arrive(segment)
        elif clock.seconds() - cut_since > USER_TIMEOUT:
            self._held_back.clear()
            for end in (self, self.other):
                end.reset_by_peer(TimeoutError())
        else:
            self._retry_later()

    def _hand_over(self, segment: bytes | None) -> None:
        if self.other.loss_reason is None and not self.other.dead:
            self.other.received.append(segment)
            self._peer.do(self.other.deliver)

    def deliver(self) -> None:
        """Pass the data that has arrived to the protocol, unless reading is paused."""
        while self.received and self._reading and self.protocol is not None and self.loss_reason is None:
            segment = self.received.popleft()
            if segment is None:
                self._end(ConnectionDone())
                return
            self.other.travelling -= len(segment)
            self._note("reads", len(segment))
            self.protocol.dataReceived(segment)
            self.other.host.do(self.other.sent)

    def sent(self) -> None:
        if self.loss_reason is None:
            self._transmit()
        if self._producer is not None and not self._unsent:
            if not self._streaming:
                self._producer.resumeProducing()
            elif self._producer_paused:
                self._producer_paused = False
                self._producer.resumeProducing()

    # --- producers ---

    def registerProducer(self, producer: IProducer, streaming: bool) -> None:
        if self.loss_reason is not None:
            producer.stopProducing()
            return
        # The cast is safe for a pull producer, too: this class calls pauseProducing(), which a pull producer lacks,
        # only for push producers.
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

    # --- end of the connection ---

    def loseConnection(self) -> None:
        if self.loss_reason is None and not self.disconnecting:
            self.disconnecting = True
            self.host.callLater(0, self._transmit)

    def abortConnection(self) -> None:
        if self.loss_reason is None:
            self._end(ConnectionAborted())
            if self.is_forgotten:
                return
            self._path.clock.callLater(self._path.delay, self.other.reset_by_peer)

    def reset_by_peer(self, error: Exception | None = None) -> None:
        """End this end of the connection because of a reset or another error.

        :param error: reason that is reported to the protocol; None for a reset.
        """
        if self.loss_reason is None and not self.dead:
            self.host.do(lambda: self._end(error or ConnectionLost()))

    def _end(self, error: Exception) -> None:
        if self.loss_reason is not None:
            return
        self._note("ends", type(error).__name__)
        self.loss_reason = Failure(error)
        self.disconnected = True
        self.connected = False
        self.host.ends.pop(self, None)
        self._unsent.clear()
        self.host.callLater(0, self._report_end)

    def _report_end(self) -> None:
        if self._is_end_reported or self.protocol is None or self.loss_reason is None:
            return
        self._is_end_reported = True
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.stopProducing()
        self.protocol.connectionLost(self.loss_reason)
        if self._lost is not None:
            self._lost(self.loss_reason)

    def _note(self, *what: object) -> None:
        trace = self._path.trace
        if trace is not None:
            trace.note(self._path.clock.seconds(), *self._names, *what)

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
