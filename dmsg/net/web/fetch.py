"""Asking HTTP servers that nobody vouches for: so much of an answer and no more, as it came, from where it was asked.

Bodies are read by :func:`dmsg.net.web.body.read_body`.  Headers have a limit too, for
Twisted takes any number of them; nothing is decompressed, for a few bytes may
become as many as somebody likes; redirections are not followed, for they lead
where nobody wanted to ask.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, TypeVar

from hyperlink import EncodedURL
from treq.client import HTTPClient
from twisted.internet.defer import CancelledError, Deferred, succeed
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
from twisted.web.client import Agent, HTTPConnectionPool, _HTTP11ClientFactory
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgent, IBodyProducer, IResponse
from zope.interface import implementer

from dmsg.errors import DmsgError

if TYPE_CHECKING:
    from treq._types import _SomeURL
    from treq.response import _Response

MAX_HEAD = 64 * 1024
"""Bytes of an answer before its body."""
KEPT = 20
"""Seconds for which a connection is kept that nothing is asked over: less than the 30 after which discoveries end
them, or a POST would be sent into one that is ending, and nobody could say whether it was taken."""

_KEEPS = (b"HTTP", 1, 1)
"""The first version of HTTP whose servers keep connections."""
_UNANSWERED = (RequestNotSent, RequestTransmissionFailed, ResponseNeverReceived)
"""What says that not a byte came back."""

T = TypeVar("T")


class HeadTooLong(DmsgError):
    """The headers of an answer do not end."""


class _Bounded(HTTP11ClientProtocol):
    """Drops a connection whose answer has too many headers.

    :ivar kept: an earlier request was answered over this connection.
    """

    kept = False
    _head = 0

    def connectionMade(self) -> None:
        super().connectionMade()
        # head and body of a request are two writes: without it the second waits for the peer's acknowledgement
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
            # one read may bring the end of the head and much of the body
            if self._head - len(data) > MAX_HEAD:
                error = HeadTooLong(f"an answer with more than {MAX_HEAD} bytes of headers")
                self._giveUp(Failure(error))  # type: ignore[no-untyped-call]
                return
        super().dataReceived(data)  # type: ignore[no-untyped-call]


class BoundedFactory(_HTTP11ClientFactory):
    """For :class:`twisted.web.client.HTTPConnectionPool`; two lines of log for each connection are no news."""

    noisy = False

    def buildProtocol(self, addr: IAddress | None) -> HTTP11ClientProtocol:
        return _Bounded(self._quiescentCallback)  # type: ignore[no-untyped-call]


@implementer(IBodyProducer)
class Body:
    """Body of a request that is written at once, and can be sent again."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.length = len(data)

    def startProducing(self, consumer: IConsumer) -> Deferred[None]:
        consumer.write(self._data)
        return succeed(None)

    def pauseProducing(self) -> None:
        """Everything was written at once."""

    def resumeProducing(self) -> None:
        """Everything was written at once."""

    def stopProducing(self) -> None:
        """Everything was written at once."""


class _Kept:
    """Kept connection, over which one request is made: if the other side has closed it meanwhile, over a new one."""

    def __init__(self, connection: _Bounded, connect: Callable[[], Deferred[Any]]) -> None:
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

        asking: Deferred[IResponse] = self._connection.request(request)
        return asking.addErrback(again)


class _Pool(HTTPConnectionPool):
    """Connections that are kept for the next request.

    A server that answers in HTTP/1.0 closes its connection, whether it says so or not: that one is not kept.  The
    others may close one in the moment in which a request is sent over it.  When nothing was answered, the request is
    sent again, once, whatever its method: everything that is asked here may be asked twice.

    Nothing is kept any more once the pool is closed: an answer may be there before its connection is free to be kept.
    """

    _closed = False
    retryAutomatically = False

    def getConnection(self, key: Hashable, endpoint: IStreamClientEndpoint) -> Deferred[Any]:
        def wrapped(connection: Any) -> Any:
            if not connection.kept:
                return connection
            return _Kept(connection, lambda: self._newConnection(key, endpoint))

        getting: Deferred[Any] = super().getConnection(key, endpoint)
        return getting.addCallback(wrapped)

    def closeCachedConnections(self) -> Deferred[None]:
        self._closed = True
        closed: Deferred[None] = super().closeCachedConnections()  # type: ignore[no-untyped-call]
        return closed

    def _putConnection(self, key: Hashable, connection: Any) -> None:
        if self._closed:
            connection.transport.abortConnection()
        elif connection._parser.response.version < _KEEPS:  # noqa: SLF001  # the answer that is just over
            connection.transport.loseConnection()
        else:
            connection.kept = True
            super()._putConnection(key, connection)  # type: ignore[no-untyped-call]


def make_pool(reactor: IReactorTime, *, persistent: bool = True, most: int = 2) -> HTTPConnectionPool:
    """Connections whose answers have a limited head.  :param most: to one host that are kept."""
    pool = _Pool(reactor, persistent)  # type: ignore[no-untyped-call]
    pool.maxPersistentPerHost = most
    pool.cachedConnectionTimeout = KEPT
    pool._factory = BoundedFactory  # noqa: SLF001  # Twisted has no other place for it
    return pool


@implementer(IAgent)
class _AsItComes:
    """Before treq's own wrapper, which would decompress."""

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


class _Literal(EncodedURL):
    """With an address: hyperlink would have it spelled as a name, and refuse its colons."""

    def to_uri(self) -> _Literal:
        """It is one."""
        return self


class WebClient(HTTPClient):
    """treq's client, which follows no redirection and decompresses nothing."""

    def __init__(self, reactor: IReactorTime, pool: HTTPConnectionPool, connect_timeout: float) -> None:
        """:param connect_timeout: seconds for TCP and TLS."""
        agent = Agent(reactor, connectTimeout=connect_timeout, pool=pool)
        super().__init__(_AsItComes(agent), data_to_body_producer=Body)

    def request(self, method: str, url: _SomeURL, **options: Any) -> Deferred[_Response]:
        """As treq's, and by addresses of IPv6."""
        if isinstance(url, str) and "[" in url:
            url = _Literal.from_text(url)
        return super().request(method, url, **{**options, "allow_redirects": False})


def cancellable(asking: Deferred[T]) -> Deferred[T]:
    """The same answer; who cancels fails with CancelledError at once, and with nothing else.

    A request that is cancelled dies of many things, by how far it was, as of ConnectingCancelledError: who takes them
    for an answer goes on to the next server, though nobody wants that any more.
    """
    wanted = True

    def cancel(_: Deferred[T]) -> None:
        nonlocal wanted
        wanted = False
        asking.cancel()

    answer: Deferred[T] = Deferred(cancel)

    def ended(result: T | Failure) -> None:
        if not wanted:
            return
        if isinstance(result, Failure):
            answer.errback(result)
        else:
            answer.callback(result)

    asking.addBoth(ended)
    return answer


def parse_json(body: bytes | str) -> Any:
    """JSON of somebody else.

    :raises ValueError: it is none, or nested more deeply than anything that is asked for.
    """
    try:
        return json.loads(body)
    except RecursionError:
        raise ValueError("nested too deeply") from None
