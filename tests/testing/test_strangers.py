"""Strangers who mean harm to a client: their floods are refused, and they cannot take over its streams."""

from __future__ import annotations

from random import Random
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import CloseReason, DropReason, TransportRefused
from dmsg.testing.bystanders import HARBOUR, Bystanders
from dmsg.testing.lab import Lab
from dmsg.testing.strangers import REQUESTS, STRANGERS, Strangers
from tests.support import Accepting


class StrangersTests(SynchronousTestCase):
    """Strangers at the server of two bystanders."""

    def setUp(self) -> None:
        self.lab = Lab(7)
        self.bystanders = Bystanders(self.lab)
        self.strangers = Strangers(self.lab, HARBOUR, self.bystanders.dave.public_key)
        self.lab.settle()
        self.bystanders.start()

    def test_a_flood_is_blamed_on_the_strangers_and_slows_nobody_else(self) -> None:
        drops = self.lab.servers[HARBOUR].factory.relay.drops
        for number in range(8):
            self.strangers.flood(Random(number))
            self.bystanders.say()
            self.lab.network.run(1)
            self.bystanders.check()
        self.assertTrue(self.strangers.flooded)
        self.assertGreater(drops[DropReason.DESTINATION_RATE], STRANGERS * REQUESTS, drops)
        # Another client still gets its share of the victim's rate.
        self.strangers.flood(Random(8))
        self.bystanders.dave.listen(Accepting(), 9)
        began = self.lab.clock.seconds()
        self.lab.result(self.bystanders.carol.connect(self.bystanders.dave.public_key, Accepting(), 9))
        self.assertLess(self.lab.clock.seconds() - began, 3)

    def test_a_stream_of_another_cannot_be_resumed(self) -> None:
        carol, dave = self.bystanders.carol, self.bystanders.dave
        accepting = Accepting()
        dave.listen(accepting, 9)
        one: Any = self.lab.result(carol.connect(dave.public_key, Accepting(), 9))
        self.lab.result(one.transport.send(b"before"))
        for number in range(6):
            asked = self.strangers.resume(one.transport.secure_end, Random(number))
            self.assertEqual(len(asked), STRANGERS)
            for answer in asked:
                error = self.assertRaises(TransportRefused, self.lab.result, answer)
                self.assertEqual((error.reason, error.final), (CloseReason.NO_SUCH_STREAM, True))
        self.lab.result(one.transport.send(b" and after"))
        self.assertEqual(accepting.built[0].data, b"before and after")
        self.assertEqual((carol.streams.resumed, dave.streams.resumed), (0, 0))
