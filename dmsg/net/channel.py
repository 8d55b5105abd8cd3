"""HTTP/1.1 connections over which more comes than is answered: so much waits and no more, and is looked at once.

Twisted's channel goes on reading after each answer, whatever it has not yet
parsed, and copies all of that for every line.  So who sends many small requests
one behind the other makes each as dear as everything behind it.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from twisted.internet.interfaces import IAddress
from twisted.internet.protocol import connectionDone
from twisted.python.failure import Failure
from twisted.web.http import HTTPChannel
from twisted.web.resource import IResource
from twisted.web.server import Site

PIECE = 8 * 1024
"""Bytes that are parsed at a time; what is behind them waits, and when a request is being answered nothing is read."""


class BoundedChannel(HTTPChannel):
    """Has one read of what comes, and parses it piece by piece."""

    _feeding = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._behind: deque[bytes] = deque()

    def dataReceived(self, data: bytes) -> None:
        self._behind.extend(data[start : start + PIECE] for start in range(0, len(data), PIECE))
        self._feed()

    def setLineMode(self, extra: bytes = b"") -> None:
        # a request is answered; what came with the end of its body is before all that waits
        self.line_mode = 1
        if extra:
            self._behind.appendleft(extra)

    def requestDone(self, request: Any) -> None:
        super().requestDone(request)  # type: ignore[no-untyped-call]
        self._feed()

    def _feed(self) -> None:
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._behind and not self._handlingRequest and not self._over:
                super().dataReceived(self._behind.popleft())  # type: ignore[no-untyped-call]
        finally:
            self._feeding = False
        if self._over:
            self._behind.clear()
        elif self._behind:
            self._networkProducer.pauseProducing()

    @property
    def _over(self) -> bool:
        # an upgrade takes the transport, an answer may end the connection
        return self.transport is None or bool(self.transport.disconnecting)  # type: ignore[attr-defined]

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._behind.clear()
        super().connectionLost(reason)  # type: ignore[no-untyped-call]


class BoundedSite(Site):
    """A site of such connections; HTTP/2, which Twisted speaks where a library for it is, has other channels."""

    noisy = False

    def __init__(self, resource: IResource, **options: Any) -> None:
        """:param options: those of :class:`twisted.web.server.Site`."""
        super().__init__(resource, **options)  # type: ignore[no-untyped-call]

    def buildProtocol(self, addr: IAddress | None) -> BoundedChannel:  # type: ignore[override]
        channel: BoundedChannel = super().buildProtocol(addr)  # type: ignore[no-untyped-call]
        return channel

    def protocol(self) -> BoundedChannel:  # type: ignore[override]
        """What :meth:`buildProtocol` makes."""
        return BoundedChannel()

    def acceptableProtocols(self) -> list[bytes]:
        """For TLS."""
        return [b"http/1.1"]
