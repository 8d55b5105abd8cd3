"""HTTP routes of a status port and their limits: the page, ``/metrics`` and ``/health``."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure
from twisted.web.iweb import IRequest
from twisted.web.server import Request
from werkzeug.exceptions import HTTPException

from dmsg.base.buckets import RateLimit
from dmsg.net.blocks import blocks_of
from dmsg.net.web.guard import GuardedFactory
from dmsg.net.web.routes import QuickKlein
from dmsg.net.web.site import Requesters, answer_http_error, gated_site
from dmsg.pages.access import Access, is_foreign, is_script
from dmsg.pages.model import Table
from dmsg.pages.rendering import flatten, whole_page
from dmsg.pages.sampler import Sampler, TooManyWatch

STATUS_CONNECTIONS = 64
"""Maximum number of connections to the status port. At most half of them may come from one network."""
STATUS_RATE, STATUS_BURST = 50.0, 500.0
"""Rate limit for one address: requests per second, and burst. The limit is low, because each request iterates over all
clients of the entity."""
CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
"""Content type of the text that Prometheus scrapes."""
MAX_QUERY = 200
"""Maximum length of a search text in characters."""
_HEADERS = {
    b"content-security-policy": b"default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    b"form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cache-control": b"no-store",
}


Rendered = Callable[[], bytes | Awaitable[bytes]]
"""Function that returns the text for Prometheus, or an awaitable of it."""
Health = Callable[[], Mapping[str, object] | Awaitable[Mapping[str, object]]]
"""Function that returns the content of ``/health``, or an awaitable of it. The item ``status`` of the content is
``ok``, or the reason why the entity does not work."""


class StatusPages:
    """Routes of the status port.

    :param sampling: sampler of the entity.
    """

    app = QuickKlein()

    def __init__(
        self,
        metrics: Rendered,
        health: Health,
        sampling: Sampler,
        access: Access,
    ) -> None:
        self._metrics = metrics
        self._health = health
        self._sampling = sampling
        self._access = access

    @app.route("/metrics", methods=["GET"])
    async def metrics(self, request: Request) -> bytes:
        """Serve the metrics to Prometheus."""
        if is_script(request):
            return _no_script(request)
        text = self._metrics()
        request.setHeader(b"content-type", CONTENT_TYPE)
        return text if isinstance(text, bytes) else await text

    @app.route("/health", methods=["GET"])
    async def health(self, request: Request) -> bytes:
        """Serve the health as JSON, for a supervisor that restarts the entity, or for a load balancer."""
        if is_script(request):
            return _no_script(request)
        request.setHeader(b"content-type", b"application/json")
        found = self._health()
        health = found if isinstance(found, Mapping) else await found
        if health["status"] != "ok":
            request.setResponseCode(503)
        return json.dumps(health).encode()

    @app.route("/", methods=["GET"])
    async def page(self, request: Request) -> bytes:
        """Serve the status page."""
        refused = self._refused(request)
        if refused is not None:
            return refused
        searched = request.args.get(b"key", [b""])[0].decode("utf-8", "replace").strip()[:MAX_QUERY]
        answer: Table | None = None
        if searched and self._sampling.source.search_key:
            answer = await self._sampling.source.search(searched)
        tag = whole_page(self._sampling.source, await self._sampling.parts(), searched, answer)
        request.setHeader(b"content-type", b"text/html; charset=utf-8")
        return b"<!DOCTYPE html>\n" + flatten(tag).encode()

    @app.route("/page.css", methods=["GET"])
    def style(self, request: Request) -> bytes:
        """Serve the style sheet. Everybody may read it."""
        return _file(request, "page.css", b"text/css; charset=utf-8")

    @app.route("/page.js", methods=["GET"])
    def script(self, request: Request) -> bytes:
        """Serve the script that updates the parts of the page. Everybody may read it."""
        return _file(request, "page.js", b"text/javascript; charset=utf-8")

    @app.route("/live", methods=["GET"])
    def live(self, request: Request) -> bytes | Deferred[bytes]:
        """Send the parts of the page as server-sent events whenever they change.

        Requests on behalf of another site's page are refused. Otherwise such a page, in the browser of a person with
        access, could use up the limited number of receivers.
        """
        refused = _no_script(request) if is_foreign(request) else self._refused(request)
        if refused is not None:
            return refused
        try:
            self._sampling.watch(request)
        except TooManyWatch:
            request.setResponseCode(503)
            return b"too many browsers watch this page already\n"
        return Deferred()

    @app.handle_errors(HTTPException)
    def _no_such_page(self, request: IRequest, failure: Failure) -> bytes:
        if getattr(failure.value, "code", 404) != 404:
            return answer_http_error(request, failure)
        request.setResponseCode(404)
        request.setHeader(b"content-type", b"text/plain; charset=utf-8")
        return b"not found; this port serves /, /metrics and /health\n"

    def _refused(self, request: Request) -> bytes | None:
        """Set the security headers; return the body of a refusal, or None if the request is allowed."""
        for name, value in _HEADERS.items():
            request.setHeader(name, value)
        found = self._access.refuses(request)
        if found is None:
            return None
        status, text = found
        request.setResponseCode(status)
        request.setHeader(b"content-type", b"text/plain; charset=utf-8")
        if status == 401:
            request.setHeader(b"www-authenticate", b'Basic realm="dmsg", charset="UTF-8"')
        return text.encode()


def _no_script(request: Request) -> bytes:
    request.setResponseCode(403)
    request.setHeader(b"content-type", b"text/plain; charset=utf-8")
    return b"requests from pages of other sites are refused\n"


def _file(request: Request, name: str, kind: bytes) -> bytes:
    request.setHeader(b"content-type", kind)
    request.setHeader(b"cache-control", b"max-age=300")
    return (files("dmsg.pages") / name).read_bytes()


def status_site(reactor: IReactorTime, pages: StatusPages, on_refused: Callable[[str], None]) -> GuardedFactory:
    """Return the site of the status port. It has limits, because strangers may connect to it."""
    # Behind a proxy all clients have the same address. So the page and the metrics have separate rate limits, and
    # requests for the page cannot use up the limit of Prometheus.
    site = gated_site(
        pages.app.resource(),
        reactor,
        on_refused,
        Requesters(reactor, STATUS_RATE, STATUS_BURST),
        max_body=0,
        posts=RateLimit(STATUS_RATE, STATUS_BURST, blocks_of),
        is_post=lambda request: request.path in (b"/metrics", b"/health"),
        independent=True,
    )
    return GuardedFactory(
        site, reactor, limit=STATUS_CONNECTIONS, most_of_block=STATUS_CONNECTIONS // 2, on_refused=on_refused
    )
