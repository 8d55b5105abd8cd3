"""Web sites of entities, with rate limits that are applied before routing, and with errors as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from io import BytesIO
from typing import TypedDict, Unpack

from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.python.failure import Failure
from twisted.web.iweb import IRequest
from twisted.web.resource import IResource, Resource
from twisted.web.server import NOT_DONE_YET, Request
from werkzeug.exceptions import HTTPException, MethodNotAllowed
from werkzeug.routing import RequestRedirect

from dmsg.base.buckets import RateLimit
from dmsg.net.addresses import forwarded_client
from dmsg.net.blocks import BlockCounts, blocks_of
from dmsg.net.isolate import call_isolated
from dmsg.net.reactor import cancel_call
from dmsg.net.turn_share import TurnShare
from dmsg.net.turns import TurnTaker
from dmsg.net.web.channel import BoundedSite, PlainRequest, SiteOptions
from dmsg.net.web.routes import finish_with

MAX_WAITING = 4096
"""Maximum number of delayed requests at a time. Further requests are refused instead of delayed."""
MAX_WAITING_SIZE = 64 * 1024 * 1024
"""Maximum number of bytes of all delayed requests. Further requests are refused instead of delayed."""
MAX_WAITING_OF_ADDRESS = 256
"""Maximum number of requests of one address that are delayed or being answered. Further requests are refused."""
MESSAGES_CACHED = 64
"""Maximum number of messages whose JSON is cached. Most responses have one of a few messages."""
IDLE_TIMEOUT = 30
"""Seconds without received data after which a connection is closed."""


@lru_cache(maxsize=MESSAGES_CACHED)
def _json_text(message: str) -> bytes:
    return json.dumps(message).encode()


def answer(request: IRequest, status: int, message: str, extra_body: bytes = b"") -> bytes:
    """Set the status of a response, and return its body ``{"message": ..., "code": ...}``.

    :param extra_body: further JSON members, beginning with a comma.
    """
    request.setResponseCode(status)
    request.setHeader(b"content-type", b"application/json")
    return b'{"message":%s,"code":%d%s}' % (_json_text(message), status, extra_body)


def answer_http_error(request: IRequest, failure: Failure) -> bytes:
    """Return the body for an HTTP error that Klein's router raised, such as an unknown path or method, and set the
    status."""
    error = failure.value
    assert isinstance(error, HTTPException)
    if isinstance(error, RequestRedirect):
        request.setHeader(b"location", error.new_url.encode())
    if isinstance(error, MethodNotAllowed) and error.valid_methods:
        request.setHeader(b"allow", ", ".join(sorted(error.valid_methods)).encode())
    return answer(request, error.code or 500, (error.name or "error").lower())


def _do_nothing() -> None:
    """Do nothing. Replaces a method of :class:`~dmsg.net.web.guard.GuardedConnection` at a site without a guard."""


def without_body(request: IRequest, body: bytes) -> bytes:
    """Return the body of a response. For a HEAD request, set only its length, and return no body."""
    if request.method != b"HEAD":
        return body
    request.setHeader(b"content-length", b"%d" % len(body))
    return b""


def close_after(request: Request) -> None:
    """Close the connection after the response. Further requests over it are ignored."""
    request.setHeader(b"connection", b"close")
    request.channel.persistent = False


class BoundedRequest(TurnTaker, PlainRequest):
    """Request that answers 413 to a body that is too long, and 503 when its memory is needed for others.

    Pipelined requests share the time of a reactor turn with the requests of other connections.

    :cvar max_body: maximum number of bytes of a body.
    :cvar share: account that divides the time of a reactor turn among requests.
    """

    max_body: int
    share: TurnShare
    count_refusal: Callable[[str], None]
    refused = False
    received = 0
    _waits = False

    def gotLength(self, length: int | None) -> None:
        # Bodies are kept in memory. Twisted would write a body that is long, or of unknown length, to a temporary file.
        self.content = BytesIO()
        if length is not None and length > self.max_body:
            self._too_long()

    def handleContentChunk(self, data: bytes) -> None:
        self.received += len(data)
        if self.received > self.max_body:
            self._too_long()
        elif not self.refused:
            super().handleContentChunk(data)  # type: ignore[no-untyped-call]

    def _guard(self, name: str) -> Callable[[], None]:
        """Return a method of this connection's guard, or a function that does nothing if there is no guard."""
        found: Callable[[], None] = getattr(getattr(self.channel, "transport", None), name, _do_nothing)
        return found

    def finish(self) -> None:
        # The guard is notified first. The call of the base class may already process the next request, which reports to
        # the guard as well.
        self._guard("request_is_answered")()
        super().finish()  # type: ignore[no-untyped-call]

    def requestReceived(self, command: bytes, path: bytes, version: bytes) -> None:
        self._guard("request_is_whole")()
        if self.refused:
            return
        self._received = command, path, version
        if self.channel.feeding:
            self.channel.count()
        self.proceed()

    @property
    def owner(self) -> str:  # type: ignore[override]
        return self.channel.block

    def _is_idle(self) -> bool:
        return bool(self._disconnected or self.channel is None)

    def _work(self) -> None:
        # While the channel parses a piece, it charges the owner for the whole time, including this call. So this call
        # is not charged again.
        if self.channel.feeding:
            self._process()
        else:
            self._spend(self._process)

    def _process(self) -> None:
        super().requestReceived(*self._received)

    def answer_busy(self) -> None:
        """Answer 503, and drop the body received so far to free its memory for others."""
        if not self.refused:
            self._refuse(b"503 Service Unavailable", "too much is on its way")

    def _too_long(self) -> None:
        if not self.refused:
            self._refuse(b"413 Content Too Large", f"body is longer than {self.max_body} bytes")
            type(self).count_refusal("too_long")

    def _refuse(self, status: bytes, text: str) -> None:
        self.refused = True
        body = json.dumps({"message": text, "code": int(status[:3])}).encode()
        # Twisted would not send a response while the body still arrives, so the response is written to the channel's
        # transport directly.
        assert self.channel.transport is not None
        self.channel.transport.write(
            b"HTTP/1.1 %s\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\nConnection: close\r\n\r\n%s" % (status, len(body), body)
        )
        # Free the memory of the received part of the body. The rest is discarded as it arrives.
        self.content = BytesIO()
        self.channel.linger()


