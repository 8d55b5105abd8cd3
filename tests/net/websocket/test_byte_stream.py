"""Byte stream in a websocket, by plain calls."""

from __future__ import annotations

from hypothesis import given, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg.net.websocket.byte_stream import BAD_DATA, BAD_PROTOCOL, StreamError, StreamReader, close_frame
from dmsg.net.websocket.frames import BEGINNING, BINARY, ENDING, MAX_CONTROL, MIDDLE, NO_MASK, PING, PONG, encode

TEXT = 0x81


def read_all(reader: StreamReader, data: bytes, frames: int = 10**6) -> bytes:
    """Return the payload that one read brings."""
    view, start, found = memoryview(data), 0, b""
    while start < len(view):
        piece, start = reader.read(view, start, frames)
        found += piece
    return found


class StreamTests(SynchronousTestCase):
    """Streams of a peer that keeps the rules."""

    @given(
        st.lists(st.tuples(st.sampled_from(("whole", "parts", "ping")), st.binary(max_size=300)), max_size=6),
        st.sampled_from((None, NO_MASK, b"\x01\x02\x03\x04", b"\0\0\0\x07")),
        st.lists(st.integers(1, 40), min_size=1),
    )
    def test_payload_arrives_however_the_frames_are_cut(
        self, messages: list[tuple[str, bytes]], key: bytes | None, cuts: list[int]
    ) -> None:
        sent, wanted, pings = b"", b"", []
        for kind, payload in messages:
            if kind == "ping":
                pings.append(payload[:MAX_CONTROL])
                sent += encode(PING, pings[-1], key)
                continue
            wanted += payload
            if kind == "whole":
                sent += encode(BINARY, payload, key)
            else:
                half = len(payload) // 2
                sent += encode(BEGINNING, payload[:half], key) + encode(PING, b"", key) + encode(MIDDLE, b"", key)
                sent += encode(ENDING, payload[half:], key)
                pings.append(b"")
        reader, found, at = StreamReader(masked=key is not None), b"", 0
        while at < len(sent):
            size = cuts[0]
            cuts = [*cuts[1:], size]
            found += read_all(reader, sent[at : at + size])
            at += size
            self.assertLessEqual(reader.held, 14 + MAX_CONTROL)
        self.assertEqual(found, wanted)
        self.assertEqual(reader.take_answer(), encode(PONG, pings[-1]) if pings else b"")
        self.assertEqual(reader.take_answer(), b"")

    def test_payload_without_a_mask_is_not_copied(self) -> None:
        for key in (None, NO_MASK):
            data = memoryview(encode(BINARY, b"payload", key))
            piece, end = StreamReader(masked=key is not None).read(data, 0, 1)
            self.assertIsInstance(piece, memoryview)
            self.assertIs(piece.obj, data.obj)  # type: ignore[union-attr]
            self.assertEqual((bytes(piece), end), (b"payload", len(data)))

    def test_one_read_costs_only_as_many_frames_as_are_asked_for(self) -> None:
        """An enemy sends frames without payload, each of which costs more than its bytes."""
        data = memoryview(encode(PING, b"") * 1000 + encode(BINARY, b"end"))
        reader = StreamReader(masked=False)
        self.assertEqual(reader.read(data, 0, 10), (b"", 20))
        self.assertEqual(reader.read(data, 20, 2000)[0], b"end")

    def test_nothing_is_read_behind_a_close(self) -> None:
        reader = StreamReader(masked=False)
        self.assertEqual(read_all(reader, encode(BINARY, b"a") + close_frame(1000) + encode(BINARY, b"b")), b"a")
        self.assertTrue(reader.closed)


class ErrorTests(SynchronousTestCase):
    """A violation of the rules ends the connection with the right code, behind the payload before it."""

    def test_each_broken_rule_has_its_code(self) -> None:
        unmasked, masked = encode(BINARY, b"a"), encode(BINARY, b"a", b"abcd")
        for data, by_client, code in (
            (unmasked, True, BAD_PROTOCOL),
            (masked, False, BAD_PROTOCOL),
            (encode(TEXT, b"a"), False, BAD_DATA),
            (encode(0x83, b"a"), False, BAD_PROTOCOL),
            (encode(0x8B, b"a"), False, BAD_PROTOCOL),
            (encode(BINARY | 0x40, b"a"), False, BAD_PROTOCOL),
            (encode(0x09, b""), False, BAD_PROTOCOL),
            (encode(PING, b"a" * 126), False, BAD_PROTOCOL),
            (encode(ENDING, b"a"), False, BAD_PROTOCOL),
            (encode(BEGINNING, b"a") + encode(BINARY, b"a"), False, BAD_PROTOCOL),
            (b"\x82\x7f" + (2**40).to_bytes(8, "big"), False, BAD_PROTOCOL),
        ):
            with self.subTest(data=data[:12]):
                error = self.assertRaises(StreamError, read_all, StreamReader(masked=by_client), data)
                self.assertEqual(error.code, code)

    @given(st.binary(max_size=200), st.booleans())
    def test_any_bytes_are_read_or_refused(self, data: bytes, masked: bool) -> None:
        try:
            self.assertLessEqual(len(read_all(StreamReader(masked=masked), data)), len(data))
        except StreamError:
            pass
