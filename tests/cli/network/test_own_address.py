"""Which address of a machine an invitation names."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from dmsg.cli.network.own_address import own_addresses, rank
from dmsg.net.addresses import Address, kind_of, parse_ip


def addresses(*texts: str) -> list[Address]:
    return [one for one in map(parse_ip, texts) if one is not None]


class RankTests(SynchronousTestCase):
    """The order of addresses."""

    def test_a_public_address_goes_before_the_private_one_of_the_default_route(self) -> None:
        """As on a machine whose second interface is the one on the internet."""
        self.assertEqual(rank(addresses("10.0.0.5"), addresses("10.0.0.5", "1.1.1.1")), ["1.1.1.1", "10.0.0.5"])

    def test_the_private_address_of_a_home_goes_before_its_public_ipv6(self) -> None:
        found = rank(addresses("192.168.1.7", "2606:4700::7"), addresses("172.17.0.1", "192.168.1.7", "2606:4700::7"))
        self.assertEqual(found, ["192.168.1.7", "2606:4700::7", "172.17.0.1"])

    def test_a_network_without_a_default_route_has_an_address_all_the_same(self) -> None:
        self.assertEqual(rank([], addresses("127.0.0.1", "10.77.0.1", "::1", "fe80::1")), ["10.77.0.1"])

    def test_a_machine_with_ipv6_alone_is_reached_by_ipv6(self) -> None:
        self.assertEqual(rank(addresses("fd00::7"), addresses("fd00::7", "2606:4700::7")), ["2606:4700::7", "fd00::7"])

    def test_addresses_where_nobody_reaches_this_machine_are_left_out(self) -> None:
        self.assertEqual(rank([], addresses("127.0.0.1", "::1", "fe80::1", "224.0.0.1", "0.0.0.0")), [])

    def test_the_addresses_of_this_machine_are_for_others(self) -> None:
        self.assertLessEqual({kind_of(one) for one in addresses(*own_addresses())}, {"public", "private"})
