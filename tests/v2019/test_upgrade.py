"""Secure transports through servers of 2019: a plain REQUEST, and the handshake in FWD frames."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from typing import Any
from unittest import TestResult

from hypothesis import example, given, settings, strategies as st
from twisted.internet.defer import fail, succeed
from twisted.internet.error import ConnectionDone
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import CloseReason, EncryptionUnavailable, EntryNotFound, TransportRefused
from dmsg.streams.core.agreement import (
    FEATURE,
    PREFACE_FRAMES,
    UPGRADE_FEATURE,
    Hello,
    Offer,
    Proposal,
    preface,
)
from dmsg.streams.core.secure import SecureEnd
from dmsg.testing.old_relay import OldRelay
from dmsg.testing.raw_client import RawClient
from dmsg.v2019.core.state import ClientTransport, State
from dmsg.v2019.core.table import ClientConnection
from dmsg.v2019.core.transports import TableSettings
from dmsg.v2019.core.wire import (
    ACCEPT,
    ACK,
    CLOSE,
    FWD,
    HANDSHAKE_PAYLOAD_SIZE,
    OK,
    REQUEST,
    Frame,
)
from dmsg.v2019.session import ClientSession
from dmsg.v2019.unconfirmed import CONFIRM_TIMEOUT
from tests.streams.core import test_resumption
from tests.support import KEYS, SERVER_KEY, VECTORS, Accepting, Carrier
from tests.v2019 import test_streams
from tests.v2019.secure_support import SecureCase
from tests.v2019.test_secure import EPHEMERAL_A, EPHEMERAL_B, HELLO_A, HELLO_B

A, B = KEYS["A"], KEYS["B"]
BOTH = frozenset({FEATURE, UPGRADE_FEATURE})


def plainly(session: ClientSession) -> ClientSession:
    """The session as it is with a server whose entry says nothing."""
    session.carries_secure = lambda: False
    return session


class OldServerCase(SecureCase):
    """A and B at a server of 2019; the entries of both say that they take upgrades."""

    relay: OldRelay

    def setUp(self) -> None:
        super().setUp()
        relay = self.network.factory.relay
        relay.__class__ = OldRelay
        self.relay = relay
        for name in "AB":
            plainly(self.sessions[name])
            self.streams[name].features_of = lambda remote: succeed(BOTH)

    def reconnect(self, name: str) -> ClientSession:
        return plainly(super().reconnect(name))

    def ask(self, port: int = 7, **options: Any) -> Any:
        options.setdefault("upgrade", True)
        return super().ask(port, **options)


class UpgradeTests(OldServerCase):
    """Upgrades between two clients of this package."""

    def test_an_upgraded_stream_carries_bytes_both_ways(self) -> None:
        seen: list[Frame] = []
        self.tamper(lambda frames: seen.extend(frames) or frames)
        one, two = self.open()
        one.transport.write(b"x" * 300_000)
        two.transport.write(b"y" * 300_000)
        self.network.settle()
        self.assertEqual((two.data, one.data), (b"x" * 300_000, b"y" * 300_000))
        self.assertTrue(one.transport.secure and two.transport.secure)
        self.assertEqual(one.transport.binding, two.transport.binding)
        self.assertEqual(two.transport.getHost().port, 7)
        self.assertEqual([len(frame.payload) for frame in seen if frame.type == REQUEST], [HANDSHAKE_PAYLOAD_SIZE])
        self.assertNotIn(b"x" * 16, b"".join(frame.payload for frame in seen))
        one.transport.loseConnection()
        self.network.settle()
        # CLOSE is authenticated, too, because a server of 2019 passes on payloads of any size.
        self.assertTrue(one.lost.check(ConnectionDone) and two.lost.check(ConnectionDone))
        self.assertEqual((self.a.transports, self.b.transports, self.relay.route_count), (0, 0, 0))

    def test_without_the_mark_the_server_says_no(self) -> None:
        error = self.failureResultOf(self.ask(upgrade=False), EncryptionUnavailable).value
        self.assertIn("carry no secure transports", str(error))

    def test_a_server_that_carries_secure_transports_gets_them(self) -> None:
        """The remote's mark alone changes nothing."""
        self.relay.__class__ = OldRelay.__mro__[1]
        self.a.carries_secure = lambda: True
        self.open()
        self.assertFalse(next(iter(self.a.core.transports.values())).upgrade)

    def test_an_upgrade_without_listener_is_refused(self) -> None:
        error = self.failureResultOf(self.ask(8), TransportRefused).value
        self.assertIs(CloseReason(error.reason), CloseReason.REFUSED)
        self.assertEqual((self.a.transports, self.b.transports), (0, 0))

    def test_the_remote_is_not_there(self) -> None:
        opening = self.a.open(KEYS["C"].public, Accepting(), port=7, secure=True, upgrade=True)
        self.network.settle()
        self.assertIn("perhaps", str(self.failureResultOf(opening, TransportRefused).value))

    def test_a_probe_passes_through_an_upgrade(self) -> None:
        probe = self.successResultOf(self.ask(0, probe=0))
        sending = probe.transport.send(b"")
        self.network.settle()
        self.successResultOf(sending)
        probe.transport.abortConnection()

    def test_a_stream_moves_to_a_server_of_today_and_back(self) -> None:
        one, two = self.open()
        expected = b""
        for number, old in enumerate((False, True, False, True, True)):
            one.transport.write(b"%d" % number * 100_000)
            expected += b"%d" % number * 100_000
            self.network.clock.advance(0)
            self.streams["A"].migrate(one.transport)
            self.relay.__class__ = OldRelay if old else OldRelay.__mro__[1]
            self.a.carries_secure = partial(bool, not old)
            moving = self.a.reopen(one.transport, upgrade=True)
            self.network.settle()
            self.successResultOf(moving)
            (transport,) = self.a.core.transports.values()
            self.assertEqual(transport.upgrade, old)
        self.assertEqual((two.data, self.streams["A"].resumed), (expected, 5))


