"""Measurement of round trips to a peer, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol as Interface, TypedDict, cast

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IProtocol, IProtocolFactory, IReactorTime
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import deferLater

from dmsg.errors import DmsgTimeout, PingUnavailable
from dmsg.keys import PubKey
from dmsg.net.streams.address import DmsgAddress
from dmsg.net.streams.transports import stream_of

if TYPE_CHECKING:
    from dmsg.net.streams.stream import StreamTransport


class Event(TypedDict, total=False):
    """Event of a measurement; see :func:`ping`."""

    connected: str
    number: int
    seconds: float
    error: str
    notice: str


class ProbingClient(Interface):
    """Interface of a client, as the measurement uses it."""

    def probe(
        self, remote: PubKey, port: int | None = None, *, timeout: float = ..., via: PubKey | None = None
    ) -> Deferred[IProtocol]:
        """Open a stream that no program of the remote notices."""

    def connect(
        self,
        remote: PubKey,
        factory: IProtocolFactory,
        port: int = 0,
        *,
        timeout: float = ...,
        via: PubKey | None = None,
    ) -> Deferred[IProtocol]:
        """Open a stream to a program of the remote."""


async def open_probe(
    client: ProbingClient,
    key: PubKey,
    port: int | None,
    timeout: float,
    on_seen: Callable[[str], None],
    via: PubKey | None = None,
) -> StreamTransport:
    """Open a stream for measuring and return its transport.

    :param port: port at which a program of the peer must listen; None if no program is needed.
    :param on_seen: callback invoked if a program of the peer notices the stream, with a text that says why.  That
        happens only if the peer's dmsg is too old for :meth:`ProbingClient.probe`.
    :param via: server to use; None for any.
    """
    try:
        protocol = await client.probe(key, port, timeout=timeout, via=via)
    except PingUnavailable as error:
        on_seen(f"{error}, so the program notices this measurement")
        protocol = await client.connect(key, Factory.forProtocol(Protocol), port or 0, timeout=timeout, via=via)
    return stream_of(protocol)


async def ping(
    reactor: IReactorTime,
    client: ProbingClient,
    key: PubKey,
    port: int | None,
    *,
    count: int,
    interval: float,
    timeout: float,
    on_event: Callable[[Event], None],
) -> None:
    """Measure ``count`` round trips.

    :param port: port at which a program of the peer must listen; None for no program.
    :param interval: seconds between two round trips.
    :param timeout: seconds to wait for the connection, and for each answer.
    :param on_event: callback invoked with each event.  The first event is ``{"connected": KEY, "seconds": S}``.  An
        event for each round trip follows: ``{"number": N, "seconds": S}`` or ``{"number": N, "error": TEXT}``.  An
        event ``{"notice": TEXT}``, with a message for the user, may precede the first event.
    :raises DmsgError: for the same reasons as in :meth:`dmsg.v2019.client.Client.connect`.
    """
    started = reactor.seconds()
    transport = await open_probe(client, key, port, timeout, lambda text: on_event({"notice": text}))
    try:
        on_event(
            {
                "connected": str(cast(DmsgAddress, transport.getPeer()).public_key),
                "seconds": reactor.seconds() - started,
            }
        )
        for number in range(1, count + 1):
            started = reactor.seconds()
            try:
                await transport.send(b"", timeout)
            except DmsgTimeout as error:
                on_event({"number": number, "error": str(error)})
            else:
                on_event({"number": number, "seconds": reactor.seconds() - started})
            if number < count:
                await deferLater(reactor, interval)
    finally:
        transport.loseConnection()
