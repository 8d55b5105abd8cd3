"""Sockets for multicast DNS on one address of this machine, for use with Twisted.

There is a separate socket for each address. Twisted reports a sender's address without its scope, so only the socket
shows on which network a packet arrived.
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
"""Hop limit of multicast DNS packets, as RFC 6762 requires."""
IP_MULTICAST_ALL = 49
"""Number of the Linux option IP_MULTICAST_ALL, for which Python has no name. The option decides whether a socket also
receives packets of groups that only other sockets joined."""

Received = Callable[[bytes, str, int], None]
"""Callback for a packet, called with its data and its sender's address and port."""


class _Packets(DatagramProtocol):
    """Protocol that passes each packet to a callback. An exception in the callback does not close the socket."""

    noisy = False

    def __init__(self, received: Received) -> None:
        self._received = received

    def datagramReceived(self, datagram: bytes, addr: tuple[str, int]) -> None:
        call_isolated(self._received, datagram, addr[0], addr[1])


def is_ipv6(interface: Interface) -> bool:
    """Whether the interface's address is an IPv6 address."""
    return isinstance(interface.address, IPv6Address)


def group_of(interface: Interface) -> str:
    """Return the multicast group of multicast DNS as an address to which a socket of this interface can send."""
    return interface.scoped(GROUP6) if is_ipv6(interface) else GROUP4


def _open(interface: Interface, host: str, port: int, *, join: bool) -> socket.socket:
    six = is_ipv6(interface)
    handle = socket.socket(socket.AF_INET6 if six else socket.AF_INET, socket.SOCK_DGRAM)
    try:
        handle.setblocking(False)
        if join:  # The port is shared with other programs on this machine that use multicast DNS, such as avahi.
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
        # The limit is one byte more than the parsers accept. A packet that is too long is then recognised, instead of
        # being truncated to a valid size.
        adopted = reactor.adoptDatagramPort(handle.fileno(), handle.family, _Packets(received), MAX_PACKET + 1)
    finally:
        handle.close()  # The socket can be closed, because the reactor has duplicated the descriptor.
    return cast("Port", adopted)


def open_responder(reactor: IReactorSocket, interface: Interface, received: Received) -> Port:
    """Return a UDP port that receives the questions on one network.

    The socket is bound to the multicast group, so that it receives no unicast packets meant for other programs at port
    5353.

    :raises OSError: the network has no multicast, or another program does not share the port.
    """
    return _adopt(reactor, _open(interface, GROUP6 if is_ipv6(interface) else GROUP4, PORT, join=True), received)


def open_asker(reactor: IReactorSocket, interface: Interface, received: Received) -> Port:
    """Return a UDP port for sending questions on one network and receiving their answers. The system chooses its
    number.

    :raises OSError: this machine no longer has the address.
    """
    return _adopt(reactor, _open(interface, str(interface.address), 0, join=False), received)
