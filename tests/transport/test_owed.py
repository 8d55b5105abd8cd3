"""Which receipts a server takes."""

from __future__ import annotations

from dataclasses import replace

from twisted.trial.unittest import SynchronousTestCase

from dmsg.keys import SecKey
from dmsg.telemetry.receipts import RECEIPT_SIZE, Receipt, Role
from dmsg.transport import owed as owed_module
from dmsg.transport.owed import OWED_FOR, Owed

A, B, C, SERVER = (SecKey.from_seed(bytes([number])) for number in range(1, 5))
TRANSPORT = bytes(range(16))
RECEIPT = Receipt(Role.INITIATOR, TRANSPORT, SERVER.public, A.public, B.public, 10, 20)


def key(secret: SecKey) -> bytes:
    return bytes(secret.public)


class OwedTests(SynchronousTestCase):
    """By plain calls."""

    def setUp(self) -> None:
        self.owed = Owed(key(SERVER))

    def carry(self, transport: bytes = TRANSPORT) -> None:
        self.owed.carries(transport, key(A), key(B))

    def test_one_of_each_end(self) -> None:
        self.carry()
        of_a, of_b = RECEIPT.sign(A), replace(RECEIPT, role=Role.RESPONDER, signer=B.public, peer=A.public).sign(B)
        self.assertTrue(self.owed.takes(of_a, key(A)))
        self.assertFalse(self.owed.takes(of_a, key(A)))
        self.owed.ended(TRANSPORT, 5.0)
        self.assertTrue(self.owed.takes(of_b, key(B)))
        self.assertFalse(self.owed.takes(of_b, key(B)))
        self.assertEqual(len(self.owed), 0)

    def test_what_was_not_due(self) -> None:
        """Of no transport, by no end of it, for another server, handed in by somebody else, badly signed."""
        self.carry()
        good = RECEIPT.sign(A)
        for data, by in (
            (bytes(RECEIPT_SIZE), key(A)),
            (replace(RECEIPT, transport=bytes(16)).sign(A), key(A)),
            (replace(RECEIPT, signer=C.public).sign(C), key(C)),
            (replace(RECEIPT, server=C.public).sign(A), key(A)),
            (good, key(B)),
            (RECEIPT.sign(B), key(A)),
            (good[:-1] + bytes([good[-1] ^ 1]), key(A)),
        ):
            self.assertFalse(self.owed.takes(data, by))
        self.assertTrue(self.owed.takes(good, key(A)))

    def test_they_are_waited_for_so_long(self) -> None:
        self.carry()
        self.owed.ended(TRANSPORT, 5.0)
        self.owed.ended(bytes(16), 5.0 + OWED_FOR - 1)
        self.assertEqual(len(self.owed), 1)
        self.owed.ended(bytes(16), 5.0 + OWED_FOR)
        self.assertFalse(self.owed.takes(RECEIPT.sign(A), key(A)))
        self.assertEqual(len(self.owed), 0)

    def test_they_are_so_many(self) -> None:
        """Those of open transports stay longest."""
        self.patch(owed_module, "MAX_OWED", 4)
        self.carry()
        for number in range(10):
            self.carry(bytes([number]) * 16)
            self.owed.ended(bytes([number]) * 16, float(number))
        self.assertEqual(len(self.owed), 4)
        self.assertEqual([one[0] for one in self.owed._ended], [7, 8, 9])
        self.owed.ended(TRANSPORT, 20.0)
        self.owed.ended(bytes(16), 8.0 + OWED_FOR)
        self.assertEqual([one[0] for one in self.owed._ended], [9, 0])
        self.assertTrue(self.owed.takes(RECEIPT.sign(A), key(A)))
