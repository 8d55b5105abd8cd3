"""``/metrics`` and ``/health`` of an entity, on an endpoint of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol

from twisted.internet.interfaces import IReactorTime
from twisted.web.resource import Resource
from twisted.web.server import Request

from dmsg.net.web.guard import GuardedFactory
from dmsg.net.web.site import gated_site

STATUS_CONNECTIONS = 64
"""Connections to ``/metrics`` and ``/health``; half of them of one network."""
STATUS_RATE, STATUS_BURST = 50.0, 500.0
"""Requests a second of one address, and at once, for ``/metrics`` and ``/health``: each goes through all clients."""


class Rendered(Protocol):
    """What can be scraped."""

    content_type: bytes

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""


class StatusPages(Resource):
    """``/metrics`` and ``/health``.

    :param health: what ``/health`` says; 503 when its ``status`` is not ``ok``.
    """

    isLeaf = True

    def __init__(self, metrics: Rendered, health: Callable[[], dict[str, Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._health = health
        self._metrics = metrics

    def render_GET(self, request: Request) -> bytes:
        if request.path == b"/metrics":
            request.setHeader(b"content-type", self._metrics.content_type)
            return self._metrics.render()
        if request.path == b"/health":
            request.setHeader(b"content-type", b"application/json")
            health = self._health()
            if health["status"] != "ok":
                request.setResponseCode(503)
            return json.dumps(health).encode()
        request.setResponseCode(404)
        return b"there are /metrics and /health\n"


def status_site(reactor: IReactorTime, pages: StatusPages, refused: Callable[[str], None]) -> GuardedFactory:
    """What listens for who watches an entity; others may find it, too."""
    site = gated_site(pages, reactor, refused, rate=STATUS_RATE, burst=STATUS_BURST, proxied=False, max_body=0)
    return GuardedFactory(
        site, reactor, most=STATUS_CONNECTIONS, most_of_block=STATUS_CONNECTIONS // 2, refused=refused
    )
