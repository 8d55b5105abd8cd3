"""Reverse proxies of the operator, which tell a server the addresses of the clients whose connections they forward."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Network, IPv6Network

from dmsg.net.addresses import forwarded_client, parse_ip

Networks = Sequence[IPv4Network | IPv6Network]


class TrustedProxies:
    """Proxies that a server trusts to name its clients.

    :ivar with_header: networks of proxies that name clients in the X-Forwarded-For header of their requests.
    :ivar with_protocol: networks of proxies whose connections begin with a PROXY protocol header.
    """

    def __init__(self, with_header: Networks = (), with_protocol: Networks = ()) -> None:
        self.with_header = tuple(with_header)
        self.with_protocol = tuple(with_protocol)

    def is_trusted(self, host: str) -> bool:
        """Return whether ``host`` is a trusted proxy. Such a proxy connects first, and then names its client."""
        return self.speak_proxy_protocol(host) or _is_in(host, self.with_header)

    def speak_proxy_protocol(self, host: str) -> bool:
        """Return whether a connection from ``host`` must begin with a PROXY protocol header."""
        return _is_in(host, self.with_protocol)

    def client_of(self, peer: str, header: bytes | None) -> str:
        """Return the client's address that X-Forwarded-For names, in its shortest form, or an empty text.

        :param peer: address from which the request came. The header is used only if this is the address of a trusted
            proxy.
        """
        if not _is_in(peer, self.with_header):
            return ""
        found = parse_ip(forwarded_client(header, lambda host: _is_in(host, self.with_header)))
        return "" if found is None else str(found)


def _is_in(host: str, networks: Networks) -> bool:
    if not networks:
        return False
    address = parse_ip(host)
    return address is not None and any(address in network for network in networks)
