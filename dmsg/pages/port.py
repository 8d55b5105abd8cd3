"""Port of an entity's status page, ``/metrics`` and ``/health`` (``--metrics``)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from twisted.internet.defer import maybeDeferred
from twisted.internet.interfaces import IListeningPort
from twisted.logger import Logger

from dmsg.net.listening import open_port
from dmsg.net.reactor import Reactor
from dmsg.pages.access import Access
from dmsg.pages.model import StatusSource

if TYPE_CHECKING:
    from dmsg.pages.sampler import Sampler
    from dmsg.pages.site import Health, Rendered

_log = Logger()


class StatusPort:
    """Port with the status page, ``/metrics`` and ``/health``, separate from the ports of the entity's protocol.

    :param where: endpoint string at which to listen; None for no port.
    :param token: token with which the page can be opened from any machine; None restricts the page to this machine.
    :param source: entity that the page describes.
    :param make_metrics: returns the function that returns the text for Prometheus; called when the port opens.
    :param health: returns the content of ``/health``.
    :ivar port: listening port; None if there is none.
    :ivar refused: number of refused requests and connections.
    """

    def __init__(
        self,
        reactor: Reactor,
        where: str | None,
        token: bytes | None,
        source: StatusSource,
        make_metrics: Callable[[], Rendered],
        health: Health,
    ) -> None:
        self._reactor = reactor
        self._where = where
        self._source = source
        self._make_metrics = make_metrics
        self._health = health
        self._access = Access(token)
        self._sampling: Sampler | None = None
        self.port: IListeningPort | None = None
        self.refused = 0

    async def start(self) -> None:
        """Listen, and start sampling the entity. Errors of the endpoint are raised."""
        if self._where is None:
            return
        # The modules of the page are imported only if there is a page, because their import takes time.
        from dmsg.pages.sampler import Sampler
        from dmsg.pages.site import StatusPages, status_site

        sampling = Sampler(self._reactor, self._source, time.time)
        pages = StatusPages(self._make_metrics(), self._health, sampling, self._access)
        site = status_site(self._reactor, pages, self._refuse)
        self.port = await open_port(self._reactor, self._where, site)
        self._sampling = sampling
        sampling.start()
        _log.info("status page, /metrics and /health are at {address}", address=str(self.port.getHost()))

    def _refuse(self, _: str) -> None:
        self.refused += 1

    async def stop(self) -> None:
        """Stop sampling, close the port, and close the connections of browsers that receive updates."""
        if self._sampling is not None:
            self._sampling.stop()
        port, self.port = self.port, None
        if port is not None:
            await maybeDeferred(port.stopListening)
