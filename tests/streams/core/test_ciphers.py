"""Secure streams with AES-256-GCM: agreement, rekeying, moves between ciphers, and the recorded vector."""

from __future__ import annotations

import json
from dataclasses import replace

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg.base.cipher_names import Cipher
from dmsg.errors import CloseReason
from dmsg.keys import SecKey
from dmsg.noise import ciphers
from dmsg.noise.handshake import HandshakeResult
from dmsg.streams.core.agreement import Hello, Offer, Proposal, agreed_cipher
from dmsg.streams.core.resumption import ACK, FWD, SecureError
from dmsg.streams.core.secure import SecureEnd
from tests.support import KEYS, VECTORS, Carrier

A, B = KEYS["A"], KEYS["B"]
WINDOW = 1 << 18
TOKEN = bytes(range(16))


def handshake(mine: Hello, theirs: Hello) -> tuple[HandshakeResult, HandshakeResult, Hello, Hello]:
    """Return the results of initiator and responder, and the hellos as each end received them."""
    proposal = Proposal(A, B.public, mine)
    offer = Offer(B, proposal.payload)
    there, payload = offer.accept(theirs)
    here, hello = proposal.process_answer(payload)
    return here, there, offer.hello, hello


def pair(cipher: Cipher, token: bytes | None = None) -> tuple[SecureEnd, SecureEnd]:
    """Both ends of a stream, attached."""
    hello = Hello(0, WINDOW, token, aes_gcm=cipher is Cipher.AES_256_GCM, tags=True)
    here, there, asked, answered = handshake(hello, hello)
    one = SecureEnd(here.hash, initiator=True, window=WINDOW, token=token, tags=True)
    two = SecureEnd(there.hash, initiator=False, window=WINDOW, token=token, tags=True)
    one.attach(Carrier(), here, answered, WINDOW, agreed_cipher(hello, answered))
    two.attach(Carrier(), there, asked, WINDOW, agreed_cipher(hello, asked))
    return one, two


class AgreementTests(SynchronousTestCase):
    """The option of both hellos."""

    @given(st.booleans(), st.booleans())
    def test_aes_needs_both(self, one: bool, other: bool) -> None:
        expected = Cipher.AES_256_GCM if one and other else Cipher.CHACHA20_POLY1305
        self.assertIs(agreed_cipher(Hello(aes_gcm=one), Hello(aes_gcm=other)), expected)

    def test_the_option_is_unknown_to_nobody_who_must_know_it(self) -> None:
        """Programs before the option ignore it, because its type is not critical."""
        encoded = Hello(7, 9, aes_gcm=True).encode()
        self.assertEqual(encoded[6:8], b"\4\0")
        self.assertTrue(Hello.decode(encoded).aes_gcm)

    def test_nobody_reads_frames_of_the_other_cipher(self) -> None:
        hello = Hello(0, WINDOW, aes_gcm=True)
        here, there, asked, answered = handshake(hello, hello)
        one = SecureEnd(here.hash, initiator=True, window=WINDOW)
        two = SecureEnd(there.hash, initiator=False, window=WINDOW)
        one.attach(Carrier(), here, answered, WINDOW, Cipher.AES_256_GCM)
        two.attach(Carrier(), there, asked, WINDOW, Cipher.CHACHA20_POLY1305)
        error = self.assertRaises(SecureError, two.open_data, one.seal_data(b"data", None))
        self.assertIs(error.reason, CloseReason.NOT_AUTHENTIC)


class RekeyTests(SynchronousTestCase):
    """Each direction changes its key after a number of messages."""

    AFTER = 8

    def setUp(self) -> None:
        self.patch(ciphers, "REKEY_AFTER", self.AFTER)

    @given(st.lists(st.tuples(st.booleans(), st.integers(1, 9000)), max_size=60))
    def test_data_and_acks_arrive_over_any_number_of_keys(self, sent: list[tuple[bool, int]]) -> None:
        one, two = pair(Cipher.AES_256_GCM)
        for forwards, size in sent:
            sender, receiver = (one, two) if forwards else (two, one)
            frame = bytearray(size + 100)
            end = sender.seal_into(memoryview(frame), 10, bytes(size), None)
            self.assertEqual(receiver.open_data(memoryview(frame)[10:end]), bytes(size))
            receiver.consume(size)
            self.assertEqual(sender.open_ack(receiver.seal_ack()), (1, []))
        self.assertEqual(one.seal_close(7)[0], two.open_close(one.seal_close(7)) or 7)

    def test_each_key_encrypts_that_many_messages(self) -> None:
        one, _ = pair(Cipher.AES_256_GCM)
        key = ciphers.first_key(self.key_of(one))
        for nonce in range(3 * self.AFTER):
            if nonce and nonce % self.AFTER == 0:
                key = ciphers.next_key(AESGCM(key).encrypt)
            sealed = one.seal_data(b"data", None)
            plain = AESGCM(key).decrypt(bytes(4) + nonce.to_bytes(8, "little"), sealed, bytes((FWD,)))
            self.assertEqual(plain[2:], b"data")

    def key_of(self, end: SecureEnd) -> bytes:
        """Attach ``end`` anew with a known key, and return that key."""
        key = bytes(range(32))
        result = HandshakeResult(B.public, key, bytes(32), bytes(32))
        end.attach(Carrier(), result, Hello(0, WINDOW), WINDOW, Cipher.AES_256_GCM)
        return key

    def test_what_comes_after_a_lost_frame_at_the_change_is_refused(self) -> None:
        one, two = pair(Cipher.AES_256_GCM)
        frames = [one.seal_data(b"data", None) for _ in range(self.AFTER + 1)]
        for frame in frames[:-2]:
            two.open_data(frame)
        error = self.assertRaises(SecureError, two.open_data, frames[-1])
        self.assertIs(error.reason, CloseReason.NOT_AUTHENTIC)

    def test_the_half_close_may_be_the_last_message_of_a_key(self) -> None:
        one, two = pair(Cipher.AES_256_GCM)
        one.half_close = two.half_close = True
        for _ in range(self.AFTER - 1):
            two.open_data(one.seal_data(b"x", None))
        self.assertIsNone(two.open_data(one.seal_end(None)))
        self.assertEqual(two.open_ack(one.seal_ack()), (0, []))

    def test_chacha_keeps_its_key(self) -> None:
        one, two = pair(Cipher.CHACHA20_POLY1305)
        before = one._encrypt  # noqa: SLF001
        for _ in range(3 * self.AFTER):
            two.open_data(one.seal_data(b"data", None))
        self.assertIs(one._encrypt.__self__, before.__self__)  # type: ignore[attr-defined]  # noqa: SLF001


