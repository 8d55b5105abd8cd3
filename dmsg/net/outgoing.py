"""Client endpoints that connect directly, or through the proxy that an environment variable names."""

from __future__ import annotations

from twisted.internet.abstract import isIPAddress, isIPv6Address
from twisted.internet.interfaces import IReactorTime, IStreamClientEndpoint

from dmsg.net.addresses import parse_address
from dmsg.net.proxies import ProxyEndpoint, proxy_for
from dmsg.net.socket_endpoints import TCPEndpoint


def tcp_endpoint(reactor: IReactorTime, address: str, timeout: float) -> IStreamClientEndpoint:
    """Return a client endpoint for ``host:port``, through the proxy that the environment names, if there is one.

    :raises DmsgError: the address, or the proxy's URL, is malformed.
    """
    host, port = parse_address(address)
    return outgoing_endpoint(reactor, host, port, timeout)


def outgoing_endpoint(reactor: IReactorTime, host: str, port: int, timeout: float) -> IStreamClientEndpoint:
    """Return a client endpoint for a host, through the proxy that the environment names, if there is one.

    :raises ProxyError: the proxy's URL is malformed.
    """
    proxy = proxy_for(host)
    if proxy is None:
        return host_endpoint(reactor, host, port, timeout)
    to_proxy = host_endpoint(reactor, proxy.host, proxy.port, timeout)
    return ProxyEndpoint(reactor, to_proxy, proxy, host, port, timeout)


def host_endpoint(reactor: IReactorTime, host: str, port: int, timeout: float) -> IStreamClientEndpoint:
    """Return a client endpoint for a host name or an IP address."""
    # An IP address gets an endpoint without name resolution, which reports a refused connection at once.
    if isIPAddress(host) or isIPv6Address(host):
        return TCPEndpoint(reactor, host, port, timeout)

    from twisted.internet.endpoints import HostnameEndpoint

    return HostnameEndpoint(reactor, host, port, timeout=timeout)
