"""The receiver's rules: whose answer it follows, and how often."""

from __future__ import annotations

from typing import Any

from hypothesis import given, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg.keys import SecKey
from dmsg.net.mdns.interfaces import Interface
from dmsg.net.mdns.packets import Question, parse_question
from dmsg.v2019.lan.messages import Announcement, LanDrop, name_for, shared_secret
from dmsg.v2019.lan.questions import ADDRESSES_OF_ONE, MAX_ANNOUNCERS, PACKETS_BURST, Announcer, CodeQuestion
from tests.v2019.lan.support import ALICE, BOB, HOME, HOME6, NUMBER


class AskingTests(SynchronousTestCase):
    """Bob was told a code."""

    def setUp(self) -> None:
        self.question = CodeQuestion(BOB, NUMBER, 0.0)

    def answer(
        self,
        key: SecKey = ALICE,
        source: str = "192.168.1.7",
        *,
        port: int = 40000,
        udp: int = 5353,
        interface: Interface = HOME,
        question: Question | None = None,
    ) -> Announcer | None:
        packet = (question or parse_question(self.question.packet)).encode_answer(
            Announcement(key.public, port).encode()
        )
        return self.question.receive(packet, source, udp, interface, 0.0)

    def test_an_answer_leads_to_its_sender(self) -> None:
        found = self.answer()
        secret = shared_secret(ALICE, sender=ALICE.public, receiver=BOB.public)
        self.assertEqual(found, Announcer(ALICE.public, HOME, "192.168.1.7", 40000, secret))
        self.assertEqual((self.question.announcers, self.question.drops.total()), (1, 0))

    def test_a_link_local_address_gets_its_scope(self) -> None:
        found = self.answer(source="fe80::7", interface=HOME6)
        assert found is not None
        self.assertEqual(found.host, "fe80::7%wlan0")

    def test_what_is_ignored(self) -> None:
        """No connection leaves the network, and none goes to a port of the system."""
        asked = parse_question(self.question.packet)
        cases: dict[LanDrop, list[dict[str, Any]]] = {
            LanDrop.OFF_LINK: [{"source": "8.8.8.8"}, {"source": "192.168.1.255"}, {"source": "127.0.0.1"}],
            LanDrop.OTHER_PORT: [{"udp": 5354}],
            LanDrop.MALFORMED: [{"port": 22}],
            LanDrop.OTHER_NAME: [
                {"question": Question(asked.identifier ^ 1, asked.name)},
                {"question": Question(asked.identifier, name_for(ALICE.public, NUMBER))},
                {"key": BOB},
            ],
        }
        for reason, changes in cases.items():
            for change in changes:
                self.assertIsNone(self.answer(**change), change)
            self.assertEqual(self.question.drops[reason], len(changes))
        self.assertEqual(self.question.announcers, 0)

    def test_a_repeated_answer_is_followed_once(self) -> None:
        self.assertIsNotNone(self.answer())
        self.assertIsNone(self.answer())
        self.assertEqual(self.question.drops, {LanDrop.REPEATED: 1})

    def test_a_liar_with_many_keys_gets_one_place(self) -> None:
        """Each address may name one key, so the sender is found behind a liar with one address."""
        for number in range(20):
            self.answer(SecKey.from_seed(b"liar %d" % number), "192.168.1.66")
        self.assertEqual(self.question.announcers, 1)
        self.assertIsNotNone(self.answer())

    def test_a_liar_who_repeats_the_senders_key_gets_one_place(self) -> None:
        for port in range(40000, 40020):
            self.answer(source="192.168.1.66", port=port)
        self.assertIsNotNone(self.answer())

    def test_at_most_three_keys_are_tried(self) -> None:
        tried = [
            self.answer(SecKey.from_seed(b"liar %d" % number), f"192.168.1.{60 + number}") is not None
            for number in range(5)
        ]
        self.assertEqual(tried, [True] * MAX_ANNOUNCERS + [False] * (5 - MAX_ANNOUNCERS))
        self.assertEqual(self.question.drops, {LanDrop.TOO_MANY: 5 - MAX_ANNOUNCERS})

    def test_a_sender_has_several_addresses(self) -> None:
        tried = [self.answer(source=f"192.168.1.{60 + number}") is not None for number in range(6)]
        self.assertEqual(tried, [True] * ADDRESSES_OF_ONE + [False] * (6 - ADDRESSES_OF_ONE))

    def test_packets_are_bounded(self) -> None:
        for _ in range(int(PACKETS_BURST)):
            self.question.receive(b"noise", "192.168.1.66", 5353, HOME, 0.0)
        self.assertIsNone(self.answer())
        self.assertEqual(self.question.drops[LanDrop.RATE_LIMITED], 1)

    @given(st.binary(max_size=600))
    def test_any_bytes(self, data: bytes) -> None:
        question = CodeQuestion(BOB, NUMBER, 0.0)
        self.assertIsNone(question.receive(data, "192.168.1.7", 5353, HOME, 0.0))
        self.assertEqual(question.drops.total(), 1)
