"""Strangers who misuse a carrier at a server: each loses the connection, for a named reason, in bounded time."""

from __future__ import annotations

import os
from typing import Any

from twisted.internet.protocol import Protocol

from dmsg.errors import DropReason
from dmsg.net.links.link import CLOSE_TIMEOUT, HANDSHAKE_TIMEOUT
from dmsg.net.websocket.byte_stream import NORMAL, close_frame
from dmsg.net.websocket.frames import BINARY, NO_MASK, encode
from dmsg.noise.xk import XKHandshake
from tests.net.links.support import REQUEST, LinkCase
from tests.support import SERVER_KEY, Recorder

UPGRADE = REQUEST + b"\r\n"


class Stranger(Recorder):
    """Client that sends bytes of the test, and records the answer."""

    closed = False

    def connectionLost(self, reason: Any = None) -> None:
        self.closed = True


class AttackTests(LinkCase):
    """Attacks by one stranger each."""

    def come(self, *pieces: bytes) -> tuple[Stranger, Any]:
        """Connect and send the pieces, each in a read of its own."""
        stranger = Stranger()
        link = self.join(stranger, "203.0.113.9")
        for piece in pieces:
            self.send(stranger, piece)
        return stranger, link

    def send(self, stranger: Protocol, data: bytes) -> None:
        if not stranger.closed:  # type: ignore[attr-defined]
            stranger.transport.write(data)  # type: ignore[union-attr]
            self.network.settle()

    def ends_as(self, stranger: Stranger, link: Any, reason: DropReason) -> None:
        self.assertTrue(stranger.closed)
        self.assertEqual(link.ended_for, reason)
        self.assertEqual(self.factory.relay.drops[reason], 1)
        self.assertEqual((self.factory.handshakes, len(self.factory._counts)), (0, 0))

    def test_garbage_behind_an_upgrade(self) -> None:
        for pieces in ((UPGRADE + b"GET / HTTP/1.1\r\n\r\n",), (UPGRADE, b"\x00\x61" + bytes(97))):
            with self.subTest(pieces=pieces):
                self.factory.relay.drops.clear()
                self.ends_as(*self.come(*pieces), DropReason.BAD_WEBSOCKET)

    def test_a_second_upgrade_inside_the_first(self) -> None:
        self.ends_as(*self.come(UPGRADE, encode(BINARY, UPGRADE, os.urandom(4))), DropReason.HANDSHAKE_FAILED)

    def test_control_frames_in_fragments(self) -> None:
        for first in (0x09, 0x0A, 0x08):
            with self.subTest(first=first):
                self.factory.relay.drops.clear()
                self.ends_as(*self.come(UPGRADE, encode(first, b"a", NO_MASK)), DropReason.BAD_WEBSOCKET)

    def test_a_request_that_never_ends(self) -> None:
        stranger, link = self.come(UPGRADE[:-2], *[b"A: " + b"a" * 1000 + b"\r\n"] * 9)
        self.assertIn(b"HTTP/1.1 431 ", stranger.data)
        self.ends_as(stranger, link, DropReason.HTTP_REQUEST)

    def test_a_line_of_another_protocol_is_answered_at_once(self) -> None:
        stranger, link = self.come(b"EHLO relay.example\r\n")
        self.assertIn(b"HTTP/1.1 400 ", stranger.data)
        self.ends_as(stranger, link, DropReason.HTTP_REQUEST)

    def test_a_request_or_a_handshake_byte_by_byte_gets_no_more_time(self) -> None:
        handshake = XKHandshake(self.key(), SERVER_KEY.public).data_to_send()
        frames = [encode(BINARY, handshake[at : at + 1], NO_MASK) for at in range(len(handshake))]
        for begin, slowly in ((b"", [UPGRADE[at : at + 1] for at in range(len(UPGRADE))]), (UPGRADE, frames)):
            with self.subTest(begin=begin):
                self.factory.relay.drops.clear()
                stranger, link = self.come(begin)
                for piece in slowly[: int(HANDSHAKE_TIMEOUT) * 2]:
                    self.send(stranger, piece)
                    self.network.clock.advance(0.5)
                    self.network.settle()
                self.ends_as(stranger, link, DropReason.HANDSHAKE_TIMEOUT)

    def test_a_close_frame_instead_of_a_handshake(self) -> None:
        stranger, link = self.come(UPGRADE, close_frame(NORMAL, b"abcd"))
        self.network.clock.advance(CLOSE_TIMEOUT)
        self.network.settle()
        self.assertTrue(stranger.closed)
        self.assertTrue(stranger.data.endswith(close_frame(NORMAL)))
        self.assertEqual(self.factory.relay.drops[DropReason.HANDSHAKE_ABANDONED], 1)
        self.assertEqual((self.factory.handshakes, len(self.factory._counts)), (0, 0))
