"""Secure transports: the key agreement, attacks of a lying server, and replays."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any, cast

from hypothesis import given, strategies as st
from twisted.internet.defer import fail
from twisted.internet.error import ConnectionDone
from twisted.logger import formatEvent, globalLogPublisher
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import (
    CloseReason,
    DmsgTimeout,
    EncryptionUnavailable,
    EntryNotFound,
    HandshakeError,
    KeyFormatError,
    TransportRefused,
)
from dmsg.keys import PubKey, SecKey
from dmsg.net.streams.address import DmsgAddress, StreamLost, StreamTimeout
from dmsg.streams.core import resumption
from dmsg.streams.core.agreement import (
    HELLO_SIZE,
    KEYS_SIZE,
    MIN_MESSAGE,
    OPTION_OPEN,
    OPTION_RESUME,
    Hello,
    Offer,
    Proposal,
    Resume,
)
from dmsg.streams.core.budget import Budget
from dmsg.streams.core.resumption import INITIAL_WINDOW, MAX_FRAMES, SecureError
from dmsg.streams.core.secure import ACK_HASH_SIZE, DIAGNOSE_SIZE, MAX_SECURE_DATA, SecureEnd
from dmsg.testing.raw_client import RawClient
from dmsg.v2019.core.wire import (
    ACK,
    CLOSE,
    FWD,
    HANDSHAKE_PAYLOAD_SIZE,
    HEADER_SIZE,
    MAX_FRAME_PAYLOAD,
    MIN_SECURE_REQUEST,
    REQUEST,
    SECURE_OVERHEAD,
    Frame,
    encode_close,
    encode_frame,
    pack_header_into,
)
from dmsg.v2019.incoming import MAX_LOOKUPS
from dmsg.v2019.transport_streams import LOOK_UP_BURST, LOOK_UP_RATE, Encryption
from dmsg.v2019.unconfirmed import CONFIRM_TIMEOUT
from tests.support import KEYS, SERVER_KEY, VECTORS, Accepting, Carrier
from tests.v2019.secure_support import SecureCase

A, B = KEYS["A"], KEYS["B"]
EPHEMERAL_A, EPHEMERAL_B = SecKey.from_seed(b"ephemeral-a"), SecKey.from_seed(b"ephemeral-b")

hellos = st.builds(
    Hello,
    port=st.integers(0, 65535),
    window=st.integers(0, 2**32 - 1),
    token=st.none() | st.binary(min_size=16, max_size=16),
    ended=st.none() | st.integers(0, 255),
    tags=st.booleans(),
    half_close=st.booleans(),
    aes_gcm=st.booleans(),
)


def pair(window: int = INITIAL_WINDOW, token: bytes | None = None, tags: bool = True) -> tuple[SecureEnd, SecureEnd]:
    """Return both attached ends of a stream."""
    proposal = Proposal(A, B.public, Hello(7, window, token), ephemeral=EPHEMERAL_A)
    offer = Offer(B, proposal.payload, ephemeral=EPHEMERAL_B)
    there, payload = offer.accept(Hello(0, window, token))
    here, hello = proposal.process_answer(payload)
    one = SecureEnd(here.hash, initiator=True, window=window, token=token, tags=tags)
    two = SecureEnd(there.hash, initiator=False, window=window, token=token, tags=tags)
    one.attach(Carrier(), here, hello, window)
    two.attach(Carrier(), there, offer.hello, window)
    return one, two


class AgreementTests(SynchronousTestCase):
    """REQUEST and ACCEPT."""

    def test_both_get_the_same_keys(self) -> None:
        proposal = Proposal(A, B.public, Hello(7, 1000, bytes(16)))
        self.assertEqual(len(proposal.payload), MIN_SECURE_REQUEST)
        self.assertEqual(proposal.payload[:HANDSHAKE_PAYLOAD_SIZE], A.public + B.public)
        offer = Offer(B, proposal.payload)
        self.assertEqual(offer.hello, Hello(7, 1000, bytes(16)))
        there, payload = offer.accept(Hello(0, 2000))
        here, hello = proposal.process_answer(payload)
        self.assertEqual(hello, Hello(0, 2000))
        self.assertEqual((here.send_key, here.receive_key, here.hash), (there.receive_key, there.send_key, there.hash))
        self.assertEqual((here.remote, there.remote), (B.public, A.public))

    @given(hellos)
    def test_hellos_come_back(self, hello: Hello) -> None:
        self.assertEqual(Hello.decode(hello.encode()), hello)
        self.assertEqual(len(hello.encode()), HELLO_SIZE)

    def test_all_hellos_are_of_one_length(self) -> None:
        resume = Resume(bytes(16), 1, 2, bytes(32))
        for hello in (Hello(), Hello(7, 9, bytes(16)), Hello(0, 9, None, resume), Hello(ended=3)):
            self.assertEqual(len(Proposal(A, B.public, hello).payload), MIN_SECURE_REQUEST)

    def test_malformed_hellos_are_refused(self) -> None:
        head = bytes(6)
        for data in (
            b"",
            head,
            head + bytes((OPTION_OPEN, 15)) + bytes(111 + 9),
            head + (bytes((OPTION_OPEN, 16)) + bytes(16)) * 2 + bytes(86),
            head + bytes((OPTION_RESUME, 59)) + bytes(61),
            head + b"\xff\0" + bytes(120),
            head.ljust(HELLO_SIZE - 1, b"\1") + b"\1",
            # This option's length is beyond the end.
            head + b"\x7f\x77".ljust(2 + 0x77, b"x") + b"\x7f",
        ):
            self.assertRaises(HandshakeError, Hello.decode, data)
        for options in (
            bytes((0x84, 1, 2)),
            bytes((0x84, 1, 0, OPTION_OPEN, 16)) + bytes(16),
            bytes((OPTION_RESUME, 60)) + bytes(60) + bytes((0x84, 1, 0)),
            bytes((0x84, 2, 0, 0)),
            bytes((0x83, 0)),
        ):
            self.assertRaises(HandshakeError, Hello.decode, (head + options).ljust(HELLO_SIZE, b"\0"))
        for probe in (0, 1):
            self.assertEqual(Hello.decode(Hello(probe=probe).encode()).probe, probe)
        unknown = head + b"\x7f\3abc"
        self.assertEqual(Hello.decode(unknown.ljust(HELLO_SIZE, b"\0")), Hello())
        # The Hello of a later version may be longer. An option without a value may be the last one.
        self.assertEqual(Hello.decode(unknown.ljust(HELLO_SIZE + 9, b"\0")), Hello())
        last = (head + b"\x7f\x76").ljust(HELLO_SIZE - 2, b"x") + b"\x7e\0"
        self.assertEqual(Hello.decode(last), Hello())

    def test_the_keys_are_bound(self) -> None:
        """The prologue has protocol and keys: a REQUEST serves no other pair, and no other role."""
        payload = Proposal(A, B.public, Hello()).payload
        message = payload[HANDSHAKE_PAYLOAD_SIZE:]
        self.assertRaises(HandshakeError, Offer, KEYS["C"], payload)
        self.assertRaises(HandshakeError, Offer, B, KEYS["C"].public + B.public + message)
        self.assertRaises(HandshakeError, Offer, A, B.public + A.public + message)

    def test_ten_thousand_mutated_messages(self) -> None:
        """Named errors, and no message that was changed is taken."""
        draw = Random(7)
        good = Proposal(A, B.public, Hello(7), ephemeral=EPHEMERAL_A)
        answer = Offer(B, good.payload, ephemeral=EPHEMERAL_B).accept(Hello(0, 5))[1]
        for number in range(10_000):
            original = good.payload if number % 2 else answer
            data = bytearray(original)
            for _ in range(draw.randrange(1, 4)):
                kind = draw.randrange(4)
                at = draw.randrange(len(data)) if data else 0
                if kind == 0 and data:
                    data[at] ^= 1 << draw.randrange(8)
                elif kind == 1:
                    del data[at : at + draw.randrange(1, 40)]
                elif kind == 2:
                    data[at:at] = draw.randbytes(draw.randrange(1, 40))
                else:
                    data[at : at + 33] = draw.choice((bytes(33), A.public, b"\2" + b"\xff" * 32, draw.randbytes(33)))
            if bytes(data) == original:
                continue
            with self.assertRaises((HandshakeError, KeyFormatError)):
                if number % 2:
                    Offer(B, bytes(data))
                else:
                    proposal = Proposal(A, B.public, Hello(7), ephemeral=EPHEMERAL_A)
                    proposal.process_answer(bytes(data))


class EndTests(SynchronousTestCase):
    """Frames, hashes, windows; no network."""

    def test_a_single_ack_answers_many_frames(self) -> None:
        one, two = pair()
        for number in range(100):
            self.assertEqual(two.open_data(one.seal_data(b"%d" % number, number)), b"%d" % number)
        two.consume(two.received)
        self.assertEqual(one.open_ack(two.seal_ack()), (100, list(range(100))))
        self.assertEqual((one.in_flight_bytes, one.acknowledged), (0, two.received))
        self.assertEqual(one.open_ack(two.seal_ack()), (0, []))

    def test_sequence_numbers_wrap_around(self) -> None:
        one, two = pair()
        for number in range(70_000):
            two.open_data(one.seal_data(b"", None))
            if number % 9000 == 0:
                self.assertGreater(one.open_ack(two.seal_ack())[0], 0)
        one.open_ack(two.seal_ack())
        self.assertFalse(one.in_flight)

    def test_acks_of_unsent_data_are_errors(self) -> None:
        for sent in (0, 5):
            one, two = pair()
            for _ in range(5):
                two.open_data(one.seal_data(b"x", None))
            one.open_ack(two.seal_ack())
            two._received_sequence = (two._received_sequence + (1 if sent else -1)) & 0xFFFF
            self.assert_error(CloseReason.BAD_FRAME, one.open_ack, two.seal_ack())

    def test_payloads_are_sealed_under_the_types_of_their_frames(self) -> None:
        """The room of secure streams knows no frames: its kinds and its largest payload must be those of 2019."""
        self.assertEqual((resumption.FWD, resumption.ACK, resumption.CLOSE), (FWD, ACK, CLOSE))
        self.assertEqual(MAX_SECURE_DATA + SECURE_OVERHEAD, MAX_FRAME_PAYLOAD)
        self.assertEqual(
            (KEYS_SIZE, MIN_MESSAGE), (HANDSHAKE_PAYLOAD_SIZE, MIN_SECURE_REQUEST - HANDSHAKE_PAYLOAD_SIZE)
        )

    def test_sealed_frames_equal_their_parts(self) -> None:
        """Sealed in a buffer, opened where they lie: for who receives them it is the same."""
        for tags in (True, False):
            for size in (1, DIAGNOSE_SIZE, DIAGNOSE_SIZE + 1, MAX_SECURE_DATA):
                data = bytes(range(251)) * (size // 251 + 1)
                data = data[:size]
                (one, two), (same, _) = pair(tags=tags), pair(tags=tags)
                frame = bytearray(b"\xff" * (HEADER_SIZE + MAX_FRAME_PAYLOAD))
                payload = same.seal_data(data, "ticket")
                pack_header_into(frame, 0, FWD, 0x1234, len(payload))
                end = one.seal_into(memoryview(frame), HEADER_SIZE, memoryview(data), "ticket")
                self.assertEqual(frame[:end], encode_frame(FWD, 0x1234, payload))
                self.assertEqual(bytes(frame[end:]), b"\xff" * (len(frame) - end))
                self.assertEqual((one.in_flight_bytes, len(one.in_flight)), (size, 1))
                received = two.open_data(memoryview(frame)[HEADER_SIZE:end])
                frame[:] = bytes(len(frame))  # The buffers are reused.
                self.assertEqual(received, data)
                self.assertEqual(one.open_ack(two.seal_ack()), (1, ["ticket"]))

    def test_a_large_frame_that_was_changed(self) -> None:
        """The frame is decrypted in place; no part of it is delivered, and the next frame fails as well."""
        one, two = pair()
        payload = bytearray(one.seal_data(bytes(MAX_SECURE_DATA), None))
        payload[100] ^= 1
        self.assert_error(CloseReason.NOT_AUTHENTIC, two.open_data, memoryview(payload))
        self.assertEqual((two.received, two.delivered), (0, (0, 0)))
        self.assert_error(CloseReason.FRAME_MISSING, two.open_data, memoryview(bytearray(one.seal_data(b"x", None))))

    def test_differing_hashes_end_the_stream(self) -> None:
        greater = set()
        for number in range(20):
            one, two = pair()
            two.open_data(one.seal_data(b"x", None))
            right = two._received_hash.digest()
            two._received_hash.update(b"%d" % number)
            greater.add(two._received_hash.digest() > right)
            self.assert_error(CloseReason.HASH_MISMATCH, one.open_ack, two.seal_ack())
        self.assertEqual(greater, {True, False})

    def test_gaps_repeats_and_changes_are_distinguished(self) -> None:
        one, two = pair()
        frames = [one.seal_data(b"%d" % number, None) for number in range(5)]
        two.open_data(frames[0])
        self.assert_error(CloseReason.FRAME_REPEATED, two.open_data, frames[0])
        self.assert_error(CloseReason.FRAME_MISSING, two.open_data, frames[2])
        for at in range(len(frames[1])):
            changed = bytearray(frames[1])
            changed[at] ^= 1
            self.assert_error(CloseReason.NOT_AUTHENTIC, two.open_data, bytes(changed))
        # A frame of one kind cannot replace a frame of another kind.
        self.assert_error(CloseReason.NOT_AUTHENTIC, two.open_ack, frames[1])
        self.assertIsNone(two.open_close(b"\0" + frames[1]))

    def test_authentic_frames_that_cannot_be(self) -> None:
        """The other end made them, and wrong: its sequence, an ACK of neither size, or of what was never sent."""

        def seal(end: SecureEnd, plain: bytes, kind: int) -> bytes:
            nonce = end._seal_nonce
            end._seal_nonce = nonce + 1
            return end._encrypt(nonce.to_bytes(12, "big"), plain, bytes((kind,)))

        def nonce_like(end: SecureEnd) -> bool:
            _, other = pair()
            return other.open_data(seal(end, b"\0\0x", FWD)) == b"x"

        self.assertTrue(nonce_like(pair()[0]))
        for plain in (b"", b"\0", b"\0\1x", b"\xff\xffx"):
            one, two = pair()
            self.assert_error(CloseReason.BAD_FRAME, two.open_data, seal(one, plain, FWD))
        for plain in (b"", bytes(2), bytes(ACK_HASH_SIZE + 1), bytes(ACK_HASH_SIZE + 3), bytes(ACK_HASH_SIZE + 7)):
            one, two = pair()
            one.seal_data(b"x", None)
            self.assert_error(CloseReason.BAD_FRAME, one.open_ack, seal(two, plain, ACK))
        one, two = pair()
        one.seal_data(b"x", None)
        self.assert_error(CloseReason.BAD_FRAME, one.open_ack, seal(two, b"\0\1" + bytes(ACK_HASH_SIZE), ACK))

    def test_reasons_of_a_close_in_as_many_bytes_as_a_family_has(self) -> None:
        one, two = pair()
        for reason, size, said in (
            (0, 1, 0),
            (255, 1, 255),
            (256, 1, CloseReason.ABORTED),
            (256, 2, 256),
            (70_000, 4, 70_000),
        ):
            payload = one.seal_close(reason, size)
            self.assertEqual(payload[:size], said.to_bytes(size, "big"))
            self.assertIsNone(two.open_close(payload, size + 1))
            self.assertEqual(two.open_close(payload, size), said)
        self.assertEqual(Hello.decode(Hello(ended=256).encode()).ended, CloseReason.ABORTED)
        self.assertEqual(encode_close(1, 256), encode_close(1, CloseReason.ABORTED))

    @given(st.binary(max_size=200))
    def test_random_frames_raise_only_named_errors(self, data: bytes) -> None:
        one, two = pair()
        self.assertRaises(SecureError, two.open_data, data)
        self.assertRaises(SecureError, two.open_ack, data)
        self.assertIsNone(two.open_close(data))

    def test_window_changes_are_announced_once(self) -> None:
        one, two = pair(100_000)
        while one.may_send:
            two.open_data(one.seal_data(bytes(10_000), None))
        self.assertEqual(one.in_flight_bytes, 100_000)
        ack = two.seal_ack()
        one.open_ack(ack)
        self.assertEqual(one.peer_window, 0)
        self.assertFalse(two.consume(10_000))
        self.assertTrue(two.consume(20_000))
        long = two.seal_ack()
        self.assertEqual(len(long), len(two.seal_ack()) + 4)
        one.open_ack(long)
        self.assertEqual(one.peer_window, 30_000)

    def test_a_sender_that_does_not_care_for_the_window(self) -> None:
        one, two = pair(10_000)
        two.open_data(one.seal_data(bytes(MAX_SECURE_DATA), None))
        two.open_data(one.seal_data(bytes(10_000), None))
        self.assert_error(CloseReason.BUFFER_FULL, two.open_data, one.seal_data(b"x", None))

    def test_frames_in_flight_are_bounded(self) -> None:
        one, _ = pair()
        for _ in range(MAX_FRAMES):
            one.seal_data(b"", None)
        self.assertFalse(one.may_send)

    def test_a_peer_has_a_part_of_the_budget(self) -> None:
        """Other peers still get a share, however many streams one peer has."""
        budget = Budget(1200)
        self.assertTrue(budget.take(b"greedy", 400))
        self.assertTrue(budget.take(b"greedy", 200))
        self.assertFalse(budget.take(b"greedy", 1))
        self.assertTrue(budget.take(b"other", 300))
        self.assertFalse(budget.take(b"other", 1))
        self.assertTrue(budget.take(b"third", 150))
        budget.give_back(b"greedy", 600)
        self.assertEqual(budget.left, 750)
        self.assertTrue(budget.take(b"other", 100))
        for peer, size in ((b"other", 400), (b"third", 150)):
            budget.give_back(peer, size)
        self.assertEqual((budget.left, budget._of), (1200, {}))

    def test_windows_grow_while_that_helps_and_there_is_budget(self) -> None:
        for seconds, budget, grows in ((0.1, 10**9, True), (0.7, 10**9, False), (0.1, 1000, False)):
            end = SecureEnd(bytes(32), initiator=True, budget=Budget(budget))
            end.round_trip = 0.1
            now = 0.0
            for _ in range(5):
                while end.consumed < end.measure_at:
                    end.received += 10_000
                    end.consume(10_000)
                now += seconds
                end.measure(now)
            self.assertEqual(end.window > INITIAL_WINDOW, grows)
            left = end._budget.left
            self.assertEqual(left, budget - (end.window - INITIAL_WINDOW))
            end.attach(Carrier(), pair_result(), Hello(), 0)
            end.release()
            self.assertEqual(end._budget.left, budget)

    def assert_error(self, reason: CloseReason, method: Any, *arguments: Any) -> None:
        with self.assertRaises(SecureError) as caught:
            method(*arguments)
        self.assertEqual(caught.exception.reason, reason)


def pair_result() -> Any:
    """Keys, whatever they are."""
    offer = Offer(B, Proposal(A, B.public, Hello()).payload)
    return offer.accept(Hello())[0]


class StreamTests(SecureCase):
    """Streams as an application uses them."""

    def test_bytes_both_ways_and_addresses(self) -> None:
        one, two = self.open()
        one.transport.write(b"to b")
        two.transport.write(b"to a" * 100_000)
        self.network.settle()
        self.assertEqual((one.data, two.data), (b"to a" * 100_000, b"to b"))
        self.assertEqual(one.transport.getPeer(), DmsgAddress(B.public, 7))
        self.assertEqual(one.transport.getHost(), DmsgAddress(A.public))
        self.assertEqual(two.transport.getHost(), DmsgAddress(B.public, 7))
        self.assertEqual(two.transport.getPeer(), DmsgAddress(A.public))
        self.assertTrue(one.transport.secure and two.transport.secure)

    def test_send_fires_when_acknowledged(self) -> None:
        one, two = self.open()
        sendings = [one.transport.send(bytes(size)) for size in (0, 1, 200_000)]
        self.network.settle()
        for sending in sendings:
            self.successResultOf(sending)
        self.assertEqual(len(two.data), 200_001)

    def test_acks_are_fewer_than_frames(self) -> None:
        one, _ = self.open()
        relay = self.network.factory.relay
        before = {peer.key: peer.frames_in for peer in relay.peers}
        for _ in range(200):
            one.transport.send(b"x")
        self.network.settle()
        frames = {peer.key: peer.frames_in - before[peer.key] for peer in relay.peers}
        self.assertEqual(frames[A.public], 200)
        self.assertLess(frames[B.public], 20)

    def test_streams_to_a_port_without_listener_are_refused(self) -> None:
        error = self.failureResultOf(self.ask(8), TransportRefused).value
        self.assertEqual(error.reason, CloseReason.REFUSED)
        self.assertIn("nobody listens at", str(error))

    def test_a_clean_end_is_told_from_a_cut_one(self) -> None:
        one, two = self.open()
        one.transport.write(b"last words")
        one.transport.loseConnection()
        self.network.settle()
        self.assertEqual(two.data, b"last words")
        self.assertTrue(two.lost.check(ConnectionDone) and one.lost.check(ConnectionDone))

    def test_a_close_that_the_server_made_is_no_clean_end(self) -> None:
        one, two = self.open(resumable=False)
        self.tamper(lambda frames: frames)
        peer = self.network.factory.relay.newest[B.public]
        (own_id,) = peer.routes
        peer.port.send(Frame(CLOSE, own_id, b"\0").encode())
        self.network.settle()
        self.assertEqual(two.lost.value.close_reason, CloseReason.PEER_DISCONNECTED)
        del one

    def test_a_reader_that_stops_stops_the_sender(self) -> None:
        one, two = self.open()
        two.transport.pauseProducing()
        sendings = [one.transport.send(bytes(10_000)) for _ in range(100)]
        self.network.settle()
        unread = two.transport.end.received - two.transport.end.consumed
        self.assertLessEqual(unread, INITIAL_WINDOW + MAX_SECURE_DATA)
        self.assertNoResult(sendings[-1])
        two.transport.resumeProducing()
        self.network.settle()
        self.successResultOf(sendings[-1])
        self.assertEqual(len(two.data), 1_000_000)

    def test_plain_requests_are_refused(self) -> None:
        opening = self.a.open(B.public, Accepting())
        self.network.settle()
        error = self.failureResultOf(opening, TransportRefused).value
        self.assertEqual(error.reason, CloseReason.ENCRYPTION_REQUIRED)

    def test_a_server_of_2019_says_no(self) -> None:
        """The server refuses a long REQUEST without a reason."""
        opening = self.a.open(B.public, Accepting(), port=7, secure=True)
        (transport,) = self.a.core.transports.values()
        self.a.frames_received(*whole(Frame(CLOSE, transport.id, b"\0").encode()))
        error = self.failureResultOf(opening, EncryptionUnavailable).value
        self.assertIn("like servers of 2019", str(error))

    def test_no_secret_or_payload_is_logged(self) -> None:
        """The log is checked at all levels, also after errors."""
        marker = b"MARKER-not-for-the-log"
        events: list[str] = []

        def note(event: Any) -> None:
            events.append(formatEvent(event) + repr(event) + str(event.get("log_failure", "")))

        globalLogPublisher.addObserver(note)  # type: ignore[arg-type]
        self.addCleanup(globalLogPublisher.removeObserver, cast(Any, note))
        one, two = self.open()
        one.transport.write(marker)
        self.network.settle()
        two.transport.end._received_hash.update(b"wrong")
        two.transport.write(marker)
        one.transport.write(marker * 10)
        self.network.settle()
        self.cut("A")
        self.network.clock.advance(self.resume_timeout)
        self.assertIsNotNone(one.lost and two.lost)
        self.assertTrue(events)
        self.assertFalse([event for event in events if marker.decode() in event])

    def test_no_plaintext_passes_the_server(self) -> None:
        marker = b"MARKER-that-nobody-else-may-read"
        seen = bytearray()
        self.tamper(lambda frames: [seen.extend(frame.encode()) or frame for frame in frames])
        _, two = self.open()
        self.successResultOf(self.ask()).transport.write(marker)
        self.network.settle()
        self.assertTrue(any(marker in built.data for built in self.listeners[7].built))  # type: ignore[attr-defined]
        self.assertGreater(len(seen), len(marker))
        self.assertNotIn(marker, bytes(seen))
        del two


def whole(data: bytes) -> tuple[bytearray, int]:
    """Arguments of frames_received."""
    return bytearray(data), len(data)


class LyingServerTests(SecureCase):
    """A server that changes what it relays ends the transport, with the right reason."""

    def lie(self, change: Any) -> int:
        """Change frames in one way; return the reason with which the receiver's stream ended."""
        one, two = self.open(resumable=False)
        done: list[bool] = []

        def once(frames: list[Frame]) -> list[Frame]:
            data = [number for number, frame in enumerate(frames) if frame.type == FWD]
            if done or len(data) < 3:
                return frames
            done.append(True)
            return list(change(frames, data[1]))

        self.tamper(once)
        for _ in range(6):
            one.transport.send(b"x").addErrback(lambda _: None)
        self.network.settle()
        self.assertTrue(done and two.lost.check(StreamLost))
        self.assertIn(two.data, (b"x", b"xx"))
        self.assertTrue(one.lost.check(StreamLost))
        reason: int = two.lost.value.close_reason
        return reason

    def test_a_bit_is_flipped(self) -> None:
        def flip(frames: list[Frame], at: int) -> list[Frame]:
            payload = bytes((frames[at].payload[0] ^ 1,)) + frames[at].payload[1:]
            return [*frames[:at], Frame(FWD, frames[at].id, payload), *frames[at + 1 :]]

        self.assertEqual(self.lie(flip), CloseReason.NOT_AUTHENTIC)

    def test_a_frame_is_left_out(self) -> None:
        self.assertEqual(self.lie(lambda frames, at: [*frames[:at], *frames[at + 1 :]]), CloseReason.FRAME_MISSING)

    def test_a_frame_is_repeated(self) -> None:
        self.assertEqual(self.lie(lambda frames, at: [*frames[: at + 1], *frames[at:]]), CloseReason.FRAME_REPEATED)

    def test_two_frames_are_swapped(self) -> None:
        self.assertEqual(
            self.lie(lambda frames, at: [*frames[:at], frames[at + 1], frames[at], *frames[at + 2 :]]),
            CloseReason.FRAME_MISSING,
        )

    def test_data_is_passed_off_as_an_ack(self) -> None:
        self.assertEqual(
            self.lie(lambda frames, at: [*frames[:at], Frame(ACK, frames[at].id, frames[at].payload)]),
            CloseReason.NOT_AUTHENTIC,
        )

    def test_frames_of_another_transport_are_injected(self) -> None:
        def inject(frames: list[Frame], at: int) -> list[Frame]:
            return [*frames[:at], Frame(FWD, frames[at].id, bytes(30)), *frames[at:]]

        self.assertEqual(self.lie(inject), CloseReason.NOT_AUTHENTIC)


