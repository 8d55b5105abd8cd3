"""Splicing of two connections: bytes that arrive at one are sent over the other.

Each connection is the producer of the other, so back-pressure passes through.  When one direction ends cleanly, its
remaining data is sent and the other connection is half-closed; the opposite direction continues.  When a connection is
lost, the other one is aborted.  A program at a TCP connection then sees a reset, and does not mistake the loss for a
clean end.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable
from typing import cast

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.interfaces import (
    IAddress,
    IHalfCloseableProtocol,
    IProtocol,
    IProtocolFactory,
    IPushProducer,
    IReactorTime,
)
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.tcp import Connection
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.base.eviction import Seniority
from dmsg.net.descriptors import max_connections
from dmsg.net.socketopts import send_more, set_reset_on_close, write_now
from dmsg.net.streams.address import DmsgAddress
from dmsg.net.streams.transports import ApplicationTransport, transport_of

READ_FRAMES = 4
"""Size of a read from the TCP connection, in frames of the stream."""
MAX_SPLICES = 1024
"""Default maximum number of spliced pairs of one listener; fewer if the process may open fewer files.  Above it, a peer
that has many connections loses one to a peer that has few; otherwise further connections are refused.
"""
PROTECTED_DIVISOR = 64
"""Divisor of the maximum number of pairs.  The quotient is the number of pairs that a peer never loses to another."""
LEFT_AFTER = 30.0
"""Seconds without a transport after which a connection of one peer makes room for another peer.  Otherwise a stranger
with many connections could end all those of peers whose server has just died.
"""

_log = Logger()


def max_splices() -> int:
    """Return the default maximum number of pairs: ``MAX_SPLICES``, or fewer if the process may open fewer files.

    A pair needs up to two file descriptors: one for TCP, and one for the agent.
    """
    return min(MAX_SPLICES, max(1, max_connections() // 2))


@implementer(IHalfCloseableProtocol)
class SplicedConnection(Protocol):
    """Connection that is spliced with another.

    :ivar partner: the other connection, once both are connected.
    :ivar loss: reason why this connection ended, or None.
    """

    partner: SplicedConnection | None = None
    reading_ended = False
    """Whether the remote of this connection has half-closed it."""
    _writing_ended = False

    def __init__(
        self, on_connected: Callable[[SplicedConnection], None] | None = None, on_lost: Callable[[], None] | None = None
    ) -> None:
        self._on_connected = on_connected
        self._on_lost = on_lost
        self.loss: Failure | None = None

    def connectionMade(self) -> None:
        if self._on_connected is not None:
            self._on_connected(self)

    def dataReceived(self, data: bytes) -> None:
        if self.partner is not None and self.partner.transport is not None:
            write_now(self.partner.transport, data)

    def readConnectionLost(self) -> None:
        """Handle a half-close by the remote: half-close the partner, and keep the opposite direction open."""
        if self.reading_ended:
            return  # TCP reports the end a second time if reading is resumed.
        self.reading_ended = True
        if self.partner is not None:
            self.partner.end_writing()
        self._close_if_both_ended()

    def writeConnectionLost(self) -> None:
        """Record that the half-close of this side, and all data before it, was sent."""
        self._writing_ended = True
        self._close_if_both_ended()

    def end_writing(self) -> None:
        """Half-close the connection after the data written so far."""
        transport = transport_of(self)
        transport.unregisterProducer()
        transport.loseWriteConnection()

    def _close_if_both_ended(self) -> None:
        # After both directions have ended, Twisted leaves a TCP connection open, whereas a stream closes itself.
        both = self.reading_ended and self._writing_ended and self.loss is None
        if both and self.transport is not None and not hasattr(self.transport, "can_half_close"):
            set_reset_on_close(self.transport, False)
            self.transport.loseConnection()

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        if reason.check(ConnectionDone) and getattr(self.transport, "unacknowledged", 0):
            # The remote closed before it had received all data. The partner is aborted, because the program that wrote
            # the data must not take this for a clean end.
            reason = Failure(ConnectionLost("closed before all that was written had arrived"))
        self.loss = reason
        other, self.partner = self.partner, None
        if other is not None and other.loss is None and other.transport is not None:
            other.partner = None
            other.transport.unregisterProducer()  # type: ignore[attr-defined]
            _end(transport_of(other), reason)
        if self._on_lost is not None:
            self._on_lost()


def _end(transport: ApplicationTransport, reason: Failure) -> None:
    if reason.check(ConnectionDone):
        set_reset_on_close(transport, False)
        transport.loseConnection()
        read_on = getattr(transport, "startReading", None)
        if read_on is not None and getattr(transport, "connected", False):
            # Data is read and discarded: a peer that is blocked in a write might never read the data that is still to
            # be sent.
            read_on()
    else:
        transport.abortConnection()


@implementer(IPushProducer)
class _Source:
    """Producer that is registered at one connection of a pair. It pauses and resumes reading from the other connection,
    its source.

    A connection that closes stops its producer, which then resumes reading from the source. Otherwise the source's
    remote could block in a write for ever, and never read the data that is still to be sent to it.
    """

    def __init__(self, transport: ApplicationTransport) -> None:
        self._transport = transport
        self.pauseProducing = transport.pauseProducing
        self.resumeProducing = transport.resumeProducing

    def stopProducing(self) -> None:
        self._transport.resumeProducing()


def join(left: SplicedConnection, right: SplicedConnection) -> None:
    """Splice two connections, both of which are connected."""
    for half, other in ((left, right), (right, left)):
        if other.loss is not None:
            _end(transport_of(half), other.loss)
            return
    for half, other in ((left, right), (right, left)):
        frame = getattr(other.transport, "max_frame", None)
        if frame is not None and isinstance(half.transport, Connection):
            # The buffer size is a multiple of the frame size of the other connection. So the data of a full buffer is
            # sent in full frames.
            half.transport.bufferSize = READ_FRAMES * frame
            send_more(half.transport)
        # If this process is killed or ends, the program at the TCP connection sees a reset instead of a clean end.
        set_reset_on_close(half.transport, True)
    left.partner, right.partner = right, left
    assert left.transport is not None and right.transport is not None
    first, second = transport_of(left), transport_of(right)
    first.registerProducer(_Source(second), True)
    second.registerProducer(_Source(first), True)
    for half, other in ((left, right), (right, left)):
        if half.reading_ended:
            # The half-close arrived before the other connection was open, so it is passed on now.
            other.end_writing()
    if not left.reading_ended:
        first.resumeProducing()


def _owner_of(addr: IAddress | None) -> Hashable:
    """Return the owner of a connection: the key of a peer, or the host of a TCP address."""
    return addr.public_key if isinstance(addr, DmsgAddress) else getattr(addr, "host", None)


def _most_useless(halves: list[SplicedConnection], since: float = math.inf) -> SplicedConnection | None:
    """Return the connection that is probably of least use; None if all of them may be in use.

    The first choice is a stream that has ended but is not read to its end.  The second choice is the stream that has
    been without a transport for the longest time; such a stream may still be resumed.

    :param since: time; a stream that has lost its transport later is not returned.
    """
    ended = next((half for half in halves if getattr(half.transport, "has_ended", False)), None)
    away = [(at, half) for half in halves if (at := getattr(half.transport, "away_since", None)) is not None]
    at, longest = min(away, key=lambda one: one[0], default=(math.inf, None))
    return ended or (longest if at <= since else None)


class SpliceFactory(Factory):
    """Factory that opens a second connection for each incoming one, and splices the two.

    :param connect: function that opens the second connection with a factory.  It returns a Deferred that fires when the
        connection is open.
    :param is_allowed: function that returns whether an address may connect.
    :param on_failed: callback invoked when the second connection cannot be opened.
    :param max_pairs: maximum number of pairs; None for the result of :func:`max_splices`.
    :param seconds: function that returns the time of the reactor; None for that of the global reactor.
    """

    noisy = False

    def __init__(
        self,
        connect: Callable[[IProtocolFactory], Deferred[IProtocol]],
        *,
        is_allowed: Callable[[IAddress], bool] = lambda address: True,
        on_failed: Callable[[Failure], None] = lambda failure: None,
        max_pairs: int | None = None,
        seconds: Callable[[], float] | None = None,
    ) -> None:
        if seconds is None:
            from twisted.internet import reactor

            seconds = cast("IReactorTime", reactor).seconds
        self._seconds = seconds
        self._connect = connect
        self.admits = self._allowed = is_allowed
        self._on_failed = on_failed
        self._max = max_splices() if max_pairs is None else max_pairs
        self._halves: dict[SplicedConnection, Hashable] = {}
        self._seniority: Seniority[Hashable] = Seniority()
        self.total = 0

    def buildProtocol(self, addr: IAddress | None) -> Protocol | None:
        if addr is not None and not self._allowed(addr):
            return None
        owner = _owner_of(addr)
        if self.pair_count >= self._max and not self._make_room(owner):
            return None
        self.total += 1

        def lost() -> None:
            self._halves.pop(half, None)

        half = SplicedConnection(self._incoming, lost)
        self._halves[half] = owner
        self._seniority.record(owner)
        return half

    @property
    def pair_count(self) -> int:
        """Number of incoming connections that are open now."""
        return len(self._halves)

    @property
    def second_transports(self) -> list[object]:
        """Transports of the second connections that are open now."""
        return [transport_of(half.partner) for half in self._halves if half.partner is not None]

    def _make_room(self, newcomer: Hashable) -> bool:
        """Make room for a new connection by aborting another one.

        :meth:`Seniority.pick_loser` says which owner loses one of its connections.  If it names none, the newcomer
        loses one of its own that is useless, or at last another owner one that seems to be left.

        :param newcomer: owner of the new connection.
        :returns: whether a connection was aborted.
        """
        counts, protected = Counter(self._halves.values()), self._max // PROTECTED_DIVISOR
        loser = self._seniority.pick_loser(counts, newcomer, protected)
        if loser is not None:
            of_loser = [half for half, owner in self._halves.items() if owner == loser]
            leaves = _most_useless(of_loser) or of_loser[-1]
        else:
            own = [half for half, owner in self._halves.items() if owner == newcomer]
            useless = _most_useless(own) or _most_useless(list(self._halves), self._seconds() - LEFT_AFTER)
            if useless is None:
                return False
            leaves = useless
        self._halves.pop(leaves, None)
        transport_of(leaves).abortConnection()
        return True

    def _incoming(self, connection: SplicedConnection) -> None:
        transport = transport_of(connection)
        transport.pauseProducing()
        dial(connection, self._connect, self._on_failed)


def dial(
    connection: SplicedConnection,
    connect: Callable[[IProtocolFactory], Deferred[IProtocol]],
    on_failed: Callable[[Failure], None],
) -> None:
    """Open a second connection for ``connection``, and splice the two.

    :param connection: first connection, which is paused.
    :param connect: function that opens the second connection.
    :param on_failed: callback invoked when the second connection cannot be opened.
    """
    two = SplicedConnection()
    factory = Factory.forProtocol(lambda: two)
    factory.noisy = False

    def connected(_: IProtocol) -> None:
        join(connection, two)

    def not_connected(failure: Failure) -> None:
        if not failure.check(CancelledError):
            on_failed(failure)
        if connection.loss is None and connection.transport is not None:
            connection.transport.abortConnection()  # type: ignore[attr-defined]

    connect(factory).addCallbacks(connected, not_connected).addErrback(
        lambda failure: _log.failure("unhandled error while two connections were joined", failure)
    )
