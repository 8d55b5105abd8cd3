"""Addresses of servers, and of those who ask: what they are, and whom they are counted as."""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address

from dmsg.errors import DmsgError

MAX_ADDRESS = 64
"""Characters of an address that somebody says: it is remembered."""
IPV6_BLOCK = 64
"""Bits of an IPv6 address that are one customer's: he has all addresses below."""

Address = IPv4Address | IPv6Address


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of a server entry's address, as in ``host:1``, ``1.2.3.4:1``, ``[::1]:1``.

    :raises DmsgError: it is none.
    """
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not colon or not host or len(port) > 5 or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise DmsgError(f"{address[:80]!r} is not HOST:PORT")
    return host, int(port)


def literal(host: str) -> Address | None:
    """The address that a text is, one of IPv4 inside one of IPv6 taken out; None for a name."""
    try:
        found = ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        return found.ipv4_mapped
    return found


@lru_cache(maxsize=4096)
def block_of(host: str, bits: int = IPV6_BLOCK) -> str:
    """Whom an address is counted as: itself, or the block that an IPv6 address is in.

    :param bits: that are common to the addresses of a block.
    """
    found = literal(host)
    if isinstance(found, IPv6Address):
        below = 128 - bits
        return f"{IPv6Address(int(found) >> below << below)}/{bits}"
    return host if found is None else str(found)


def kind_of(address: Address) -> str:
    """``public``, ``private``, ``loopback``, or ``none``: nobody's server is there."""
    if address.is_loopback:
        return "loopback"
    if isinstance(address, IPv6Address) and (
        address.sixtofour is not None or address.teredo is not None or address.is_site_local
    ):
        return "none"  # leads to an address of IPv4 that it hides, or to none
    if address.is_multicast or address.is_unspecified or address.is_link_local or address.is_reserved:
        return "none"
    return "public" if address.is_global else "private"


@lru_cache(maxsize=4096)
def is_public(host: str) -> bool:
    """A text is an address on the internet: whoever is there is a stranger, and no proxy of ours."""
    found = literal(host)
    return found is not None and kind_of(found) == "public"


def forwarded_client(header: bytes | None) -> str:
    """Whom our own proxy saw, by X-Forwarded-For: the last; what stands before it anybody can write.  Or empty."""
    return (header or b"").decode("latin-1").rpartition(",")[2].strip()[:MAX_ADDRESS]


def parse_port(text: str) -> int:
    """:raises ValueError: not 0 to 65535."""
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise ValueError(f"{text[:20]!r} is not a port, 0 to 65535")
    return int(text)
