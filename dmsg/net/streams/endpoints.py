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
from dmsg.net.streams.address import DmsgAddress

CONNECT_TIMEOUT = 10.0
"""Seconds for a connect, by default."""


class StreamOpener(Protocol):
    """A client of some protocol family."""

    def connect(
        self, remote: PubKey | DmsgAddress, factory: IProtocolFactory, port: int = ..., *, timeout: float = ...
    ) -> Deferred[IProtocol]:
        """Open a stream to ``remote``."""

    def listen(self, factory: IProtocolFactory, port: int = ...) -> IListeningPort:
        """Accept streams."""


@implementer(IStreamClientEndpoint)
class DmsgClientEndpoint:
    """Connects to a port of a public key.

    :param remote: the key, or an address with its port.
    :param port: 0 to 65535.
    :param timeout: seconds for the whole of a connect.
    :raises TypeError: ``port`` is not an int.
    :raises ValueError: it is not a port, or not that of the address.
    """

    def __init__(
        self, client: StreamOpener, remote: PubKey | DmsgAddress, port: int = 0, *, timeout: float = CONNECT_TIMEOUT
    ) -> None:
        self._client = client
        self._address = DmsgAddress.of(remote, port)
        self._timeout = timeout

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:
        """As in :class:`twisted.internet.interfaces.IStreamClientEndpoint`."""
        return self._client.connect(self._address, protocolFactory, timeout=self._timeout)


@implementer(IStreamServerEndpoint)
class DmsgServerEndpoint:
    """Listens on a port of a client's public key."""

    def __init__(self, client: StreamOpener, port: int = 0) -> None:
        self._client = client
        self._port = port

    def listen(self, protocolFactory: IProtocolFactory) -> Deferred[IListeningPort]:
        """As in :class:`twisted.internet.interfaces.IStreamServerEndpoint`."""
        return execute(self._client.listen, protocolFactory, self._port)
