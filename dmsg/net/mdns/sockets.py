"""Sockets for multicast DNS on one address of this machine, used by Twisted.

Each address has a socket of its own: Twisted reports the sender's address without its scope, so only the socket shows
on which network a packet arrived.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Callable
from ipaddress import IPv6Address
from typing import cast

from twisted.internet.interfaces import IReactorSocket
from twisted.internet.protocol import DatagramProtocol
from twisted.internet.udp import Port

from dmsg.net.isolate import call_isolated
from dmsg.net.mdns.interfaces import Interface
from dmsg.net.mdns.packets import MAX_PACKET, PORT

GROUP4, GROUP6 = "224.0.0.251", "ff02::fb"
HOPS = 255
"""Hop limit of packets of multicast DNS, as RFC 6762 asks."""
IP_MULTICAST_ALL = 49
"""Linux's option, which Python does not name: whether a socket gets packets of groups that other sockets joined."""

Received = Callable[[bytes, str, int], None]
"""Callback for a packet: its data, and the address and port of its sender."""


class _Packets(DatagramProtocol):
    """Protocol that passes each packet to a callback; an error in it does not end the socket."""

    noisy = False

    def __init__(self, received: Received) -> None:
        self._received = received

    def datagramReceived(self, datagram: bytes, addr: tuple[str, int]) -> None:
        call_isolated(self._received, datagram, addr[0], addr[1])


def is_ipv6(interface: Interface) -> bool:
    """Whether the address is an IPv6 address."""
    return isinstance(interface.address, IPv6Address)


def group_of(interface: Interface) -> str:
    """Return the group of multicast DNS, as an address to which a socket of this interface can send."""
    return interface.scoped(GROUP6) if is_ipv6(interface) else GROUP4


def _open(interface: Interface, host: str, port: int, *, join: bool) -> socket.socket:
    six = is_ipv6(interface)
    handle = socket.socket(socket.AF_INET6 if six else socket.AF_INET, socket.SOCK_DGRAM)
    try:
        handle.setblocking(False)
        if join:  # The port is shared, because other programs on this machine, such as avahi, use it, too.
            handle.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if hasattr(socket, "SO_REUSEPORT"):
                handle.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if six:
            handle.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            handle.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, interface.index)
            handle.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, HOPS)
            handle.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS, HOPS)
            if join:
                member = socket.inet_pton(socket.AF_INET6, GROUP6) + struct.pack("@I", interface.index)
                handle.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, member)
            handle.bind((host, port, 0, interface.index))
        else:
            own = interface.address.packed
            handle.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, own)
            handle.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, HOPS)
            handle.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, HOPS)
            if join:
                if sys.platform == "linux":
                    handle.setsockopt(socket.IPPROTO_IP, IP_MULTICAST_ALL, 0)
                handle.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(GROUP4) + own)
            handle.bind((host, port))
    except BaseException:
        handle.close()
        raise
    return handle


def _adopt(reactor: IReactorSocket, handle: socket.socket, received: Received) -> Port:
    try:
        # One byte more is read than may be parsed, so that a longer packet is recognised and not cut.
        adopted = reactor.adoptDatagramPort(handle.fileno(), handle.family, _Packets(received), MAX_PACKET + 1)
    finally:
        handle.close()  # The socket can be closed, because the reactor has made a copy of the descriptor.
    return cast("Port", adopted)


def open_responder(reactor: IReactorSocket, interface: Interface, received: Received) -> Port:
    """Return a UDP port that gets the questions of one network.

    The socket is bound to the group, so that it takes no unicast packets from other programs with port 5353.

    :raises OSError: the network has no multicast, or another program has the port for itself.
    """
    return _adopt(reactor, _open(interface, GROUP6 if is_ipv6(interface) else GROUP4, PORT, join=True), received)


def open_asker(reactor: IReactorSocket, interface: Interface, received: Received) -> Port:
    """Return a UDP port with a free number, from which questions are asked on one network, and to which the answers
    come.

    :raises OSError: the address is not there any more.
    """
    return _adopt(reactor, _open(interface, str(interface.address), 0, join=False), received)