class MoveTests(SynchronousTestCase):
    """A stream may change its cipher with its transport; its rolling hashes continue."""

    @given(st.lists(st.sampled_from(Cipher), min_size=2, max_size=5))
    def test_a_stream_moves_between_ciphers(self, kinds: list[Cipher]) -> None:
        one, two = pair(kinds[0], TOKEN)
        for number, cipher in enumerate(kinds[1:], 1):
            two.open_data(one.seal_data(b"before", None))
            one.seal_data(b"lost", None)
            one.generation = number
            resume = Hello(0, WINDOW, resume=one.position(), aes_gcm=cipher is Cipher.AES_256_GCM)
            proposal = Proposal(A, B.public, resume)
            offer = Offer(B, proposal.payload)
            assert offer.hello.resume is not None
            position = replace(two.position(), generation=number)
            reply = Hello(0, WINDOW, resume=position, aes_gcm=offer.hello.aes_gcm)
            there, payload = offer.accept(reply)
            here, hello = proposal.process_answer(payload)
            answer = two.answer(there, offer.hello, reply)
            one.detach()
            asking = one.attach_resumed(Carrier(), here, hello, WINDOW, agreed_cipher(resume, hello))
            confirming = one.seal_ack()
            self.assertTrue(answer.is_confirmed_by(FWD, asking))
            self.assertFalse(answer.is_confirmed_by(ACK, confirming), "the second message is not the first")
            two.resume_over(Carrier(), answer)
            self.assertEqual((one.cipher, two.cipher), (cipher, cipher))
            self.assertEqual(two.open_data(asking), b"")
            two.open_ack(confirming)
            acknowledged = two.seal_ack()
            self.assertTrue(one.is_authentic(ACK, acknowledged))
            _, unsent = one.prove()
            self.assertEqual([bytes(data) for data, _ in unsent], [b"lost"])
            one.open_ack(acknowledged)
            for data, ticket in unsent:
                self.assertEqual(two.open_data(one.seal_data(data, ticket)), b"lost")
            one.open_ack(two.seal_ack())


class VectorTests(SynchronousTestCase):
    """``secure_transport_aes.json``, which was computed by OpenSSL's AES and HMAC alone."""

    def test_frames_are_those_of_the_vector(self) -> None:
        vector = json.loads((VECTORS / "secure_transport_aes.json").read_text())
        mine = Hello(7, 262144, TOKEN, tags=True, half_close=True, aes_gcm=True)
        theirs = replace(mine, port=0)
        self.assertEqual(mine.encode().hex(), vector["hello_initiator"])
        self.assertEqual(theirs.encode().hex(), vector["hello_responder"])
        proposal = Proposal(A, B.public, mine, ephemeral=SecKey(bytes.fromhex(vector["ephemeral_initiator"])))
        offer = Offer(B, proposal.payload, ephemeral=SecKey(bytes.fromhex(vector["ephemeral_responder"])))
        there, payload = offer.accept(theirs)
        self.assertEqual((proposal.payload.hex(), payload.hex()), (vector["request"], vector["accept"]))
        here, hello = proposal.process_answer(payload)
        self.assertEqual(here.send_key.hex(), vector["key_initiator_to_responder"])
        one = SecureEnd(here.hash, initiator=True, token=TOKEN, tags=True)
        one.attach(Carrier(), here, hello, 262144, agreed_cipher(mine, hello))
        two = SecureEnd(there.hash, initiator=False, token=TOKEN, tags=True)
        two.attach(Carrier(), there, offer.hello, 262144, agreed_cipher(theirs, offer.hello))
        nonce = sequence = 0
        for frame in vector["frames"]:
            # The frames between those of the vector are left out: counters of both ends jump over them.
            one._seal_nonce += frame["nonce"] - nonce  # noqa: SLF001
            two._open_nonce += frame["nonce"] - nonce  # noqa: SLF001
            one._next_sequence = (one._next_sequence + frame["sequence"] - sequence) & 0xFFFF  # noqa: SLF001
            two._received_sequence = (frame["sequence"] - 1) & 0xFFFF  # noqa: SLF001
            if two._open_nonce == two._open_rekey:  # noqa: SLF001
                two._rekey_opening()  # noqa: SLF001  # The frame before would have done it.
            data = bytes.fromhex(frame["data"])
            sealed = one.seal_data(data, None)
            self.assertEqual(sealed.hex(), frame["payload"])
            self.assertEqual(two.open_data(sealed), data)
            nonce, sequence = frame["nonce"] + 1, frame["sequence"] + 1
