"""Networks and keys for tests of peers on a network."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from dmsg.keys import SecKey
from dmsg.net.mdns.interfaces import Interface

ALICE, BOB = SecKey.from_seed(b"lan alice"), SecKey.from_seed(b"lan bob")
"""Sender and receiver."""
HOME = Interface("wlan0", 3, IPv4Address("192.168.1.5"), IPv4Network("192.168.1.0/24"))
HOME6 = Interface("wlan0", 3, IPv6Address("fe80::5"), IPv6Network("fe80::/10"))
NUMBER = 5274
