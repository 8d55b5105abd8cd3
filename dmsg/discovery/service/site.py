"""HTTP site of discovery: applies rate limits to requests before they reach a route, and measures requests for the
metrics.
"""

from __future__ import annotations

from functools import cache

from twisted.internet.interfaces import IReactorTime
from twisted.web.iweb import IRequest
from twisted.web.server import Site

from dmsg.base.buckets import RateLimit
from dmsg.discovery.entries.dialects import DIALECTS, Dialect
from dmsg.discovery.entries.entry import MAX_ENTRY_SIZE
from dmsg.discovery.service.api import DiscoveryAPI
from dmsg.discovery.service.reached_at import ReachedAt
from dmsg.discovery.service.settings import DEFAULTS, DiscoverySettings
from dmsg.net.blocks import blocks_of
from dmsg.net.web.site import gated_site
from dmsg.telemetry.metrics import Metrics

GO_TIMEOUT = 5.0
"""Maximum seconds by which a request on a path of 2019 is delayed in place of being refused. Clients of 2019 do not
understand status 429, and servers of 2019 give up after 10 s.
"""

_GO_PATHS = tuple(f"{path.rpartition('/')[0]}/".encode() for path in Dialect.GO2019.entries)
"""Prefixes of the URL paths that programs of 2019 request."""
_POST_PATHS = tuple(path.encode() for path in (*Dialect.SEED.entries, *(f"{path}/" for path in Dialect.GO2019.entries)))
_ENTRY_PATHS = tuple(f"{path}/" for dialect in DIALECTS for path in dialect.entries)
_PATHS = frozenset(
    {
        *Dialect.SEED.entries,
        *(path for dialect in DIALECTS for path in dialect.available),
        "/health",
        "/metrics",
        "/openapi.json",
    }
)


def make_site(
    api: DiscoveryAPI,
    reactor: IReactorTime,
    metrics: Metrics,
    settings: DiscoverySettings = DEFAULTS,
) -> Site:
    """Return the protocol factory for discovery's HTTP port; see :func:`dmsg.net.web.site.gated_site`."""

    def refused(reason: str) -> None:
        metrics.refused.labels(reason).inc()

    # The counters are cached by label, because the look-up of a counter takes longer than counting. There are few
    # labels.
    requests = cache(lambda path, status: metrics.requests.labels(path, str(status)))
    reached_at = ReachedAt()

    def finished(request: IRequest, status: int, seconds: float) -> None:
        reached_at.requested(request)
        path = _path_label(request.path)
        requests(path, status).inc()
        metrics.seconds.labels(path).observe(seconds)

    return gated_site(
        api.resource(),
        reactor,
        refused,
        api.requesters,
        max_body=MAX_ENTRY_SIZE,
        max_delay=lambda request: GO_TIMEOUT if request.path.startswith(_GO_PATHS) else 0.0,
        posts=RateLimit(settings.post_rate if settings.rate else 0.0, settings.post_burst, blocks_of),
        is_post=lambda request: request.method == b"POST" and request.path.startswith(_POST_PATHS),
        on_delayed=metrics.delayed.inc,
        on_finished=finished,
    )


def _path_label(path: bytes) -> str:
    """Return the label of a path in metrics. Unknown paths share one label, because otherwise strangers could create
    any number of time series.
    """
    text = path.decode("latin-1")
    if text in _PATHS:
        return text
    for prefix in _ENTRY_PATHS:
        if text.startswith(prefix):
            return prefix + "{key}"
    return "other"
