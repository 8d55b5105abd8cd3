"""Frames: items F of the checklist."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import DropReason, LocalProtocolError, RemoteProtocolError
from dmsg.messaging.core.table import ClientConnection
from dmsg.messaging.core.wire import (
    CHANNEL_CLOSED,
    CHANNEL_OPENED,
    CLOSE_CHANNEL,
    OPEN_CHANNEL,
    SEND,
    Frame,
    FrameBuffer,
    Profile,
    decode_open,
    encode_close,
    encode_closed,
    encode_frame,
    encode_header,
    encode_open,
    encode_opened,
    read_header,
    send_head,
)
from tests.messaging.support import KEYS, Network, vectors

FORMS = {Profile.SKYWIRE: "go_wire_hex", Profile.SEED: "seed_layout_hex"}


class F_FrameTests(SynchronousTestCase):
    """Frames in both layouts."""

    def test_F1_recorded_frames(self) -> None:
        types = set()
        for case in vectors("frames")["frames"]:
            body = bytes.fromhex(case["body_hex"])
            types.add(case["type"])
            for profile, form in FORMS.items():
                wire = bytes.fromhex(case[form])
                self.assertEqual(encode_frame(profile, case["type"], body), wire, case["name"])
                self.assertEqual(FrameBuffer(profile).feed(wire), [Frame(case["type"], body)])
        self.assertEqual(types, {OPEN_CHANNEL, CHANNEL_OPENED, CLOSE_CHANNEL, CHANNEL_CLOSED, SEND})

    def test_F1_encoders_of_each_type(self) -> None:
        cases = {case["name"]: case for case in vectors("frames")["frames"]}
        for profile, form in FORMS.items():
            wire = {name: bytes.fromhex(case[form]) for name, case in cases.items()}
            body = bytes.fromhex(cases["OpenChannel id=254 remote=B"]["body_hex"])
            remote, message = decode_open(body)
            self.assertEqual((remote, len(message)), (KEYS["B"].public, 49))
            self.assertEqual(encode_open(profile, 254, remote, message), wire["OpenChannel id=254 remote=B"])
            opened = bytes.fromhex(cases["ChannelOpened id=7"]["body_hex"])
            self.assertEqual(encode_opened(profile, 7, opened[1:]), wire["ChannelOpened id=7"])
            self.assertEqual(encode_close(profile, 255), wire["CloseChannel id=255"])
            self.assertEqual(encode_closed(profile, 0), wire["ChannelClosed id=0"])
            send = wire["Send id=10"]
            self.assertEqual(send_head(profile, 10, len(send) - 6 - 16), send[:6])

    @given(
        st.sampled_from(Profile),
        st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=90)), max_size=6),
        st.lists(st.integers(0, 600), max_size=8),
    )
    def test_F2_cut_anywhere(self, profile: Profile, frames: list[tuple[int, bytes]], cuts: list[int]) -> None:
        stream = b"".join(encode_frame(profile, *frame) for frame in frames)
        buffer = FrameBuffer(profile)
        found = []
        edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
        for start, end in zip(edges, edges[1:], strict=False):
            found += buffer.feed(stream[start:end])
        self.assertEqual(found, [Frame(*frame) for frame in frames])

    def test_F2_at_every_boundary_through_the_server(self) -> None:
        for profile in Profile:
            network = Network(profile)
            a, b = network.raw(KEYS["A"]), network.raw(KEYS["B"])
            self.open(network, a, b)
            stream = encode_frame(profile, SEND, b"\0\0\x03abc") + encode_frame(profile, SEND, b"\0\0\x10" + b"d" * 16)
            expected = [(SEND, b"\xff\0\x03abc"), (SEND, b"\xff\0\x10" + b"d" * 16)]
            for cut in range(len(stream) + 1):
                cast(Any, a.transport).write(stream[:cut])
                network.settle()
                cast(Any, a.transport).write(stream[cut:])
                network.settle()
                self.assertEqual(b.take(), expected)

    def open(self, network: Network, a: object, b: object) -> None:
        from tests.messaging.support import RawClient

        assert isinstance(a, RawClient) and isinstance(b, RawClient)
        a.send(OPEN_CHANNEL, b"\0" + b.key.public + bytes(49))
        network.settle()
        ((frame_type, body),) = b.take()
        self.assertEqual((frame_type, body[0], body[1:34]), (OPEN_CHANNEL, 255, a.key.public))
        b.send(CHANNEL_OPENED, b"\xff" + bytes(49))
        network.settle()
        self.assertEqual([frame for frame, _ in a.take()], [CHANNEL_OPENED])

    def test_F3_the_largest_body(self) -> None:
        for case in vectors("frames")["size_limits_go"]:
            size = case["body_len"]
            header = bytes.fromhex(case.get("header_hex", ""))[:3]
            if case["go_write_error"] is None and case.get("go_read_error") is None:
                self.assertEqual(encode_header(Profile.SKYWIRE, SEND, size), header)
                self.assertEqual(read_header(Profile.SKYWIRE, header, 0), (SEND, size))
            else:
                # The Go writer sends slightly longer messages than its reader accepts. This implementation does not.
                self.assertRaises(LocalProtocolError, encode_header, Profile.SKYWIRE, SEND, size)
                if header:
                    self.assertRaises(RemoteProtocolError, read_header, Profile.SKYWIRE, header, 0)
        self.assertEqual((Profile.SEED.max_plaintext, Profile.SKYWIRE.max_plaintext), (65516, 65498))
        self.assertEqual(encode_header(Profile.SEED, SEND, 65535), b"\x04\xff\xff")
        self.assertRaises(LocalProtocolError, encode_header, Profile.SEED, SEND, 65536)

    def test_F3_an_overlong_message_is_refused_before_encryption(self) -> None:
        """The channel stays usable; the Go client's channel would be unusable then."""
        for profile in Profile:
            one, two = (ClientConnection(KEYS[name], profile) for name in "AB")
            two.accepting = True
            channel = one.open(KEYS["B"].public)
            data = bytearray(one.data_to_send()[0])
            data[4:37] = KEYS["A"].public
            _, (requested,) = two.receive_frames(data, len(data))
            two.accept(requested.channel)
            answer = bytearray(b"".join(two.data_to_send()))
            one.receive_frames(answer, len(answer))
            limit = profile.max_plaintext
            self.assertRaises(LocalProtocolError, one.send, channel, bytes(limit + 1))
            self.assertEqual(one.data_to_send(), [])
            one.send(channel, bytes(limit))
            frame = bytearray(b"".join(one.data_to_send()))
            self.assertEqual(len(frame), 3 + profile.max_body)
            taken, (received,) = two.receive_frames(frame, len(frame))
            self.assertEqual((taken, cast(Any, received).data), (len(frame), bytes(limit)))

    def test_F4_malformed_frames_are_ignored_and_counted(self) -> None:
        """Ignored and counted at both ends; a size that cannot be ends the link."""
        for profile in Profile:
            network = Network(profile)
            a = network.raw(KEYS["A"])
            client = network.client(KEYS["B"])
            for body in (b"", b"\1"):
                for frame_type in range(256):
                    if body or frame_type < 6:
                        a.send(frame_type, body)
                        client.link.server_side.send(encode_frame(profile, frame_type, body))
            network.settle()
            self.assertTrue(a.up and a.lost is None and client.connected)
            # Each OpenChannel and each CloseChannel of a wrong length is answered.
            self.assertEqual(a.take(), [(CHANNEL_CLOSED, b"\1"), (CHANNEL_CLOSED, b"\1")])
            drops = network.relay.drops
            self.assertEqual(drops[DropReason.BAD_REQUEST], 1)
            self.assertEqual(drops[DropReason.UNKNOWN_FRAME], 251 + 6)
            # The client's answer adds one.
            self.assertEqual(drops[DropReason.NO_SUCH_TRANSPORT], 6)

    def test_F4_a_size_that_cannot_be(self) -> None:
        for header in (b"\0\0", b"\xff\xff", b"\xff\xef"):
            network = Network(Profile.SKYWIRE)
            a, b = network.raw(KEYS["A"]), network.client(KEYS["B"])
            cast(Any, a.transport).write(header + b"\4")
            b.link.server_side.send(header + b"\4")
            network.settle()
            self.assertIsNotNone(a.lost)
            self.assertFalse(b.connected)
            self.assertEqual(network.relay.drops[DropReason.BAD_FRAME], 1)

    def test_F5_frames_of_unknown_channels(self) -> None:
        network = Network()
        a = network.raw(KEYS["A"])
        client = network.client(KEYS["B"])
        for frame_type, body in (
            (CHANNEL_OPENED, b"\7" + bytes(49)),
            (CLOSE_CHANNEL, b"\7"),
            (CHANNEL_CLOSED, b"\7"),
            (SEND, b"\7\0\1x"),
        ):
            a.send(frame_type, body)
            client.link.server_side.send(encode_frame(Profile.SEED, frame_type, body))
        network.settle()
        # A CloseChannel for an unknown channel is answered. No other frame for an unknown channel is.
        self.assertEqual(a.take(), [(CHANNEL_CLOSED, b"\7")])
        self.assertTrue(client.connected)
        self.assertEqual(network.relay.drops[DropReason.NO_SUCH_TRANSPORT], 5)
        self.assertEqual(client.core.drops[DropReason.NO_SUCH_TRANSPORT], 4)
