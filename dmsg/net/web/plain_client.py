"""HTTP client of one server, without TLS, redirections, compression and cookies.

Twisted's own client imports many modules that most commands do not need, among them those for TLS. Requests in HTTPS
and to hosts that need encoding go through :mod:`dmsg.net.web.fetch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast
from urllib.parse import quote, urlsplit

from twisted.internet.defer import CancelledError, Deferred, DeferredList, TimeoutError
from twisted.internet.error import ConnectionLost
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.python.failure import Failure

from dmsg.errors import DmsgError
from dmsg.net.outgoing import outgoing_endpoint
from dmsg.net.own_pauses import FairTimeout, TimeLeft, stop_timeout
from dmsg.net.reactor import cancel_call
from dmsg.net.socketopts import outstanding_bytes
from dmsg.net.web.response import ResponseParser

IDLE_TIMEOUT = 20
"""Seconds after which an idle connection is closed. This is less than the 30 s after which a discovery closes it. If a
POST is sent into a connection that the server closes, the client cannot know whether the server received it."""
ACK_TIMEOUT = 3.0
"""Seconds after which a kept connection is considered dead if the peer's kernel does not acknowledge a request. A slow
program at the other end does not matter, because its kernel acknowledges the request at once. TCP keepalive would not
help here: it begins only after ``KEEPALIVE_IDLE`` seconds, which is more than ``IDLE_TIMEOUT``."""
MAX_IDLE = 2
"""Maximum number of idle connections that are kept."""
_SAFE = "!$%&'()*+,-./:;=?@_~"
"""Characters of a path and a query that are sent as they are."""


def is_plain(url: str) -> bool:
    """Whether :class:`PlainClient` can be used for a URL: plain HTTP to an IP address or an ASCII host name."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = parts.port
    except ValueError:
        return False
    is_bare = parts.username is None and not parts.query and not parts.fragment and port != 0
    return parts.scheme == "http" and is_bare and bool(host) and url.isascii() and not set(host) & set(" %\\\t")


class AckWatch:
    """Check that a request over a kept connection is acknowledged; stop it when the response begins.

    :param transport: transport of the connection, to which the request was just written.
    :param on_dead: callback invoked once if the peer's kernel acknowledges nothing for a while.
    """

    def __init__(self, reactor: IReactorTime, transport: object, on_dead: Callable[[], object]) -> None:
        self._reactor = reactor
        self._transport = transport
        self._on_dead = on_dead
        self._outstanding = 0
        # Transports may hold back small writes until the next reactor turn, so nothing is measured at once.
        self._timer = FairTimeout(reactor, ACK_TIMEOUT / 2, self._measure)

    def _measure(self) -> None:
        self._outstanding = outstanding_bytes(self._transport)
        if self._outstanding:
            self._timer = FairTimeout(self._reactor, ACK_TIMEOUT / 2, self._check)

    def _check(self) -> None:
        if outstanding_bytes(self._transport) >= self._outstanding:
            self._on_dead()

    def stop(self) -> None:
        """End the check."""
        self._timer.stop()


class PlainClient:
    """HTTP client of one server, which keeps idle connections for the next request.

    The server may close a kept connection just when a request is sent over it. If no byte of a response has arrived,
    the request is then sent once more over a new connection. The method does not matter, because every request made
    here is idempotent. The same happens if a kept connection has died silently, for example because this machine was
    asleep or has changed its network.

    :param url: base URL, for which :func:`is_plain` holds.
    :param timeout: seconds until the head of a response is complete, and again until its body is.
    :param limit: maximum number of bytes of the body of a response.
    """

    def __init__(self, reactor: IReactorTime, url: str, *, timeout: float, limit: int) -> None:
        parts = urlsplit(url)
        self._reactor = reactor
        self._host = parts.hostname or ""
        self._port = parts.port or 80
        self._netloc = parts.netloc
        self._path = parts.path
        self._timeout = timeout
        self._limit = limit
        self._idle: list[_Connection] = []
        self._open: dict[_Connection, None] = {}
        self._closed = False

    def request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> Deferred[tuple[int, bytes]]:
        """Send a request, and return the status code and the body of its response.

        :param path: path and query, which are appended to the base URL.

        The Deferred fails with errors of the connection, :class:`twisted.internet.defer.TimeoutError`, and
        :class:`~dmsg.errors.DmsgError` for a response that is malformed or too long, or a proxy that refuses.
        """
        lines = [f"{method} {quote(self._path + path, safe=_SAFE) or '/'} HTTP/1.1", f"Host: {self._netloc}"]
        lines += [f"{name}: {value}" for name, value in headers.items()] + ["Accept-Encoding: identity"]
        if body is not None:
            lines.append(f"Content-Length: {len(body)}")
        # Head and body are one write, because Nagle's algorithm would delay a second one.
        data = "\r\n".join([*lines, "", ""]).encode("ascii") + (body or b"")
        time_left = TimeLeft(self._reactor, self._timeout)
        return Deferred.fromCoroutine(self._request(data, time_left)).addBoth(time_left.stop)

    async def _request(self, data: bytes, time_left: TimeLeft) -> tuple[int, bytes]:
        if self._idle:
            kept = self._idle.pop()
            try:
                return await kept.ask(data, self._limit, time_left.seconds, is_kept=True)
            except (CancelledError, TimeoutError, DmsgError):
                raise
            except Exception:
                if kept.is_answered:
                    raise
                if kept.is_dead:
                    # The other kept connections have probably died, too.
                    for other in list(self._idle):
                        other.abort()
                    self._idle.clear()
        factory = Factory.forProtocol(lambda: _Connection(self._reactor, self._timeout, self._keep_idle, self._lost))
        factory.noisy = False
        endpoint = outgoing_endpoint(self._reactor, self._host, self._port, self._timeout)
        connection = cast(_Connection, await endpoint.connect(factory))
        self._open[connection] = None
        if connection.lost.called:
            self._open.pop(connection, None)
        return await connection.ask(data, self._limit, time_left.seconds)

    def _keep_idle(self, connection: _Connection) -> bool:
        """Keep an idle connection for later requests, unless ``MAX_IDLE`` others are kept.

        :returns: whether the connection is kept.
        """
        if self._closed or len(self._idle) >= MAX_IDLE:
            return False
        self._idle.append(connection)
        return True

    def _lost(self, connection: _Connection) -> None:
        self._open.pop(connection, None)
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> Deferred[None]:
        """Close all connections; the Deferred fires when they are closed. A connection that is still being made is
        closed after its response."""
        self._closed = True
        lost = [connection.lost for connection in self._open]
        for connection in list(self._open):
            connection.abort()
        return DeferredList(lost).addCallback(lambda _: None)


