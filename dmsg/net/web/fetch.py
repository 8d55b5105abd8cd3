"""HTTP client with limits, for untrusted servers.

:func:`dmsg.net.web.body.read_body` reads bodies up to a limit. Headers have a limit too, because Twisted accepts any
number. Nothing is decompressed, because a few bytes could expand to any amount of data. Redirections are not followed,
because they could lead to an unintended address.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

from hyperlink import EncodedURL
from treq.client import HTTPClient
from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.endpoints import wrapClientTLS
from twisted.internet.interfaces import IAddress, IConsumer, IReactorTime, IStreamClientEndpoint
from twisted.python.failure import Failure
from twisted.web._newclient import (
    HEADER,
    STATUS,
    HTTP11ClientProtocol,
    Request,
    RequestNotSent,
    RequestTransmissionFailed,
    ResponseNeverReceived,
)
from twisted.web.client import URI, Agent, BrowserLikePolicyForHTTPS, HTTPConnectionPool, _HTTP11ClientFactory
from twisted.web.error import SchemeNotSupported
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgent, IAgentEndpointFactory, IBodyProducer, IResponse
from zope.interface import implementer

from dmsg.net.outgoing import outgoing_endpoint
from dmsg.net.own_pauses import add_fair_timeout
from dmsg.net.web.body import read_body
from dmsg.net.web.plain_client import IDLE_TIMEOUT, AckWatch
from dmsg.net.web.response import MAX_HEAD, HeadTooLong

if TYPE_CHECKING:
    from treq._types import _SomeURL
    from treq.response import _Response

_PERSISTENT_VERSION = (b"HTTP", 1, 1)
"""First version of HTTP in which servers keep connections open by default."""
_UNANSWERED = (RequestNotSent, RequestTransmissionFailed, ResponseNeverReceived)
"""Errors that mean that no byte of a response has arrived."""


class _BoundedConnection(HTTP11ClientProtocol):
    """Connection that is closed if the headers of a response exceed ``MAX_HEAD``.

    :ivar is_reused: whether an earlier request was answered over this connection.
    """

    is_reused = False
    _head = 0

    def connectionMade(self) -> None:
        super().connectionMade()
        # The head and the body of a request are written separately. With Nagle's algorithm, the second write would wait
        # for an ACK of the first.
        no_delay = getattr(self.transport, "setTcpNoDelay", None)
        if no_delay is not None:
            no_delay(True)

    def request(self, request: Request) -> Deferred[IResponse]:
        self._head = 0
        asking: Deferred[IResponse] = super().request(request)
        return asking

    def dataReceived(self, data: bytes) -> None:
        parser = self._parser
        if parser is not None and parser.state in (STATUS, HEADER):
            self._head += len(data)
            # The last read does not count toward the limit, because it may contain not only the end of the head but
            # also much of the body.
            if self._head - len(data) > MAX_HEAD:
                error = HeadTooLong(f"the headers of an answer have more than {MAX_HEAD} bytes")
                self._giveUp(Failure(error))  # type: ignore[no-untyped-call]
                return
        super().dataReceived(data)  # type: ignore[no-untyped-call]


class BoundedFactory(_HTTP11ClientFactory):
    """Factory of the connections of a pool, which writes no log line for each connection."""

    noisy = False

    def buildProtocol(self, addr: IAddress | None) -> HTTP11ClientProtocol:
        return _BoundedConnection(self._quiescentCallback)  # type: ignore[no-untyped-call]


@implementer(IBodyProducer)
class Body:
    """Request body that is written in one piece, so that the request can be repeated."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.length = len(data)

    def startProducing(self, consumer: IConsumer) -> Deferred[None]:
        consumer.write(self._data)
        return succeed(None)

    def pauseProducing(self) -> None:
        """Do nothing, because the body is written in one piece."""

    def resumeProducing(self) -> None:
        """Do nothing, because the body is written in one piece."""

    def stopProducing(self) -> None:
        """Do nothing, because the body is written in one piece."""


class _KeptConnection:
    """Reused connection for one request. If the server has closed the connection meanwhile, or the connection has died
    silently, the request is repeated over a new one."""

    def __init__(
        self, reactor: IReactorTime, connection: _BoundedConnection, connect: Callable[[], Deferred[Any]]
    ) -> None:
        self._reactor = reactor
        self._connection = connection
        self._connect = connect

    def request(self, request: Request) -> Deferred[IResponse]:
        def again(failure: Failure) -> Any:
            error = failure.value
            reasons = getattr(error, "reasons", ())
            if (
                not isinstance(error, _UNANSWERED)
                or any(one.check(CancelledError) for one in reasons)
                or not (request.bodyProducer is None or isinstance(request.bodyProducer, Body))
            ):
                return failure
            return self._connect().addCallback(lambda connection: connection.request(request))

        transport: Any = self._connection.transport
        asking: Deferred[IResponse] = self._connection.request(request)
        watch = AckWatch(self._reactor, transport, transport.abortConnection)

        def answered(result: Any) -> Any:
            watch.stop()
            return result

        return asking.addBoth(answered).addErrback(again)


