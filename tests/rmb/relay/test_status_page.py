"""The page of a relay of the bus, over TCP."""

from __future__ import annotations

import re

from tests.rmb.network import RmbCase
from tests.support import asynchronous


class PageTests(RmbCase):
    """Sessions and traffic on the page of a relay."""

    @asynchronous
    async def test_the_page_lists_senders_and_receivers(self) -> None:
        relay = await self.relay(metrics="tcp:0:interface=127.0.0.1", queue="sqlite::memory:", max_sessions=2)
        for name in "AB":
            self.twin(name, relay.domain)  # type: ignore[attr-defined]
        sender, receiver = await self.raw("A", relay), await self.raw("B", relay)
        receiver.answers_pings = False
        for number in range(3):
            sender.send(sender.envelope(receiver.session, uid=str(number), payload=b"x" * 1000), self.now())
        for _ in range(3):
            await receiver.messages.get()
        assert relay.metrics_port is not None
        url = f"http://127.0.0.1:{relay.metrics_port.getHost().port}"  # type: ignore[attr-defined]
        status, text = await self.status_of(url + "/")
        self.assertEqual(status, 200)
        plain = re.sub(r"<[^>]*>", " ", text)
        plain = " ".join(plain.split())
        for expected in (
            "rmb relay",
            "The relay has nearly reached its limit of sessions.",
            "Sessions 2 of 2",
            r"Sessions that send most Session Rate now Bytes Messages 1 [\d.]+ k?B/s 3\.\d kB 3",
            r"Sessions that receive most Session Rate now Messages 2 [\d.]+/s 3",
            r"Sessions that confirm slowest Session Messages waiting Bytes waiting 2 3 [\d.]+ kB",
            "Failed deliveries to other relays Relay Messages none",
            "none since the start",
        ):
            self.assertRegex(plain, expected)
        status, text = await self.status_of(url + "/health")
        self.assertEqual((status, '"sessions": 2' in text), (200, True))
