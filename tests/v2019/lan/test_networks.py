"""Networks that come and go while something runs on them."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network

from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.net.mdns.interfaces import Interface
from dmsg.v2019.lan.networks import CHECK_INTERVAL, Networks
from tests.v2019.lan.support import HOME, HOME6

OFFICE = Interface("eth0", 2, IPv4Address("10.0.0.5"), IPv4Network("10.0.0.0/8"))


class Running:
    """Service that runs on an address."""

    def __init__(self, log: list[tuple[str, Interface]], interface: Interface) -> None:
        self.log = log
        self.interface = interface
        log.append(("start", interface))

    def stop(self) -> Deferred[None]:
        self.log.append(("stop", self.interface))
        return succeed(None)


class NetworksTests(SynchronousTestCase):
    """A machine that is moved about."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.present = [HOME]
        self.broken: set[Interface] = set()
        self.log: list[tuple[str, Interface]] = []
        self.warnings: list[str] = []
        self.networks = Networks(self.clock, lambda: list(self.present), self.open_on, self.warnings.append)

    def open_on(self, interface: Interface) -> Running:
        if interface in self.broken:
            raise OSError("no such device")
        return Running(self.log, interface)

    def test_it_follows_the_addresses_of_the_machine(self) -> None:
        self.assertEqual(self.networks.interfaces, [HOME])
        self.present = [HOME, OFFICE]
        self.clock.advance(CHECK_INTERVAL)
        self.present = [OFFICE]
        self.clock.advance(CHECK_INTERVAL)
        self.assertEqual(self.networks.interfaces, [OFFICE])
        self.assertEqual(self.log, [("start", HOME), ("start", OFFICE), ("stop", HOME)])
        self.successResultOf(self.networks.stop())
        self.assertEqual(self.log[-1], ("stop", OFFICE))
        self.clock.advance(10 * CHECK_INTERVAL)
        self.assertEqual((self.networks.interfaces, self.clock.getDelayedCalls()), ([], []))

    def test_an_address_that_cannot_be_used_is_tried_again_and_stops_no_other(self) -> None:
        self.broken = {HOME6}
        self.present = [HOME6, OFFICE]
        self.clock.advance(CHECK_INTERVAL)
        self.assertEqual(self.networks.interfaces, [OFFICE])
        self.assertEqual(self.networks.failed, {"fe80::5%wlan0": "no such device"})
        self.clock.advance(CHECK_INTERVAL)
        self.assertEqual(self.warnings, ["codes cannot be exchanged on the network at fe80::5%wlan0: no such device"])
        self.broken = set()
        self.clock.advance(CHECK_INTERVAL)
        self.assertEqual(self.networks.interfaces, [OFFICE, HOME6])
        self.assertEqual(self.networks.failed, {})

    def test_a_system_that_does_not_tell_is_asked_again(self) -> None:
        def failing() -> list[Interface]:
            raise OSError("getifaddrs")

        self.networks._list_interfaces = failing
        self.clock.advance(CHECK_INTERVAL)
        self.assertEqual(self.networks.interfaces, [HOME])
        self.assertEqual(self.networks.failed, {"this machine": "getifaddrs"})