class _Pool(HTTPConnectionPool):
    """Pool of connections that are reused for later requests.

    A connection is not reused if the server answered in HTTP/1.0, because such a server closes it even without saying
    so. Any server may close a connection just when a request is sent over it. If no byte of the response has arrived,
    the request is repeated once over a new connection. The same happens if the connection has died silently. The method
    does not matter, because every request that uses this pool is idempotent.

    After the pool is closed, it keeps no connections, even if the response of a pending request arrives later.
    """

    _closed = False
    retryAutomatically = False

    def getConnection(self, key: Hashable, endpoint: IStreamClientEndpoint) -> Deferred[Any]:
        def wrapped(connection: Any) -> Any:
            if not connection.is_reused:
                return connection
            return _KeptConnection(self._reactor, connection, lambda: self._newConnection(key, endpoint))

        getting: Deferred[Any] = super().getConnection(key, endpoint)
        return getting.addCallback(wrapped)

    def closeCachedConnections(self) -> Deferred[None]:
        self._closed = True
        closed: Deferred[None] = super().closeCachedConnections()  # type: ignore[no-untyped-call]
        return closed

    def _putConnection(self, key: Hashable, connection: Any) -> None:
        if self._closed:
            connection.transport.abortConnection()
        elif connection._parser.response.version < _PERSISTENT_VERSION:  # noqa: SLF001  # of the last response
            connection.transport.loseConnection()
        else:
            connection.is_reused = True
            super()._putConnection(key, connection)  # type: ignore[no-untyped-call]


def make_pool(reactor: IReactorTime, *, persistent: bool = True, limit: int = 2) -> HTTPConnectionPool:
    """Return a pool of connections that limit the headers of responses.

    :param limit: maximum number of idle connections for one host.
    """
    pool = _Pool(reactor, persistent)  # type: ignore[no-untyped-call]
    pool.maxPersistentPerHost = limit
    pool.cachedConnectionTimeout = IDLE_TIMEOUT
    pool._factory = BoundedFactory  # noqa: SLF001  # Twisted has no other place for it
    return pool


@implementer(IAgent)
class _UndecodedClient:
    """Agent that requests uncompressed bodies, and hides the header Content-Encoding so that treq decompresses
    nothing."""

    def __init__(self, agent: IAgent) -> None:
        self._agent = agent

    def request(
        self, method: bytes, uri: bytes, headers: Headers | None = None, bodyProducer: IBodyProducer | None = None
    ) -> Deferred[IResponse]:
        headers = Headers() if headers is None else headers.copy()
        headers.setRawHeaders(b"accept-encoding", [b"identity"])

        def came(response: IResponse) -> IResponse:
            response.headers.removeHeader(b"content-encoding")
            return response

        asking: Deferred[IResponse] = self._agent.request(method, uri, headers, bodyProducer)
        return asking.addCallback(came)


class _LiteralURL(EncodedURL):
    """URL with an IPv6 address. Twisted's usual class for URLs, hyperlink, cannot be used: it would encode the address
    as a DNS name and refuse its colons."""

    def to_uri(self) -> _LiteralURL:
        """Return the URL itself, which is already a URI."""
        return self


@implementer(IAgentEndpointFactory)
class _Endpoints:
    """Factory of endpoints for HTTP servers, which connect directly or through the proxy that the environment names."""

    def __init__(self, reactor: IReactorTime, timeout: float) -> None:
        self._reactor = reactor
        self._timeout = timeout
        self._policy = BrowserLikePolicyForHTTPS()

    def endpointForURI(self, uri: URI) -> IStreamClientEndpoint:
        endpoint = outgoing_endpoint(self._reactor, uri.host.decode("ascii"), uri.port, self._timeout)
        if uri.scheme == b"https":
            return wrapClientTLS(self._policy.creatorForNetloc(uri.host, uri.port), endpoint)
        if uri.scheme != b"http":
            raise SchemeNotSupported(f"unsupported scheme: {uri.scheme!r}")
        return endpoint


class WebClient(HTTPClient):
    """HTTP client of treq that follows no redirections and decompresses nothing."""

    def __init__(self, reactor: IReactorTime, pool: HTTPConnectionPool, connect_timeout: float) -> None:
        """:param connect_timeout: seconds to wait for a TCP connection, and for the answer of a proxy."""
        agent = Agent.usingEndpointFactory(reactor, _Endpoints(reactor, connect_timeout), pool)
        super().__init__(_UndecodedClient(agent), data_to_body_producer=Body)

    def request(self, method: str, url: _SomeURL, **options: Any) -> Deferred[_Response]:
        """Send a request as treq does, but also to a host that is given as an IPv6 address."""
        if isinstance(url, str) and "[" in url:
            url = _LiteralURL.from_text(url)
        return super().request(method, url, **{**options, "allow_redirects": False})


class TreqRequests:
    """Requests to one server through a client of treq, with the interface of
    :class:`~dmsg.net.web.plain_client.PlainClient`.

    :param http: client of treq; None for a new :class:`WebClient`.
    """

    def __init__(self, reactor: IReactorTime, url: str, *, timeout: float, limit: int, http: Any = None) -> None:
        self._reactor = reactor
        self._url = url
        self._timeout = timeout
        self._limit = limit
        self._pool = make_pool(reactor) if http is None else None
        self._http = http if self._pool is None else WebClient(reactor, self._pool, timeout)

    def request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> Deferred[tuple[int, bytes]]:
        """Send a request, and return the status code and the body of its response."""
        return Deferred.fromCoroutine(self._request(method, path, headers, body))

    async def _request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> tuple[int, bytes]:
        asking = self._http.request(method, f"{self._url}{path}", data=body, headers=headers, reactor=self._reactor)
        response = await add_fair_timeout(asking, self._timeout, self._reactor)
        answer = await add_fair_timeout(read_body(response, self._limit), self._timeout, self._reactor)
        return response.code, answer

    def close(self) -> Deferred[None]:
        """Close the connections that are kept."""
        if self._pool is None:
            return succeed(None)
        closed: Deferred[None] = self._pool.closeCachedConnections()
        return closed
