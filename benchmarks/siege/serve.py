"""``dmsg serve``, open to all."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

from twisted.internet.defer import gatherResults
from twisted.web.client import Agent, HTTPConnectionPool, readBody

from benchmarks.machine import Entity
from benchmarks.siege.crowd import Crowd
from benchmarks.siege.enemies import reactor, run_clients
from benchmarks.siege.network import enemy
from benchmarks.siege.peer import Peer
from benchmarks.siege.programs import DMSG, Program
from benchmarks.siege.scene import NEWCOMER_TIMEOUT, ready, until
from benchmarks.wire import Connection
from dmsg.clients.http import DmsgEndpointFactory
from dmsg.keys import PubKey, SecKey
from dmsg.v2019.client import Client
from dmsg.v2019.core.wire import REQUEST, encode_frame

MANY = 20_000
"""Files of the large directory."""


def _keys(keys: int, addresses: int, rate: float) -> Callable[..., None]:
    """Keys that knock without an end, all together ``rate`` times a second.

    Each REQUEST has an ephemeral key of its own and is false in its last bytes: only who works out the keys sees that.
    """

    def attack(seconds: float, host: str, port: str, server: str, victim: str, url: str) -> None:
        where, relay, to = (host, int(port)), PubKey.from_hex(server), bytes(PubKey.from_hex(victim))
        crowd = Crowd(keys, lambda number: Connection(where, relay, enemy(number % addresses), NEWCOMER_TIMEOUT))
        crowd.act(lambda one: None)
        ids = cycle(range(2, 8000, 2))
        each = rate / keys

        def knock(one: Connection) -> None:
            payload = bytes(one.key.public) + to + bytes(SecKey.generate().public) + os.urandom(144)
            one.send(encode_frame(REQUEST, next(ids), payload))
            one.skip()

        ready()
        goes_on = until(seconds)
        while goes_on():
            began = time.monotonic()
            crowd.act(knock)
            time.sleep(max(0.0, 1 / each - (time.monotonic() - began)))

    return attack


def _listing(seconds: float, host: str, port: str, server: str, victim: str, url: str) -> None:
    """The page of a directory of 20,000 files, four times at once and again and again."""

    async def act(clients: list[Client]) -> None:
        pool = HTTPConnectionPool(reactor)
        pool.maxPersistentPerHost = 4
        agent: Any = Agent.usingEndpointFactory(reactor, DmsgEndpointFactory(clients[0]), pool)

        def get() -> Any:
            got = agent.request(b"GET", f"http://{victim}/many/".encode())
            got.addCallback(readBody).addErrback(lambda _: None)
            return got

        while True:
            await gatherResults([get() for _ in range(4)])

    run_clients(seconds, url, 1, act)


class ServeScene(Peer):
    """A client that fetches a small file repeatedly, and strangers that connect for the first time."""

    attacks = {
        "100 keys that knock": _keys(100, 10, 1000.0),
        "1,000 keys that knock": _keys(1000, 100, 1000.0),
        "listing of 20,000 files": _listing,
    }
    prepared = frozenset(attacks)

    def _start(self) -> Entity:
        root = self._relay.directory / "public"
        for directory in (root, root / "many"):
            directory.mkdir()
        (root / "small.txt").write_bytes(bytes(1000))
        for number in range(MANY):
            Path(root / "many" / f"{number:05}.txt").touch()
        words = ("serve", str(root), "--no-agent", "--discovery", self._url, "--key-file", str(self._key_file))
        program = Program(*DMSG, *words)
        program.wait_for("is at")
        return program

    def there_and_back(self) -> None:
        self._visitor.ask("read", key=self._victim.hex(), path="/small.txt")
