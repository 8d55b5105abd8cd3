"""Klein with a short way to the routes that nearly all requests are for.

Klein asks Werkzeug for the route of each request, which puts the whole URL
together for it, and hands on what a route answers through five Deferreds: more
than all the rest that a look-up costs.  Here a path that is a route as it
stands, or one with a last segment that the route takes, is found in a table; whatever else there is
(escapes, doubled slashes, other methods, paths that do not exist) goes Klein's way.
Routes, methods and the error map are declared to Klein, and to nobody else.
"""

from __future__ import annotations

import re
from typing import Any

from klein import Klein
from klein.resource import KleinResource
from twisted.internet.defer import CancelledError, Deferred, maybeDeferred
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.server import NOT_DONE_YET, Request

_log = Logger()

_SEGMENT = re.compile(rb"[0-9A-Za-z_-]+")
_HOST = re.compile(rb"[0-9A-Za-z_-]+(\.[0-9A-Za-z_-]+)*(:[0-9]{1,5})?")
"""Names and addresses as most of them are; Werkzeug looks at the others."""
_LAST = re.compile("(?P<before>/(?:[^<>]*/)?)<(?P<path>path:)?(?P<name>[^<>:]+)>")


class QuickKlein(Klein):
    """An application whose routes answer ``bytes``, at once or later."""

    def resource(self) -> KleinResource:
        """The root resource."""
        return QuickResource(self)


class QuickResource(KleinResource):
    """The resource of a :class:`QuickKlein`."""

    def __init__(self, app: Klein) -> None:
        super().__init__(app)
        # (method, path) -> route; (method, path up to the last segment) -> route and the name of that segment
        self._whole: dict[tuple[bytes, bytes], str] = {}
        self._last: dict[tuple[bytes, bytes], tuple[str, str]] = {}
        for rule in app.url_map.iter_rules():
            # a route without methods takes them all
            methods = [method.encode() for method in rule.methods or ("GET", "HEAD", "POST")]
            if not rule.arguments:
                self._whole.update({(method, rule.rule.encode()): rule.endpoint for method in methods})
            elif (found := _LAST.fullmatch(rule.rule)) is not None:
                way = rule.endpoint, found["name"]
                for method in methods:
                    # of two routes with the same beginning the one for one segment goes before that for a path
                    if not found["path"] or (method, found["before"].encode()) not in self._last:
                        self._last[method, found["before"].encode()] = way

    def _find(self, request: Request) -> tuple[str, dict[str, str]] | None:
        """The route of a request and its arguments; None: Klein looks."""
        if _HOST.fullmatch(request.getHeader(b"host") or b"") is None:
            return None
        method, path = request.method, request.path
        whole = self._whole.get((method, path))
        if whole is not None:
            return whole, {}
        before, slash, last = path.rpartition(b"/")
        way = self._last.get((method, before + slash))
        if way is None or _SEGMENT.fullmatch(last) is None:
            return None
        return way[0], {way[1]: last.decode()}

    def render(self, request: Any) -> Any:
        found = self._find(request)
        if found is None:
            return super().render(request)
        endpoint, arguments = found
        result: Deferred[Any] = maybeDeferred(self._app.execute_endpoint, endpoint, request, **arguments)
        result.addErrback(self._failed, request)
        if isinstance(result.result if result.called else None, bytes):
            return result.result
        request.notifyFinish().addErrback(lambda _: result.cancel())
        result.addCallback(finish_with, request).addErrback(_broken, request)
        return NOT_DONE_YET

    def _failed(self, failure: Failure, request: Request) -> object:
        """What the error map says; what it does not know goes on, and what nobody is there any more to be told."""
        if request._disconnected:  # noqa: SLF001
            return failure
        for kinds, handler in self._app._error_handlers:  # noqa: SLF001  # there is no public way
            if failure.check(*kinds):
                return self._app.execute_error_handler(handler, request, failure)
        return failure


def finish_with(body: bytes, request: Request) -> None:
    """A whole answer, to a request that was not answered at once; to a HEAD only its length.

    Nothing, if who asked has left: a route may answer all the same, because it was told so.
    """
    if request._disconnected:  # noqa: SLF001  # as Twisted's own requests ask
        return
    request.setHeader(b"content-length", b"%d" % len(body))
    if request.method != b"HEAD":
        request.write(body)
    request.finish()


def _broken(failure: Failure, request: Request) -> None:
    """A fault of this program, or nobody is there any more to be answered."""
    if not request._disconnected:  # noqa: SLF001
        request.processingFailed(failure)
    elif not failure.check(CancelledError):
        _log.failure("a request that nobody waits for failed", failure)
