"""Who is let in to knock: before any key is worked out."""

from __future__ import annotations

from typing import Any

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.delegation import doorman as doorman_module
from dmsg.delegation.doorman import OF_ALL_BURST, OF_ONE_BURST, OF_ONE_RATE, Doorman
from dmsg.errors import CloseReason
from dmsg.keys import PubKey
from dmsg.transport.agreement import Offer
from dmsg.transport.wire import CLOSE, REQUEST, Frame
from tests.support import KEYS, SERVER_KEY, Accepting, RawClient
from tests.transport.secure_support import SecureCase

A, B = KEYS["A"].public, KEYS["B"].public


def request(number: int, of: PubKey = A) -> bytes:
    return number.to_bytes(33, "big")


class DoormanTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.factories: list[Any] = []
        self.doorman = Doorman(self.clock.seconds, lambda: self.factories)

    def test_each_once(self) -> None:
        self.assertIsNone(self.doorman.refusal(A, request(1)))
        self.assertIs(self.doorman.refusal(A, request(1)), CloseReason.NOT_AUTHENTIC)
        # by whomever it is said again
        self.assertIs(self.doorman.refusal(B, request(1, B)), CloseReason.NOT_AUTHENTIC)
        self.assertEqual(self.doorman.refused, 2)

    def test_of_one_and_of_all(self) -> None:
        for number in range(int(OF_ONE_BURST)):
            self.assertIsNone(self.doorman.refusal(A, request(number)))
        self.assertIs(self.doorman.refusal(A, request(99_999)), CloseReason.RATE_LIMITED)
        self.assertIsNone(self.doorman.refusal(B, request(99_998)))
        self.clock.advance(1)
        for number in range(int(OF_ONE_RATE)):
            self.assertIsNone(self.doorman.refusal(A, request(100_000 + number)))
        self.assertIs(self.doorman.refusal(A, request(200_000)), CloseReason.RATE_LIMITED)

    def test_what_is_refused_is_not_remembered(self) -> None:
        self.patch(doorman_module, "REMEMBERED", 3)
        for number in range(5):
            self.assertIsNone(self.doorman.refusal(A, request(number)))
        self.assertEqual(len(self.doorman._seen), 3)
        self.assertGreater(OF_ALL_BURST, OF_ONE_BURST)

    def test_who_is_admitted(self) -> None:
        """Nobody whom no listener takes; everybody, as long as one asks nothing, or there is none."""
        self.assertIsNone(self.doorman.refusal(A, request(1)))

        class Only:
            def admits(self, address: Any) -> bool:
                return bool(address.public_key == A)

        self.factories.append(Only())
        self.assertIsNone(self.doorman.refusal(A, request(2)))
        self.assertIs(self.doorman.refusal(B, request(3, B)), CloseReason.REFUSED)
        self.factories.append(object())
        self.assertIsNone(self.doorman.refusal(B, request(4, B)))


class ReplayTests(SecureCase):
    """At a whole client."""

    def test_a_request_said_again_costs_no_keys(self) -> None:
        """By a client that has seen it go by, or by a relay."""
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
