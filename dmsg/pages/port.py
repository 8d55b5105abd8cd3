"""What an entity opens at ``--metrics``, from its start to its end."""

from __future__ import annotations

import time

from twisted.internet.defer import maybeDeferred
from twisted.internet.endpoints import serverFromString
from twisted.internet.interfaces import IListeningPort
from twisted.logger import Logger

from dmsg.net.reactor import Reactor
from dmsg.pages.access import Access
from dmsg.pages.model import Shown
from dmsg.pages.sampling import Sampling
from dmsg.pages.site import Health, Rendered, StatusPages, status_site

_log = Logger()


class StatusPort:
    """The page, ``/metrics`` and ``/health``, beside what the entity listens at.

    :param where: endpoint string; None: it opens nothing.
    :param token: who has it may look at the page from anywhere; None: it is for this machine alone.
    :ivar port: what listens; None: nothing does.
    :ivar refused: requests and connections that were refused.
    """

    def __init__(
        self,
        reactor: Reactor,
        where: str | None,
        token: bytes | None,
        shown: Shown,
        metrics: Rendered,
        health: Health,
    ) -> None:
        self._reactor = reactor
        self._where = where
        self._sampling = Sampling(reactor, shown, time.time)
        self._pages = StatusPages(metrics, health, self._sampling, Access(token))
        self.port: IListeningPort | None = None
        self.refused = 0

    async def start(self) -> None:
        """Listen, and look at the entity from now on.  Raises what listening raises."""
        if self._where is None:
            return
        site = status_site(self._reactor, self._pages, self._refuse)
        self.port = await serverFromString(self._reactor, self._where).listen(site)
        self._sampling.start()
        _log.info("status page, /metrics and /health: {address}", address=str(self.port.getHost()))

    def _refuse(self, _: str) -> None:
        self.refused += 1

    async def stop(self) -> None:
        """Look no more; who watches is told so by the end of his connection."""
        self._sampling.stop()
        port, self.port = self.port, None
        if port is not None:
            await maybeDeferred(port.stopListening)
