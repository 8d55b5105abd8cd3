"""Receipts that a server accepts."""

from __future__ import annotations

from dataclasses import replace

from twisted.trial.unittest import SynchronousTestCase

from dmsg.keys import SecKey
from dmsg.telemetry import receipts_due as owed_module
from dmsg.telemetry.receipts import RECEIPT_SIZE, Receipt, Role
from dmsg.telemetry.receipts_due import DUE_FOR, ReceiptsDue, ReceiptVerdict

A, B, C, SERVER = (SecKey.from_seed(bytes([number])) for number in range(1, 5))
TRANSPORT = bytes(range(16))
RECEIPT = Receipt(Role.INITIATOR, TRANSPORT, SERVER.public, A.public, B.public, 10, 20)


def key(secret: SecKey) -> bytes:
    return bytes(secret.public)


class ReceiptsDueTests(SynchronousTestCase):
    """The table of due receipts, called directly."""

    def setUp(self) -> None:
        self.owed = ReceiptsDue(key(SERVER), -DUE_FOR)

    def check(self, payload: bytes, by: bytes, now: float = 0.0) -> ReceiptVerdict:
        """Check a receipt with the table."""
        return self.owed.check(payload, by, now)

    def carry(self, transport: bytes = TRANSPORT) -> None:
        self.owed.add_transport(transport, key(A), key(B))

    def test_each_end_owes_a_single_receipt(self) -> None:
        self.carry()
        of_a, of_b = RECEIPT.sign(A), replace(RECEIPT, role=Role.RESPONDER, signer=B.public, peer=A.public).sign(B)
        self.assertTrue(self.check(of_a, key(A)))
        self.assertFalse(self.check(of_a, key(A)))
        self.owed.ended(TRANSPORT, 5.0)
        self.assertTrue(self.check(of_b, key(B)))
        self.assertFalse(self.check(of_b, key(B)))
        self.assertEqual(len(self.owed), 0)

    def test_receipts_that_are_not_due_are_refused(self) -> None:
        """Cases: of an unknown transport, by a client that is not an end, for another server, handed in by another
        client, badly signed.
        """
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
            (replace(RECEIPT, role=Role.RESPONDER).sign(A), key(A)),
            (replace(RECEIPT, peer=C.public).sign(A), key(A)),
        ):
            self.assertFalse(self.check(data, by))
        self.assertTrue(self.check(good, key(A)))

    def test_due_receipts_expire(self) -> None:
        self.carry()
        self.owed.ended(TRANSPORT, 5.0)
        self.owed.ended(bytes(16), 5.0 + DUE_FOR - 1)
        self.assertEqual(len(self.owed), 1)
        self.owed.ended(bytes(16), 5.0 + DUE_FOR)
        self.assertFalse(self.check(RECEIPT.sign(A), key(A)))
        self.assertEqual(len(self.owed), 0)

    def test_the_number_of_due_receipts_is_bounded(self) -> None:
        """Receipts of open transports stay due, however many transports end."""
        self.patch(owed_module, "MAX_DUE", 3)
        self.carry()
        for number in range(10):
            self.carry(bytes([number]) * 16)
            self.owed.ended(bytes([number]) * 16, float(number))
        self.assertEqual(len(self.owed), 4)
        self.assertEqual([one[0] for one in self.owed._ended], [7, 8, 9])
        self.owed.ended(TRANSPORT, 20.0)
        self.owed.ended(bytes(16), 8.0 + DUE_FOR)
        self.assertEqual([one[0] for one in self.owed._ended], [9, 0])
        self.assertTrue(self.check(RECEIPT.sign(A), key(A)))


class FormerTests(SynchronousTestCase):
    """After its start a server accepts receipts of transports that it carried before it was killed."""

    def setUp(self) -> None:
        self.owed = ReceiptsDue(key(SERVER), 100.0)

    def test_once_and_for_a_while(self) -> None:
        good = RECEIPT.sign(A)
        self.assertFalse(self.owed.check(good, key(B), 101.0))
        self.assertFalse(self.owed.check(good[:-1] + bytes([good[-1] ^ 1]), key(A), 101.0))
        self.assertFalse(self.owed.check(replace(RECEIPT, server=C.public).sign(A), key(A), 101.0))
        self.assertTrue(self.owed.check(good, key(A), 101.0))
        self.assertFalse(self.owed.check(good, key(A), 102.0))
        other = replace(RECEIPT, transport=bytes(16)).sign(A)
        self.assertTrue(self.owed.check(other, key(A), 99.9 + DUE_FOR))
        self.assertFalse(self.owed.check(replace(RECEIPT, transport=b"1" * 16).sign(A), key(A), 100.0 + DUE_FOR))
        self.assertEqual(self.owed._former, {})

    def test_former_receipts_are_marked(self) -> None:
        self.owed.add_transport(TRANSPORT, key(A), key(B))
        other = replace(RECEIPT, transport=bytes(16))
        self.assertIs(self.owed.check(RECEIPT.sign(A), key(A), 101.0), ReceiptVerdict.KNOWN)
        self.assertIs(self.owed.check(other.sign(A), key(A), 101.0), ReceiptVerdict.FORMER)

    def test_live_receipts_are_bounded_in_memory(self) -> None:
        self.patch(owed_module, "MAX_FORMER_OF_SIGNER", 2)
        self.patch(owed_module, "MAX_DUE", 4)
        for number in range(1, 10):
            transport = bytes([number]) * 16
            self.owed.add_transport(transport, key(A), key(B))
            self.assertTrue(self.owed.check(replace(RECEIPT, transport=transport).sign(A), key(A), 101.0))
        self.assertEqual(len(self.owed._received), 4)
        self.assertIs(
            self.owed.check(replace(RECEIPT, transport=bytes(16)).sign(A), key(A), 101.0), ReceiptVerdict.FORMER
        )
        self.owed.ended(TRANSPORT, 100.0 + DUE_FOR)
        self.assertEqual((self.owed._received, self.owed._former), ({}, {}))

    def test_receipts_in_order_are_not_former(self) -> None:
        self.owed.add_transport(TRANSPORT, key(A), key(B))
        for by, data in (
            (A, RECEIPT.sign(A)),
            (B, replace(RECEIPT, role=Role.RESPONDER, signer=B.public, peer=A.public).sign(B)),
        ):
            self.assertTrue(self.owed.check(data, key(by), 101.0))
            self.assertFalse(self.owed.check(data, key(by), 101.0))

    def test_so_many_of_one_and_in_all(self) -> None:
        self.patch(owed_module, "MAX_FORMER_OF_SIGNER", 3)
        self.patch(owed_module, "MAX_FORMER", 5)

        self.patch(owed_module, "MAX_FORMER_OF_NETWORK", 4)

        def taken(signer: SecKey, network: str) -> int:
            peer = B if signer is not B else A
            return sum(
                self.owed.check(
                    replace(RECEIPT, transport=bytes([number]) * 16, signer=signer.public, peer=peer.public).sign(
                        signer
                    ),
                    key(signer),
                    101.0,
                    network,
                )
                is ReceiptVerdict.FORMER
                for number in range(10)
            )

        self.assertEqual([taken(A, "here"), taken(B, "here"), taken(B, "there"), taken(C, "there")], [3, 1, 1, 0])
