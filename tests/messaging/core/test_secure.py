"""End to end encryption: items N of the checklist."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import CloseReason, DropReason, HandshakeError, TransportRefused
from dmsg.keys import PubKey, SecKey
from dmsg.messaging.core.agreement import Offer, Proposal
from dmsg.messaging.core.events import Closed, DataReceived, Opened, Requested
from dmsg.messaging.core.secure import ChannelCiphers
from dmsg.messaging.core.table import ClientConnection
from dmsg.messaging.core.wire import CHANNEL_CLOSED, CHANNEL_OPENED, OPEN_CHANNEL, SEND, Profile
from dmsg.noise.handshake import Handshake, Pattern
from tests.messaging.support import KEYS, Network, vectors
from tests.support import Accepting

A, B = KEYS["A"], KEYS["B"]


class N_NoiseTests(SynchronousTestCase):
    """KK, transport messages, rekeying."""

    def agree(self, profile: Profile) -> tuple[ChannelCiphers, ChannelCiphers]:
        recorded = vectors("noise_kk")
        one, two = (SecKey.from_hex(recorded[f"{who}_ephemeral"]["sec"]) for who in ("initiator", "responder"))
        proposal = Proposal(A, B.public, profile, ephemeral=one)
        self.assertEqual(proposal.message.hex(), recorded["message1"])
        ciphers, message = Offer(B, A.public, proposal.message, profile, ephemeral=two).accept()
        self.assertEqual(message.hex(), recorded["message2"])
        self.assertEqual((len(proposal.message), len(message)), (49, 49))
        return proposal.process_answer(message), ciphers

    def test_N1_both_messages_as_recorded(self) -> None:
        self.agree(Profile.SEED)

    def test_N2_the_handshake_hash(self) -> None:
        recorded = vectors("noise_kk")
        one, two = (SecKey.from_hex(recorded[f"{who}_ephemeral"]["sec"]) for who in ("initiator", "responder"))
        initiator = Handshake(Pattern.KK, A, initiator=True, remote=B.public, ephemeral=one)
        responder = Handshake(Pattern.KK, B, initiator=False, remote=A.public, ephemeral=two)
        responder.read_message(initiator.write_message())
        initiator.read_message(responder.write_message())
        for side in (initiator, responder):
            assert side.result is not None
            self.assertEqual(side.result.hash.hex(), recorded["handshake_hash"])

    def exchange(self, profile: Profile, recorded: dict[str, Any]) -> int:
        a, b = self.agree(profile)
        count = 0
        for sender, receiver, name in ((a, b, "A_to_B"), (b, a, "B_to_A")):
            for message in recorded[name]:
                ciphertext = sender.seal(message["plaintext"].encode())
                self.assertEqual(ciphertext.hex(), message["ciphertext"], (name, message["n"]))
                self.assertEqual(receiver.open(ciphertext).decode(), message["plaintext"])
                count += 1
        return count

    def test_N3_25_messages_with_rekeying(self) -> None:
        self.assertEqual(self.exchange(Profile.SKYWIRE, vectors("noise_kk")), 50)

    def test_N3_25_messages_without(self) -> None:
        self.assertEqual(self.exchange(Profile.SEED, vectors("noise_kk")["without_rekey"]), 50)

    def test_N4_a_first_message_that_is_refused(self) -> None:
        good = Proposal(A, B.public, Profile.SEED).message
        wrong_key = Proposal(A, KEYS["X"].public, Profile.SEED).message
        bad = [wrong_key, good[:-1] + bytes((good[-1] ^ 1,)), bytes(33) + good[33:], b"\5" + good[1:], good[:48]]
        for message in bad:
            self.assertRaises(HandshakeError, Offer, B, A.public, message, Profile.SEED)
            network = Network()
            a = network.raw(A)
            factory = Accepting()
            client = network.client(B, factory)
            a.send(OPEN_CHANNEL, b"\3" + B.public + message)
            network.settle()
            self.assertEqual(a.take(), [(CHANNEL_CLOSED, b"\3")])
            self.assertEqual((factory.built, network.relay.channel_count), ([], 0))
            self.assertTrue(client.connected)

    def test_N4_a_second_message_that_is_refused(self) -> None:
        """The one who asked says so to the one who believes that it is open."""
        for message in (bytes(49), bytes(48), A.public + bytes(16)):
            network = Network()
            client, b = network.client(A), network.raw(B)
            opening = client.open(B.public, Accepting())
            network.settle()
            b.take()
            b.send(CHANNEL_OPENED, b"\xff" + message)
            network.settle()
            self.failureResultOf(opening, TransportRefused)
            self.assertEqual(b.take(), [(CHANNEL_CLOSED, b"\xff")])
            self.assertEqual((network.relay.channel_count, client.transports), (0, 0))

    def pair(self, profile: Profile = Profile.SEED) -> tuple[ClientConnection, ClientConnection, Any, Any]:
        """Return two cores with an open channel, and both ends of the channel."""
        one, two = ClientConnection(A, profile), ClientConnection(B, profile)
        two.accepting = True
        channel = one.open(B.public)
        frame = bytearray(one.data_to_send()[0])
        frame[4:37] = A.public
        (requested,) = two.receive_frames(frame, len(frame))[1]
        assert isinstance(requested, Requested)
        two.accept(requested.channel)
        frame = bytearray(two.data_to_send()[0])
        (opened,) = one.receive_frames(frame, len(frame))[1]
        assert isinstance(opened, Opened)
        return one, two, channel, requested.channel

    def test_N5_tampered_replayed_reordered(self) -> None:
        for profile in Profile:
            for damage in range(6):
                one, two, channel, there = self.pair(profile)
                frames = []
                for word in (b"first", b"second", b"third"):
                    one.send(channel, word)
                    frames.append(b"".join(one.data_to_send()))
                if damage == 0:
                    frames[1] = frames[1][:-1] + bytes((frames[1][-1] ^ 1,))
                elif damage == 1:
                    frames[1] = frames[0]
                elif damage == 2:
                    del frames[1]
                elif damage == 3:
                    frames[1:] = [frames[2], frames[1]]
                elif damage == 4:
                    # The changed byte belongs to the inner length.
                    frames[1] = frames[1][:5] + bytes((frames[1][5] ^ 1,)) + frames[1][6:]
                else:
                    head = encode_short(profile)
                    frames[1] = head
                data = bytearray(b"".join(frames))
                _, events = two.receive_frames(data, len(data))
                self.assertEqual(events, [DataReceived(there, b"first"), Closed(there, CloseReason.NOT_AUTHENTIC)])
                closed = b"".join(two.data_to_send())
                self.assertEqual(closed[-1:], bytes((there.id,)))
                self.assertEqual(two.channels, {})
                self.assertEqual(two.drops[DropReason.BAD_FRAME], 1)

    def test_N5_through_the_server(self) -> None:
        network = Network()
        factory = Accepting()
        client, b = network.client(A), network.client(B, factory)
        opening = client.open(B.public, Accepting())
        network.settle()
        mine: Any = self.successResultOf(opening)
        b.link.server_side.send(b"\4\0\x14\xff\0\x11" + bytes(17))
        network.settle()
        (theirs,) = factory.built
        self.assertIn("changed on its way", str(theirs.lost.value))
        self.assertIsNotNone(mine.lost)
        self.assertEqual(network.relay.channel_count, 0)

    def test_N6_an_empty_message(self) -> None:
        for profile in Profile:
            one, two, channel, there = self.pair(profile)
            one.send(channel, b"")
            one.send(channel, b"x")
            data = bytearray(b"".join(one.data_to_send()))
            self.assertEqual(len(data), 3 + 3 + 16 + 3 + 3 + 17)
            self.assertEqual(two.receive_frames(data, len(data))[1], [DataReceived(there, b"x")])


def encode_short(profile: Profile) -> bytes:
    """A Send that is too short to be one, on channel 0."""
    from dmsg.messaging.core.wire import encode_frame

    return encode_frame(profile, SEND, b"\0\0")


class KeyTests(SynchronousTestCase):
    """keys.json: Diffie-Hellman of DHLEN 33."""

    def test_both_ends_derive_the_same_key(self) -> None:
        recorded = vectors("keys")["ecdh"]
        self.assertEqual((A.ecdh(B.public) + b"\0").hex(), recorded["DH(A,B)"])
        self.assertEqual((B.ecdh(A.public) + b"\0").hex(), recorded["DH(B,A)"])
        self.assertEqual((A.ecdh(KEYS["S"].public) + b"\0").hex(), recorded["DH(A,S)"])
        for key in vectors("keys")["keys"]:
            self.assertEqual(SecKey.from_hex(key["sec"]).public, PubKey.from_hex(key["pub"]))
            self.assertEqual(SecKey.from_seed(key["seed"].encode()).hex(), key["sec"])