class ReplayTests(SecureCase):
    """A server that says again what it has heard."""

    def test_a_replayed_request_opens_no_stream(self) -> None:
        """The request is answered, but the application is not notified, because the sender cannot confirm."""
        requests: list[bytes] = []

        def note(frames: list[Frame]) -> list[Frame]:
            requests.extend(frame.payload for frame in frames if frame.type == REQUEST)
            return frames

        self.tamper(note)
        self.open()
        built = self.listeners[7].built  # type: ignore[attr-defined]
        self.assertEqual((len(requests), len(built)), (1, 1))
        liar = RawClient(A, SERVER_KEY.public)  # The client sends in A's name, as a server could.
        self.network.join(liar)
        self.network.settle()
        liar.send(Frame(REQUEST, 2, requests[0]).encode())
        self.network.settle()
        liar.send(Frame(FWD, 2, bytes(40)).encode())
        self.network.settle()
        self.network.clock.advance(CONFIRM_TIMEOUT + 1)
        self.network.settle()
        self.assertEqual(len(built), 1)
        self.assertEqual(len(self.b.core.transports), 1)
        self.assertFalse(self.b._incoming._unconfirmed)

    def test_unconfirmed_streams_are_removed(self) -> None:
        proposal = Proposal(A, B.public, Hello(7, 1000))
        quiet = RawClient(A, SERVER_KEY.public)
        self.network.join(quiet)
        self.network.settle()
        quiet.send(Frame(REQUEST, 2, proposal.payload).encode())
        self.network.settle()
        self.assertEqual(len(self.b._incoming._unconfirmed), 1)
        self.network.clock.advance(CONFIRM_TIMEOUT)
        self.network.settle()
        self.assertEqual((len(self.b._incoming._unconfirmed), self.b.transports), (0, 0))
        self.assertEqual(quiet.take()[-1].payload, bytes((CloseReason.TIMEOUT,)))