class WhoMayTests(OldServerCase):
    """Plain REQUESTs that are taken for upgrades."""

    def request(self) -> RawClient:
        """A plain REQUEST of A, by a program that does nothing more."""
        client = RawClient(A, SERVER_KEY.public)
        self.network.join(client)
        self.network.settle()
        client.take()
        client.send(Frame(REQUEST, 2, A.public + B.public).encode())
        self.network.settle()
        return client

    def test_only_clients_whose_entry_says_so(self) -> None:
        for offers in (frozenset(), frozenset({FEATURE})):
            self.streams["B"].features_of = lambda remote, offers=offers: succeed(offers)
            (frame,) = self.request().take()
            self.assertEqual((frame.type, frame.payload), (CLOSE, bytes((CloseReason.ENCRYPTION_REQUIRED,))))

    def test_a_peer_without_an_entry_is_invited(self) -> None:
        """A peer without an entry, such as a command that has just started, gets an invitation. It only leads to a
        secure transport.
        """
        self.streams["B"].features_of = lambda remote: fail(EntryNotFound("none"))
        accept, *frames = self.request().take()
        self.assertEqual((accept.type, len(frames)), (ACCEPT, PREFACE_FRAMES))
        self.b.pings.answered = True
        (frame,) = self.request().take()
        self.assertEqual((frame.type, frame.payload), (CLOSE, bytes((CloseReason.ENCRYPTION_REQUIRED,))))

    def test_not_through_a_server_of_today(self) -> None:
        self.b.pings.answered = True
        (frame,) = self.request().take()
        self.assertEqual((frame.type, frame.payload), (CLOSE, bytes((CloseReason.ENCRYPTION_REQUIRED,))))

    def test_an_initiator_of_2019_with_a_stale_entry_gets_no_data(self) -> None:
        """The initiator sees a transport that opens and is closed; it acknowledges the frames and passes none on."""
        client = self.request()
        accept, *frames = client.take()
        self.assertEqual((accept.type, accept.payload), (ACCEPT, A.public + B.public))
        self.assertEqual([(frame.type, len(frame.payload)) for frame in frames], [(FWD, 2)] * PREFACE_FRAMES)
        client.send(b"".join(Frame(ACK, 2, frame.payload).encode() for frame in frames))
        self.network.settle()
        self.assertEqual(client.take(), [])
        client.send(Frame(FWD, 2, b"\0\1GET / HTTP/1.1").encode())
        self.network.settle()
        self.assertEqual([frame.type for frame in client.take()], [CLOSE])
        self.assertEqual((self.b.transports, self.listeners[7].built), (0, []))  # type: ignore[attr-defined]

    def test_a_silent_upgrade_times_out(self) -> None:
        client = self.request()
        self.assertEqual(len(self.b._incoming._unconfirmed), 1)
        self.network.clock.advance(CONFIRM_TIMEOUT)
        self.network.settle()
        self.assertEqual(client.take()[-1].payload, bytes((CloseReason.TIMEOUT,)))
        self.assertEqual((self.b.transports, len(self.b._incoming._unconfirmed)), (0, 0))

    def test_frames_that_have_no_place_there(self) -> None:
        for frame in (
            Frame(FWD, 2, b""),
            Frame(FWD, 2, b"\0"),
            Frame(ACK, 2, b"\0\1\2"),
            Frame(ACCEPT, 2, A.public + B.public),
            Frame(FWD, 2, bytes(2 + 177)),
            Frame(FWD, 2, bytes(60_000)),
            Frame(ACCEPT, 2, b""),
        ):
            client = self.request()
            client.take()
            client.send(frame.encode())
            self.network.settle()
            self.assertEqual([one.type for one in client.take()], [CLOSE], frame)
            self.assertEqual(self.b.transports, 0)

    def test_a_message_is_good_for_one_kind_of_opening(self) -> None:
        """The prologue says which, so a relay cannot have one stand for the other."""
        upgrade = Proposal(A, B.public, Hello(7, 1000), upgrade=True)
        plain = Proposal(A, B.public, Hello(7, 1000))
        self.assertEqual(upgrade.payload, A.public + B.public)
        self.assertEqual(Offer(B, upgrade.keys + upgrade.message, upgrade=True).hello.port, 7)
        for proposal, wrong in ((upgrade, False), (plain, True)):
            with self.assertRaises(Exception) as caught:
                Offer(B, proposal.keys + proposal.message, upgrade=wrong)
            self.assertIn("authentic", str(caught.exception))

    def test_a_recorded_upgrade_said_again(self) -> None:
        frames: list[Frame] = []
        self.tamper(lambda seen: frames.extend(seen) or seen)
        self.open()
        message = next(frame.payload for frame in frames if frame.type == FWD)
        client = self.request()
        client.take()
        client.send(Frame(FWD, 2, message).encode())
        self.network.settle()
        # The ephemeral key was used before.
        self.assertEqual(client.take()[-1].payload, bytes((CloseReason.NOT_AUTHENTIC,)))
        self.streams["B"].handshake_limits._seen.clear()
        client = self.request()
        client.take()
        client.send(Frame(FWD, 2, message).encode())
        self.network.settle()
        client.send(Frame(FWD, 2, bytes(40)).encode())
        self.network.settle()
        self.network.clock.advance(CONFIRM_TIMEOUT)
        self.network.settle()
        self.assertEqual(len(self.listeners[7].built), 1)  # type: ignore[attr-defined]
        self.assertEqual(self.b.transports, 1)


