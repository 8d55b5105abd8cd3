"""Twisted endpoints for streams to and from public keys."""

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

from dmsg.base.timeouts import CONNECT_TIMEOUT
from dmsg.keys import PubKey
from dmsg.net.streams.address import DmsgAddress


class StreamOpener(Protocol):
    """Interface of a client, of any protocol family, that opens and accepts streams."""

    def connect(
        self, remote: PubKey | DmsgAddress, factory: IProtocolFactory, port: int = ..., *, timeout: float = ...
    ) -> Deferred[IProtocol]:
        """Open a stream to ``remote``."""

    def listen(self, factory: IProtocolFactory, port: int = ...) -> IListeningPort:
        """Accept streams at ``port``."""


@implementer(IStreamClientEndpoint)
class DmsgClientEndpoint:
    """Client endpoint for a port of a public key.

    :param remote: public key, or an address with its port.
    :param port: port from 0 to 65535.
    :param timeout: seconds for the whole attempt to open a stream.
    :raises TypeError: ``port`` is not an int.
    :raises ValueError: ``port`` is not 0 to 65535, or differs from the port of the address.
    """

    def __init__(
        self, client: StreamOpener, remote: PubKey | DmsgAddress, port: int = 0, *, timeout: float = CONNECT_TIMEOUT
    ) -> None:
        self._client = client
        self._address = DmsgAddress.of(remote, port)
        self._timeout = timeout

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:
        """Open a stream; see :class:`twisted.internet.interfaces.IStreamClientEndpoint`."""
        return self._client.connect(self._address, protocolFactory, timeout=self._timeout)


@implementer(IStreamServerEndpoint)
class DmsgServerEndpoint:
    """Server endpoint for a port of the client's own public key."""

    def __init__(self, client: StreamOpener, port: int = 0) -> None:
        self._client = client
        self._port = port

    def listen(self, protocolFactory: IProtocolFactory) -> Deferred[IListeningPort]:
        """Accept streams; see :class:`twisted.internet.interfaces.IStreamServerEndpoint`."""
        return execute(self._client.listen, protocolFactory, self._port)
