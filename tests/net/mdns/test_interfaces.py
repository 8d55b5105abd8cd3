"""Addresses of this machine: which are used, and which others are on their link."""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from twisted.trial.unittest import SynchronousTestCase

from dmsg.net.interfaces import UP, system_addresses
from dmsg.net.mdns.interfaces import (
    LOOPBACK,
    MULTICAST,
    POINT_TO_POINT,
    RUNNING,
    Interface,
    is_usable,
    list_interfaces,
)

FOUR = Interface("wlan0", 3, IPv4Address("192.168.1.5"), IPv4Network("192.168.1.0/24"))
SIX = Interface("wlan0", 3, IPv6Address("fe80::5"), IPv6Network("fe80::/10"))


class InterfaceTests(SynchronousTestCase):
    """Networks of this machine."""

    def test_only_addresses_of_machines_in_the_network_are_on_the_link(self) -> None:
        self.assertTrue(FOUR.has_on_link("192.168.1.9"))
        self.assertTrue(FOUR.has_on_link("::ffff:192.168.1.9"))
        outside = ["192.168.2.9", "127.0.0.1", "224.0.0.251", "0.0.0.0", "192.168.1.0", "192.168.1.255", "fe80::9", "?"]
        self.assertEqual([host for host in outside if FOUR.has_on_link(host)], [])

    def test_of_ipv6_only_link_local_addresses_are_on_the_link(self) -> None:
        self.assertTrue(SIX.has_on_link("fe80::9"))
        self.assertTrue(SIX.has_on_link("fe80::9%wlan0"))
        outside = ["2001:db8::9", "fd00::9", "::1", "::", "ff02::fb", "192.168.1.9"]
        self.assertEqual([host for host in outside if SIX.has_on_link(host)], [])

    def test_a_network_of_two_has_no_broadcast_address(self) -> None:
        pair = Interface("eth0", 2, IPv4Address("10.0.0.0"), IPv4Network("10.0.0.0/31"))
        self.assertTrue(pair.has_on_link("10.0.0.1"))

    def test_a_link_local_address_gets_its_scope_once(self) -> None:
        self.assertEqual(SIX.host, "fe80::5%wlan0")
        self.assertEqual(SIX.scoped("fe80::9%wlan0"), "fe80::9%wlan0")
        self.assertEqual(FOUR.scoped("192.168.1.9"), "192.168.1.9")

    def test_loopback_tunnels_and_unplugged_networks_are_not_used(self) -> None:
        good = UP | RUNNING | MULTICAST
        self.assertTrue(is_usable(good))
        for flags in (good | LOOPBACK, good | POINT_TO_POINT, good & ~UP, good & ~RUNNING, good & ~MULTICAST):
            self.assertFalse(is_usable(flags), hex(flags))

    def test_the_systems_addresses_are_read(self) -> None:
        """The list of the system has at least loopback, and what is used of it belongs to a network card."""
        found = {(name, str(address), str(mask)) for name, _, address, mask in system_addresses()}
        self.assertTrue(any(address == "127.0.0.1" and mask == "255.0.0.0" for _, address, mask in found), found)
        names = {name for _, name in socket.if_nameindex()}
        for one in list_interfaces():
            self.assertIn(one.name, names)
            self.assertFalse(one.address.is_loopback)
            self.assertIn(one.address, one.network)
