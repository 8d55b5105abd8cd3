"""Unconfirmed RESUMEs: they change nothing of the stream, whoever made them."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any
from unittest import mock

from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from hypothesis import given, settings, strategies as st
from twisted.internet.error import ConnectionDone
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import CloseReason
from dmsg.streams.core.agreement import Hello, Proposal, Resume
from dmsg.streams.core.resumption import END_DATA, INITIAL_WINDOW, is_authentic, pack_nonce
from dmsg.streams.core.secure import SecureEnd
from dmsg.testing.raw_client import RawClient
from dmsg.v2019.core.wire import ACK, CLOSE, FWD, REQUEST, Frame, FrameBuffer
from dmsg.v2019.incoming import MAX_ANSWERS
from dmsg.v2019.session import ClientSession
from dmsg.v2019.unconfirmed import CONFIRM_TIMEOUT
from tests.support import KEYS, SERVER_KEY
from tests.v2019.test_half_close import HalfCase

A, B = KEYS["A"], KEYS["B"]


class AuthenticTests(SynchronousTestCase):
    def test_each_kind_of_frame_has_associated_data_of_its_own(self) -> None:
        """So a relay cannot turn an ACK into data, or data into the end of the data."""
        cipher, nonce = ChaCha20Poly1305(bytes(32)), 7
        for sealed_as, prefix, frame_type in (
            (bytes((FWD,)), b"", FWD),
            (END_DATA, b"", FWD),
            (bytes((ACK,)), b"", ACK),
            (bytes((CLOSE,)), b"\5", CLOSE),
        ):
            payload = prefix + cipher.encrypt(pack_nonce(nonce), b"data", sealed_as)
            for other in (FWD, ACK, CLOSE):
                found = is_authentic(cipher.decrypt, nonce, other, payload)
                self.assertIs(found, other == frame_type, (sealed_as, other))
            self.assertFalse(is_authentic(cipher.decrypt, nonce + 1, frame_type, payload))


class ForgeryCase(HalfCase):
    """A relay that has the responder's secret key speaks in A's name.

    The first message of KK in the name of A takes ``es`` and ``ss``, for both of which B's secret key is enough; the
    messages here are made with A's, which gives the same bytes.  The forger cannot confirm what it asks for.
    """

    used = 0

    def forger(self) -> RawClient:
        """A connection in A's name; the real A keeps its own."""
        client = RawClient(A, SERVER_KEY.public)
        self.network.join(client)
        self.network.settle()
        return client

    def forge(self, client: RawClient, resume: Resume) -> None:
        """A RESUME that arrives and is never confirmed."""
        self.used += 2
        proposal = Proposal(A, B.public, Hello(0, INITIAL_WINDOW, resume=resume))
        client.send(Frame(REQUEST, self.used, proposal.payload).encode())
        self.network.settle()

    def position(self, protocol: Any, **changes: Any) -> Resume:
        """Change a RESUME as a relay could that has seen the token and the tags."""
        end: SecureEnd = protocol.transport.end
        position = end.position()
        return replace(position, **{"generation": end.generation + 1, **changes})