class DeadlineTests(SecureCase):
    """Deadlines fail what they are for and leave nothing."""

    def calls(self) -> int:
        return len(self.network.clock.getDelayedCalls())

    def test_a_send_in_time_leaves_no_timer(self) -> None:
        one, _ = self.open()
        before = self.calls()
        sending = one.transport.send(b"x", timeout=5)
        self.network.settle()
        self.successResultOf(sending)
        self.assertEqual(self.calls(), before)

    def test_a_send_that_is_late(self) -> None:
        one, two = self.open()
        two.transport.pauseProducing()
        before = self.calls()
        sending = one.transport.send(bytes(2_000_000), timeout=5)
        self.network.settle()
        self.network.clock.advance(5)
        self.assertIn("did not acknowledge the data within", str(self.failureResultOf(sending, DmsgTimeout).value))
        self.assertEqual(self.calls(), before)
        self.assertIsNone(one.lost)

    def test_a_connect_that_is_late(self) -> None:
        quiet = RawClient(KEYS["C"], SERVER_KEY.public)
        self.network.join(quiet)
        self.network.settle()
        before = self.calls()
        opening = self.a.open(KEYS["C"].public, Accepting(), 3, port=7, secure=True)
        self.network.settle()
        self.network.clock.advance(3)
        self.failureResultOf(opening, DmsgTimeout)
        self.network.settle()
        self.assertEqual((self.a.transports, self.network.factory.relay.route_count), (0, 0))
        self.assertEqual(self.calls(), before)

    def test_a_read_deadline_ends_the_stream(self) -> None:
        one, two = self.open()
        one.transport.setReadDeadline(3)
        sending = one.transport.send(bytes(10**6))
        two.transport.pauseProducing()
        self.network.settle()
        self.network.clock.advance(3)
        self.network.settle()
        self.assertTrue(one.lost.check(StreamTimeout) and one.lost.check(DmsgTimeout))
        self.failureResultOf(sending, DmsgTimeout)
        two.transport.resumeProducing()
        self.assertEqual(two.lost.value.close_reason, CloseReason.TIMEOUT)
        self.assertEqual((self.a.transports, self.b.transports), (0, 0))

    def test_read_deadline_moved_and_taken_back(self) -> None:
        one, _ = self.open()
        one.transport.setReadDeadline(3)
        self.network.clock.advance(2)
        one.transport.setReadDeadline(3)
        self.network.clock.advance(2)
        self.assertIsNone(one.lost)
        one.transport.setReadDeadline(None)
        self.network.clock.advance(5)
        self.assertIsNone(one.lost)

    def test_a_write_deadline_needs_unacknowledged_data(self) -> None:
        one, two = self.open()
        one.transport.write(b"x")
        one.transport.setWriteDeadline(3)
        self.network.settle()
        self.network.clock.advance(3)
        self.assertIsNone(one.lost)
        two.transport.pauseProducing()
        one.transport.write(bytes(10**6))
        one.transport.setDeadline(2)
        self.network.settle()
        self.network.clock.advance(2)
        self.assertTrue(one.lost.check(StreamTimeout))

    def test_an_idle_stream_times_out(self) -> None:
        one, two = self.open()
        one.transport.setIdleTimeout(4)
        for _ in range(3):
            self.network.clock.advance(3)
            two.transport.write(b"still here")
            self.network.settle()
        self.assertIsNone(one.lost)
        self.network.clock.advance(3)
        self.network.clock.advance(1.1)
        self.assertTrue(one.lost.check(StreamTimeout))

    def test_ended_streams_leave_no_deadline_calls(self) -> None:
        one, _ = self.open(resumable=False)
        before = self.calls()
        one.transport.setDeadline(50)
        one.transport.setIdleTimeout(50)
        one.transport.abortConnection()
        self.network.settle()
        self.assertLessEqual(self.calls(), before)


