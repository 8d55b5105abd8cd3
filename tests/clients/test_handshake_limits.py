"""Limits of handshakes, which apply before any key is computed."""

from __future__ import annotations

from typing import Any

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.clients import handshake_limits as doorman_module
from dmsg.clients.handshake_limits import (
    ALL_KNOWN_BURST,
    ALL_STRANGERS_BURST,
    ALL_STRANGERS_RATE,
    ONE_KNOWN_BURST,
    ONE_KNOWN_RATE,
    ONE_STRANGER_BURST,
    RESERVED_BURST,
    HandshakeLimits,
)
from dmsg.errors import CloseReason
from dmsg.keys import SecKey
from dmsg.streams.core.agreement import Offer
from dmsg.testing.raw_client import RawClient
from dmsg.v2019.core.wire import CLOSE, REQUEST, Frame
from tests.support import KEYS, SERVER_KEY, Accepting
from tests.v2019.secure_support import SecureCase

A, B = KEYS["A"].public, KEYS["B"].public


def request(number: int) -> bytes:
    return number.to_bytes(33, "big")


class HandshakeLimitsTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.factories: list[Any] = []
        self.handshake_limits = HandshakeLimits(self.clock.seconds, lambda: self.factories)
        self.here, self.there = (self.handshake_limits.at(KEYS[name].public) for name in "CB")
        self.count = 0

    def asked(self, count: float, *who: bytes, at: Any = None) -> int:
        """Return how many of ``count`` handshakes, from these initiators in turn, are admitted."""
        let_in = 0
        for number in range(int(count)):
            self.count += 1
            let_in += (at or self.here)(who[number % len(who)], request(self.count)) is None
        return let_in

    def test_a_handshake_is_counted_once(self) -> None:
        self.assertIsNone(self.here(A, request(1)))
        self.assertIs(self.here(A, request(1)), CloseReason.NOT_AUTHENTIC)
        # A repeated ephemeral key is refused, whoever sends it and at whichever server.
        self.assertIs(self.there(B, request(1)), CloseReason.NOT_AUTHENTIC)
        self.assertEqual(self.handshake_limits.refused, 2)

    def test_strangers_displace_no_peer_to_which_this_client_connects(self) -> None:
        """Strangers with many keys complete a handshake each, which makes all of them known."""
        self.patch(doorman_module, "MAX_KNOWN", 10)
        self.handshake_limits.remember_contacted(A)
        for number in range(100):
            self.handshake_limits.remember(SecKey.from_seed(b"%d" % number).public)
        self.assertEqual(self.asked(ONE_KNOWN_BURST + 10, A), ONE_KNOWN_BURST)
        for number in range(10):
            self.handshake_limits.remember_contacted(SecKey.from_seed(b"contacted %d" % number).public)
        self.assertEqual((len(self.handshake_limits._known_keys), len(self.handshake_limits._contacted_keys)), (10, 10))

    def test_handshakes_of_a_single_server_are_limited(self) -> None:
        self.handshake_limits.remember(A)
        self.assertEqual(self.asked(ONE_KNOWN_BURST + 10, A), ONE_KNOWN_BURST)
        self.assertIs(self.here(A, request(0)), CloseReason.RATE_LIMITED)
        self.clock.advance(1)
        self.assertEqual(self.asked(ONE_KNOWN_RATE + 10, A), ONE_KNOWN_RATE)
        # Handshakes through another server were counted for that server.
        self.assertEqual(self.asked(10, A, at=self.there), 10)

    def test_strangers_do_not_displace_known_keys(self) -> None:
        self.handshake_limits.remember(A)
        # There are as many strangers as places, each with a key of its own.
        names = [bytes([2]) + number.to_bytes(32, "big") for number in range(int(ALL_STRANGERS_BURST) + 50)]
        self.assertEqual(self.asked(len(names), *names), ALL_STRANGERS_BURST)
        self.assertIs(self.here(B, request(0)), CloseReason.RATE_LIMITED)
        self.assertEqual(self.asked(100, A), 100)
        self.assertIsNone(self.there(B, request(0)))

    def test_repeated_strangers_do_not_displace_new_keys(self) -> None:
        """At most one of fifty newcomers is refused, however many known strangers repeat their handshakes."""
        for attackers in (100, 1000):
            self.setUp()
            names = [bytes([2]) + number.to_bytes(32, "big") for number in range(attackers)]
            let_in = newcomers = refused = 0
            for turn in range(600):
                self.clock.advance(0.02)
                let_in += self.asked(100, *names)  # This is a rate of 5000 a second.
                names = [*names[100:], *names[:100]]
                if not turn % 6:
                    newcomers += 1
                    refused += not self.asked(1, bytes([3]) + turn.to_bytes(32, "big"))
            self.assertEqual((newcomers, refused), (100, 0), attackers)
            self.assertLess(let_in, 12 * ALL_STRANGERS_RATE + ALL_STRANGERS_BURST)

    def test_servers_are_counted_apart_and_forgotten(self) -> None:
        self.patch(doorman_module, "MAX_SERVERS", 2)
        for name in "ABC":
            self.asked(1, A, at=self.handshake_limits.at(KEYS[name].public))
        self.assertEqual(len(self.handshake_limits._all_strangers), 2)

    def test_each_server_has_its_own_share(self) -> None:
        others = [bytes([2]) + number.to_bytes(32, "big") for number in range(100)]
        for one in (A, *others):
            self.handshake_limits.remember(one)  # type: ignore[arg-type]
        least = RESERVED_BURST * len(others)
        self.assertEqual(self.asked(ALL_KNOWN_BURST + least + 500, *others), ALL_KNOWN_BURST + least)
        self.assertEqual(self.asked(RESERVED_BURST + 5, A), RESERVED_BURST)

    def test_of_one_stranger(self) -> None:
        self.assertEqual(self.asked(ONE_STRANGER_BURST + 10, A), ONE_STRANGER_BURST)
        self.assertEqual(self.asked(5, B), 5)
        self.handshake_limits.remember(A)
        self.assertEqual(self.asked(300, A), 300)

    def test_the_number_of_known_keys_is_limited(self) -> None:
        self.patch(doorman_module, "MAX_KNOWN", 3)
        for number in range(5):
            self.handshake_limits.remember(bytes([number]))  # type: ignore[arg-type]
        self.assertEqual(len(self.handshake_limits._known_keys), 3)

    def test_initiators_refused_by_all_listeners_are_not_admitted(self) -> None:
        """All initiators are admitted while a listener accepts anybody or there is no listener."""
        self.assertIsNone(self.here(A, request(1)))

        class Only:
            def admits(self, address: Any) -> bool:
                return bool(address.public_key == A)

        self.factories.append(Only())
        self.assertIsNone(self.here(A, request(2)))
        self.assertIs(self.here(B, request(3)), CloseReason.REFUSED)
        self.assertIs(self.here(bytes(33), request(4)), CloseReason.REFUSED)
        self.factories.append(object())
        self.assertIsNone(self.here(B, request(5)))


class ReplayTests(SecureCase):
    """Repeated requests at a client."""

    def test_a_request_said_again_costs_no_keys(self) -> None:
        """The request is repeated by another client that has seen it, or by a relay."""
        raw = RawClient(KEYS["C"], SERVER_KEY.public)
        self.network.join(raw)
        self.network.settle()
        raw.take()
        opened: list[bytes] = []
        original = Offer.__init__

        def counted(offer: Any, key: Any, payload: bytes) -> None:
            opened.append(payload)
            original(offer, key, payload)

        self.patch(Offer, "__init__", counted)
        self.a.open(B, Accepting(), port=7, secure=True)
        self.network.settle()
        self.assertEqual(len(opened), 1)
        replayed = bytes(KEYS["C"].public + B) + opened[0][66:]
        for number in range(50):
            raw.send(Frame(REQUEST, 2 * number, replayed).encode())
        self.network.settle()
        self.assertEqual(len(opened), 1)
        self.assertEqual(
            [(frame.type, frame.payload[0]) for frame in raw.take()], [(CLOSE, CloseReason.NOT_AUTHENTIC)] * 50
        )