class OldResponderTests(OldServerCase):
    """A program of 2019 whose entry has marks that dmsg left there."""

    def answer(self, *frames: Frame) -> tuple[Any, RawClient]:
        """Send A's request to a program that accepts it and answers with ``frames``; return the result and that
        program.
        """
        client = RawClient(KEYS["C"], SERVER_KEY.public)
        self.network.join(client)
        self.network.settle()
        client.take()
        opening = self.a.open(KEYS["C"].public, Accepting(), 5, port=7, secure=True, upgrade=True)
        self.network.settle()
        (request,) = client.take()
        self.assertEqual((request.type, request.payload), (REQUEST, A.public + KEYS["C"].public))
        client.send(Frame(ACCEPT, request.id, request.payload).encode())
        for frame in frames:
            client.send(Frame(frame.type, request.id, frame.payload).encode())
        self.network.settle()
        return opening, client

    def assert_told(self, opening: Any, client: RawClient) -> None:
        """Check that A gets the reason, and that the program gets a CLOSE and no readable byte."""
        error = self.failureResultOf(opening, EncryptionUnavailable).value
        self.assertIn("dmsg discovery delete", str(error))
        self.assertEqual([frame.type for frame in client.take()], [CLOSE])
        self.assertEqual(self.a.transports, 0)

    def test_an_old_responder_that_waits_is_reported(self) -> None:
        opening, client = self.answer()
        self.assertNoResult(opening)
        self.assertEqual(client.take(), [])
        self.network.clock.advance(5)
        self.network.settle()
        self.assert_told(opening, client)

    def test_an_old_responder_that_speaks_first_is_reported(self) -> None:
        for payload in (b"\0\1SSH-2.0", b"\0\1", b"\0"):
            opening, client = self.answer(Frame(FWD, 0, payload))
            if len(payload) > 1:
                self.assert_told(opening, client)
            else:
                self.failureResultOf(opening)

    def test_an_old_responder_never_sends_the_preface_by_chance(self) -> None:
        """A program's sequences count up by one, so it never sends the preface by chance."""
        first = preface(A.public + KEYS["C"].public)[0]
        opening, client = self.answer(*(Frame(FWD, 0, (first + n & 0xFFFF).to_bytes(2, "big")) for n in range(4)))
        self.assert_told(opening, client)

    def test_an_old_responder_that_closes_is_reported(self) -> None:
        opening, client = self.answer(Frame(CLOSE, 0, b"\0"))
        self.failureResultOf(opening, EncryptionUnavailable)
        self.assertEqual(client.take(), [])


