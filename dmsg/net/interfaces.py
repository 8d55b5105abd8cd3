"""Addresses of the network interfaces of this machine, from ``getifaddrs(3)``.

Python's standard library gives the names of the interfaces, but neither their addresses nor the sizes of their
networks.
"""

from __future__ import annotations

import ctypes
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address
from itertools import islice

from dmsg.net.addresses import Address

MAX_ADDRESSES = 1024
"""Maximum number of addresses that :func:`interface_addresses` returns; further ones are left out."""
UP = 0x1
_HAS_SIZE = sys.platform != "linux"
"""Whether a socket address begins with a byte for its size, as on BSD and macOS."""


class _IfAddrs(ctypes.Structure):
    """Entry in the list that ``getifaddrs`` returns, with only the fields that all systems have."""


_IfAddrs._fields_ = [  # The fields are set here, because the structure refers to itself.
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("netmask", ctypes.c_void_p),
]


def interface_addresses() -> list[Address]:
    """Return the addresses of all interfaces that are up, in the order of the system. The list is empty if the system
    reports none."""
    with suppress(OSError):
        found = (address for _, flags, address, _ in system_addresses() if flags & UP)
        return list(dict.fromkeys(islice(found, MAX_ADDRESSES)))
    return []


def system_addresses() -> Iterator[tuple[str, int, IPv4Address | IPv6Address, IPv4Address | None]]:
    """Iterate over the addresses of all network interfaces. Each item has the name and flags of the interface, the
    address, and the netmask of an IPv4 address.

    :raises OSError: the system call failed.
    """
    library = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_IfAddrs)()
    if library.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), "getifaddrs")
    try:
        one = first
        while one:
            entry = one.contents
            address = _read(entry.address)
            mask = _read(entry.netmask)
            if address is not None:
                yield entry.name.decode(), entry.flags, address, mask if isinstance(mask, IPv4Address) else None
            one = entry.next
    finally:
        library.freeifaddrs(first)


def _read(pointer: int | None) -> IPv4Address | IPv6Address | None:
    if not pointer:
        return None
    head = ctypes.string_at(pointer, 2)
    family = head[1] if _HAS_SIZE else int.from_bytes(head, sys.byteorder)
    if family == socket.AF_INET:
        return IPv4Address(ctypes.string_at(pointer + 4, 4))
    if family == socket.AF_INET6:
        data = bytearray(ctypes.string_at(pointer + 8, 16))
        if data[0] == 0xFE and data[1] & 0xC0 == 0x80 and _HAS_SIZE:
            data[2:4] = b"\0\0"  # BSD stores the scope inside a link-local address, so the scope is removed.
        return IPv6Address(bytes(data))
    return None
