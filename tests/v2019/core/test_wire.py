"""Payloads of control frames."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import KeyFormatError
from dmsg.keys import SecKey
from dmsg.v2019.core.wire import DRAIN, MAX_HINTS, FrameBuffer, FrameType, close_reason, encode_drain, parse_drain

KEYS = [SecKey.from_seed(bytes([number])).public for number in range(1, MAX_HINTS + 2)]


class FrameTypeTests(SynchronousTestCase):
    def test_the_numbers_of_the_types_stay(self) -> None:
        names = "OK REQUEST ACCEPT CLOSE PING PONG DRAIN RECEIPT NOTICE".split()
        expected = {name: number for number, name in enumerate(names)} | {"FWD": 10, "ACK": 11}
        self.assertEqual({one.name: int(one) for one in FrameType}, expected)


class DrainTests(SynchronousTestCase):
    def test_the_servers_of_a_drain_are_parsed(self) -> None:
        for number in (0, 1, MAX_HINTS):
            (frame,) = FrameBuffer().feed(encode_drain(300, KEYS[:number]))
            self.assertEqual((frame.type, frame.id), (DRAIN, 0))
            self.assertEqual(parse_drain(frame.payload), (300, KEYS[:number]))

    def test_further_servers_are_left_out(self) -> None:
        (frame,) = FrameBuffer().feed(encode_drain(1, KEYS))
        self.assertEqual(parse_drain(frame.payload), (1, KEYS[:MAX_HINTS]))

    def test_a_drain_of_another_length_is_refused(self) -> None:
        hints = b"".join(KEYS[:MAX_HINTS])
        for payload in (b"", b"\0", bytes(2) + KEYS[0][:1], bytes(2) + KEYS[0] + b"x", bytes(2) + hints + KEYS[0]):
            self.assertRaises(KeyFormatError, parse_drain, payload)


class CloseTests(SynchronousTestCase):
    def test_an_empty_close_has_no_reason(self) -> None:
        self.assertEqual(close_reason(b""), 0)
        self.assertEqual(close_reason(b"\x07\x09"), 7)