class AllUpgraded(OldServerCase):
    """Opens and resumes with upgrades, whatever a test asks for."""

    def setUp(self) -> None:
        super().setUp()
        for name in "AB":
            self.always(self.sessions[name])

    def reconnect(self, name: str) -> ClientSession:
        return self.always(super().reconnect(name))

    @staticmethod
    def always(session: ClientSession) -> ClientSession:
        """The remote is known to take upgrades."""
        opened, reopened = session.open, session.reopen
        session.open = lambda *some, **more: opened(*some, **{"upgrade": True, **more})
        session.reopen = lambda *some, **more: reopened(*some, **{"upgrade": True, **more})
        return session


class AllReconnecting(AllUpgraded):
    """Opens and resumes with upgrades.

    At the end of a walk, a client connects again if an older connection of its key has ended, because no REQUEST
    reaches its newer connection any more.
    """

    def connect_unreachable_again(self) -> None:
        for name in "AB":
            if bytes(KEYS[name].public) in self.relay.unreachable:
                self.reconnect_quietly(name)  # type: ignore[attr-defined]


APART = {
    # Some of these tests make their frames by hand, and Hypothesis allows one of them to run in one place only.
    "test_a_replayed_resumption_has_no_effect",
    "test_only_the_peer_can_resume_a_stream",
    "test_a_resumption_that_is_never_confirmed_can_be_repeated",
    "test_data_behind_the_answer_is_processed",
    "test_an_unconfirmed_answer_leaves_the_old_state",
    "test_random_walk",
}


class SameTests(SynchronousTestCase):
    """Rules of resumed streams also hold for upgraded ones."""

    def test_upgraded_streams_resume(self) -> None:
        for kind in (test_streams.ResumeTests, test_resumption.LateTests):
            upgraded: Any = type(f"Upgraded{kind.__name__}", (AllUpgraded, kind), {})
            for name in sorted(name for name in dir(upgraded) if name.startswith("test_") and name not in APART):
                result = TestResult()
                upgraded(name).run(result)
                self.assertTrue(result.wasSuccessful(), f"{name}: {result.errors + result.failures}")

    @settings(max_examples=20, deadline=None)
    @example(427659488)
    @given(st.integers(0, 2**32))
    def test_random_walk(self, seed: int) -> None:
        walk: Any = type("UpgradedWalk", (AllReconnecting, test_resumption.ManyConnectionsTests), {})
        walk("walk").walk(seed)


