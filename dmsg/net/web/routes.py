"""Klein with a fast path for the routes of most requests.

For each request, Klein asks Werkzeug for the route. Werkzeug assembles the whole URL, and Klein passes the result
through five Deferreds. That takes longer than all other work of a look-up in discovery. This module looks up the path
in a table instead. The table has paths without variables, and paths whose only variable is the last segment. All other
requests (escapes, doubled slashes, other methods, unknown paths) are left to Klein. Routes, methods and error handlers
are declared to Klein only.
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
"""Pattern of common host names and addresses. Requests with any other host are left to Klein."""
_LAST = re.compile("(?P<before>/(?:[^<>]*/)?)<(?P<path>path:)?(?P<name>[^<>:]+)>")


class QuickKlein(Klein):
    """Klein application whose routes return ``bytes`` or a Deferred of them."""

    def resource(self) -> KleinResource:
        """Return the root resource of the application."""
        return QuickResource(self)


class QuickResource(KleinResource):
    """Root resource of a :class:`QuickKlein`."""

    def __init__(self, app: Klein) -> None:
        super().__init__(app)
        # The first table maps (method, path) to a route. The second maps (method, path up to the last segment) to a
        # route and the name of its variable.
        self._static_rules: dict[tuple[bytes, bytes], str] = {}
        self._last: dict[tuple[bytes, bytes], tuple[str, str]] = {}
        for rule in app.url_map.iter_rules():
            # A route without declared methods accepts all methods. The tables contain the most common ones.
            methods = [method.encode() for method in rule.methods or ("GET", "HEAD", "POST")]
            if not rule.arguments:
                self._static_rules.update({(method, rule.rule.encode()): rule.endpoint for method in methods})
            elif (found := _LAST.fullmatch(rule.rule)) is not None:
                way = rule.endpoint, found["name"]
                for method in methods:
                    # If two routes differ only in the variable at their end, the table contains the route whose
                    # variable has no slashes.
                    if not found["path"] or (method, found["before"].encode()) not in self._last:
                        self._last[method, found["before"].encode()] = way

    def _find(self, request: Request) -> tuple[str, dict[str, str]] | None:
        """Return the route of a request and its arguments, or None if the request is left to Klein."""
        if _HOST.fullmatch(request.getHeader(b"host") or b"") is None:
            return None
        method, path = request.method, request.path
        whole = self._static_rules.get((method, path))
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
        """Call the error handler for a failure. If there is no handler, or the client has disconnected, return the
        failure."""
        if request._disconnected:  # noqa: SLF001
            return failure
        for kinds, handler in self._app._error_handlers:  # noqa: SLF001  # there is no public way
            if failure.check(*kinds):
                return self._app.execute_error_handler(handler, request, failure)
        return failure


def finish_with(body: bytes, request: Request) -> None:
    """Send a response to a request that was not answered at once. For a HEAD request, send only the length of the body.

    If the client has disconnected, send nothing. A route may return a body even after its Deferred was cancelled.
    """
    if request._disconnected:  # noqa: SLF001  # as Twisted's own requests ask
        return
    request.setHeader(b"content-length", b"%d" % len(body))
    if request.method != b"HEAD":
        request.write(body)
    request.finish()


def _broken(failure: Failure, request: Request) -> None:
    """Answer a failed request with an error. If the client has disconnected, only log the failure."""
    if not request._disconnected:  # noqa: SLF001
        request.processingFailed(failure)
    elif not failure.check(CancelledError):
        _log.failure("unhandled error in a request whose client has disconnected", failure)
