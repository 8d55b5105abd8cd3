"""Counts of one end: the data it may send, the window it announces, and the growth of both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import CloseReason
from dmsg.streams.core.agreement import Hello
from dmsg.streams.core.budget import Budget
from dmsg.streams.core.resumption import INITIAL_WINDOW, SecureError
from dmsg.streams.core.secure import EARLY_WINDOW, MAX_WINDOW, MIN_LIMIT, SecureEnd
from tests.support import Carrier
from tests.v2019.test_secure import pair, pair_result

NOW = 1e6
"""Seconds of a clock that runs for a while."""


def fill(one: SecureEnd, two: SecureEnd, size: int = 32_768) -> int:
    """Send what may be sent; returns how many bytes are in flight."""
    while one.may_send:
        two.open_data(one.seal_data(bytes(size), "token"))
    return one.in_flight_bytes


class LimitTests(SynchronousTestCase):
    """Limit of a sender for its own data, whatever window the receiver announces."""

    def setUp(self) -> None:
        self.one, self.two = pair(MAX_WINDOW)

    def acknowledge(self) -> None:
        self.two.consume(self.two.received - self.two.consumed)
        self.one.open_ack(self.two.seal_ack())

    def test_the_congestion_window_grows_by_three_times_the_acknowledged_bytes(self) -> None:
        self.assertEqual(fill(self.one, self.two), INITIAL_WINDOW)
        self.acknowledge()
        self.assertEqual(self.one.limit, 4 * INITIAL_WINDOW)
        while self.one.limit < MAX_WINDOW:
            fill(self.one, self.two)
            self.acknowledge()
        self.assertEqual(self.one.limit, MAX_WINDOW)
        fill(self.one, self.two)
        self.acknowledge()
        self.assertEqual(self.one.limit, MAX_WINDOW)

    def test_a_full_queue_halves_the_congestion_window(self) -> None:
        fill(self.one, self.two)
        self.one.queue_was_full()
        self.assertEqual(self.one.limit, INITIAL_WINDOW // 2)
        self.acknowledge()
        self.assertEqual(self.one.limit, INITIAL_WINDOW // 2 + INITIAL_WINDOW // 8)
        before = self.one.limit
        for size, grows in ((9, 1), (80, 10)):
            self.two.open_data(self.one.seal_data(bytes(size), None))
            self.acknowledge()
            self.assertEqual(self.one.limit, before + grows)
            before = self.one.limit

    def test_the_congestion_window_has_a_minimum(self) -> None:
        self.one.seal_data(bytes(1000), None)
        self.one.queue_was_full()
        self.assertEqual(self.one.limit, MIN_LIMIT)


class ResumeTests(SynchronousTestCase):
    """Position that the other end states."""

    def setUp(self) -> None:
        self.one, self.two = pair(token=bytes(16))
        for size in (10, 20, 30):
            sealed = self.one.seal_data(bytes(size), size)
            if size < 30:
                self.two.open_data(sealed)

    def test_a_good_one(self) -> None:
        self.assertEqual(self.one.resume(self.two.position())[0], [10, 20])
        self.assertEqual((self.one.acknowledged, self.one.in_flight_bytes), (30, 0))

    def test_positions_and_hashes_that_cannot_be(self) -> None:
        """Within a frame, beyond what was sent, before what was acknowledged, other bytes: whichever way it differs."""
        good = self.two.position()
        for there in (
            replace(good, received=29),
            replace(good, received=31),
            replace(good, received=61),
            replace(good, received=0),
            replace(good, hash=bytes(32)),
            replace(good, hash=b"\xff" * 32),
        ):
            self.setUp()
            if not there.received:
                self.one.open_ack(self.two.seal_ack())
            error = self.assertRaises(SecureError, self.one.resume, there)
            self.assertEqual(error.reason, CloseReason.HASH_MISMATCH)

    def test_delivered_data_of_a_former_transport_is_not_resent(self) -> None:
        self.one.open_ack(self.two.seal_ack())
        self.assertEqual((self.one.delivered, self.two.delivered), ((30, 0), (0, 30)))
        self.one._before, self.two._before = (13, 0), (0, 9)
        self.assertEqual((self.one.delivered, self.two.delivered), ((17, 0), (0, 21)))

    def test_frames_are_numbered_from_one_to_the_next(self) -> None:
        nonce = self.one._seal_nonce
        self.one.seal_data(b"x", None)
        self.one.seal_ack()
        self.assertEqual(self.one._seal_nonce, nonce + 2)


class CountTests(SynchronousTestCase):
    """Counts that an end keeps."""

    def test_a_new_one(self) -> None:
        end = SecureEnd(bytes(32), initiator=True)
        self.assertEqual((end.acknowledged, end.received, end.consumed, end.in_flight_bytes), (0, 0, 0, 0))
        self.assertEqual((end.idle_moves, end.delivered, end.offer_window()), (0, (0, 0), INITIAL_WINDOW))
        self.assertEqual(end.measure_at, 1)
        self.assertFalse(end.may_send)

    def test_delivered_over_each_transport(self) -> None:
        one, two = pair()
        two.open_data(one.seal_data(bytes(100), None))
        one.open_data(two.seal_data(bytes(30), None))
        one.open_ack(two.seal_ack())
        self.assertEqual((one.delivered, two.delivered), ((100, 30), (0, 100)))
        before: Any = one.transport
        one.attach(Carrier(), pair_result(), Hello(0, 77), 55)
        self.assertEqual((before.delivered, before.secure), ((100, 30), None))
        self.assertEqual((one.delivered, one.peer_window, one.told_window), ((0, 0), 77, 55))

    def test_empty_frames_are_acknowledged_by_position(self) -> None:
        one, two = pair(token=bytes(16))
        two.open_data(one.seal_data(b"abc", "data"))
        one.seal_data(b"", "probe")
        one.seal_data(b"", "another")
        one.seal_data(b"not there", "late")
        tokens, unsent = one.resume(two.position())
        self.assertEqual((tokens, unsent), (["data", "probe", "another"], [(b"not there", "late")]))
        self.assertEqual((one.in_flight_bytes, one.acknowledged, len(one.in_flight)), (0, 3, 0))

    def test_a_window_that_is_more_than_full(self) -> None:
        one, two = pair(1000)
        two.open_data(one.seal_data(bytes(1500), None))
        self.assertEqual(two.offer_window(), 0)
        two.consume(600)
        self.assertEqual(two.offer_window(), 100)

    def test_the_sender_hears_of_a_quarter(self) -> None:
        for window, enough in ((100_000, 25_000), (100_002, 25_000)):
            one, two = pair(window)
            two.open_data(one.seal_data(bytes(window // 2), None))
            two.open_data(one.seal_data(bytes(window - window // 2), None))
            one.open_ack(two.seal_ack())
            self.assertEqual((two.told_window, one.peer_window), (0, 0))
            self.assertFalse(two.consume(enough - 1))
            self.assertTrue(two.consume(1))


class GrowthTests(SynchronousTestCase):
    """A receiver's window."""

    def end(self, window: int) -> SecureEnd:
        end = SecureEnd(bytes(32), initiator=True, window=window, budget=Budget(10 * MAX_WINDOW))
        end.round_trip = 0.1
        end.measure(NOW)
        return end

    def test_the_receive_window_grows_fourfold_and_then_twofold(self) -> None:
        for window, seconds, grows in (
            (INITIAL_WINDOW, 0.59, 4 * INITIAL_WINDOW),
            (INITIAL_WINDOW, 0.61, INITIAL_WINDOW),
            (EARLY_WINDOW, 0.39, 2 * EARLY_WINDOW),
            (EARLY_WINDOW, 0.41, EARLY_WINDOW),
            (2 * EARLY_WINDOW, 0.39, 4 * EARLY_WINDOW),
            (MAX_WINDOW - 5, 0.1, MAX_WINDOW),
            (MAX_WINDOW, 0.1, MAX_WINDOW),
        ):
            end = self.end(window)
            end.consumed = 1000
            end.measure(NOW + seconds)
            self.assertEqual((end.window, end.measure_at), (grows, 1000 + grows))

    def test_the_window_does_not_grow_without_a_round_trip(self) -> None:
        end = self.end(INITIAL_WINDOW)
        end.round_trip = None
        end.measure(NOW)
        self.assertEqual(end.window, INITIAL_WINDOW)

    def test_large_holders_get_no_more_of_a_small_budget(self) -> None:
        budget = Budget(1200)
        self.assertTrue(budget.take(b"greedy", 400))
        self.assertTrue(budget.take(b"greedy", 200))
        self.assertFalse(budget.take(b"greedy", 10))
        self.assertEqual(budget.left, 600)
