"""What is asked and answered about codes."""

from __future__ import annotations

from base64 import b32decode

from hypothesis import given, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg.keys import PUBKEY_SIZE, PubKey, SecKey
from dmsg.net.mdns.packets import MAX_LABEL, Question, parse_question
from dmsg.v2019.lan.messages import (
    MIN_PORT,
    SERVICE,
    Announcement,
    BadMessage,
    is_for_codes,
    name_for,
    receiver_of,
    shared_secret,
)

ALICE, BOB = SecKey.from_seed(b"lan alice"), SecKey.from_seed(b"lan bob")


class NameTests(SynchronousTestCase):
    """Names for which receivers ask."""

    def test_only_the_owner_of_the_number_recognises_the_name(self) -> None:
        name = name_for(BOB.public, 5274)
        self.assertTrue(is_for_codes(name))
        self.assertEqual(receiver_of(name, 5274), BOB.public)
        self.assertIsNone(receiver_of(name, 5275))

    def test_the_name_survives_the_packet(self) -> None:
        name = name_for(BOB.public, 5274)
        self.assertLessEqual(max(map(len, name)), MAX_LABEL)
        self.assertEqual(parse_question(Question(1, name).encode()).name, name)

    def test_the_same_number_has_another_name_with_another_key(self) -> None:
        self.assertNotEqual(name_for(BOB.public, 5274)[0], name_for(ALICE.public, 5274)[0])

    def test_the_name_tells_nothing_else(self) -> None:
        """Hash and key are all there is; the number itself is not in it."""
        found, key, *service = name_for(BOB.public, 5274)
        self.assertEqual(tuple(service), SERVICE)
        padded = (label.upper() + b"=" * (-len(label) % 8) for label in (found, key))
        self.assertEqual([len(b32decode(label)) for label in padded], [16, PUBKEY_SIZE])
        self.assertNotIn(b"5274", b".".join(name_for(BOB.public, 5274)[:1]))

    def test_other_names(self) -> None:
        name = name_for(BOB.public, 5274)
        for other in ((), name[1:], (b"more", *name), (*name[:-1], b"lan"), (b"_googlecast", b"_tcp", b"local")):
            self.assertFalse(is_for_codes(other), other)
        for bad in ((b"!", name[1]), (name[0], b"aa"), (name[0][:-2], name[1]), (name[0], name[0])):
            with self.assertRaises(BadMessage):
                receiver_of((*bad, *SERVICE), 5274)

    @given(st.binary(min_size=1, max_size=63), st.binary(min_size=1, max_size=63))
    def test_any_labels(self, one: bytes, two: bytes) -> None:
        try:
            found = receiver_of((one.lower(), two.lower(), *SERVICE), 5274)
        except BadMessage:
            return
        self.assertIsNone(found)


class AnnouncementTests(SynchronousTestCase):
    """Content of an answer."""

    def test_it_is_parsed_as_it_was_encoded(self) -> None:
        told = Announcement(ALICE.public, 40000)
        self.assertEqual(Announcement.parse(told.encode()), told)

    def test_ports_of_the_system_are_refused(self) -> None:
        Announcement.parse(Announcement(ALICE.public, MIN_PORT).encode())
        for port in (0, 22, MIN_PORT - 1):
            with self.assertRaises(BadMessage):
                Announcement.parse(Announcement(ALICE.public, port).encode())

    @given(st.binary(max_size=60))
    def test_any_bytes(self, text: bytes) -> None:
        try:
            Announcement.parse(text)
        except BadMessage:
            pass

    def test_another_version_and_no_key(self) -> None:
        text = Announcement(ALICE.public, 40000).encode()
        for bad in (b"\x02" + text[1:], text[:3] + bytes(33), text + b"\0", b""):
            with self.assertRaises(BadMessage):
                Announcement.parse(bad)


class SecretTests(SynchronousTestCase):
    """Secret of a link."""

    def test_both_ends_have_the_same_and_nobody_else(self) -> None:
        one = shared_secret(ALICE, sender=ALICE.public, receiver=BOB.public)
        self.assertEqual(one, shared_secret(BOB, sender=ALICE.public, receiver=BOB.public))
        eve = SecKey.from_seed(b"lan eve")
        self.assertNotEqual(one, shared_secret(eve, sender=eve.public, receiver=PubKey(BOB.public)))
        self.assertNotEqual(one, shared_secret(ALICE, sender=BOB.public, receiver=ALICE.public))
