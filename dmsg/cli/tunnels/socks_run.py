"""Implementation of ``dmsg socks``: a proxy that opens a stream to a peer for each connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twisted.internet.defer import fail
from twisted.internet.interfaces import IProtocol
from twisted.internet.protocol import Factory

from dmsg.clients.address_book import SUFFIX, AddressBook, UnknownName
from dmsg.errors import ConnectFailed, DmsgTimeout, EntryNotFound

if TYPE_CHECKING:
    from twisted.internet.defer import Deferred
    from twisted.internet.interfaces import IAddress
    from twisted.internet.protocol import Protocol
    from twisted.python.failure import Failure

    from dmsg.apps.splice import SplicedConnection
    from dmsg.net.reactor import Reactor
    from dmsg.net.streams.address import DmsgAddress
    from dmsg.v2019.client import Client


class NotAPeer(UnknownName):
    """Error: the requested host is neither KEY.dmsg nor NAME.dmsg.  The proxy reaches no other hosts."""


def peer_of(host: str, port: int) -> DmsgAddress:
    """Return the address of the peer that ``KEY.dmsg`` or ``NAME.dmsg`` names; see
    :meth:`~dmsg.clients.address_book.AddressBook.find_host`.

    :raises UnknownName: there is no such peer.
    """

    from dmsg.net.streams.address import DmsgAddress

    if not host.lower().endswith(SUFFIX):
        raise NotAPeer(f"{host[:80]!r} is not KEY.dmsg or NAME.dmsg")
    return DmsgAddress(AddressBook().find_host(host), port)


def _code_of(failure: Failure) -> int:
    from dmsg.apps.socks import FAILED, NOT_ALLOWED, REFUSED, UNREACHABLE
    from dmsg.cli.tunnels.forward import warn

    warn(failure)
    if failure.check(NotAPeer):
        return NOT_ALLOWED
    if failure.check(EntryNotFound, UnknownName, DmsgTimeout):
        return UNREACHABLE
    return REFUSED if failure.check(ConnectFailed) else FAILED


class SocksFactory(Factory):
    """Factory of the connections from programs to the proxy.  Their number is limited."""

    noisy = False

    def __init__(self, reactor: Reactor, client: Client, timeout: float) -> None:
        self._reactor = reactor
        self._client = client
        self._timeout = timeout
        self._connections = 0

    def buildProtocol(self, addr: IAddress | None) -> Protocol | None:
        from dmsg.apps.socks import SocksProtocol
        from dmsg.apps.splice import max_splices

        if self._connections >= max_splices():
            return None
        self._connections += 1
        return SocksProtocol(self._reactor, self._dial, _code_of, self._lost)

    def _lost(self) -> None:
        self._connections -= 1

    def _dial(self, host: str, port: int, connection: SplicedConnection) -> Deferred[IProtocol]:

        try:
            address = peer_of(host, port)
        except UnknownName:
            return fail()
        factory = Factory.forProtocol(lambda: connection)
        factory.noisy = False
        return self._client.connect(address, factory, timeout=self._timeout)