class PlainTests(SecureCase):
    """A client that prefers secure transports takes plain ones only from those who offer nothing else."""

    encryption = Encryption.PREFER

    def test_the_signed_entry_decides(self) -> None:
        from twisted.internet.defer import Deferred, succeed

        self.listeners[0] = Accepting()
        waiting: Deferred[Any] = Deferred()
        for answer, taken in ((succeed({"secure1"}), False), (succeed(()), True), (waiting, True)):
            self.streams["B"].features_of = lambda remote, answer=answer: answer
            opening = self.a.open(B.public, Accepting())
            self.network.settle()
            if answer is waiting:
                self.assertNoResult(opening)
                waiting.callback(())
                self.network.settle()
            if taken:
                self.successResultOf(opening)
            else:
                refused = self.failureResultOf(opening, TransportRefused).value
                self.assertEqual(refused.reason, CloseReason.ENCRYPTION_REQUIRED)

    def test_so_many_are_looked_up_at_a_time(self) -> None:
        """Each look-up is a question to discovery, even if its result is no longer awaited."""
        from twisted.internet.defer import Deferred

        self.listeners[0] = Accepting()
        asked: list[Deferred[Any]] = []

        def ask(remote: PubKey) -> Deferred[Any]:
            asked.append(Deferred())
            return asked[-1]

        self.streams["B"].features_of = ask
        openings = []
        for number in range(MAX_LOOKUPS + 4):
            openings.append(self.a.open(B.public, Accepting()))
            self.network.settle()
            if number % 2:
                openings[-1].cancel()
                self.network.settle()
        self.assertEqual(len(asked), MAX_LOOKUPS)
        refused = self.failureResultOf(openings[MAX_LOOKUPS], TransportRefused).value
        self.assertEqual(refused.reason, CloseReason.RATE_LIMITED)
        for one in asked:
            one.callback(())
        self.network.settle()
        self.successResultOf(openings[0])
        self.assertEqual(self.streams["B"].asking, 0)
        for opening in openings:
            opening.addErrback(lambda _: None)

    def test_so_many_are_looked_up_in_a_second(self) -> None:
        """Discovery counts look-ups by address: strangers must not have it refuse this client and its neighbours."""
        self.listeners[0] = Accepting()
        asked: Counter[PubKey] = Counter()

        def ask(remote: PubKey) -> Any:
            asked[remote] += 1
            return fail(EntryNotFound("unlisted"))

        self.streams["B"].features_of = ask
        enemies = [RawClient(SecKey.from_seed(b"enemy %d" % number), SERVER_KEY.public) for number in range(8)]
        for enemy in enemies:
            self.network.join(enemy)
        self.network.settle()
        for turn in range(100):
            for enemy in enemies:
                request = bytes(enemy.key.public) + bytes(B.public)
                enemy.send(b"".join(encode_frame(REQUEST, 20 * turn + 2 * number, request) for number in range(5)))
            self.network.clock.advance(0.1)
            self.network.settle()
        self.assertTrue(LOOK_UP_BURST < asked.total() <= LOOK_UP_BURST + 10 * LOOK_UP_RATE, asked.total())
        # A newcomer gets its share.
        self.a.open(B.public, Accepting()).addErrback(lambda _: None)
        self.network.settle()
        self.assertEqual(asked[A.public], 1)
        # A cached entry causes no request to discovery.
        self.streams["B"].is_known = lambda remote: True
        for _ in range(50):
            self.a.open(B.public, Accepting()).addErrback(lambda _: None)
        self.network.settle()
        self.assertEqual(asked[A.public], 51)


