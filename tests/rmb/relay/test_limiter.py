"""Limits of messages and bytes that a twin sends on its own initiative."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from dmsg.rmb.errors import Drop
from dmsg.rmb.relay.limiter import FREE_ANSWER, FixedWindow
from tests.rmb.test_relay import PairCase
from tests.support import asynchronous


class FixedWindowTests(SynchronousTestCase):
    def test_small_fragments_count_like_a_message(self) -> None:
        window = FixedWindow(10, 1000)
        window.charge(1, 9, 0.0)
        self.assertTrue(window.measure(1, 1, 0.0))
        self.assertFalse(window.measure(1, 1, 0.0))
        self.assertTrue(window.measure(2, 1, 0.0))
        self.assertTrue(window.measure(1, 1, 60.0))

    def test_every_window_begins_anew(self) -> None:
        """Each window has all messages and bytes, whatever was used in the window before."""
        window = FixedWindow(3, 10)
        for begin in (0.0, 60.0, 120.0):
            sizes = (11, 4, 4, 2, 1)  # An answer that is larger than the whole window is not counted.
            allowed = [window.measure(1, size, begin) for size in sizes]
            self.assertEqual(allowed, [False, True, True, True, False])
            self.assertFalse(window.measure(1, 1, begin + 59.9))
        self.assertEqual([window.measure(1, size, 180.0) for size in (6, 5, 4)], [True, False, False])

    def test_the_twin_that_was_quiet_longest_is_forgotten(self) -> None:
        window = FixedWindow(1, 10)
        window._most = 2
        for twin, allowed in ((1, True), (2, True), (1, False), (3, True), (1, False), (2, True), (3, True)):
            self.assertIs(window.measure(twin, 1, 0.0), allowed, twin)

    def test_answers_are_free(self) -> None:
        """One answer for each request is free, up to a size; other answers count as messages."""
        window = FixedWindow(2, 10_000)
        for _ in range(3):
            window.ask(1, 0.0)
        self.assertTrue(window.measure(1, FREE_ANSWER, 0.0, is_answer=True))
        # The answer is larger than the whole window.
        self.assertFalse(window.measure(1, FREE_ANSWER + 9_000, 0.0, is_answer=True))
        self.assertTrue(window.measure(1, FREE_ANSWER + 5_000, 0.0, is_answer=True))
        # There are three requests. No more are remembered than a window has messages.
        for allowed in (True, True, False):
            self.assertEqual(window.measure(1, 1, 0.0, is_answer=True), allowed)

    def test_only_bytes_beyond_the_free_ones_of_an_answer_count(self) -> None:
        """The bytes beyond those that are free, and no message."""
        window = FixedWindow(1, FREE_ANSWER)
        window.ask(1, 0.0)
        window.ask(1, 0.0)
        self.assertTrue(window.measure(1, FREE_ANSWER, 0.0, is_answer=True))
        self.assertTrue(window.measure(1, FREE_ANSWER, 0.0))
        self.assertFalse(window.measure(1, 1, 0.0))

    def test_questions_of_before(self) -> None:
        """An answer may take until the next minute."""
        window = FixedWindow(1, 10_000)
        window.ask(1, 0.0)
        self.assertTrue(window.measure(1, 1, 60.0, is_answer=True))
        self.assertTrue(window.measure(1, 1, 60.0))

    def test_small_answers_are_free_too(self) -> None:
        """The twin has all bytes of the window for its own messages."""
        window = FixedWindow(3, FREE_ANSWER)
        for _ in range(3):
            window.ask(1, 0.0)
        for size in (1, 100, FREE_ANSWER - 1):
            self.assertTrue(window.measure(1, size, 0.0, is_answer=True))
        self.assertTrue(window.measure(1, FREE_ANSWER, 0.0))

    def test_a_question_allows_a_single_answer(self) -> None:
        window = FixedWindow(2, 100)
        self.assertTrue(window.measure(1, 1, 0.0, is_answer=True))  # Nobody asked, so this answer counts.
        window.ask(1, 0.0)
        self.assertEqual([window.measure(1, 1, 0.0) for _ in range(2)], [True, False])
        self.assertEqual([window.measure(1, 1, 0.0, is_answer=True) for _ in range(2)], [True, False])

    def test_the_rest_of_a_long_answer_counts(self) -> None:
        window = FixedWindow(2, 10_000)
        for _ in range(2):
            window.ask(1, 0.0)
        answers = [window.measure(1, FREE_ANSWER + rest, 0.0, is_answer=True) for rest in (5000, 5001)]
        self.assertEqual(answers, [True, False])

    def test_a_later_window_allows_no_more_than_the_first(self) -> None:
        window = FixedWindow(2, 5)
        for begin in (0.0, 60.0, 120.0):
            self.assertEqual([window.measure(1, 1, begin) for _ in range(3)], [True, True, False])
            self.assertEqual([window.measure(2, size, begin) for size in (5, 1)], [True, False])

    def test_a_clock_that_is_set_back_begins_a_new_window(self) -> None:
        """Otherwise the twin would be refused until the clock has caught up."""
        window = FixedWindow(1, 10)
        self.assertEqual([window.measure(1, 1, now) for now in (86_400.0, 86_401.0, 30.0, 31.0)], [True, False] * 2)


class RelayTests(PairCase):
    @asynchronous
    async def test_answers_do_not_use_up_a_twins_rate(self) -> None:
        """The twin answers all requests and may send as many messages of its own as without them."""
        self.offset = 60 - self.now() % 60
        a, b = await self.pair(limit=(4, 100_000))
        for sender in (a, await self.raw("A", self.one, "other")):
            for _ in range(2):
                sender.send(sender.envelope(b.session), self.now())
                asked = await b.messages.get()
                b.send(b.envelope(sender.session, None, uid=asked.uid), self.now())
                await sender.messages.get()
        for number in range(4):
            b.send(b.envelope(a.session, uid=str(number)), self.now())
            self.assertEqual((await a.messages.get()).uid, str(number))
        await self.refused(b, b.envelope(a.session), "exceeded rate limits, dropping message")
        self.assertEqual(self.drops(Drop.RATE_LIMITED), 1)
