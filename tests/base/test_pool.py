"""Buffers that are used again."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from dmsg.base.pool import BufferPool


class PoolTests(SynchronousTestCase):
    def test_the_pool_keeps_a_limited_number_of_buffers(self) -> None:
        pool = BufferPool(10, 2)
        taken = [pool.take() for _ in range(3)]
        self.assertEqual(len({id(one) for one in taken}), 3)
        self.assertEqual([len(one) for one in taken], [10] * 3)
        for one in taken:
            pool.give_back(one)
        again = [pool.take() for _ in range(3)]
        self.assertEqual([any(one is before for before in taken) for one in again], [True, True, False])
