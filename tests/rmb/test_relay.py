"""The relay on real TCP, with real websockets."""

from __future__ import annotations

from dmsg.rmb.address import Session
from tests.rmb.network import RmbCase
from tests.support import asynchronous


class SmokeTests(RmbCase):
    @asynchronous
    async def test_a_message(self) -> None:
        """From one session to another."""
        relay = await self.named_relay()
        a, b = self.twin("A", relay.domain), self.twin("B", relay.domain)
        ra, rb = await self.raw("A", relay), await self.raw("B", relay, "s")
        sent = ra.send(ra.envelope(Session(b, "s")), self.now())
        got = await rb.messages.get()
        self.assertEqual([sent], rb.raw)
        self.assertEqual(a, got.source.twin)
        ra.socket.ping(b"12345678")
        self.assertEqual(b"12345678", await ra.pongs.get())

    @asynchronous
    async def test_a_call(self) -> None:
        """Client to client."""
        relay = await self.named_relay()
        for name in "AB":
            self.twin(name, None)
        a, b = self.client("A", relay), self.client("B", relay)
        b.serve("echo", lambda request: request.payload)
        await a.when_online(), await b.when_online()
        reply = await a.call(self.ids["B"], "echo", b"hello")
        self.assertEqual(b"hello", reply.payload)
