"""Server side of HTTP/1.1 connections, with bounded buffers and a limited time in each reactor turn.

Twisted's channel does not limit the cost of its input. It continues to read after each response even if much is
unparsed, and copies all unparsed data for every line. So the time for many small pipelined requests grows with the
square of their number. A body in chunks of one byte takes a long time to parse, and a short header or parameter becomes
an object of hundreds of bytes.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypedDict, Unpack

from twisted.internet.interfaces import IAddress, IReactorTime
from twisted.internet.protocol import connectionDone
from twisted.python.failure import Failure
from twisted.web.http import HTTPChannel
from twisted.web.http_headers import Headers
from twisted.web.resource import IResource
from twisted.web.server import Request, Site

from dmsg.net.blocks import blocks_of
from dmsg.net.own_pauses import FairTimeout, stop_timeout
from dmsg.net.turn_share import TurnShare
from dmsg.net.turn_writes import send_at_turn_end
from dmsg.net.turns import TurnTaker
from dmsg.net.web.pending_requests import PendingRequests

PARSE_SIZE = 2 * 1024
"""Number of bytes of HTTP requests that are parsed at a time. The rest is buffered, and nothing is read while
more than one piece is buffered."""
MAX_HEADERS = 100
"""Maximum number of headers of a request. Twisted itself limits their total size to 16 KiB."""
HEADER_COST = 300
"""Number of bytes of memory that a header uses in addition to its text."""
MAX_TRAILERS = 1024
"""Maximum number of bytes of trailers after a chunked body. They are not used."""
MAX_PARAMETERS = 64
"""Maximum number of query parameters of a request."""
MAX_LENGTH_LINE = 40
"""Maximum number of bytes of a Content-Length header line. Python raises an exception for a number with thousands of
digits."""
LINGER_FOR, LINGER_SIZE = 5.0, 64 * 1024 * 1024
"""Maximum number of seconds and bytes for which the rest of a request is read and discarded after an early response. If
the connection were closed while data still arrive, the kernel would reset it, and the client would not see the
response. Pauses of this process do not count."""
_ABSOLUTE = re.compile(rb"https?://([^/?#]+)([/?].*|)", re.IGNORECASE | re.DOTALL)


def owner_of(address: object) -> str:
    """Return the owner to whom the time and memory of a connection are charged: a block of addresses, or the key of the
    other end of a stream."""
    return blocks_of(str(getattr(address, "host", None) or getattr(address, "public_key", "")))[0].name


class BoundedChannel(TurnTaker, HTTPChannel):
    """HTTP channel that buffers at most one read and one piece, and parses them in pieces over several reactor turns.

    :ivar feeding: whether a piece is being parsed. Its time is then charged to the owner by the channel.
    """

    maxHeaders = MAX_HEADERS
    site: BoundedSite
    timeOut: float | None  # type: ignore[assignment]  # Twisted accepts fractions of a second.
    block = ""
    feeding = False
    _waits = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._unparsed: deque[bytes] = deque()
        self._paused = False
        self._given_up = False
        self._lingering: FairTimeout | None = None
        self._dropped = 0
        self._head = b""
        self._header_cost = 0
        self._idle_timeout: FairTimeout | None = None

    def connectionMade(self) -> None:
        super().connectionMade()  # type: ignore[no-untyped-call]
        # Twisted's transport makes a new address object at each call, and each request asks for both addresses.
        self._peer = self.transport.getPeer()  # type: ignore[union-attr]
        self._host = self.transport.getHost()  # type: ignore[union-attr]
        # If the site has a guard, ``self.transport`` is the guard's wrapper around the connection.
        send_at_turn_end(getattr(self.transport, "transport", self.transport), self.site.reactor)
        self.block = owner_of(self._peer)

    def getPeer(self) -> IAddress:
        return self._peer

    def getHost(self) -> IAddress:
        return self._host

    def setTimeout(self, period: float | None) -> float | None:
        # Twisted makes and cancels a timer for each request. Here, one timeout continues while requests are answered.
        # The period is always that of the site, or None.
        before, self.timeOut = self.timeOut, period
        if period is not None and self._idle_timeout is None:
            self._idle_timeout = FairTimeout(self.site.reactor, period, self._on_idle)
        elif period is not None:
            self.resetTimeout()
        return before

    def resetTimeout(self) -> None:
        if self._idle_timeout is not None:
            self._idle_timeout.restart()

    def _on_idle(self) -> None:
        """Close the connection, because nothing was received for the timeout. While a request is being answered there
        is no timeout; :meth:`setTimeout` then starts it again."""
        self._idle_timeout = None
        if self.timeOut is not None:
            self.timeoutConnection()  # type: ignore[no-untyped-call]

    def _stop_idle_timeout(self) -> None:
        timeout, self._idle_timeout = self._idle_timeout, None
        stop_timeout(timeout)

    def dataReceived(self, data: bytes) -> None:
        if self._lingering is not None:
            self._dropped += len(data)
            if self._dropped > LINGER_SIZE:
                self._close()
            return
        self._unparsed.extend(data[start : start + PARSE_SIZE] for start in range(0, len(data), PARSE_SIZE))
        self.site.unanswered.book(self, len(data))
        self._feed()

    def headerReceived(self, line: bytes) -> bool:
        if len(line) > MAX_LENGTH_LINE and line[:15].lower() == b"content-length:":
            self._respondToBadRequestAndDisconnect()  # type: ignore[no-untyped-call]
            return False
        received: bool = super().headerReceived(line)  # type: ignore[no-untyped-call]
        if received:
            self._header_cost += HEADER_COST
        return received

    def allHeadersReceived(self) -> None:
        decoder: Any = self._transferDecoder
        if hasattr(decoder, "_maxTrailerHeadersSize"):
            decoder._maxTrailerHeadersSize = MAX_TRAILERS  # noqa: SLF001  # Twisted has no setting for it
        super().allHeadersReceived()  # type: ignore[no-untyped-call]

    def setLineMode(self, extra: bytes = b"") -> None:
        # Twisted calls this method when a request was answered. ``extra`` are the data that arrived with the end of its
        # body; they are parsed before other buffered data.
        self.line_mode = 1
        if extra:
            self._unparsed.appendleft(extra)

    def writeHeaders(self, version: bytes, code: bytes, reason: bytes, headers: Headers) -> None:
        # Twisted's method takes more time: it writes each part of each header on its own, and checks the type of every
        # part. The head is kept here until the beginning of the body is known, so that both are written at once.
        lines = [b"%b %b %b\r\n" % (version, code, reason)]
        for name, values in headers.getAllRawHeaders():
            lines += [b"%b: %b\r\n" % (name, value) for value in values]
        lines.append(b"\r\n")
        self._head = b"".join(lines)

    def write(self, data: bytes) -> None:
        self.writeSequence((data,))

    def writeSequence(self, iovec: Iterable[bytes]) -> None:
        head, self._head = self._head, b""
        assert self.transport is not None
        if head:
            iovec = (head, *iovec)
        self.transport.writeSequence(iovec)

    def flush_head(self) -> None:
        """Write the head of a response that has no body, or whose body comes later."""
        if self._head:
            self.writeSequence(())

    def requestDone(self, request: Request) -> None:
        super().requestDone(request)  # type: ignore[no-untyped-call]
        if self._has_ended:
            self._unparsed.clear()
        self.site.unanswered.settle(self, sum(map(len, self._unparsed)))
        self._feed()

    def resumeProducing(self) -> None:
        # This method is called when the responses written so far are sent. No request is parsed before that, so a
        # client that does not read its responses cannot make the server buffer more of them.
        super().resumeProducing()  # type: ignore[no-untyped-call]
        self._feed()

    @property
    def share(self) -> TurnShare:  # type: ignore[override]
        return self.site.share

    @property
    def owner(self) -> str:  # type: ignore[override]
        return self.block

    def count(self) -> None:
        """Charge the time that parsing the current piece has taken so far.

        A request calls this method while its piece is parsed, and then checks whether the owner has used up its share.
        """
        self._count()

    def _work(self) -> None:
        self._feed()

    def _parse(self, piece: bytes) -> None:
        self.feeding = True
        try:
            super().dataReceived(piece)  # type: ignore[no-untyped-call]
        finally:
            self.feeding = False
            # The headers of a request that is already answered use no memory any more.
            cost, self._header_cost = self._header_cost, 0
            if cost and self.requests:
                self.site.unanswered.book(self, cost)

    def _feed(self) -> None:
        if self.feeding:
            return
        while self._unparsed and not self._handlingRequest and not self._waitingForTransport and not self._has_ended:
            if not self._may_work():
                self._next_turn()
                break
            self._spend(self._parse, self._unparsed.popleft())
        if self._has_ended:
            self.drop_buffer()
        elif self._paused or len(self._unparsed) > 1:
            # Reading goes on while a single piece waits. The piece is usually the only request of a client, which then
            # waits for the answer. A pause would cost two system calls.
            if self._unparsed:
                self._paused = True
                self._networkProducer.pauseProducing()
            else:
                self._paused = False
                self._networkProducer.resumeProducing()

    @property
    def _has_ended(self) -> bool:
        # The transport is checked too, because an upgrade may have detached it and a response may have closed the
        # connection.
        return self._given_up or self.transport is None or bool(self.transport.disconnecting)  # type: ignore[attr-defined]

    def drop_buffer(self) -> None:
        """Drop unparsed data, because the connection ends or was upgraded to another protocol."""
        self._unparsed.clear()
        self.site.unanswered.remove(self)
        if self.timeOut is None:
            self._stop_idle_timeout()

    def linger(self) -> None:
        """Close the connection with a delay, because the response was written before the whole request had arrived. The
        delay lets the client read the response."""
        self._given_up = True
        self.drop_buffer()
        self.setTimeout(None)
        self._networkProducer.resumeProducing()
        if self._lingering is None:
            self._lingering = FairTimeout(self.site.reactor, LINGER_FOR, self._close)

    def _close(self) -> None:
        stop_timeout(self._lingering)
        self.loseConnection()  # type: ignore[no-untyped-call]

    def give_up(self) -> None:
        """End the connection to free its memory for others, with status 503 if its request is still incomplete
        (:class:`~dmsg.net.web.pending_requests.MemoryHolder`)."""
        self._given_up = True
        self._unparsed.clear()
        answer = getattr(self.requests[-1], "answer_busy", None) if self.requests else None
        if answer is not None and not self._handlingRequest:
            answer()
        else:
            self.transport.abortConnection()  # type: ignore[union-attr]

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.drop_buffer()
        stop_timeout(self._lingering)
        super().connectionLost(reason)  # type: ignore[no-untyped-call]
        self._stop_idle_timeout()
        # A request, its channel and its decoder refer to each other. The references are removed, so that their memory
        # is freed without the garbage collector.
        self.requests = []
        self._transferDecoder = None
        self._dataBuffer = []
        self.clearLineBuffer()  # type: ignore[no-untyped-call]


class PlainRequest(Request):
    """Request without cookies, with a limited number of parameters and exactly one host.

    The request target may be a whole URL, as clients send it to a proxy (absolute-form, RFC 9112, 3.2.2).
    """

    channel: BoundedChannel

    def getRequestHostname(self) -> bytes:
        """Return the host from the Host header, or the host of the connection's local address if the header is not
        valid."""
        try:
            host: bytes = super().getRequestHostname()  # type: ignore[no-untyped-call]
        except AttributeError:  # The address of a UNIX socket has no host.
            host = b"localhost"
        return host

    def write(self, data: bytes) -> None:
        super().write(data)  # type: ignore[no-untyped-call]
        if self.channel is not None:
            self.channel.flush_head()

    def parseCookies(self) -> None:
        """Do not parse cookies, because no route uses them and each would cost one or two objects."""

    def requestReceived(self, command: bytes, path: bytes, version: bytes) -> None:
        hosts = self.requestHeaders.getRawHeaders(b"host")
        several = hosts is not None and len(hosts) > 1  # RFC 9112, section 3.2, demands a refusal.
        if several or path.count(b"&") + path.count(b";") >= MAX_PARAMETERS:
            self.channel._respondToBadRequestAndDisconnect()  # type: ignore[no-untyped-call]  # noqa: SLF001  # as Twisted's own requests do
            return
        if path[:1] != b"/" and (whole := _ABSOLUTE.fullmatch(path)) is not None:
            # The host in the URL takes precedence over the Host header.
            self.requestHeaders.setRawHeaders(b"host", [whole[1]])
            rest = whole[2]
            path = rest if rest.startswith(b"/") else b"/" + rest
        super().requestReceived(command, path, version)  # type: ignore[no-untyped-call]


class SiteOptions(TypedDict, total=False):
    """Keyword arguments that are passed to :class:`twisted.web.server.Site`."""

    timeout: float
    reactor: IReactorTime
    parsePOSTFormSubmission: bool


class BoundedSite(Site):
    """Site that limits the reactor time and the memory that its connections use.

    Each connection is a :class:`BoundedChannel`. The site does not offer HTTP/2, for which Twisted uses other channels.

    :ivar share: account that divides the time of a reactor turn among the connections.
    :ivar unanswered: account of the memory that requests use until they are answered.
    """

    noisy = False

    def __init__(
        self,
        resource: IResource,
        *,
        requestFactory: type[PlainRequest] = PlainRequest,
        share: TurnShare | None = None,
        on_refused: Callable[[str], None] = lambda reason: None,
        **options: Unpack[SiteOptions],
    ) -> None:
        """:param on_refused: called with ``busy`` when a connection is closed because all connections together use too
            much memory.
        :param options: arguments of :class:`twisted.web.server.Site`.
        """
        super().__init__(resource, requestFactory=requestFactory, **options)  # type: ignore[no-untyped-call]
        self.share = share or TurnShare(self.reactor)
        self.unanswered = PendingRequests(on_refused=on_refused)

    def buildProtocol(self, addr: IAddress | None) -> BoundedChannel:  # type: ignore[override]
        channel: BoundedChannel = super().buildProtocol(addr)  # type: ignore[no-untyped-call]
        return channel

    def protocol(self) -> BoundedChannel:  # type: ignore[override]
        """Return a new channel for :meth:`buildProtocol`."""
        return BoundedChannel()

    def acceptableProtocols(self) -> list[bytes]:
        """Return the protocols to offer over TLS (ALPN): only HTTP/1.1."""
        return [b"http/1.1"]
