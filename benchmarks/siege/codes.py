"""Codes of words: numbers are looked up one after the other, and whatever is found is ended by a wrong guess."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import chain, cycle
from random import randrange, shuffle

from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.protocol import Factory
from twisted.internet.threads import deferToThread

from benchmarks.machine import Entity, away
from benchmarks.siege.enemies import reactor, run_clients
from benchmarks.siege.network import enemy
from benchmarks.siege.programs import Visitor
from benchmarks.siege.rest import ask, request
from benchmarks.siege.scene import LOST, Scene, listed_server
from benchmarks.siege.verdict import CONNECT_WITHIN, Bounds
from benchmarks.siege.visitor import SAID_AFTER
from dmsg.apps.codes.pake import Role
from dmsg.apps.codes.stream import MAX_WRONG_GUESSES, PORT, CodeEnd
from dmsg.apps.codes.words import Code
from dmsg.discovery.entries.entry import ClientMeta, Entry
from dmsg.errors import DmsgError
from dmsg.keys import PubKey, SecKey
from dmsg.v2019.client import Client

AT_ONCE = 8
"""Numbers that an enemy looks at at a time."""


def _find(where: tuple[str, int], number: int, source: str) -> PubKey | None:
    """Return the key behind a number."""
    with suppress(*LOST, ValueError), socket.create_connection(where, 5, (source, 0)) as connection:
        status, body = ask(connection, request("GET", f"/discovery/nameplates/{number}"))
        if status == 200:
            return PubKey.from_hex(json.loads(body)["static"])
    return None


async def _guess(client: Client, key: PubKey, number: int) -> None:
    for _ in range(MAX_WRONG_GUESSES):
        end = CodeEnd(reactor, Role.RECEIVER, Code.make(number))
        end.agreed.addErrback(lambda _: None)
        factory = Factory.forProtocol(partial(_itself, end))
        with suppress(DmsgError):
            await client.connect(key, factory, PORT, timeout=5.0)
            await end.agreed


def _itself(end: CodeEnd) -> CodeEnd:
    return end


def _ending(addresses: int) -> Callable[..., None]:
    """End every code that is found, with look-ups from ``addresses`` addresses."""

    def attack(seconds: float, host: str, port: str, url: str) -> None:
        where = (host, int(port))
        # The attacker tries all nameplates in random order.
        shortest = list(range(1000, 10_000))
        shuffle(shortest)
        numbers = chain(shortest, iter(lambda: randrange(100_000, 1_000_000), None))
        sources = cycle([enemy(each) for each in range(addresses)])

        async def look(client: Client) -> None:
            for number in numbers:
                key = await deferToThread(_find, where, number, next(sources))
                if key is not None:
                    await _guess(client, key, number)

        async def act(clients: list[Client]) -> None:
            await gatherResults([Deferred.fromCoroutine(look(clients[0])) for _ in range(AT_ONCE)])

        reactor.suggestThreadPoolSize(AT_ONCE)
        run_clients(seconds, url, 1, act)

    return attack


class CodesScene(Scene):
    """A client that looks up an entry, and pairs of people who use codes."""

    attacks = {
        "one address that ends codes": _ending(1),
        "100 addresses that end codes": _ending(100),
    }
    prepared = frozenset(attacks)
    needs_public = True
    newcomers = 12
    bounds = Bounds(connect_within=SAID_AFTER + CONNECT_WITHIN)

    def __init__(self) -> None:
        self.entity = Entity("dmsg-discovery", "--listen=tcp:0:interface=127.0.0.1", "--store=memory:", core=away())
        self._where = self.entity.address()
        self._url = f"http://127.0.0.1:{self._where[1]}"
        self._relay, _ = listed_server(self._url)
        self._visitor = Visitor(self._url)
        key = SecKey.generate()
        entry = Entry("0.0.1", 0, time.time_ns(), key.public.hex(), ClientMeta(())).sign(key)
        self.restore()
        ask(self._connection, request("POST", "/discovery/entries", entry.to_json()))
        self._get = request("GET", f"/discovery/entries/{key.public}")

    def restore(self) -> None:
        self._connection = socket.create_connection(self._where, 30)

    def there_and_back(self) -> None:
        time.sleep(0.005)  # The rate stays below the limit per address.
        if ask(self._connection, self._get)[0] != 200:
            raise ConnectionError("the entry is gone")

    def newcomer(self) -> None:
        self._visitor.ask("code")

    def words(self) -> list[str]:
        return [*map(str, self._where), self._url]

    def close(self) -> None:
        self._connection.close()
        self._visitor.stop()
        self._relay.stop()
        self.entity.stop()
