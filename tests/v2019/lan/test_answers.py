"""The sender's rules: it answers only queries for its own number."""

from __future__ import annotations

from hypothesis import given, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg.keys import SecKey
from dmsg.net.mdns.packets import Question, parse_answer
from dmsg.v2019.direct.tickets import Tickets, dialler_tag, listener_tag
from dmsg.v2019.lan.answers import ANSWERS_BURST, PACKETS_BURST, QUESTIONS_BURST, QUESTIONS_RATE, CodeAnswers
from dmsg.v2019.lan.messages import SERVICE, Announcement, LanDrop, name_for, shared_secret
from tests.v2019.lan.support import ALICE, BOB, HOME, HOME6, NUMBER


class AnsweringTests(SynchronousTestCase):
    """Alice offers a code."""

    def setUp(self) -> None:
        self.tickets = Tickets()
        self.answers = CodeAnswers(ALICE, NUMBER, self.tickets, 0.0)

    def ask(self, data: bytes, source: str = "192.168.1.9", now: float = 0.0) -> bytes | None:
        return self.answers.receive(data, source, HOME, 40000, now)

    def dropped(self, *reasons: LanDrop) -> None:
        self.assertEqual(list(self.answers.drops.elements()), list(reasons))

    def test_who_asks_for_the_number_gets_an_answer_and_a_ticket(self) -> None:
        question = Question(7, name_for(BOB.public, NUMBER))
        data = self.ask(question.encode())
        assert data is not None
        answer = parse_answer(data)
        self.assertEqual(answer.question, question)
        self.assertEqual(Announcement.parse(answer.text), Announcement(ALICE.public, 40000))
        secret = shared_secret(BOB, sender=ALICE.public, receiver=BOB.public)
        self.assertEqual(self.tickets.find(dialler_tag(secret), 0.0), (BOB.public, listener_tag(secret)))
        self.dropped()

    def test_who_asks_for_another_number_hears_nothing(self) -> None:
        self.assertIsNone(self.ask(Question(7, name_for(BOB.public, NUMBER + 1)).encode()))
        self.dropped(LanDrop.OTHER_CODE)

    def test_other_services_and_noise(self) -> None:
        self.assertIsNone(self.ask(Question(7, (b"_googlecast", b"_tcp", b"local")).encode()))
        self.assertIsNone(self.ask(Question(7, (b"a", b"b", *SERVICE)).encode()))
        self.assertIsNone(self.ask(b"noise"))
        self.assertEqual(self.answers.drops, {LanDrop.OTHER_NAME: 1, LanDrop.MALFORMED: 2})

    def test_somebody_outside_the_network_hears_nothing(self) -> None:
        packet = Question(7, name_for(BOB.public, NUMBER)).encode()
        for source in ("192.168.2.9", "8.8.8.8", "127.0.0.1", "fe80::9"):
            self.assertIsNone(self.ask(packet, source))
        self.dropped(*[LanDrop.OFF_LINK] * 4)
        self.assertIsNotNone(self.answers.receive(packet, "fe80::9", HOME6, 40000, 0.0))

    def test_who_tries_all_numbers_is_slowed_and_others_are_not(self) -> None:
        answered = 0
        for number in range(NUMBER - 200, NUMBER + 1):
            answered += self.ask(Question(7, name_for(BOB.public, number)).encode()) is not None
        self.assertEqual(answered, 0)
        self.assertEqual(self.answers.drops[LanDrop.OTHER_CODE], QUESTIONS_BURST)
        right = Question(7, name_for(BOB.public, NUMBER)).encode()
        self.assertIsNotNone(self.ask(right, "192.168.1.10"))
        self.assertIsNone(self.ask(right))
        self.assertIsNotNone(self.ask(right, now=1.0 / QUESTIONS_RATE))

    def test_many_who_know_the_number_are_bounded(self) -> None:
        """Each answer costs a key agreement, so there is a rate for all together."""
        answered = 0
        for one in range(60):
            key = SecKey.from_seed(b"receiver %d" % one).public
            answered += self.ask(Question(7, name_for(key, NUMBER)).encode(), f"192.168.1.{10 + one}") is not None
        self.assertEqual(answered, ANSWERS_BURST)
        self.assertEqual(self.answers.drops, {LanDrop.RATE_LIMITED: 60 - ANSWERS_BURST})

    def test_packets_of_all_kinds_are_bounded(self) -> None:
        for _ in range(int(PACKETS_BURST)):
            self.ask(b"noise")
        self.assertIsNone(self.ask(Question(7, name_for(BOB.public, NUMBER)).encode(), now=0.0))
        self.assertEqual(self.answers.drops[LanDrop.RATE_LIMITED], 1)
        self.assertIsNotNone(self.ask(Question(7, name_for(BOB.public, NUMBER)).encode(), now=1.0))

    @given(st.binary(max_size=600))
    def test_any_bytes(self, data: bytes) -> None:
        answers = CodeAnswers(ALICE, NUMBER, Tickets(), 0.0)
        self.assertIsNone(answers.receive(data, "192.168.1.9", HOME, 40000, 0.0))
        self.assertEqual(answers.drops.total(), 1)
