"""Implementation of ``dmsg iperf``: streams to one peer, and the measurement of their throughput."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IPushProducer
from twisted.internet.protocol import Factory, Protocol
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.apps.transfer import lost_text
from dmsg.base.units import counted, human_size, milliseconds
from dmsg.cli.output import tell
from dmsg.errors import DmsgError
from dmsg.keys import PubKey
from dmsg.net.streams.transports import ApplicationTransport, stream_of, transport_of

if TYPE_CHECKING:
    from twisted.internet.interfaces import IAddress

    from dmsg.net.reactor import Reactor
    from dmsg.net.streams.address import DmsgAddress
    from dmsg.net.streams.stream import StreamTransport
    from dmsg.v2019.client import Client


BLOCK = bytes(65492)
HEADER_LIMIT = 256
BLOCKS_PER_TURN = 16
"""Maximum number of blocks that the producer writes in one reactor turn."""


@implementer(IPushProducer)
class _Source:
    """Producer that writes without pause while the transport accepts data."""

    def __init__(self, reactor: Reactor, transport: ApplicationTransport) -> None:
        self._reactor = reactor
        self._transport = transport
        self._paused = False
        self._scheduled = False
        self._stopped = False
        transport.registerProducer(self, True)
        self.resumeProducing()

    def pauseProducing(self) -> None:
        self._paused = True

    def resumeProducing(self) -> None:
        self._paused = False
        if not self._scheduled:
            self._scheduled = True
            self._reactor.callLater(0, self._write)

    def _write(self) -> None:
        self._scheduled = False
        for _ in range(BLOCKS_PER_TURN):
            if self._paused or self._stopped:
                return
            self._transport.write(BLOCK)
        self.resumeProducing()

    def stopProducing(self) -> None:
        self._stopped = True

    def finish(self) -> None:
        """Stop writing, and unregister the producer."""
        self._stopped = True
        self._transport.unregisterProducer()


class _MeasuredStream(Protocol):
    """Protocol of one stream of a measurement.

    At the measuring side, it counts the received bytes.  At the serving side, it reads the settings of the measurement
    from the first line, and then sends or discards data.

    :param on_counted: callback invoked with the number of received bytes, at the measuring side; None at the serving
        side.
    :param longest: maximum seconds for which the serving side sends.
    """

    def __init__(
        self, reactor: Reactor, on_counted: Callable[[int], None] | None = None, *, longest: float = 0.0
    ) -> None:
        self._reactor = reactor
        self._longest = longest
        self._on_counted = on_counted
        self._header: bytes | None = b"" if on_counted is None else None
        self._source: _Source | None = None
        self.lost: Deferred[str] = Deferred()
        """Deferred that fires with the reason why the stream ended; the reason is empty after a clean end."""

    def dataReceived(self, data: bytes) -> None:
        if self._header is not None:
            self._header += data
            line, newline, _ = self._header.partition(b"\n")
            if not newline:
                if len(self._header) > HEADER_LIMIT:
                    self.transport.abortConnection()  # type: ignore[union-attr]
                return
            self._header = None
            try:
                wanted = json.loads(line)
                seconds = min(float(wanted["seconds"]), self._longest) if wanted.get("reverse") else 0.0
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                self.transport.abortConnection()  # type: ignore[union-attr]
                return
            if seconds > 0:
                self._source = _Source(self._reactor, transport_of(self))
                self._reactor.callLater(seconds, self._end)
        elif self._on_counted is not None:
            self._on_counted(len(data))

    def _end(self) -> None:
        if self._source is not None and not self.lost.called:
            self._source.finish()
            self.transport.loseConnection()  # type: ignore[union-attr]

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        self.lost.callback("" if reason.check(ConnectionDone) else lost_text(reason))


class MeasurementFactory(Factory):
    """Factory of the serving side of measurements."""

    noisy = False

    def __init__(self, reactor: Reactor, is_allowed: Callable[[IAddress], bool], longest: float) -> None:
        """:param longest: maximum seconds for which a measurement may let this side send."""
        self._reactor = reactor
        self._longest = longest
        self.admits = self._allowed = is_allowed

    def buildProtocol(self, addr: IAddress | None) -> Protocol | None:
        return (
            _MeasuredStream(self._reactor, longest=self._longest) if addr is not None and self._allowed(addr) else None
        )


async def measure(
    reactor: Reactor,
    client: Client,
    address: DmsgAddress,
    seconds: float,
    parallel: int,
    reverse: bool,
    timeout: float,
) -> None:
    """Measure the throughput to a peer.  Print it each second, and at the end for the whole time.

    :param parallel: number of parallel streams.
    :param reverse: whether the peer sends.
    :param timeout: seconds that opening a stream may take.
    """
    from twisted.internet.task import LoopingCall

    measuring = _Measurement(reactor, reverse)
    await measuring.connect(client, address, parallel, timeout)
    telling = LoopingCall(measuring.tell_rate)
    telling.clock = reactor
    measuring.begin(seconds)
    telling.start(1.0, now=False).addErrback(lambda _: None)
    try:
        await (measuring.received() if reverse else measuring.sent(seconds))
    finally:
        if telling.running:
            telling.stop()
    measuring.tell_result()


class _Measurement:
    """Measurement with parallel streams to one peer."""

    def __init__(self, reactor: Reactor, reverse: bool) -> None:
        self._reactor = reactor
        self._reverse = reverse
        self._on_counted = 0
        self._protocols: list[_MeasuredStream] = []
        self._transports: list[StreamTransport] = []
        self._sources: list[_Source] = []
        self._acknowledged: list[int] = []
        """Number of acknowledged bytes of each stream when the measurement started."""
        self._started = self._reported_at = 0.0
        self._reported_bytes = 0

    def _count(self, size: int) -> None:
        self._on_counted += size

    async def connect(self, client: Client, address: DmsgAddress, parallel: int, timeout: float) -> None:
        """Open the streams, and print the round-trip time to the peer."""
        factory = Factory.forProtocol(lambda: _MeasuredStream(self._reactor, self._count))
        factory.noisy = False
        self._protocols = [
            cast(_MeasuredStream, await client.connect(address, factory, timeout=timeout)) for _ in range(parallel)
        ]
        self._transports = [stream_of(protocol) for protocol in self._protocols]
        first = self._transports[0]
        before = time.perf_counter()
        await first.send(b"")
        took = time.perf_counter() - before
        tell(
            f"connected to {address.text} through {cast(PubKey, first.server).short}..., "
            f"{counted(parallel, 'stream')}, round trip {milliseconds(took)}",
            connected=str(address),
            server=str(first.server),
            streams=parallel,
            round_trip=took,
        )

    def begin(self, seconds: float) -> None:
        """Send the settings of the measurement to the peer.  Start sending data, unless the peer is to send."""
        self._started = self._reported_at = time.perf_counter()
        self._acknowledged = [one.acknowledged_bytes or 0 for one in self._transports]
        header = json.dumps({"reverse": self._reverse, "seconds": seconds}).encode() + b"\n"
        for transport in self._transports:
            transport.write(header)
            if not self._reverse:
                self._sources.append(_Source(self._reactor, transport))

    def _total(self) -> int:
        """Return the number of bytes that have arrived at the receiver since the start. With ``--reverse``, this side
        is the receiver and counts them. Otherwise it counts the acknowledged bytes, if each stream has
        acknowledgements."""
        acknowledged = [transport.acknowledged_bytes for transport in self._transports]
        known = [size for size in acknowledged if size is not None]
        if self._reverse or len(known) < len(acknowledged):
            return self._on_counted
        return sum(known) - sum(self._acknowledged)

    def tell_rate(self) -> None:
        """Print the throughput since the last call."""
        now, total = time.perf_counter(), self._total()
        rate = (total - self._reported_bytes) / (now - self._reported_at)
        since, until = self._reported_at - self._started, now - self._started
        tell(f"{since:6.1f} - {until:.1f} s  {human_size(rate)}/s", since=since, until=until, bytes_a_second=rate)
        self._reported_at, self._reported_bytes = now, total

    async def received(self) -> None:
        """Wait until the peer has sent all its data.

        :raises DmsgError: a stream was lost.
        """

        ends = await gatherResults([protocol.lost for protocol in self._protocols])
        broken = next((one for one in ends if one), "")
        if broken:
            raise DmsgError(f"a stream was lost: {broken}")

    async def sent(self, seconds: float) -> None:
        """Wait until the time is over or a stream is lost.  Then stop sending, and wait until all data is
        acknowledged.
        """

        waiting: Deferred[None] = Deferred()

        def over(_: object = None) -> None:
            if not waiting.called:
                waiting.callback(None)

        self._reactor.callLater(seconds, over)
        for protocol in self._protocols:
            protocol.lost.addBoth(over)
        await waiting
        for source in self._sources:
            source.finish()
        for transport in self._transports:
            # Frames are acknowledged in order, so the acknowledgement of this frame covers all earlier ones.
            await transport.send(b"")

    def tell_result(self) -> None:
        """Print the throughput of the whole measurement, and close the streams.

        :raises DmsgError: this side sent, and the streams do not count acknowledged bytes.
        """
        passed, total = time.perf_counter() - self._started, self._total()
        if not self._reverse and self._transports[0].acknowledged_bytes is None:
            raise DmsgError(
                "without encryption, the sending side cannot measure: use --reverse, so that this side receives"
            )
        text = f"{human_size(total)} in {passed:.2f} s, {human_size(total / passed)}/s"
        tell(text, bytes=total, seconds=passed, bytes_a_second=total / passed)
        for transport in self._transports:
            transport.loseConnection()
