"""Codes: their spelling, and the proof that both sides know the same code."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg.apps.codes.pake import ELEMENT_SIZE, MAX_MESSAGE, Agreement, CodeProtocolError, Role, WrongCode
from dmsg.apps.codes.stream import MAX_WRONG_GUESSES
from dmsg.apps.codes.words import (
    CHECK_BITS,
    DEFAULT_WORDS,
    EXAMPLE,
    MIN_WORDS,
    Code,
    CodeError,
    completions,
    looks_like_code,
    word_list,
)
from dmsg.keys import PubKey, SecKey
from tests.support import vectors

SENDER, RECEIVER, STRANGER = (SecKey.from_seed(b"code %d" % number).public for number in range(3))
BINDING = bytes(range(32))
CODE = Code(5274, ("guitar", "alpha", "juice"))


class WordTests(SynchronousTestCase):
    """``5274-guitar-alpha-juice``."""

    def test_the_word_list_has_2048_sorted_words(self) -> None:
        words = word_list()
        self.assertEqual((len(words), words[0], words[-1]), (2048, "abandon", "zoo"))
        self.assertEqual(sorted(words), list(words))

    @given(st.integers(1, 10**8 - 1), st.integers(MIN_WORDS, 12))
    def test_any_code_is_understood(self, nameplate: int, words: int) -> None:
        code = Code.make(nameplate, words)
        for text in (str(code), str(code).upper(), f" {code}\n".replace("-", " ")):
            self.assertEqual(Code.parse(text), code)
        self.assertTrue(looks_like_code(str(code)))
        self.assertNotIn(code.words[-1], repr(code))

    def test_abbreviated_words_are_understood(self) -> None:
        self.assertEqual(Code.parse("5274-guit-alph-juic"), CODE)
        self.assertEqual(Code.parse("5274-guita-alpha-juice"), CODE)
        self.assertEqual(str(Code.parse("0007-guit-alph-acto")), "7-guitar-alpha-actor")
        self.assertRaises(CodeError, Code.parse, "5274-gui-alpha-juice")

    def test_the_example_is_a_valid_code(self) -> None:
        """Everywhere in help and documentation; whoever types it is told nothing about a mistake."""
        self.assertEqual(Code.parse(EXAMPLE), CODE)

    def test_a_mistyped_number_is_reported(self) -> None:
        """The mistake is reported before discovery is asked, because the number may belong to another code."""
        told = sum(not Code(number, CODE.words).fits for number in range(1000, 10_000))
        self.assertAlmostEqual(told / 9000, 1 - 2**-CHECK_BITS, places=2)
        error = self.assertRaises(CodeError, Code.parse, "5247-guitar-alpha-juice")
        self.assertIn("do not match; it was not tried", str(error))
        self.assertRaises(CodeError, Code.parse, "5274-alpha-guitar-juice")

    def test_the_secret_words_have_26_bits(self) -> None:
        """The words that fit a number are spread evenly: 26 bits, and five tries."""
        fits = sum(Code(5274, ("guitar", "alpha", word)).fits for word in word_list())
        fits += sum(Code(5274, ("zoo", word, "juice")).fits for word in word_list())
        self.assertAlmostEqual(fits / 4096, 2**-CHECK_BITS, delta=0.005)
        self.assertLess(MAX_WRONG_GUESSES / 2 ** (11 * DEFAULT_WORDS - CHECK_BITS), 1 / 4_000_000)

    def test_a_code_of_an_older_dmsg(self) -> None:
        self.assertIn("too old", str(self.assertRaises(CodeError, Code.parse, "7-guitar-alpha")))

    def test_any_kind_of_dash_and_space_separates_words(self) -> None:
        """Each kind of dash is tested alone and between spaces, including no-break spaces."""
        code = CODE
        dashes = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe58\ufe63\uff0d"
        for dash in (*dashes, "--", " ", "\u00a0", "\u202f"):
            for around in ("", " ", "\u00a0", "\u202f"):
                between = around + dash + around
                text = f"\u00a05274{between}Guitar{between}ALPHA{between}juice\u00a0"
                self.assertEqual(Code.parse(text), code, repr(text))
                self.assertTrue(looks_like_code(text), repr(text))
        self.assertEqual(Code.parse("\ufeff5274-gui\u00adtar-\u200balpha-juice\u2069"), code, "invisible characters")
        self.assertEqual(completions("7\u2013guitar\u2013zo"), ["7-guitar-zone-", "7-guitar-zoo-"])

    def test_a_mistyped_word_is_reported(self) -> None:
        error = self.assertRaises(CodeError, Code.parse, "7-guitra-alpha-zoo")
        self.assertIn("'guitra' is not a word that codes use; 'guitar' perhaps?", str(error))
        self.assertIn("not a word", str(self.assertRaises(CodeError, Code.parse, "7-xqzv-alpha-zoo")))

    @given(st.text(max_size=60))
    def test_any_text_is_a_code_or_a_code_error(self, text: str) -> None:
        try:
            code = Code.parse(text)
        except CodeError as error:
            self.assertLess(len(str(error)), 300)
        else:
            self.assertEqual(Code.parse(str(code)), code)

    def test_malformed_codes_are_refused(self) -> None:
        long = "7" + "-zoo" * 13
        for text in (
            "",
            "7",
            "7-",
            "7-zoo",
            "7" * 6000 + "-zoo-zoo",
            "0-guitar-alpha-zoo",
            "123456789-guitar-alpha-zoo",
            "guitar-alpha-zoo",
            "7-guitar-alpha",
            "²-zoo",
            long,
        ):
            self.assertRaises(CodeError, Code.parse, text)
        for text in ("film.mkv", "02" + "ab" * 32, "7", "", "123456789-zoo"):
            self.assertFalse(looks_like_code(text), text)

    def test_the_largest_code_has_twelve_words_and_eight_digits(self) -> None:
        """A code has at most twelve words and eight digits. Each excess has an error message of its own."""
        for code in (Code.make(99_999_999), Code.make(7, 12)):
            self.assertEqual(Code.parse(str(code)), code)
        one_more = str(Code.make(7, 13))
        said = str(self.assertRaises(CodeError, Code.parse, one_more))
        self.assertIn("at least three words", said)
        self.assertNotIn("too old", said)
        for number in ("123456789", "0", "\u0667", "guitar"):
            error = self.assertRaises(CodeError, Code.parse, f"{number} guitar alpha juice")
            self.assertIn("begins with a number", str(error), number)

    def test_error_messages_repeat_the_start_of_the_input(self) -> None:
        long = "x" * 81
        for text, shown in (
            (long, long[:80]),
            ("5274 " + long, "5274 " + long[:75]),
            ("5247-guitar-alpha-juice" + " " * 80, "5247-guitar-alpha-juice" + " " * 57),
            ("5274-guitar-alpha-" + long, long[:40]),
        ):
            self.assertIn(f"{shown!r} is ", str(self.assertRaises(CodeError, Code.parse, text)))

    def test_the_password_is_the_bytes_both_ends_derive_from(self) -> None:
        self.assertEqual(CODE.password, b"guitar-alpha-juice")

    def test_words_are_completed_by_their_start(self) -> None:
        self.assertEqual(completions("7-gui"), ["7-guide-", "7-guilt-", "7-guitar-"])
        self.assertEqual(completions("7-guitar-zo"), ["7-guitar-zone-", "7-guitar-zoo-"])
        self.assertEqual(completions("7-guitar-alpha-zo"), ["7-guitar-alpha-zone", "7-guitar-alpha-zoo"])
        self.assertEqual(completions("7-guitar-alpha-zoo-zo"), ["7-guitar-alpha-zoo-zone", "7-guitar-alpha-zoo-zoo"])
        self.assertEqual(len(completions("7-")), 2048)
        for text in ("", "7", "gui", "x-gui", "7-guitarx"):
            self.assertEqual(completions(text), [], text)


def run(one: Any, two: Any, change: Any = lambda data, number: data) -> list[Exception]:
    """Carry messages between two ends until none is left; what each raised."""
    errors: list[Exception] = []
    number = 0
    while True:
        moved = False
        for here, there in ((one, two), (two, one)):
            data = here.data_to_send()
            if data:
                moved = True
                data, number = change(data, number), number + 1
                try:
                    there.receive_data(data)
                except (WrongCode, CodeProtocolError) as error:
                    errors.append(error)
        if not moved:
            return errors


def ends(
    password: bytes = b"guitar-alpha",
    guess: bytes = b"guitar-alpha",
    *,
    seen: PubKey = SENDER,
    binding: bytes = BINDING,
) -> tuple[Agreement, Agreement]:
    """A receiver who sees the key ``seen``, and the sender."""
    receiver = Agreement(Role.RECEIVER, guess, local=RECEIVER, remote=seen, binding=binding)
    return receiver, Agreement(Role.SENDER, password, local=SENDER, remote=RECEIVER, binding=BINDING)


def chance(known: bytes) -> Callable[[int], bytes]:
    """Return a replacement of ``os.urandom`` that always returns the same bytes."""
    return lambda size: known[:size]


class PakeTests(SynchronousTestCase):
    """Both ends of the key agreement, without a stream."""

    def test_both_sides_with_the_same_words_agree(self) -> None:
        receiver, sender = ends()
        self.assertEqual(run(receiver, sender), [])
        self.assertTrue(receiver.done and sender.done)
        self.assertEqual(receiver.verifier, sender.verifier)
        self.assertRegex(str(sender.verifier), r"^\d{4} \d{4} \d{4}$")

    def test_a_wrong_receiver_is_detected_by_the_sender(self) -> None:
        """The receiver is found out by the sender, and told."""
        receiver, sender = ends(guess=b"guitar-alpine")
        errors = run(receiver, sender)
        self.assertEqual([str(error) for error in errors], ["the code is wrong"] * 2)
        self.assertFalse(receiver.done or sender.done)

    def test_another_key_or_stream_fails_the_agreement(self) -> None:
        """A relay or discovery that sits between, with both words right."""
        for receiver, sender in (ends(seen=STRANGER), ends(binding=bytes(32))):
            self.assertEqual(len(run(receiver, sender)), 2)

    def test_a_reflected_message_is_refused(self) -> None:
        receiver, _ = ends()
        sent = receiver.data_to_send()
        self.assertRaises(CodeProtocolError, receiver.receive_data, sent)

    def test_a_confirmation_before_there_is_a_key(self) -> None:
        _, sender = ends()
        self.assertRaises(CodeProtocolError, sender.receive_data, b"\x02\x00\x20" + bytes(32))
        # A confirmation before there is a key, or at the receiver, is refused. The error does not say that the code was
        # wrong.
        for end in ends():
            self.assertRaises(CodeProtocolError, end.receive_data, b"\x03\x00\x00")
        receiver, sender = ends()
        sender.receive_data(receiver.data_to_send())
        self.assertRaises(CodeProtocolError, sender.receive_data, b"\x03\x00\x00")
        receiver.receive_data(sender.data_to_send())
        self.assertRaises(WrongCode, receiver.receive_data, b"\x03\x00\x00")

    def test_messages_out_of_turn_are_refused(self) -> None:
        receiver, sender = ends()
        first = receiver.data_to_send()
        for early in (
            b"\x02\x00\x22" + first[3:],
            first[:3] + b"\x02" + first[4:],
            b"\x01\x00\x21" + first[3:-1],
            b"\x01\x00\x23" + first[3:] + b"x",
        ):
            error = self.assertRaises(CodeProtocolError, ends()[1].receive_data, early)
            said = "does not use dmsg's protocol for codes" if early[0] == 2 else "another version"
            self.assertIn(said, str(error))
        sender.receive_data(first)
        receiver.receive_data(sender.data_to_send())
        self.assertRaises(CodeProtocolError, receiver.receive_data, bytes(3))
        self.assertIn("does not use", str(self.assertRaises(CodeProtocolError, sender.receive_data, first)))

    def test_messages_may_arrive_byte_by_byte(self) -> None:
        receiver, sender = ends()
        self.assertFalse(receiver.awaits_guess or sender.awaits_guess)
        for here, there in ((receiver, sender), (sender, receiver), (receiver, sender), (sender, receiver)):
            data = here.data_to_send()
            for at in range(len(data)):
                self.assertFalse(there.done)
                self.assertEqual(there.receive_data(data[at : at + 1]), b"")
            self.assertIs(there.awaits_guess, not there.done)
        self.assertTrue(receiver.done and sender.done)

    def test_an_announced_size_above_the_limit_is_refused_at_once(self) -> None:
        for size in (MAX_MESSAGE + 1, 0xFF00):
            for end in ends():
                self.assertRaises(CodeProtocolError, end.receive_data, b"\x01" + size.to_bytes(2, "big"))
        for end in ends():
            self.assertEqual(end.receive_data(b"\x01" + MAX_MESSAGE.to_bytes(2, "big")), b"")

    def test_a_binding_of_another_size_is_refused(self) -> None:
        for size in (31, 33):
            with self.assertRaises(ValueError):
                ends(binding=bytes(size))

    def test_bytes_behind_the_agreement_are_returned(self) -> None:
        receiver, sender = ends()
        sender.receive_data(receiver.data_to_send())
        receiver.receive_data(sender.data_to_send())
        self.assertEqual(sender.receive_data(receiver.data_to_send() + b"rest"), b"rest")
        self.assertEqual(receiver.receive_data(sender.data_to_send() + b"more"), b"more")

    @settings(max_examples=40)
    @given(st.integers(0, 3), st.integers(0, 10**6), st.integers(1, 255))
    def test_any_byte_that_a_relay_changes(self, message: int, where: int, by: int) -> None:
        def change(data: bytes, number: int) -> bytes:
            if number != message:
                return data
            at = where % len(data)
            return data[:at] + bytes((data[at] ^ by,)) + data[at + 1 :]

        receiver, sender = ends()
        run(receiver, sender, change)
        self.assertFalse(receiver.done and sender.done)

    @given(st.binary(max_size=MAX_MESSAGE + 100))
    def test_random_messages_raise_only_protocol_errors(self, data: bytes) -> None:
        for end in ends():
            try:
                end.receive_data(data)
            except (WrongCode, CodeProtocolError) as error:
                self.assertLess(len(str(error)), 120)
            self.assertFalse(end.done)
            self.assertLessEqual(len(end._buffer), MAX_MESSAGE + 3)

    def test_invalid_group_elements_are_refused(self) -> None:
        """Elements of small order, not on the curve, or for this end's own side."""
        for element in (
            bytes(32),
            b"\x01" + bytes(31),
            b"\xff" * 32,
            bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa"),
        ):
            for side in (b"A", b"B", b"S"):
                for end in ends():
                    body = b"\x01" + side + element
                    self.assertEqual(len(body), 1 + ELEMENT_SIZE)
                    self.assertRaises(CodeProtocolError, end.receive_data, b"\x01\x00\x22" + body)

    def test_messages_and_verifier_match_the_vectors(self) -> None:
        """A whole run with known chance: every message and the verifier."""
        for case in vectors("codes")["runs"]:
            keys = {name: SecKey.from_hex(case[name]).public for name in ("sender", "receiver")}
            binding = bytes.fromhex(case["binding"])
            made = {}
            for role, own, other in (
                (Role.SENDER, "sender", "receiver"),
                (Role.RECEIVER, "receiver", "sender"),
            ):
                entropy = bytes.fromhex(case[f"{own}_entropy"])
                made[own] = Agreement(
                    role,
                    case["password"].encode(),
                    local=keys[own],
                    remote=keys[other],
                    binding=binding,
                    entropy=chance(entropy),
                )
            sent: list[str] = []

            def record(data: bytes, number: int, sent: list[str] = sent) -> bytes:
                sent.append(data.hex())
                return data

            self.assertEqual(run(made["receiver"], made["sender"], record), [])
            self.assertEqual(sent, case["messages"])
            self.assertEqual({made["sender"].verifier, made["receiver"].verifier}, {case["verifier"]})


