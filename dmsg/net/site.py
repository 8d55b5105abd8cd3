"""Web sites of entities: what stands before the routes, and answers that are JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure
from twisted.web.iweb import IRequest
from twisted.web.resource import IResource, Resource
from twisted.web.server import Request, Site
from werkzeug.exceptions import HTTPException, MethodNotAllowed
from werkzeug.routing import RequestRedirect

from dmsg.buckets import RateLimit

IDLE_TIMEOUT = 30
"""Seconds that a request, or a kept connection, may take."""


def answer(request: IRequest, status: int, message: str) -> bytes:
    """``{"message": ..., "code": ...}``."""
    request.setResponseCode(status)
    request.setHeader(b"content-type", b"application/json")
    return json.dumps({"message": message, "code": status}, separators=(",", ":")).encode()


def answer_http_error(request: IRequest, failure: Failure) -> bytes:
    """Unknown paths and methods, as Klein's router raises them."""
    error = failure.value
    assert isinstance(error, HTTPException)
    if isinstance(error, RequestRedirect):
        request.setHeader(b"location", error.new_url.encode())
    if isinstance(error, MethodNotAllowed) and error.valid_methods:
        request.setHeader(b"allow", ", ".join(sorted(error.valid_methods)).encode())
    return answer(request, error.code or 500, (error.name or "error").lower())


class BoundedRequest(Request):
    """Answers 413 to a long body at once and reads none of it."""

    max_body: int
    count_refusal: Callable[[str], None]
    refused = False
    received = 0

    def gotLength(self, length: int | None) -> None:
        super().gotLength(length if length is None or length <= self.max_body else 0)  # type: ignore[no-untyped-call]
        if length is not None and length > self.max_body:
            self._refuse()

    def handleContentChunk(self, data: bytes) -> None:
        self.received += len(data)
        if self.received > self.max_body:
            self._refuse()
        elif not self.refused:
            super().handleContentChunk(data)  # type: ignore[no-untyped-call]

    def requestReceived(self, command: bytes, path: bytes, version: bytes) -> None:
        if not self.refused:
            super().requestReceived(command, path, version)  # type: ignore[no-untyped-call]

    def _refuse(self) -> None:
        if self.refused:
            return
        self.refused = True
        type(self).count_refusal("too_long")
        body = json.dumps({"message": f"body is longer than {self.max_body} bytes", "code": 413}).encode()
        # the body is still on its way: nothing but the channel itself can answer now
        assert self.channel.transport is not None
        self.channel.transport.write(
            b"HTTP/1.1 413 Content Too Large\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(body), body)
        )
        self.channel.loseConnection()


class Gate(Resource):
    """Body limit and rate limit, for all paths."""

    isLeaf = True

    def __init__(
        self, root: IResource, reactor: IReactorTime, limit: RateLimit, proxied: bool, refused: Callable[[str], None]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._root = root
        self._reactor = reactor
        self._limit = limit
        self._proxied = proxied
        self._refused = refused

    def _address(self, request: Request) -> str:
        if self._proxied and (forwarded := request.getHeader(b"x-forwarded-for")):
            # the last is what our own proxy saw; those before it anybody can write
            return forwarded.decode("latin-1").rpartition(",")[2].strip()
        return str(getattr(request.getClientAddress(), "host", ""))

    def render(self, request: Request) -> int | bytes:
        if not self._limit.allow(self._address(request), self._reactor.seconds()):
            self._refused("rate_limit")
            request.setHeader(b"retry-after", b"1")
            return answer(request, 429, "too many requests")
        segments: list[bytes] = request.postpath or []
        try:
            b"/".join(segments).decode()
            (request.getHeader(b"host") or b"").decode("ascii")
        except UnicodeDecodeError:  # Klein would log a traceback
            self._refused("bad_path")
            return answer(request, 400, "path or host is no text")
        rendered: int | bytes = self._root.render(request)
        return rendered


def gated_site(
    root: IResource,
    reactor: Any,
    refused: Callable[[str], None],
    *,
    rate: float,
    burst: float,
    proxied: bool,
    max_body: int,
) -> Site:
    """The factory to listen with.

    :param refused: called with ``too_long``, ``rate_limit`` or ``bad_path``.
    :param rate: requests a second and address, ``burst`` of them at once; 0 means no limit.
    :param proxied: the address is the last of X-Forwarded-For.
    :param max_body: bytes of a request's body.
    """
    gate = Gate(root, reactor, RateLimit(rate, burst), proxied, refused)
    bounded = type("Bounded", (BoundedRequest,), {"max_body": max_body, "count_refusal": staticmethod(refused)})
    site = Site(gate, requestFactory=bounded, timeout=IDLE_TIMEOUT, reactor=reactor, parsePOSTFormSubmission=False)
    site.noisy = False
    return site
