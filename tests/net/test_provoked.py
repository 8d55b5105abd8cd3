"""A stranger's REQUESTs cost the stranger his connections, and the client that has to answer them nothing; over TCP."""

from __future__ import annotations

import os
from typing import Any

from twisted.internet import reactor
from twisted.internet.task import deferLater
from twisted.trial.unittest import SkipTest

from dmsg.errors import DropReason
from dmsg.keys import SecKey
from dmsg.v2019.core.wire import REQUEST, encode_frame
from tests.net.support import EntityCase
from tests.support import Accepting, asynchronous

CONNECTIONS = 20
ENEMY = "127.0.0.2"


class ProvokedTests(EntityCase):
    @asynchronous
    async def test_a_flood_of_requests_is_charged_to_its_sender(self) -> None:
        """Twenty connections of one address, each within its rate of 500 a second, ask one client."""
        url = await self.start_discovery()
        server = await self.start_server(f"--discovery={url}")
        key = SecKey.generate()
        victim = await self.start_client(url, key=key, min_servers=1)
        victim.listen(Accepting())
        (session,) = server.factory.sessions
        enemies = [await self.raw_client(server, source=ENEMY) for _ in range(CONNECTIONS)]
        number = 0
        started = reactor.seconds()
        while any(not enemy.closed for enemy in enemies):
            if number == 10_000:
                # What the server has read counts, because a busy machine leaves the rest in the buffers of sockets.
                read = server.factory.relay.drops[DropReason.DESTINATION_RATE] / (reactor.seconds() - started)
                if read < FLOOD:
                    raise SkipTest(
                        f"this machine is too busy for a flood: {read:.0f} refused REQUESTs a second, not {FLOOD}"
                    )
                self.fail("the flood ended nobody")
            number += 25
            # The rate is 10,000 a second. Each frame has a valid point and an invalid tag.
            for enemy in enemies:
                if not enemy.closed:
                    body = bytes(enemy.key.public + key.public + SERVER_POINT) + os.urandom(144)
                    own = (2 * (number + one) % 8000 for one in range(25))
                    enemy.send(b"".join(encode_frame(REQUEST, one, body) for one in own))
            await deferLater(reactor, max(0.0, started + number / 500 - reactor.seconds()))
        drops = server.factory.relay.drops
        self.assertEqual(drops[DropReason.FLOOD], CONNECTIONS)
        self.assertGreater(drops[DropReason.DESTINATION_RATE], 0)
        # The client stays connected. Neither its address nor, for others, the attacker's address is refused.
        self.assertIn(session, server.factory.sessions)
        await self.raw_client(server)
        await self.raw_client(server, source=ENEMY)
        other = await self.start_client(url, min_servers=1)
        protocol: Any = await other.connect(key.public, Accepting())
        protocol.transport.loseConnection()


FLOOD = 8_000
"""Refused REQUESTs a second, of all connections together, below which the server need not end any of them."""
SERVER_POINT = SecKey.from_seed(b"a point").public
