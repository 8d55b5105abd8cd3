"""Messages over the agent's socket: their bytes, and bytes that are no message."""

from __future__ import annotations

from typing import Any

from hypothesis import given, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg.agent.wire import (
    MAX_LINE,
    MAX_PAYLOAD,
    Kind,
    Reader,
    WireError,
    encode_close,
    encode_count,
    encode_frame,
    encode_line,
    error_line,
    parse_close,
    parse_count,
    parse_line,
    raise_error,
)
from dmsg.errors import (
    CloseReason,
    ConnectFailed,
    ConnectTimeout,
    DiscoveryError,
    DmsgError,
    DmsgTimeout,
    EncryptionUnavailable,
    EntryNotFound,
    PingUnavailable,
    TransportRefused,
)

frames = st.lists(st.tuples(st.sampled_from(Kind), st.binary(max_size=200)), max_size=8)


class ReaderTests(SynchronousTestCase):
    """Lines and frames, in pieces of any size."""

    @given(frames, st.integers(1, 50))
    def test_frames_cut_anywhere_are_reassembled(self, sent: list[tuple[Kind, bytes]], size: int) -> None:
        data = encode_line({"a": 1}) + b"".join(encode_frame(kind, payload) for kind, payload in sent)
        reader = Reader()
        got: list[Any] = []
        first = None
        for start in range(0, len(data), size):
            reader.feed(data[start : start + size])
            if first is None:
                first = reader.next_line()
            while first is not None and (found := reader.next_frame()) is not None:
                got.append(found)
        assert first is not None
        self.assertEqual(parse_line(first), {"a": 1})
        self.assertEqual(got, sent)
        self.assertEqual(reader.buffered_bytes, 0)

    @given(st.binary(max_size=300))
    def test_random_bytes_raise_only_wire_errors(self, data: bytes) -> None:
        """Random bytes raise no error but WireError."""
        for read in (Reader.next_line, Reader.next_frame):
            reader = Reader()
            reader.feed(data)
            try:
                while (found := read(reader)) is not None:
                    if isinstance(found, bytes):
                        parse_line(found)
                    else:
                        (parse_close if found[0] is Kind.CLOSE else parse_count)(found[1])
            except WireError:
                pass

    def test_close_reasons_below_256_take_one_byte(self) -> None:
        """Close reasons of 2019 have one byte, as before."""
        for reason, size in ((0, 1), (255, 1), (256, 2), (0xFFFFFFFF, 4)):
            payload = encode_close(reason)[5:]
            self.assertEqual((len(payload), parse_close(payload)), (size, reason))
        self.assertEqual(encode_close(1 << 32), encode_close(CloseReason.ABORTED))
        for wrong in (b"", bytes(5)):
            self.assertRaises(WireError, parse_close, wrong)

    def test_reader_enforces_its_limits(self) -> None:
        reader = Reader()
        reader.feed(b"x" * (MAX_LINE - 1))
        self.assertIsNone(reader.next_line())
        reader.feed(b"x")
        self.assertRaises(WireError, reader.next_line)
        reader = Reader()
        reader.feed(encode_frame(Kind.DATA, bytes(MAX_PAYLOAD)))
        self.assertEqual(reader.next_frame(), (Kind.DATA, bytes(MAX_PAYLOAD)))
        reader.feed(encode_frame(Kind.DATA, bytes(MAX_PAYLOAD + 1)))
        self.assertRaises(WireError, reader.next_frame)
        self.assertRaises(WireError, parse_line, b"[" * 50_000)

    def test_messages_have_the_documented_layout(self) -> None:
        self.assertEqual(encode_frame(Kind.DATA, b"hi"), b"\0\0\0\0\2hi")
        self.assertEqual(encode_count(Kind.TAKEN, 3), b"\1\0\0\0\4\0\0\0\3")
        self.assertEqual(encode_close(CloseReason.REFUSED), b"\2\0\0\0\1\x09")
        self.assertEqual(encode_count(Kind.READ, 70_000), b"\4\0\0\0\4\0\1\x11\x70")


class ErrorTests(SynchronousTestCase):
    """A program raises what the agent met."""

    def test_errors_keep_their_class_over_the_socket(self) -> None:
        for error in (
            ConnectFailed("gone", (("02ab", "refused"),)),
            ConnectTimeout("late", ()),
            EntryNotFound(key="02" * 33),
            DiscoveryError("away", 503),
            EncryptionUnavailable("none"),
            PingUnavailable("old"),
            TransportRefused(CloseReason.REFUSED),
            DmsgTimeout("late"),
            DmsgError("something"),
        ):
            answer = parse_line(encode_line(error_line(error)).rstrip(b"\n"))
            with self.assertRaises(type(error)) as caught:
                raise_error(answer)
            self.assertIs(type(caught.exception), type(error))
            self.assertEqual(str(caught.exception), str(error))
            for field in ("key", "status", "reason"):
                self.assertEqual(getattr(caught.exception, field, None), getattr(error, field, None))

    def test_other_exceptions_are_not_rebuilt_from_their_names(self) -> None:
        """An agent names errors that cross the socket, not any class that there is."""
        raise_error({"fine": True})
        for name in ("CloseReason", "needs_extra", "__builtins__", "no such", "", 7, None):
            with self.assertRaises(DmsgError) as caught:
                raise_error({"error": name, "text": "x"})
            self.assertIs(type(caught.exception), DmsgError)
