"""Addresses at which other machines may reach this one, and the choice of one of them for an invitation."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress

from dmsg.net.addresses import Address, kind_of, parse_ip
from dmsg.net.interfaces import interface_addresses

LOOPBACK = "127.0.0.1"
"""Address to use on a machine without a network. Only programs of the same machine can reach it."""
_ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Addresses that no host has, because they are reserved for documentation (RFC 5737, RFC 3849).  The route to them is
the default route.
"""


def own_addresses() -> list[str]:
    """Return the addresses at which other machines may reach this one, the best first.

    No packet is sent: connecting a UDP socket only looks up the route.
    """
    return rank(route_addresses(), interface_addresses())


def rank(routes: Sequence[Address], others: Sequence[Address]) -> list[str]:
    """Return addresses in the order in which an invitation should prefer them, without loopback and link-local ones.

    A public IPv4 address comes first, because every machine can reach it.  A public IPv6 address comes after the
    private IPv4 address of the default route, which machines of the same home can reach even if they have no IPv6.

    :param routes: local addresses of this machine's default routes.
    :param others: addresses of this machine's interfaces.
    """

    def place(address: Address) -> tuple[bool, bool, bool, bool]:
        is_public, is_on_route, is_ipv4 = kind_of(address) == "public", address in routes, address.version == 4
        return not (is_public and is_ipv4), not (is_on_route and is_ipv4), not is_public, not is_on_route

    known = [one for one in dict.fromkeys((*routes, *others)) if kind_of(one) in ("public", "private")]
    return [str(one) for one in sorted(known, key=place)]


def route_addresses() -> list[Address]:
    """Return the local addresses of this machine's default routes, IPv4 before IPv6."""
    found = []
    for family, elsewhere in _ELSEWHERE:
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))
            found.append(parse_ip(str(probe.getsockname()[0])))
    return [one for one in found if one is not None]