class ForgedResumeTests(ForgeryCase):
    """The three ways in which an unconfirmed RESUME acted on a stream."""

    def test_a_forged_resume_does_not_acknowledge_data(self) -> None:
        """The relay keeps back what B sends, and says in A's name that A has it: ``send`` does not fire."""
        one, two = self.open()
        held: list[bytes] = []
        port = self.network.factory.relay.newest[A.public].port
        end: SecureEnd = two.transport.end

        class Holding:
            def __getattr__(self, name: str) -> Any:
                return (lambda data: held.append(bytes(data))) if name == "send" else getattr(port, name)

        self.network.factory.relay.newest[A.public].port = Holding()
        sending = two.transport.send(b"x" * 100)
        self.network.settle()
        self.assertTrue(held)
        forger = self.forger()
        sent, _, counted = end.in_flight[0]
        rolling = end._sent_hash.copy()
        rolling.update(counted)
        rolling.update(len(sent).to_bytes(8, "big"))
        self.forge(forger, Resume(end.token or b"", 1, len(sent), rolling.digest()))
        self.assertNoResult(sending)
        self.assertEqual((two.transport.acknowledged_bytes, len(end.in_flight)), (0, 1))
        # A gets the acknowledgement as soon as the relay passes it on, although the RESUME still waits.
        for data in held:
            port.send(data)
        self.network.factory.relay.newest[A.public].port = port
        self.network.settle()
        self.successResultOf(sending)
        self.assertEqual(one.data, b"x" * 100)

    def test_a_forged_history_does_not_end_the_stream(self) -> None:
        one, two = self.open()
        one.transport.write(b"one")
        two.transport.write(b"two")
        self.network.settle()
        forger = self.forger()
        self.forge(forger, self.position(one, hash=bytes(32)))
        self.forge(forger, self.position(one, received=10**9))
        self.network.clock.advance(CONFIRM_TIMEOUT)
        self.network.settle()
        self.assertEqual((one.lost, two.lost), (None, None))
        one.transport.write(b" more")
        two.transport.write(b" more")
        self.network.settle()
        self.assertEqual((two.data, one.data), (b"one more", b"two more"))

    def test_a_forged_generation_does_not_block_the_real_one(self) -> None:
        one, two = self.open()
        forger = self.forger()
        self.forge(forger, self.position(one, generation=2**32 - 1))
        self.assertEqual(two.transport.end.generation, 0)
        self.cut("B")
        one.transport.write(b"on it goes")
        self.find()
        self.assertEqual((two.data, self.streams["A"].resumed), (b"on it goes", 1))
        self.assertEqual(two.transport.end.generation, one.transport.end.generation)

    def test_the_transport_stays_in_service_meanwhile(self) -> None:
        """The transport carries both directions while a RESUME waits, and after the RESUME was given up."""
        one, two = self.open()
        forger = self.forger()
        for turn in range(3):
            self.forge(forger, self.position(one, generation=100 + turn))
            one.transport.write(b"1%d" % turn)
            two.transport.write(b"2%d" % turn)
            self.network.settle()
            self.assertEqual(self.streams["B"].suspended, 0)
        self.assertEqual((two.data, one.data), (b"101112", b"202122"))
        self.network.clock.advance(CONFIRM_TIMEOUT)
        self.network.settle()
        self.assertEqual(self.b.transports, 1)
        self.assertFalse(two.transport.end.answers or self.b._incoming._unconfirmed)

    def test_random_frames_do_not_confirm_a_resume(self) -> None:
        one, two = self.open()
        forger = self.forger()
        for kind in (FWD, CLOSE, 0xB):
            self.forge(forger, self.position(one))
            forger.take()
            forger.send(Frame(kind, self.used, bytes(40)).encode())
            self.network.settle()
            said = [frame.payload for frame in forger.take() if frame.type == CLOSE]
            self.assertEqual(said, [] if kind == CLOSE else [bytes((CloseReason.NOT_AUTHENTIC,))])
            one.transport.write(b"x")
            self.network.settle()
        self.assertEqual((two.data, two.lost, two.transport.end.generation), (b"xxx", None, 0))
        self.assertFalse(two.transport.end.answers)


