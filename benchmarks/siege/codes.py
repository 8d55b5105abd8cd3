"""Codes of words: numbers are looked up one after the other, and whatever is found is ended by a wrong guess."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import chain, count, cycle

from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.protocol import Factory
from twisted.internet.threads import deferToThread

from benchmarks.machine import Entity, away
from benchmarks.siege.enemies import reactor, run_clients
from benchmarks.siege.network import enemy
from benchmarks.siege.programs import Visitor
from benchmarks.siege.rest import ask, request
from benchmarks.siege.scene import LOST, Scene
from benchmarks.siege.verdict import CONNECT_WITHIN, Bounds
from benchmarks.siege.visitor import SAID_AFTER
from dmsg.apps.codes.pake import Role
from dmsg.apps.codes.stream import PORT, CodeEnd
from dmsg.apps.codes.words import Code
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
    end = CodeEnd(reactor, Role.RECEIVER, Code.make(number, 2))
    end.agreed.addErrback(lambda _: None)
    factory = Factory.forProtocol(lambda: end)
    with suppress(DmsgError):
        await client.connect(key, factory, timeout=5.0, port=PORT)
        await end.agreed


def _ending(addresses: int) -> Callable[..., None]:
    """End every code that is found, with lookups from so many addresses."""

    def attack(seconds: float, host: str, port: str, url: str) -> None:
        where = (host, int(port))
        # short numbers first, again and again: most codes had one of these
        numbers = chain.from_iterable(chain(range(1, 100), range(start, start + 100)) for start in count(100, 100))
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
    """Somebody who looks a number up, and people who make codes and say them to others."""

    attacks = {
        "one address that ends codes": _ending(1),
        "100 addresses that end codes": _ending(100),
    }
    prepared = frozenset(attacks)
    needs_public = True
    newcomers = 16
    bounds = Bounds(connect_within=SAID_AFTER + CONNECT_WITHIN)

    def __init__(self) -> None:
        self.entity = Entity("dmsg-discovery", "--listen=tcp:0:interface=127.0.0.1", "--store=memory:", core=away())
        self._where = self.entity.address()
        self._url = f"http://127.0.0.1:{self._where[1]}"
        self._relay = Entity(
            "dmsg-server",
            "--listen=tcp:0:interface=127.0.0.1",
            f"--discovery={self._url}",
            "--key-file=server.key",
            "--create",
            core=away(),
        )
        self._relay.wait_for("registered in discovery")
        self._visitor = Visitor(self._url)
        key = SecKey.generate().public.hex()
        self.restore()
        status, body = ask(
            self._connection, request("POST", "/discovery/nameplates", json.dumps({"static": key}).encode())
        )
        assert status in (200, 201), (status, body)
        self._get = request("GET", f"/discovery/nameplates/{json.loads(body)['nameplate']}")

    def restore(self) -> None:
        self._connection = socket.create_connection(self._where, 30)

    def there_and_back(self) -> None:
        time.sleep(0.005)  # below the limit of one address
        if ask(self._connection, self._get)[0] != 200:
            raise ConnectionError("the number is gone")

    def newcomer(self) -> None:
        self._visitor.ask("code")

    def words(self) -> list[str]:
        return [*map(str, self._where), self._url]

    def close(self) -> None:
        self._connection.close()
        self._visitor.stop()
        self._relay.stop()
        self.entity.stop()
