"""Client endpoints that connect to a server over one of its carriers."""

from __future__ import annotations

from twisted.internet.interfaces import IReactorTime, IStreamClientEndpoint

from dmsg.net.addresses import parse_address
from dmsg.net.carriers.names import ALPN, SECURE_WEBSOCKET, WEBSOCKET, Carrier
from dmsg.net.carriers.websocket import WebSocketEndpoint
from dmsg.net.outgoing import outgoing_endpoint


def carrier_endpoint(
    reactor: IReactorTime, address: str, carrier: Carrier, *, encrypted: bool, timeout: float
) -> IStreamClientEndpoint:
    """Return the client endpoint for one carrier of a server. The endpoint connects through the proxy that the
    environment names, if there is one.

    :param address: the server's ``host:port``.
    :param encrypted: whether links write ciphertext, see :class:`~dmsg.net.carriers.transport.WebSocketTransport`.
    :raises DmsgError: the address, or the proxy's URL, is malformed.
    """
    host, port = parse_address(address)
    endpoint = outgoing_endpoint(reactor, host, carrier.port or port, timeout)
    return over_carrier(reactor, endpoint, host, port, carrier, encrypted=encrypted, timeout=timeout)


def over_carrier(
    reactor: IReactorTime,
    endpoint: IStreamClientEndpoint,
    host: str,
    port: int,
    carrier: Carrier,
    *,
    encrypted: bool,
    timeout: float,
) -> IStreamClientEndpoint:
    """Return a client endpoint that adds TLS and a websocket to a TCP endpoint, as the carrier requires.

    :param host: host of the server's address. It is also sent to the server: in TLS as SNI, and in HTTP as the Host
        header.
    :param port: port of the server's address.
    """
    if carrier.secure:
        # The import is inside the function, because importing OpenSSL takes a tenth of a second and plain TCP does not
        # need OpenSSL.
        from dmsg.net.carriers.tls import tls_endpoint

        endpoint = tls_endpoint(endpoint, host, ALPN[carrier.kind])
    if carrier.kind not in (WEBSOCKET, SECURE_WEBSOCKET):
        return endpoint
    # The zone of an IPv6 address is removed, because the zone has a meaning on this machine only and web servers refuse
    # it.
    named = f"[{host.partition('%')[0]}]" if ":" in host else host
    if carrier.port != 443:
        named = f"{named}:{carrier.port or port}"
    return WebSocketEndpoint(reactor, endpoint, named, encrypted=encrypted, timeout=timeout)