class VectorTests(SynchronousTestCase):
    """``tests/vectors/secure_transport.json``, from which another implementation can be checked."""

    def test_secure_streams_match_the_vectors(self) -> None:
        """The frames of the vectors are computed again from the keys alone, and are equal."""
        for name, tags in (("secure_transport.json", False), ("secure_transport_tags.json", True)):
            recorded = json.loads((VECTORS / name).read_text())
            self.assertEqual(make_vectors(tags), recorded)

    def test_the_rolling_hash_over_tags_by_the_document(self) -> None:
        """BLAKE2b-256 over handshake hash, direction, the tags of the frames that have data, and the position."""
        binding = bytes.fromhex(json.loads((VECTORS / "secure_transport_tags.json").read_text())["handshake_hash"])
        one, two = vector_pair(True)
        sealed = [one.seal_data(data, None) for data in (b"abc", b"", b"de")]
        for frame in sealed:
            two.open_data(frame)
        expected = binding + b"\2" + sealed[0][-16:] + sealed[2][-16:] + (5).to_bytes(8, "big")
        self.assertEqual(two.position().hash, hashlib.blake2b(expected, digest_size=32).digest())
        back = two.seal_data(b"back", None)
        one.open_data(back)
        expected = binding + b"\3" + back[-16:] + (4).to_bytes(8, "big")
        self.assertEqual(one.position().hash, hashlib.blake2b(expected, digest_size=32).digest())
        self.assertEqual(one.open_ack(two.seal_ack())[0], 3)

    def test_the_rolling_hash_by_the_document(self) -> None:
        """BLAKE2b-256 over handshake hash, direction and data."""
        one, two = pair(token=bytes(16))
        two.open_data(one.seal_data(b"abc", None))
        offer = Offer(B, Proposal(A, B.public, Hello(), ephemeral=EPHEMERAL_A).payload)
        del offer
        binding = json.loads((VECTORS / "secure_transport.json").read_text())["handshake_hash"]
        fresh, _ = pair()
        self.assertEqual(fresh.received, 0)
        digest = hashlib.blake2b(bytes.fromhex(binding) + b"\0" + b"abc", digest_size=32).digest()
        vector = vector_pair()[1]
        vector.open_data(vector_pair()[0].seal_data(b"abc", None))
        self.assertEqual(vector.position().hash[:ACK_HASH_SIZE], digest[:ACK_HASH_SIZE])