def make_vectors() -> str:
    """Return the content of ``tests/vectors/codes.json``; it was written once."""
    runs = []
    for number, password in enumerate(("guitar-alpha", "zoo", "-".join(["abandon"] * 12))):
        case: dict[str, Any] = {"password": password, "binding": bytes([number] * 32).hex()}
        for name in ("sender", "receiver"):
            case[name] = SecKey.from_seed(f"{name} {number}".encode()).hex()
            case[f"{name}_entropy"] = (SecKey.from_seed(f"chance {name} {number}".encode()).to_bytes() * 2).hex()
        keys = {name: SecKey.from_hex(case[name]).public for name in ("sender", "receiver")}
        made = [
            Agreement(
                role,
                password.encode(),
                local=keys[own],
                remote=keys[other],
                binding=bytes.fromhex(case["binding"]),
                entropy=chance(bytes.fromhex(case[f"{own}_entropy"])),
            )
            for role, own, other in ((Role.RECEIVER, "receiver", "sender"), (Role.SENDER, "sender", "receiver"))
        ]
        case["messages"] = []
        run(made[0], made[1], lambda data, _: (case["messages"].append(data.hex()), data)[1])
        case["verifier"] = made[0].verifier
        runs.append(case)
    return json.dumps({"about": "runs of docs/protocol/word-codes.md with known chance", "runs": runs}, indent=1) + "\n"