class ManyResumesTests(ForgeryCase):
    """Several RESUMEs wait for their confirmation at a time."""

    def test_forged_resumes_do_not_displace_the_real_resume(self) -> None:
        """The relay's places fill with forged RESUMEs through one server. The real RESUME is the newest, and is
        confirmed.
        """
        one, two = self.open()
        forger = self.forger()
        for turn in range(3 * MAX_ANSWERS):
            self.forge(forger, self.position(one, generation=1000 - turn))
        self.assertEqual(len(two.transport.end.answers), MAX_ANSWERS)
        self.cut("A")
        one.transport.write(b"here I am")
        self.find()
        self.assertEqual((two.data, one.lost, two.lost), (b"here I am", None, None))
        # Requests for an older generation cannot arrive any more. The others may arrive, but did not.
        self.assertTrue(
            all(answer.generation > two.transport.end.generation for answer in two.transport.end.answers.values())
        )
        self.network.clock.advance(CONFIRM_TIMEOUT)
        self.network.settle()
        self.assertFalse(two.transport.end.answers)
        self.assertEqual(self.b.transports, 1)

    def test_forged_resumes_through_another_server_do_not_count(self) -> None:
        """The forging relay has places of its own. It evicts no RESUME that came over another connection."""
        one, two = self.open()
        forger = self.forger()
        self.forge(forger, self.position(one))
        (first,) = two.transport.end.answers
        # The next connection stands for another server, and has a session of its own.
        old = self.b
        new = self.reconnect("B")
        for turn in range(2 * MAX_ANSWERS):
            self.forge(forger, self.position(one, generation=10 + turn))
        self.assertIn(first, two.transport.end.answers)
        self.assertEqual(len(two.transport.end.answers), 1 + MAX_ANSWERS)
        self.assertEqual((old.transports, new.transports), (2, MAX_ANSWERS))
        self.network.clock.advance(CONFIRM_TIMEOUT)
        self.network.settle()
        self.assertEqual((old.transports, new.transports), (1, 0))
        old.close()

    def test_an_ending_stream_removes_its_resumes(self) -> None:
        one, two = self.open()
        self.forge(self.forger(), self.position(one))
        two.transport.abortConnection()
        self.network.settle()
        self.assertEqual(self.b.transports, 0)
        self.assertFalse(two.transport.end.answers)

    def test_a_lost_connection_removes_its_resumes(self) -> None:
        one, two = self.open()
        self.forge(self.forger(), self.position(one))
        self.cut("B")
        self.assertFalse(two.transport.end.answers)
        one.transport.write(b"x")
        self.find()
        self.assertEqual(two.data, b"x")


class LateTests(ForgeryCase):
    """Until a move is confirmed, the old transport carries the stream. No data is lost or delivered twice."""

    def catch(self) -> tuple[list[Frame], Any]:
        """Keep all later frames of the server for B; return them, and the port that delivers them."""
        relay = self.network.factory.relay
        port = relay.newest[B.public].port
        caught: list[Frame] = []
        buffer = FrameBuffer()

        class Late:
            def __getattr__(self, name: str) -> Any:
                return (lambda data: caught.extend(buffer.feed(bytes(data)))) if name == "send" else getattr(port, name)

        relay.newest[B.public].port = Late()
        return caught, port

    def ask_late(self) -> tuple[Any, Any]:
        """A moves; the old transport's data reaches B behind the REQUEST, as it does over another server."""
        one, two = self.open()
        one.transport.write(b"first.")
        self.network.settle()
        caught, port = self.catch()
        one.transport.write(b"second." * 10_000)
        self.network.settle()
        self.streams["A"].migrate(one.transport)
        self.stream, self.searching = self.wanted.pop()
        self.a.reopen(self.stream).addBoth(self._tried, self.stream, self.searching)
        self.network.settle()
        self.assertEqual(two.data, b"first.")
        self.network.factory.relay.newest[B.public].port = port
        asked = [frame for frame in caught if frame.type == REQUEST]
        for frame in (*asked, *(frame for frame in caught if frame.type != REQUEST)):
            port.send(frame.encode())
        return one, two

    def test_data_behind_the_answer_is_processed(self) -> None:
        one, two = self.ask_late()
        self.network.settle()
        self.assertGreater(two.transport.end._given, len(b"first."))
        one.transport.write(b"third.")
        self.network.settle()
        self.assertEqual(two.data, b"first." + b"second." * 10_000 + b"third.")
        self.assertEqual((one.lost, two.lost, one.transport.end.generation), (None, None, 1))
        self.assertEqual(one.transport.end.acknowledged, len(two.data))

    def test_an_unconfirmed_answer_leaves_the_old_state(self) -> None:
        """A has the answer, and what it sent then never arrives: B stands where the old transport left it."""
        one, two = self.ask_late()
        while one.transport.end.unproven is None:
            self.network.clock.advance(0)
            for pump in self.network.pumps:
                if one.transport.end.unproven is None:
                    pump.pump()
        self.sessions["A"].link.transport.abortConnection()  # type: ignore[attr-defined]
        self.network.settle()
        self.assertEqual(two.data, b"first." + b"second." * 10_000)
        self.find()
        one.transport.write(b"third.")
        self.network.settle()
        self.assertEqual((one.lost, two.lost, one.transport.end.generation), (None, None, 2))
        self.assertEqual(two.data, b"first." + b"second." * 10_000 + b"third.")

    def test_diverged_ends_end_the_stream_at_both(self) -> None:
        """The initiator's word is proved by its confirmation: then the comparison ends both at once."""
        one, two = self.open()
        two.transport.write(b"x")
        self.network.settle()
        one.transport.end._received_hash.update(b"y")
        self.cut("A")
        self.find()
        self.assertEqual(one.lost.value.close_reason, CloseReason.HASH_MISMATCH)
        self.assertEqual(two.lost.value.close_reason, CloseReason.HASH_MISMATCH)


