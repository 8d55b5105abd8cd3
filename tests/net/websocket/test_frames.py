"""Parser and encoder of websocket frames, by plain calls."""

from __future__ import annotations

from hypothesis import given, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg.net.websocket import frames
from dmsg.net.websocket.frames import BINARY, OTHER_FRAME, PIECE, PING, SMALL, Frames, FrameTooLarge, PieceBuffer


class FramesTests(SynchronousTestCase):
    """Frames however the bytes are cut."""

    @given(
        st.lists(st.tuples(st.sampled_from([BINARY, PING, frames.PONG]), st.integers(0, 300)), max_size=20),
        st.lists(st.integers(1, 50), min_size=1, max_size=20),
        st.booleans(),
    )
    def test_frames_accept_any_chunking(self, messages: list[tuple[int, int]], cuts: list[int], masked: bool) -> None:
        """Encoded frames are parsed unchanged; control frames over 125 bytes, and text frames, are passed on."""
        expected, stream = [], b""
        for number, (first, size) in enumerate(messages):
            data = bytes([number]) * size
            frame = frames.encode(first, data, b"\x01\x02\x03\xff" if masked else None)
            whole = first == BINARY or size <= frames.MAX_CONTROL
            expected.append((first, data) if whole else (OTHER_FRAME, frame))
            stream += frame
        text = b"\x81\x80abcd" if masked else b"\x81\x00"
        expected.append((OTHER_FRAME, text))
        stream += text
        reader = Frames(masked, 1000)
        got, at, turn = [], 0, 0
        while at < len(stream):
            size = cuts[turn % len(cuts)]
            got += list(reader.feed(stream[at : at + size]))
            at, turn = at + size, turn + 1
        self.assertEqual(expected, got)

    @given(st.binary(max_size=200))
    def test_random_bytes_are_frames_or_too_large(self, data: bytes) -> None:
        """Frames, or FrameTooLarge; what it holds is bounded by what a frame may have."""
        reader = Frames(True, 100)
        try:
            for _ in reader.feed(data):
                pass
        except FrameTooLarge:
            return
        self.assertLessEqual(reader.held, 100 + frames.MAX_HEADER)

    def test_all_forms_of_length_are_parsed(self) -> None:
        for size in (125, 126, 65535, 65536, 200_000):
            data = bytes(size)
            reader = Frames(False, 200_000)
            stream = frames.encode(BINARY, data)
            got = [item for at in range(0, len(stream), 60_000) for item in reader.feed(stream[at : at + 60_000])]
            self.assertEqual([(BINARY, data)], got)
        self.assertRaises(FrameTooLarge, list, Frames(False, 10).feed(frames.encode(BINARY, bytes(11))))

    def test_each_length_has_its_shortest_form(self) -> None:
        """RFC 6455, section 5.2: one byte up to 125, then 126 and two bytes, then 127 and eight bytes."""
        for size, head in (
            (0, "8200"),
            (125, "827d"),
            (126, "827e007e"),
            (65535, "827effff"),
            (65536, "827f0000000000010000"),
        ):
            self.assertEqual(frames.encode(BINARY, bytes(size))[: len(head) // 2].hex(), head)

    @given(st.binary(max_size=40), st.binary(min_size=4, max_size=4))
    def test_the_mask_repeats_every_four_bytes(self, data: bytes, key: bytes) -> None:
        masked = bytes(byte ^ key[number % 4] for number, byte in enumerate(data))
        self.assertEqual(frames.mask(data, key), masked)

    def test_a_frame_is_yielded_with_its_last_byte(self) -> None:
        """A ping without a payload has two bytes; the parser must not wait for a third."""
        reader = Frames(False, 100)
        stream = frames.encode(PING, b"") * 2
        got = [list(reader.feed(stream[at : at + 1])) for at in range(4)]
        self.assertEqual(got, [[], [(PING, b"")], [], [(PING, b"")]])
        reader = Frames(False, 100)
        self.assertEqual(list(reader.feed(stream[:3])), [(PING, b"")])
        self.assertEqual(list(reader.feed(stream[3:])), [(PING, b"")])

    def test_frames_with_the_wrong_mask_are_not_taken_as_messages(self) -> None:
        """Clients mask their frames and servers do not (RFC 6455, section 5.1)."""
        plain, masked = frames.encode(BINARY, b"data"), frames.encode(BINARY, b"data", b"mask")
        for reads_masked, wrong, right in ((True, plain, masked), (False, masked, plain)):
            reader = Frames(reads_masked, 100)
            self.assertEqual(list(reader.feed(wrong + right)), [(OTHER_FRAME, wrong), (BINARY, b"data")])


class PieceBufferTests(SynchronousTestCase):
    @given(st.lists(st.sampled_from([1, SMALL - 1, SMALL, SMALL + 1, PIECE - 1, PIECE, PIECE + 1]), max_size=30))
    def test_all_pieces_come_out_in_order(self, sizes: list[int]) -> None:
        pieces, whole = PieceBuffer(), b""
        for number, size in enumerate(sizes):
            pieces.add(bytes([number]) * size)
            whole += bytes([number]) * size
            self.assertEqual(pieces.size, len(whole))
        self.assertEqual((pieces.take(), pieces.size, pieces.take()), (whole, 0, b""))

    def test_small_pieces_are_joined_and_large_pieces_not_copied(self) -> None:
        """One object for each byte would take fifty times the memory; one growing buffer would be copied often."""
        pieces = PieceBuffer()
        for _ in range(3 * PIECE):
            pieces.add(b"x")
        self.assertLessEqual(len(pieces._pieces), 3)
        pieces = PieceBuffer()
        for _ in range(100):
            pieces.add(bytes(SMALL - 1))
        self.assertLess(max(map(len, [*pieces._pieces, pieces._tail])), PIECE + SMALL)
        large = bytes(SMALL)
        pieces.add(large)
        self.assertIs(pieces._pieces[-1], large)
