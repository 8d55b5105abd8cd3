"""Limits of discovery's requests to others: addresses and names."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet.address import IPv4Address
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.discovery.checks import limits
from dmsg.discovery.checks.limits import (
    RESOLVING_PER_BLOCK,
    CheckPostponed,
    NameResolver,
)
from dmsg.discovery.checks.schedule import (
    may_check,
)
from tests.net.test_own_pauses import pass_time


class MayCheckTests(SynchronousTestCase):
    """Discovery cannot be made to connect to addresses in its own network."""

    def test_private_networks_are_only_checked_for_posters_in_them(self) -> None:
        for address, poster, may in (
            ("8.8.8.8:1", "1.1.1.1", True),
            ("8.8.8.8:1", "", True),
            ("relay.example:1", "1.1.1.1", True),
            ("127.0.0.1:1", "1.1.1.1", False),
            ("127.0.0.1:1", "10.0.0.1", False),
            ("127.0.0.1:1", "127.0.0.1", True),
            ("10.0.0.1:1", "1.1.1.1", False),
            ("10.0.0.1:1", "10.0.0.2", True),
            ("[::ffff:127.0.0.1]:1", "1.1.1.1", False),
            ("[::1]:1", "1.1.1.1", False),
            ("169.254.169.254:80", "169.254.0.1", False),
            ("0.0.0.0:1", "0.0.0.0", False),
            ("224.0.0.1:1", "224.0.0.1", False),
            ("nonsense", "1.1.1.1", False),
            ("8.8.8.8%x.example:1", "1.1.1.1", False),
            ("[2002:7f00:1::1]:1", "1.1.1.1", False),
            ("[fec0::1]:1", "1.1.1.1", False),
            ("a..b:1", "1.1.1.1", False),
            ("x" * 64 + ".example:1", "1.1.1.1", False),
            ("127.0.0.1:1", "", False),
            ("[fd00::1]:1", "fd00::/64", True),
            ("[fd00::1]:1", "2600::/64", False),
        ):
            self.assertEqual(may_check(address, poster), may, (address, poster))

    def test_an_option_allows_checks_in_private_networks(self) -> None:
        """An option for discoveries of private networks."""
        for address, may in (("10.0.0.1:1", True), ("127.0.0.1:1", True), ("169.254.169.254:80", False)):
            self.assertEqual(may_check(address, "1.1.1.1", anywhere=True), may, address)


class NamesTests(SynchronousTestCase):
    """A resolver that answers when the test says."""

    def setUp(self) -> None:
        self.clock: Any = Clock()
        self.asked: list[tuple[Any, str]] = []
        cast(Any, self.clock).nameResolver = self
        self.names = NameResolver(self.clock)

    def resolveHostName(self, receiver: Any, host: str) -> None:
        self.asked.append((receiver, host))

    def resolve(self, host: str, place: str) -> Deferred[Any]:
        return Deferred.fromCoroutine(self.names.resolve(host, place))

    def answer(self, *addresses: str) -> None:
        receiver, _ = self.asked.pop(0)
        for address in addresses:
            receiver.addressResolved(IPv4Address("TCP", address, 0))
        receiver.resolutionComplete()

    def test_names_that_take_long_keep_few_threads(self) -> None:
        """A look-up that was cancelled keeps its place, because its thread is still busy."""
        slow = [self.resolve(f"{number}.slow", "1.1.1.1") for number in range(50)]
        self.assertEqual(len(self.asked), RESOLVING_PER_BLOCK)
        for one in slow[RESOLVING_PER_BLOCK:]:
            self.failureResultOf(one, CheckPostponed)
        pass_time(self.clock, limits.NAME_TIMEOUT + 0.1)
        for one in slow[:RESOLVING_PER_BLOCK]:
            self.failureResultOf(one, CheckPostponed)
        self.failureResultOf(self.resolve("more.slow", "1.1.1.1"), CheckPostponed)
        honest = self.resolve("honest.example", "2.2.2.2")
        self.assertEqual(self.asked[-1][1], "honest.example")
        self.asked = self.asked[-1:] + self.asked[:-1]
        self.answer("8.8.8.8")
        self.assertEqual([str(one) for one in self.successResultOf(honest)], ["8.8.8.8"])
        self.answer()
        self.assertNoResult(self.resolve("more.slow", "1.1.1.1"))

    def test_a_name_that_led_to_a_server(self) -> None:
        """Without room for another look-up, the server's last known addresses are used."""
        first = self.resolve("honest.example", "2.2.2.2")
        self.answer("8.8.8.8")
        addresses = self.successResultOf(first)
        self.names.remember_addresses("honest.example", addresses)
        for number in range(limits.RESOLVING):
            self.assertNoResult(self.resolve(f"{number}.slow", f"1.1.{number}.1"))
        self.assertEqual(self.successResultOf(self.resolve("honest.example", "2.2.2.2")), addresses)
        self.failureResultOf(self.resolve("other.example", "2.2.2.2"), CheckPostponed)

    def test_a_name_that_does_not_resolve_fails_the_check(self) -> None:
        none = self.resolve("none.example", "2.2.2.2")
        self.answer()
        self.assertEqual(self.successResultOf(none), [])