class BoundedOptions(SiteOptions):
    """Arguments of :class:`~dmsg.net.web.channel.BoundedSite`."""

    requestFactory: type[BoundedRequest]
    share: TurnShare
    on_refused: Callable[[str], None]


def bounded_arguments(
    reactor: IReactorTime, max_body: int, on_refused: Callable[[str], None], timeout: float
) -> BoundedOptions:
    """Return the arguments of a :class:`~dmsg.net.web.channel.BoundedSite` whose requests are :class:`BoundedRequest`
    objects.

    :param on_refused: called with ``too_long`` or ``busy``.
    :param timeout: seconds without received data after which a connection is closed.
    """
    share = TurnShare(reactor)
    of_site = {"max_body": max_body, "share": share, "count_refusal": staticmethod(on_refused)}
    return {
        "requestFactory": type("Bounded", (BoundedRequest,), of_site),
        "share": share,
        "on_refused": on_refused,
        "timeout": timeout,
        "reactor": reactor,
        "parsePOSTFormSubmission": False,
    }


class Requesters:
    """Rate limiter of HTTP requests, by the client's address.

    :param rate: requests per second and address; 0 for no limit.
    :param burst: number of requests that an address may send in a burst.
    :param proxied: whether to use the client's address that the operator's proxy appended to X-Forwarded-For.
    """

    def __init__(self, reactor: IReactorTime, rate: float, burst: float, *, proxied: bool = False) -> None:
        self._reactor = reactor
        self._proxied = proxied
        self.limit = RateLimit(rate, burst, blocks_of)

    def client_of(self, request: IRequest) -> str:
        """Return the address of a request's client; an empty text if the operator's proxy does not name the client."""
        if self._proxied:
            return forwarded_client(request.getHeader(b"x-forwarded-for"))
        return str(getattr(request.getClientAddress(), "host", ""))

    def address_of(self, request: IRequest) -> str:
        """Return the address block to which a request is charged."""
        return blocks_of(self.client_of(request) or str(getattr(request.getClientAddress(), "host", "")))[0].name

    def charge(self, request: IRequest, requests: float) -> None:
        """Charge ``requests`` more requests to the address that sent ``request``, because ``request`` was invalid."""
        self.limit.charge(self.address_of(request), requests, self._reactor.seconds())


class GateOptions(TypedDict, total=False):
    """Optional arguments of :class:`Gate`."""

    max_delay: Callable[[Request], float]
    posts: RateLimit | None
    is_post: Callable[[Request], bool]
    independent: bool
    on_delayed: Callable[[], None]
    on_finished: Callable[[Request, int, float], None]


