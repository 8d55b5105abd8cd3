"""Implementation of ``dmsg bench``: acknowledged messages and round trips."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from twisted.internet.defer import Deferred
from twisted.internet.protocol import Factory, Protocol

from dmsg.base.units import human_size, milliseconds
from dmsg.cli.output import state, tell
from dmsg.cli.screen import print_table, screen
from dmsg.keys import PubKey
from dmsg.net.streams.transports import stream_of

if TYPE_CHECKING:
    from twisted.internet.interfaces import IAddress
    from twisted.python.failure import Failure

    from dmsg.net.reactor import Reactor
    from dmsg.net.streams.stream import StreamTransport
    from dmsg.v2019.client import Client


class DiscardProtocol(Protocol):
    """Protocol that discards received data."""

    def dataReceived(self, data: bytes) -> None:
        pass


def discard_factory(admits: Callable[[IAddress], bool] = lambda address: True) -> Factory:
    """Return a factory of :class:`DiscardProtocol`.

    :param admits: function that returns whether an address may connect.
    """

    factory = _DiscardFactory()
    factory.admits = admits
    return factory


class _DiscardFactory(Factory):
    noisy = False
    admits: Callable[[IAddress], bool]

    def buildProtocol(self, addr: IAddress | None) -> DiscardProtocol | None:
        return DiscardProtocol() if addr is not None and self.admits(addr) else None


async def measure(
    reactor: Reactor, transport: StreamTransport, size: int, seconds: float, in_flight: int
) -> tuple[int, float]:
    """Send messages, and count the acknowledged ones.

    :param size: bytes of a message.
    :param seconds: seconds after which no further message is sent.
    :param in_flight: number of messages that are unacknowledged at any time.
    :returns: number of acknowledged messages, and the seconds from the first message to the last acknowledgement.
    """

    payload = bytes(size)
    acknowledged = 0
    ended: Deferred[None] = Deferred()
    waiting = 0
    start = time.perf_counter()
    stop_at = start + seconds

    def one_more(_: None) -> None:
        nonlocal acknowledged, waiting
        acknowledged += 1
        waiting -= 1
        if time.perf_counter() < stop_at:
            send()
        elif not waiting and not ended.called:
            ended.callback(None)

    def fail(failure: Failure) -> None:
        if not ended.called:
            ended.errback(failure)

    def send() -> None:
        nonlocal waiting
        waiting += 1
        transport.send(payload).addCallbacks(one_more, fail)

    for _ in range(in_flight):
        send()
    await ended
    return acknowledged, time.perf_counter() - start


async def round_trips(transport: StreamTransport, count: int) -> list[float]:
    """Return the durations in seconds of ``count`` round trips, in ascending order."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        await transport.send(b"")
        times.append(time.perf_counter() - start)
    return sorted(times)


async def run_bench(
    reactor: Reactor,
    client: Client,
    remote: PubKey,
    sizes: Sequence[int],
    seconds: float,
    in_flight: int,
    timeout: float,
) -> None:
    """Measure round trips and the throughput for each message size, and print the results.

    :param remote: peer to which the messages are sent.
    :param sizes: bytes per message.
    :param seconds: seconds to measure each size.
    :param in_flight: number of messages that are unacknowledged at any time.
    :param timeout: seconds that opening the stream may take.
    """

    transport = stream_of(await client.connect(remote, Factory.forProtocol(Protocol), timeout=timeout))
    times = await round_trips(transport, 200)
    p50, p99 = times[len(times) // 2], times[int(len(times) * 0.99)]
    tell(f"round trip: p50 {milliseconds(p50)}, p99 {milliseconds(p99)}", p50=p50, p99=p99)
    table = Table("message", "acknowledged/s", "rate", box=None, pad_edge=False)
    for size in sizes:
        count, took = await measure(reactor, transport, size, seconds, in_flight)
        if state.json:
            tell("", size=size, acknowledged_a_second=count / took, bytes_a_second=count * size / took)
        table.add_row(f"{size} B", f"{count / took:,.0f}", f"{human_size(count * size / took)}/s")
    if not state.json:
        print_table(screen(), table)
    transport.loseConnection()
