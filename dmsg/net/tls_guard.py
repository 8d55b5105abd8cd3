"""TLS connections of a server: chooses a protocol by ALPN, and ends a connection whose peer sends too many bytes of TLS
that carry no data (:mod:`dmsg.net.tls_overhead`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from OpenSSL.SSL import NO_OVERLAPPING_PROTOCOLS, Connection, Context
from twisted.internet.interfaces import IAddress, IListeningPort, IProtocol, IProtocolNegotiationFactory, ITransport
from twisted.protocols.tls import BufferingTLSTransport, TLSMemoryBIOFactory

from dmsg.net.tls_overhead import ITLSOverhead, OverheadAccount


class GuardedTLS(BufferingTLSTransport):
    """TLS protocol of one connection to a server."""

    def __init__(self, factory: TLSMemoryBIOFactory, above: IProtocol) -> None:
        super().__init__(factory, above)
        self._overhead = OverheadAccount()

    def makeConnection(self, transport: ITransport) -> None:
        super().makeConnection(transport)  # type: ignore[no-untyped-call]
        connection = self._tlsConnection
        if connection is None:
            return
        recv, deliver = connection.recv, self._overhead.deliver

        def counted(size: int) -> bytes:
            data: bytes = recv(size)
            deliver(len(data))
            return data

        # Each call of recv returns the data of one TLS record. The data are counted here and not in the protocol above,
        # because another protocol may take its place.
        connection.recv = counted  # type: ignore[method-assign, assignment]

    def dataReceived(self, data: bytes) -> None:
        overhead = self._overhead
        overhead.receive(len(data))
        super().dataReceived(data)  # type: ignore[no-untyped-call]
        if overhead.is_exceeded and not self._aborted and not self._lostTLSConnection:
            above = self.wrappedProtocol
            if ITLSOverhead.providedBy(above):
                above.tls_overhead_exceeded()
            else:
                self.abortConnection()  # type: ignore[no-untyped-call]


def guard_tls(port: IListeningPort, context: Context) -> None:
    """Guard the connections that a port with TLS will accept.

    :param context: TLS context of the port. No connection may have been made with it yet.
    """
    factory = cast(TLSMemoryBIOFactory, port.factory)  # type: ignore[attr-defined]
    above_tls = factory.wrappedFactory
    negotiates = IProtocolNegotiationFactory(above_tls, None)
    known = () if negotiates is None else tuple(negotiates.acceptableProtocols())

    def build(address: IAddress | None) -> GuardedTLS | None:
        # The factory above refuses a connection by returning None. Twisted's own method would raise an exception for
        # that.
        above = above_tls.buildProtocol(address)
        return None if above is None else GuardedTLS(factory, above)

    def choose(_: Connection, offered: Sequence[bytes]) -> Any:
        return next((one for one in known if one in offered), NO_OVERLAPPING_PROTOCOLS)

    factory.buildProtocol = build  # type: ignore[method-assign, assignment]
    # Twisted's own ALPN callback makes OpenSSL refuse a client that offers only protocols that the server does not
    # know.
    context.set_alpn_select_callback(choose)