class _Connection(Protocol):
    """Connection that carries one request at a time.

    :param timeout: seconds until the body of a response is complete, from the end of its head.
    :param on_free: callback invoked when the connection has become idle; returns whether to keep the connection.
    :ivar lost: Deferred that fires when the connection is lost.
    :ivar is_answered: whether a byte of the response to the last request arrived.
    :ivar is_dead: whether the peer's kernel has not acknowledged the last request.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        timeout: float,
        on_free: Callable[[_Connection], bool],
        on_lost: Callable[[_Connection], None],
    ) -> None:
        self._reactor = reactor
        self._timeout = timeout
        self._on_free = on_free
        self._on_lost = on_lost
        self._parser: ResponseParser | None = None
        self._answer: Deferred[tuple[int, bytes]] = Deferred()
        self._timer: FairTimeout | None = None
        self._idle_call: IDelayedCall | None = None
        self._loss: Failure | None = None
        self.lost: Deferred[None] = Deferred()
        self.is_answered = self.is_dead = False
        self._watch: AckWatch | None = None

    def ask(self, data: bytes, limit: int, seconds: float, *, is_kept: bool = False) -> Deferred[tuple[int, bytes]]:
        """Send a request; the Deferred fires with the status code and the body.

        :param seconds: seconds after which the request fails if the head of the response has not arrived.
        :param is_kept: whether the connection was idle, and so may have died unnoticed.
        """
        cancel_call(self._idle_call)
        self._answer = Deferred(lambda _: self._drop())
        self.is_answered = False
        if self._loss is not None:
            self._answer.errback(self._loss)
            return self._answer
        self._parser = ResponseParser(limit)
        self._timer = FairTimeout(self._reactor, max(0.0, seconds), self._time_out)
        assert self.transport is not None
        self.transport.write(data)
        if is_kept:
            self._watch = AckWatch(self._reactor, self.transport, self._died)
        return self._answer

    def _died(self) -> None:
        self.is_dead = True
        self._fail(Failure(ConnectionLost("the request was not acknowledged")))

    def _drop(self) -> None:
        """End the connection, whose response nobody waits for any more."""
        self._parser = None
        self.abort()

    def abort(self) -> None:
        """End the connection; a request that is not answered fails."""
        self._cancel_timers()
        if self.transport is not None:
            self.transport.abortConnection()  # type: ignore[attr-defined]

    def dataReceived(self, data: bytes) -> None:
        parser = self._parser
        if parser is None:
            # No request is pending, so the data are not a response.
            self.abort()
            return
        self.is_answered = True
        self._stop_watch()
        had_head = bool(parser.status)
        try:
            parser.receive_data(data)
        except DmsgError as error:
            self._fail(Failure(error))
            return
        if parser.is_complete:
            self._finish(parser)
        elif parser.status and not had_head:
            stop_timeout(self._timer)
            self._timer = FairTimeout(self._reactor, self._timeout, self._time_out)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._loss = reason
        self._on_lost(self)
        parser = self._parser
        if parser is not None and parser.receive_end():
            self._finish(parser)
        elif parser is not None:
            self._fail(reason)
        self._cancel_timers()
        self.lost.callback(None)

    def _cancel_timers(self) -> None:
        stop_timeout(self._timer)
        self._stop_watch()
        cancel_call(self._idle_call)

    def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def _finish(self, parser: ResponseParser) -> None:
        stop_timeout(self._timer)
        self._parser = None
        assert self.transport is not None
        if self._loss is None and parser.keeps_connection and self._on_free(self):
            self._idle_call = self._reactor.callLater(IDLE_TIMEOUT, self.abort)
        else:
            self.transport.loseConnection()
        self._answer.callback((parser.status, parser.body))

    def _fail(self, reason: Failure) -> None:
        self._drop()
        if not self._answer.called:
            self._answer.errback(reason)

    def _time_out(self) -> None:
        self._fail(Failure(TimeoutError()))
