"""Parsing and classification of the addresses of servers and clients, and address blocks to which limits apply."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address

from dmsg.errors import DmsgError

MAX_ADDRESS = 64
"""Maximum number of characters of a client's address from an X-Forwarded-For header. A longer text is truncated,
because the server keeps it in memory."""
MAX_PROXIES = 8
"""Maximum number of entries at the end of an X-Forwarded-For header that are examined for the client's address. Proxies
of the operator may follow one another, and their addresses are skipped."""
IPV6_BLOCK = 64
"""Prefix length of the IPv6 block that one customer usually has."""

_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_][A-Za-z0-9_-]{0,62}(\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*\.?")
"""Pattern of a DNS name in ASCII. A name with other characters must be in its ASCII form, which begins with ``xn--``.
"""
_ZONE = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""Zone of an IPv6 address, such as the name of a network interface."""

Address = IPv4Address | IPv6Address


def is_host(text: str) -> bool:
    """Return whether a text is an IP address or a DNS name in ASCII. Such a text is safe in the first line of an HTTP
    request, because it has no spaces, line ends or other control characters."""
    if _NAME.fullmatch(text):
        return True
    address, percent, zone = text.partition("%")
    return ":" in address and parse_ip(address) is not None and (not percent or bool(_ZONE.fullmatch(zone)))


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port of the address in a server's entry, such as ``host:1``, ``1.2.3.4:1`` or ``[::1]:1``.

    The address comes from an untrusted source. The host must therefore pass :func:`is_host`; any other text could add
    lines to an HTTP request.

    :raises DmsgError: the text is not an address.
    """
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    number = int(port) if len(port) <= 5 and port.isascii() and port.isdigit() else 0
    if not colon or not is_host(host) or not 0 < number < 65536:
        raise DmsgError(f"{address[:80]!r} is not HOST:PORT")
    return host, number


def parse_ip(host: str) -> Address | None:
    """Parse an IP address. Return the IPv4 address for an IPv4-mapped IPv6 address, and None for a DNS name."""
    try:
        found = ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        return found.ipv4_mapped
    return found


@lru_cache(maxsize=4096)
def block_of(host: str, bits: int = IPV6_BLOCK) -> str:
    """Return the name of the address block to which limits apply for this address: the address itself for IPv4, a block
    such as ``2001:db8::/64`` for IPv6.

    :param bits: prefix length of the IPv6 block.
    """
    found = parse_ip(host)
    if isinstance(found, IPv6Address):
        below = 128 - bits
        return f"{IPv6Address(int(found) >> below << below)}/{bits}"
    return host if found is None else str(found)


def kind_of(address: Address) -> str:
    """Return ``public``, ``private``, ``loopback``, or ``none`` for an address that no server can have."""
    if address.is_loopback:
        return "loopback"
    if isinstance(address, IPv6Address) and (
        address.sixtofour is not None or address.teredo is not None or address.is_site_local
    ):
        # These addresses are not accepted: 6to4 and Teredo contain an IPv4 address that is not checked here, and
        # site-local addresses are obsolete.
        return "none"
    if address.is_multicast or address.is_unspecified or address.is_link_local or address.is_reserved:
        return "none"
    return "public" if address.is_global else "private"


@lru_cache(maxsize=4096)
def is_public(host: str) -> bool:
    """Return whether a text is a public IP address. Callers limit only clients with public addresses, because any other
    address may belong to the operator's own reverse proxy."""
    found = parse_ip(host)
    return found is not None and kind_of(found) == "public"


def forwarded_client(header: bytes | None, is_proxy: Callable[[str], bool] = lambda host: False) -> str:
    """Return the client's address from an X-Forwarded-For header; an empty text if the header names no client.

    A client can send a header with any content, and the operator's proxy appends the client's address. So the result is
    the last address that does not belong to one of the operator's proxies. The port that some proxies append is
    removed.

    :param is_proxy: returns whether an address belongs to one of the operator's proxies.
    """
    rest = (header or b"").decode("latin-1")
    for _ in range(MAX_PROXIES):
        rest, _, last = rest.rpartition(",")
        host = _without_port(last.strip()[:MAX_ADDRESS])
        if not is_proxy(host):
            return host
    return ""


def _without_port(text: str) -> str:
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0] if text.count(":") == 1 else text


def parse_port(text: str) -> int:
    """Parse a port number.

    :raises ValueError: the text is not a number from 0 to 65535.
    """
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise ValueError(f"{text[:20]!r} is not a port, 0 to 65535")
    return int(text)


def split_address(text: str) -> tuple[str, int | None]:
    """Split the text of a client's address, which may begin with ``dmsg:``, into a key or name, and the port.

    :returns: the part before the colon, and the port; None without a colon.
    :raises ValueError: the part behind the colon is not a port.
    """
    who, colon, port = text.removeprefix("dmsg:").partition(":")
    return who, parse_port(port) if colon else None
