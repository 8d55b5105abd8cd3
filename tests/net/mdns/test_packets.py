"""Packets of multicast DNS: against another implementation, and against what anybody may send."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given, strategies as st
from twisted.names import dns
from twisted.trial.unittest import SynchronousTestCase

from dmsg.net.mdns.packets import (
    ANSWER_TTL,
    MAX_LABEL,
    MAX_PACKET,
    MAX_TEXT,
    Answer,
    MalformedPacket,
    Question,
    encode_name,
    parse_answer,
    parse_question,
)

NAME = (b"first", b"_dmsg-code", b"_tcp", b"local")
QUESTION = Question(0x1234, NAME)
names = st.lists(st.binary(min_size=1, max_size=MAX_LABEL).map(bytes.lower), max_size=5).map(tuple)


class PacketTests(SynchronousTestCase):
    """Questions and answers."""

    @given(st.integers(0, 0xFFFF), names)
    def test_a_question_is_parsed_as_it_was_encoded(self, identifier: int, name: tuple[bytes, ...]) -> None:
        question = Question(identifier, name)
        self.assertEqual(parse_question(question.encode()), question)

    @given(names.filter(lambda name: sum(map(len, name)) < 200), st.binary(max_size=200))
    def test_an_answer_is_parsed_as_it_was_encoded(self, name: tuple[bytes, ...], text: bytes) -> None:
        question = Question(7, name)
        self.assertEqual(parse_answer(question.encode_answer(text)), Answer(question, text))

    def test_twisted_reads_a_question(self) -> None:
        message = dns.Message()
        message.fromStr(QUESTION.encode())
        (query,) = message.queries
        self.assertEqual((message.id, message.answer, query.type, query.cls), (0x1234, 0, dns.TXT, dns.IN))
        self.assertEqual(query.name.name, b".".join(NAME))

    def test_twisted_reads_an_answer(self) -> None:
        message = dns.Message()
        message.fromStr(QUESTION.encode_answer(b"text"))
        (answer,) = message.answers
        self.assertEqual((message.id, message.answer, message.auth, message.rCode), (0x1234, 1, 1, 0))
        self.assertEqual((answer.name.name, answer.ttl), (b".".join(NAME), ANSWER_TTL))
        self.assertEqual(cast(Any, answer.payload).data, [b"text"])
        self.assertEqual([query.name.name for query in message.queries], [b".".join(NAME)])

    def test_what_twisted_writes_is_read(self) -> None:
        asked = dns.Message(id=3)
        asked.addQuery(b".".join(NAME).upper(), dns.TXT, dns.IN)
        self.assertEqual(parse_question(asked.toStr()), Question(3, NAME))
        answered = dns.Message(id=3, answer=1, auth=True)
        answered.addQuery(b".".join(NAME), dns.TXT, dns.IN)
        answered.answers = [dns.RRHeader(b".".join(NAME), dns.TXT, dns.IN, 10, dns.Record_TXT(b"text"))]
        self.assertEqual(parse_answer(answered.toStr()), Answer(Question(3, NAME), b"text"))

    def test_an_answer_may_repeat_its_name_uncompressed(self) -> None:
        head, record = QUESTION.encode_answer(b"text").split(b"\xc0\x0c")
        self.assertEqual(parse_answer(head + encode_name(NAME) + record), Answer(QUESTION, b"text"))
        with self.assertRaises(MalformedPacket):
            parse_answer(head + encode_name((b"another",)) + record)

    def test_bits_that_ask_for_unicast_and_name_a_unique_record_are_ignored(self) -> None:
        self.assertEqual(parse_question(QUESTION.encode()[:-2] + b"\x80\x01"), QUESTION)
        answer = bytearray(QUESTION.encode_answer(b"text"))
        answer[answer.index(b"\xc0\x0c") + 4] |= 0x80
        self.assertEqual(parse_answer(bytes(answer)).text, b"text")

    def test_limits_of_what_is_sent(self) -> None:
        with self.assertRaises(ValueError):
            QUESTION.encode_answer(bytes(MAX_TEXT + 1))
        for label in (b"", bytes(MAX_LABEL + 1)):
            with self.assertRaises(ValueError):
                encode_name((label,))


class HostilePacketTests(SynchronousTestCase):
    """Anything else is refused with the one error that callers handle."""

    def refused(self, data: bytes) -> None:
        for parse in (parse_question, parse_answer):
            with self.assertRaises(MalformedPacket):
                parse(data)

    @given(st.binary(max_size=MAX_PACKET + 50))
    def test_any_bytes(self, data: bytes) -> None:
        for parse in (parse_question, parse_answer):
            try:
                parse(data)
            except MalformedPacket:
                pass

    @given(st.data())
    def test_a_changed_packet(self, draw: st.DataObject) -> None:
        whole = draw.draw(st.sampled_from([QUESTION.encode(), QUESTION.encode_answer(b"a text of some length")]))
        data = bytearray(whole)
        for _ in range(draw.draw(st.integers(1, 3))):
            data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
        self.test_any_bytes.hypothesis.inner_test(self, bytes(data))  # type: ignore[attr-defined]

    def test_every_cut_and_every_byte_too_much(self) -> None:
        question, answer = QUESTION.encode(), QUESTION.encode_answer(b"text")
        for size in range(len(question)):
            self.refused(question[:size])
        for size in range(len(answer)):
            self.refused(answer[:size])
        self.refused(question + b"\0")
        self.refused(answer + b"\0")

    def test_a_name_that_points_at_itself(self) -> None:
        head = QUESTION.encode()[:12]
        self.refused(head + b"\xc0\x0c" + b"\0\x10\0\x01")

    def test_more_than_one_question_or_record(self) -> None:
        for at in range(4, 12, 2):
            for packet in (QUESTION.encode(), QUESTION.encode_answer(b"text")):
                changed = bytearray(packet)
                changed[at + 1] += 1
                self.refused(bytes(changed))

    def test_an_error_is_no_answer(self) -> None:
        packet = bytearray(QUESTION.encode_answer(b"text"))
        packet[3] |= 3
        self.refused(bytes(packet))

    def test_a_packet_that_is_too_long(self) -> None:
        self.refused(QUESTION.encode_answer(bytes(255)) + bytes(MAX_PACKET))

    def test_two_strings_in_a_record(self) -> None:
        packet = bytearray(QUESTION.encode_answer(b"text"))
        packet[-5] = 2
        self.refused(bytes(packet))
