"""Account of the bytes that a TLS peer sends beside its data."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from dmsg.net.tls_overhead import MAX_OVERHEAD, RECORD_OVERHEAD, OverheadAccount


class AccountTests(SynchronousTestCase):
    """Bytes that count as overhead, and bytes that do not."""

    def test_whole_records_are_free(self) -> None:
        account = OverheadAccount()
        for size in (1, 13, 16384) * 1000:
            account.receive(size + RECORD_OVERHEAD)
            account.deliver(size)
        self.assertEqual(account.level, 0)

    def test_an_incomplete_record_is_no_overhead_for_long(self) -> None:
        account = OverheadAccount()
        for _ in range(1000):
            account.receive(16384)
            self.assertFalse(account.is_exceeded)
            account.receive(22 + 16384 + 22)
            account.deliver(16384)
            account.deliver(16384)
        self.assertEqual(account.level, 0)

    def test_data_do_not_pay_in_advance(self) -> None:
        account = OverheadAccount()
        account.receive(10**6)
        account.deliver(10**6)
        account.receive(MAX_OVERHEAD)
        self.assertFalse(account.is_exceeded)
        account.receive(1)
        self.assertTrue(account.is_exceeded)
        account.deliver(1)
        self.assertFalse(account.is_exceeded)
