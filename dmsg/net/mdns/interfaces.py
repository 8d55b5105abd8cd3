"""Addresses of this machine on networks that support multicast."""

from __future__ import annotations

import socket
import sys
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from dmsg.net.addresses import parse_ip
from dmsg.net.interfaces import UP, system_addresses

MAX_INTERFACES = 16
"""Maximum number of this machine's addresses that are used. Further addresses are ignored."""
LOOPBACK, POINT_TO_POINT, RUNNING = 0x8, 0x10, 0x40
MULTICAST = 0x1000 if sys.platform == "linux" else 0x8000


@dataclass(frozen=True, slots=True)
class Interface:
    """Address of this machine on one network.

    :ivar name: name of the network interface, such as ``wlan0``.
    :ivar index: number of the network interface.
    :ivar address: IPv4 address, or link-local IPv6 address.
    :ivar network: range of addresses that are reached on the link, without a router.
    """

    name: str
    index: int
    address: IPv4Address | IPv6Address
    network: IPv4Network | IPv6Network

    @property
    def host(self) -> str:
        """This machine's address as text, with its scope if it is an IPv6 address."""
        return self.scoped(str(self.address))

    def scoped(self, host: str) -> str:
        """Return an address on this link as text to which a socket can connect. An IPv6 address gets the scope of this
        link."""
        return f"{host}%{self.name}" if isinstance(self.address, IPv6Address) and "%" not in host else host

    def has_on_link(self, host: str) -> bool:
        """Whether an address can belong to a machine on this link. Addresses behind a router and multicast groups
        cannot."""
        address = parse_ip(host)
        if address is None or address.version != self.network.version or address not in self.network:
            return False
        if address.is_multicast or address.is_unspecified or address.is_loopback:
            return False
        if self.network.num_addresses <= 2 or isinstance(address, IPv6Address):
            return True
        return address not in (self.network.network_address, self.network.broadcast_address)


def is_usable(flags: int) -> bool:
    """Whether multicast over an interface with these flags reaches other machines. It does not over tunnels and
    loopback."""
    needed = UP | RUNNING | MULTICAST
    return flags & needed == needed and not flags & (LOOPBACK | POINT_TO_POINT)


def list_interfaces() -> list[Interface]:
    """Return the IPv4 and link-local IPv6 addresses of this machine on networks that support multicast.

    :raises OSError: the system call failed.
    """
    found: dict[tuple[str, str], Interface] = {}
    for name, flags, address, mask in system_addresses():
        if not is_usable(flags) or (isinstance(address, IPv6Address) and not address.is_link_local):
            continue
        network: IPv4Network | IPv6Network
        if isinstance(address, IPv6Address):
            network = IPv6Network("fe80::/10")
        else:
            network = IPv4Network(f"{address}/{mask}", strict=False)
        try:
            index = socket.if_nametoindex(name)
        except OSError:
            continue  # The interface has disappeared meanwhile, so it is left out.
        found[name, str(address)] = Interface(name, index, address, network)
    return list(found.values())[:MAX_INTERFACES]