class FrameTests(SynchronousTestCase):
    """The core alone."""

    def test_frames_of_a_wrong_kind_or_size_close_the_transport(self) -> None:
        for initiator in (False, True):
            for kind, payload in ((FWD, b""), (FWD, b"\0"), (OK, bytes(8)), (ACK, b"\0"), (ACK, bytes(8))):
                core, transport = _upgrading(initiator)
                (closed,) = feed(core, Frame(kind, transport.id, payload))
                self.assertEqual((closed.reason, transport.state), (CloseReason.BAD_FRAME, State.CLOSED))

    @given(
        st.booleans(),
        st.lists(
            st.tuples(st.integers(0, 15), st.binary(max_size=8) | st.binary(min_size=177, max_size=180)), max_size=8
        ),
    )
    def test_random_frames_end_at_worst_the_connection(self, initiator: bool, frames: list[tuple[int, bytes]]) -> None:
        """Random frames during an upgrade end at worst the transport or the connection."""
        core, transport = _upgrading(initiator)
        for frame_type, payload in frames:
            feed(core, Frame(frame_type, transport.id, payload))
        if core.broken is None:
            self.assertIn(transport.state, (State.AGREEING, State.INVITED, State.CLOSED))

    def test_upgrades_match_the_vectors(self) -> None:
        """``tests/vectors/secure_transport_upgrade.json``, from which another implementation can be checked."""
        recorded = json.loads((VECTORS / "secure_transport_upgrade.json").read_text())
        self.assertEqual(make_vectors(), recorded)

    def test_the_preface_by_the_document(self) -> None:
        digest = hashlib.sha256(b"dmsg upgraded transport 1" + A.public + B.public).digest()
        self.assertEqual(b"".join(n.to_bytes(2, "big") for n in preface(A.public + B.public)), digest[:8])


def _upgrading(initiator: bool) -> tuple[ClientConnection, ClientTransport]:
    """Return one end of a transport that is being upgraded."""
    core = ClientConnection(A.public, TableSettings(key=A))
    core.accepting = True
    feed(core, Frame(OK, 0, b""))
    if initiator:
        transport = core.request(B.public, Proposal(A, B.public, Hello(7, 1000), upgrade=True))
        feed(core, Frame(ACCEPT, transport.id, transport.payload))
    else:
        (requested,) = feed(core, Frame(REQUEST, 3, B.public + A.public))
        transport = requested.transport
        core.invite(transport)
    return core, transport


def feed(core: ClientConnection, frame: Frame) -> list[Any]:
    """The events of one frame."""
    data = bytearray(frame.encode())
    return core.receive_frames(data, len(data))[1]


def make_vectors() -> dict[str, Any]:
    """The opening of an upgrade: payloads in the order in which they are sent."""
    proposal = Proposal(A, B.public, HELLO_A, upgrade=True, ephemeral=EPHEMERAL_A)
    offer = Offer(B, proposal.keys + proposal.message, upgrade=True, ephemeral=EPHEMERAL_B)
    there, answer = offer.accept(HELLO_B)
    here, _ = proposal.process_answer(answer)
    assert here.hash == there.hash
    end = SecureEnd(here.hash, initiator=True, token=HELLO_A.token)
    end.attach(Carrier(), here, HELLO_B, HELLO_A.window)
    sequence = bytes(2)
    return {
        "initiator": {"secret": A.hex(), "ephemeral": EPHEMERAL_A.hex()},
        "responder": {"secret": B.hex(), "ephemeral": EPHEMERAL_B.hex()},
        "hello_initiator": HELLO_A.encode().hex(),
        "hello_responder": HELLO_B.encode().hex(),
        "handshake_hash": there.hash.hex(),
        "key_initiator_to_responder": there.receive_key.hex(),
        "key_responder_to_initiator": there.send_key.hex(),
        "frames": [
            {"from": "initiator", "frame": "REQUEST", "payload": proposal.payload.hex()},
            {"from": "responder", "frame": "ACCEPT", "payload": proposal.payload.hex()},
            *(
                {"from": "responder", "frame": "FWD", "payload": number.to_bytes(2, "big").hex(), "meaning": "preface"}
                for number in preface(proposal.payload)
            ),
            {"from": "initiator", "frame": "FWD", "payload": (sequence + proposal.message).hex()},
            {"from": "responder", "frame": "FWD", "payload": (sequence + answer[HANDSHAKE_PAYLOAD_SIZE:]).hex()},
            {"from": "initiator", "frame": "ACK", "payload": end.seal_ack().hex(), "meaning": "confirms"},
        ],
    }
