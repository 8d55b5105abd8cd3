"""A server that opens channels without an end, in whoever's name."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.clients.handshake_limits import ONE_STRANGER_BURST, HandshakeLimits
from dmsg.errors import DropReason
from dmsg.messaging.core.agreement import Proposal
from dmsg.messaging.core.events import Event, Requested
from dmsg.messaging.core.table import ClientConnection
from dmsg.messaging.core.wire import CHANNEL_CLOSED, ID_COUNT, Profile, encode_close, encode_open
from dmsg.net.turn_share import CLIENT_FRAMES
from dmsg.noise.handshake import HANDSHAKE_FRAMES
from tests.messaging.support import KEYS

A, B = KEYS["A"], KEYS["B"]


class HandshakeLimitsTests(SynchronousTestCase):
    """Limits in the core of one client."""

    def setUp(self) -> None:
        self.handshake_limits = HandshakeLimits(Clock().seconds, tuple)
        self.core = ClientConnection(B, Profile.SEED, refusal=self.handshake_limits.at(KEYS["X"].public))
        self.core.accepting = True

    def opening(self, number: int, *, ping: bool = False, ephemeral: bool = False) -> bytes:
        proposal = Proposal(A, B.public, Profile.SEED, ephemeral=A if ping else KEYS["X"] if ephemeral else None)
        return encode_open(Profile.SEED, number, A.public, proposal.message)

    def receive(self, data: bytes) -> list[Event]:
        _, events = self.core.receive_frames(bytearray(data), len(data), CLIENT_FRAMES)
        return events

    def test_the_key_agreements_of_one_read_are_limited(self) -> None:
        """Each key agreement takes a third of a millisecond, so the remaining ones are computed in the next turn."""
        data = bytearray(b"".join(self.opening(number) for number in range(40)))
        counts = []
        while data:
            taken, events = self.core.receive_frames(data, len(data), CLIENT_FRAMES)
            del data[:taken]
            counts.append(len(events))
            self.assertEqual(self.core.has_frames_left, len(events) == CLIENT_FRAMES // HANDSHAKE_FRAMES)
        self.assertEqual(counts, [16, 16, 8])

    def test_a_repeated_opening_is_refused(self) -> None:
        once = self.opening(1, ephemeral=True)
        self.assertEqual([type(event) for event in self.receive(once)], [Requested])
        self.assertEqual(self.receive(self.opening(2, ephemeral=True)), [])
        self.assertEqual((self.core.drops[DropReason.REFUSED], self.handshake_limits.refused), (1, 1))
        self.assertEqual(self.core.data_to_send()[-1][0], CHANNEL_CLOSED)

    def test_pings_have_one_ephemeral_and_come_again(self) -> None:
        for number in range(3):
            self.receive(self.opening(number, ping=True))
        self.assertEqual((len(self.core.channels), self.handshake_limits.refused), (3, 0))

    def test_channels_opened_and_closed_repeatedly_are_limited(self) -> None:
        """The channels have one name."""
        once = [self.opening(0, ping=True) + encode_close(Profile.SEED, 0)] * 3
        self.handshake_limits._one_stranger.charge(f"{KEYS['X'].public} {A.public}", ONE_STRANGER_BURST - 2, 0.0)
        for data in once:
            self.receive(data)
        self.assertEqual(self.handshake_limits.refused, 1)
        self.assertLess(len(self.core.channels), ID_COUNT)