class ManyConnectionsTests(ForgeryCase):
    """Moves from one connection to another while the ones before still bring what was on its way."""

    @settings(max_examples=30, deadline=None)
    @given(st.integers(0, 2**32))
    def test_random_walk_of_resumptions(self, seed: int) -> None:
        self.walk(seed)

    def walk(self, seed: int) -> None:
        """Run a random walk."""
        self.setUp()
        draw = Random(seed)
        one, two = self.both()
        ending = draw.choice((one, two))
        sent = {one: b"", two: b""}
        older: list[ClientSession] = []
        forger = self.forger()
        for step in range(draw.randrange(10, 60)):
            action = draw.choice(
                ("write", "write", "pump", "pump", "pump", "find", "move", "anew", "cut", "forge", "end")
            )
            protocol = draw.choice((one, two))
            if action == "write":
                data = b"%d." % step * draw.choice((1, 10, 1000, 40_000))
                if not protocol.transport.writing_ended:
                    sent[protocol] += data
                protocol.transport.write(data)
            elif action == "pump":
                self.network.clock.advance(draw.choice((0, 0, 0.01)))
                for pump in self.network.pumps:
                    if draw.random() < 0.5:
                        pump.pump()
            elif action == "anew" and len(older) < 4:
                # The new connection gets all new requests. The older one keeps its transports.
                name = draw.choice("AB")
                older.append(self.sessions[name])
                self.reconnect_quietly(name)
            elif action == "end" and step > 10:
                ending.transport.loseWriteConnection()
            elif action == "cut" and older:
                older.pop(draw.randrange(len(older))).link.transport.abortConnection()  # type: ignore[attr-defined]
            elif action == "move":
                self.streams["A"].migrate(one.transport)
            elif action == "find":
                self.try_all()
            elif action == "forge":
                self.used += 2
                resume = self.position(one, generation=draw.choice((1, 5, 2**32 - 1)))
                proposal = Proposal(A, B.public, Hello(0, INITIAL_WINDOW, resume=resume))
                forger.send(Frame(REQUEST, self.used, proposal.payload).encode())
        for attempt in range(20):
            self.network.settle()
            self.connect_unreachable_again()
            self.find()
            # Each attempt tries one server, as clients do again and again until one of them resumes the stream.
            if attempt > 4 and one.transport.away_since is two.transport.away_since is None:
                break
        self.assertEqual((one.lost, two.lost), (None, None))
        self.assertEqual(two.data, sent[one])
        self.assertEqual(one.data, sent[two])
        one.transport.loseConnection()
        self.network.settle()
        self.assertTrue(one.lost.check(ConnectionDone) and two.lost.check(ConnectionDone))
        for protocol in (one, two):
            self.assertLessEqual(protocol.told.count("no more comes"), 1)
        self.network.clock.advance(CONFIRM_TIMEOUT)
        for session in older:
            session.close()
        self.network.settle()
        self.assertFalse(two.transport.end.answers)
        self.tearDown()

    def connect_unreachable_again(self) -> None:
        """Connect clients again that no REQUEST reaches; servers of today have none."""

    def reconnect_quietly(self, name: str) -> None:
        """A connection more, made before anything else moves."""
        before, network = list(self.network.pumps), self.network

        def settle() -> None:
            for _ in range(8):
                network.clock.advance(0)
                for pump in network.pumps:
                    if pump not in before:
                        pump.pump()

        with mock.patch.object(network, "settle", settle):  # Frames that are under way on other links stay there.
            self.reconnect(name)

    def try_all(self) -> None:
        """Send requests for all streams that A wants to resume; none is delivered yet."""
        wanted, self.wanted = self.wanted, []
        for stream, searching in wanted:
            if not searching.called and self.a.connected:
                self.a.reopen(stream).addBoth(self._tried, stream, searching)