HELLO_A = Hello(7, 262144, bytes(range(16)))
HELLO_B = Hello(0, 262144, bytes(range(16)))


def vector_pair(tags: bool = False) -> tuple[SecureEnd, SecureEnd]:
    """The two ends of the vectors."""
    proposal = Proposal(A, B.public, replace(HELLO_A, tags=tags), ephemeral=EPHEMERAL_A)
    offer = Offer(B, proposal.payload, ephemeral=EPHEMERAL_B)
    there, payload = offer.accept(replace(HELLO_B, tags=tags))
    here, hello = proposal.process_answer(payload)
    one = SecureEnd(here.hash, initiator=True, token=HELLO_A.token, tags=offer.hello.tags)
    two = SecureEnd(there.hash, initiator=False, token=HELLO_A.token, tags=hello.tags)
    one.attach(Carrier(), here, hello, HELLO_A.window)
    two.attach(Carrier(), there, offer.hello, HELLO_B.window)
    return one, two


def make_vectors(tags: bool) -> dict[str, Any]:
    """A whole stream: handshake, data both ways, an ACK with and without window, resumption, the end."""
    hello_a, hello_b = replace(HELLO_A, tags=tags), replace(HELLO_B, tags=tags)
    proposal = Proposal(A, B.public, hello_a, ephemeral=EPHEMERAL_A)
    offer = Offer(B, proposal.payload, ephemeral=EPHEMERAL_B)
    there, accept = offer.accept(hello_b)
    one, two = vector_pair(tags)
    frames = []

    def note(who: str, what: str, payload: bytes, **more: Any) -> None:
        frames.append({"from": who, "frame": what, "payload": payload.hex(), **more})

    note("initiator", "ACK", confirm := one.seal_ack(), meaning="confirms")
    two.open_ack(confirm)
    for data in (b"hello", b"", bytes(range(256))):
        note("initiator", "FWD", sealed := one.seal_data(data, None), data=data.hex())
        two.open_data(sealed)
    two.consume(two.received)
    note("responder", "ACK", sealed := two.seal_ack(), meaning="acknowledges all, window as it was")
    one.open_ack(sealed)
    note("responder", "FWD", sealed := two.seal_data(b"world", None), data=b"world".hex())
    one.open_data(sealed)
    note("initiator", "ACK", sealed := one.seal_ack(), meaning="not consumed: names the window")
    two.open_ack(sealed)
    note("initiator", "FWD", one.seal_data(b"lost", None), data=b"lost".hex(), meaning="does not arrive")
    one.detach()
    one.generation += 1
    resume_a = Hello(0, one.offer_window(), resume=one.position())
    second = Proposal(A, B.public, resume_a, ephemeral=SecKey.from_seed(b"ephemeral-a2"))
    offer_2 = Offer(B, second.payload, ephemeral=SecKey.from_seed(b"ephemeral-b2"))
    assert offer_2.hello.resume is not None
    two.detach()
    two.generation = offer_2.hello.resume.generation
    two.resume(offer_2.hello.resume)
    resume_b = Hello(0, two.offer_window(), resume=two.position())
    there_2, accept_2 = offer_2.accept(resume_b)
    here_2, hello_2 = second.process_answer(accept_2)
    assert hello_2.resume is not None
    _, unsent = one.resume(hello_2.resume)
    one.attach(Carrier(), here_2, hello_2, resume_a.window)
    two.attach(Carrier(), there_2, offer_2.hello, resume_b.window)
    resumed: list[Any] = []
    frames, before = resumed, frames
    note("initiator", "ACK", confirm := one.seal_ack(), meaning="confirms")
    two.open_ack(confirm)
    for again, _ in unsent:
        note("initiator", "FWD", sealed := one.seal_data(again, None), data=bytes(again).hex())
        two.open_data(sealed)
    note("initiator", "CLOSE", sealed := one.seal_close(0), reason=0)
    assert two.open_close(sealed) == 0
    return {
        "initiator": {"secret": A.hex(), "ephemeral": EPHEMERAL_A.hex()},
        "responder": {"secret": B.hex(), "ephemeral": EPHEMERAL_B.hex()},
        "request": proposal.payload.hex(),
        "accept": accept.hex(),
        "hello_initiator": hello_a.encode().hex(),
        "hello_responder": hello_b.encode().hex(),
        "handshake_hash": there.hash.hex(),
        "key_initiator_to_responder": there.receive_key.hex(),
        "key_responder_to_initiator": there.send_key.hex(),
        "frames": before,
        "resumption": {
            "ephemeral_initiator": SecKey.from_seed(b"ephemeral-a2").hex(),
            "ephemeral_responder": SecKey.from_seed(b"ephemeral-b2").hex(),
            "request": second.payload.hex(),
            "accept": accept_2.hex(),
            "hello_initiator": resume_a.encode().hex(),
            "hello_responder": resume_b.encode().hex(),
            "frames": resumed,
        },
    }
