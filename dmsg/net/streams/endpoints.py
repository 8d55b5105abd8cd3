"""Endpoints over whatever opens streams to public keys."""

from __future__ import annotations

from typing import Protocol

from twisted.internet.defer import Deferred, execute
from twisted.internet.interfaces import (
    IListeningPort,
    IProtocol,
    IProtocolFactory,
    IStreamClientEndpoint,
    IStreamServerEndpoint,
)
from zope.interface import implementer

from dmsg.keys import PubKey

CONNECT_TIMEOUT = 10.0
"""Seconds for a connect, by default."""


class StreamOpener(Protocol):
    """A client of some protocol family."""

    def connect(
        self, remote: PubKey, factory: IProtocolFactory, timeout: float = ..., *, port: int = ...
    ) -> Deferred[IProtocol]:
        """Open a stream to ``remote``."""

    def listen(self, factory: IProtocolFactory, port: int = ...) -> IListeningPort:
        """Accept streams."""


@implementer(IStreamClientEndpoint)
class DmsgClientEndpoint:
    """Connects to a public key."""

    def __init__(
        self, client: StreamOpener, remote: PubKey, timeout: float = CONNECT_TIMEOUT, *, port: int = 0
    ) -> None:
        self._client = client
        self._port = port
        self._remote = remote
        self._timeout = timeout

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:
        """As in :class:`twisted.internet.interfaces.IStreamClientEndpoint`."""
        return self._client.connect(self._remote, protocolFactory, self._timeout, port=self._port)


@implementer(IStreamServerEndpoint)
class DmsgServerEndpoint:
    """Listens on a port of a client's public key."""

    def __init__(self, client: StreamOpener, port: int = 0) -> None:
        self._client = client
        self._port = port

    def listen(self, protocolFactory: IProtocolFactory) -> Deferred[IListeningPort]:
        """As in :class:`twisted.internet.interfaces.IStreamServerEndpoint`."""
        return execute(self._client.listen, protocolFactory, self._port)
