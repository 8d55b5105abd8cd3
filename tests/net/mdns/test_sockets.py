"""Sockets for multicast DNS, as far as one machine without a network has them."""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv4Network
from typing import Any, cast

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

from dmsg.net.mdns.interfaces import Interface
from dmsg.net.mdns.packets import MAX_PACKET
from dmsg.net.mdns.sockets import open_asker, open_responder
from tests.support import asynchronous

LOOPBACK = Interface("lo", 1, IPv4Address("127.0.0.1"), IPv4Network("127.0.0.0/8"))


class SocketTests(TestCase):
    """Real sockets, on loopback."""

    def opened(self, port: Any) -> Any:
        self.addCleanup(port.stopListening)
        return port

    @asynchronous
    async def test_packets_reach_the_callback_and_an_error_there_ends_nothing(self) -> None:
        got: list[tuple[bytes, str]] = []
        whole: Deferred[None] = Deferred()

        def received(data: bytes, host: str, port: int) -> None:
            got.append((data, host))
            if data == b"bad":
                raise ValueError(data)
            if data.startswith(b"end"):
                whole.callback(None)

        port = self.opened(open_asker(cast(Any, reactor), LOOPBACK, received))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            for data in (b"bad", b"good", b"end" + bytes(MAX_PACKET)):
                sender.sendto(data, ("127.0.0.1", port.getHost().port))
        await whole
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), 1)
        self.assertEqual(got[:2], [(b"bad", "127.0.0.1"), (b"good", "127.0.0.1")])
        # A longer packet is cut behind the first byte that is too much.
        self.assertEqual(len(got[2][0]), MAX_PACKET + 1)

    def test_two_programs_can_wait_for_questions(self) -> None:
        for _ in range(2):
            port = self.opened(open_responder(cast(Any, reactor), LOOPBACK, lambda *_: None))
            self.assertEqual((port.getHost().host, port.getHost().port), ("224.0.0.251", 5353))

    def test_an_address_of_somebody_else(self) -> None:
        other = Interface("lo", 1, IPv4Address("198.51.100.7"), IPv4Network("198.51.100.0/24"))
        for opening in (open_asker, open_responder):
            with self.assertRaises(OSError):
                opening(cast(Any, reactor), other, lambda *_: None)