class Gate(Resource):
    """Root resource of a site, which applies rate limits to all requests before they are routed.

    :param max_delay: returns the maximum number of seconds for which a request may be delayed instead of refused.
    :param posts: separate rate limit of requests for which ``is_post`` is true. While an address exceeds the general
        limit, the general limit applies to these requests, too.
    :param independent: whether ``posts`` applies even if the address exceeds the general limit.
    :param on_delayed: called for each request that is delayed instead of refused.
    :param on_finished: called with a request, its status and its duration in seconds.
    """

    isLeaf = True

    def __init__(
        self,
        root: IResource,
        reactor: IReactorTime,
        requesters: Requesters,
        on_refused: Callable[[str], None],
        *,
        max_delay: Callable[[Request], float] = lambda request: 0.0,
        posts: RateLimit | None = None,
        is_post: Callable[[Request], bool] = lambda request: False,
        independent: bool = False,
        on_delayed: Callable[[], None] = lambda: None,
        on_finished: Callable[[Request, int, float], None] = lambda request, status, seconds: None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._root = root
        self._reactor = reactor
        self._limit = requesters.limit
        self._address_of = requesters.address_of
        self._refused = on_refused
        self._max_delay = max_delay
        self._posts = posts
        self._is_post = is_post
        self._independent = independent
        self._on_delayed = on_delayed
        self._on_finished = on_finished
        self._waiting: dict[Request, IDelayedCall] = {}
        self._open = BlockCounts()
        self._waiting_size = 0
        self._stopped = False

    def log(self, request: Request) -> None:
        """Pass an answered request to ``on_finished``; replaces Twisted's access log."""
        seconds = self._reactor.seconds() - getattr(request, "began", 0.0)
        # Twisted calls this method before it ends the request, which must end even if the callback fails.
        call_isolated(self._on_finished, request, request.code, seconds)

    def stop(self) -> None:
        """Drop all delayed requests."""
        self._stopped = True
        for request in list(self._waiting):
            self._forget(request)

    def render(self, request: Request) -> int | bytes:
        now = self._reactor.seconds()
        request.began = now  # type: ignore[attr-defined]
        address = self._address_of(request)
        crowded = self._open.crowded_block(address, MAX_WAITING_OF_ADDRESS)
        self._open.add(address)
        request.notifyFinish().addCallbacks(
            self._done, self._client_left, callbackArgs=(address,), errbackArgs=(address, request)
        )
        if crowded:
            self._refused("too_many_waiting")
            close_after(request)
            request.setHeader(b"retry-after", b"1")
            return answer(request, 429, "too many requests wait for an answer")
        own = self._posts is not None and self._is_post(request)
        own = own and (self._independent or not self._limit.is_exhausted(address, now))
        limit = self._posts if own and self._posts is not None else self._limit
        room = not self._stopped and len(self._waiting) < MAX_WAITING and self._waiting_size < MAX_WAITING_SIZE
        wait = limit.reserve(address, now, self._max_delay(request) if room else 0.0)
        if wait is None:
            self._refused("rate_limit")
            close_after(request)
            request.setHeader(b"retry-after", b"1")
            return answer(request, 429, "too many requests")
        if not wait:
            return self._let_in(request)
        self._on_delayed()
        self._waiting_size += self._size_of(request)
        self._waiting[request] = self._reactor.callLater(wait, self._proceed, request)
        return NOT_DONE_YET

    @staticmethod
    def _size_of(request: Request) -> int:
        return int(getattr(request, "received", 0)) + 1024

    def _done(self, _: object, address: str) -> None:
        self._open.remove(address)

    def _client_left(self, _: object, address: str, request: Request) -> None:
        """Drop a request whose client has disconnected, and report it with status 499."""
        self._open.remove(address)
        self._forget(request)
        self._on_finished(request, 499, self._reactor.seconds() - request.began)  # type: ignore[attr-defined]

    def _forget(self, request: Request) -> None:
        call = self._waiting.pop(request, None)
        if call is not None:
            self._waiting_size -= self._size_of(request)
            cancel_call(call)

    def _proceed(self, request: Request) -> None:
        self._forget(request)
        try:
            body = self._let_in(request)
        except Exception:  # Twisted handles an exception in the same way when it renders a request itself.
            request.processingFailed(Failure())
            return
        if isinstance(body, bytes):
            finish_with(body, request)

    def _let_in(self, request: Request) -> int | bytes:
        segments: list[bytes] = request.postpath or []
        try:
            b"/".join(segments).decode()
            (request.getHeader(b"host") or b"").decode("ascii")
        except UnicodeDecodeError:
            # Such a path or host is refused here, because Klein would log a traceback when it fails to decode it.
            self._refused("bad_path")
            return answer(request, 400, "path or host is no text")
        try:
            rendered: int | bytes = self._root.render(request)
        except HTTPException as error:  # The Host header is invalid, so the URL of the request cannot be assembled.
            self._refused("bad_path")
            return answer(request, error.code or 400, "host cannot be one")
        return without_body(request, rendered) if isinstance(rendered, bytes) else rendered


def gated_site(
    root: IResource,
    reactor: IReactorTime,
    on_refused: Callable[[str], None],
    requesters: Requesters,
    *,
    max_body: int,
    **of_gate: Unpack[GateOptions],
) -> BoundedSite:
    """Return the factory of a site whose requests pass a :class:`Gate`.

    :param on_refused: called with ``too_long``, ``busy``, ``rate_limit``, ``too_many_waiting`` or ``bad_path``.
    :param max_body: maximum number of bytes of a request's body.
    :param of_gate: arguments of the :class:`Gate`, which is the site's ``resource``.
    """
    gate = Gate(root, reactor, requesters, on_refused, **of_gate)
    site = BoundedSite(gate, **bounded_arguments(reactor, max_body, on_refused, IDLE_TIMEOUT))
    # The log method of the gate replaces Twisted's access log, so that there is no log line for each request.
    site.log = gate.log  # type: ignore[method-assign,assignment]  # All requests are of the class above.
    return site
