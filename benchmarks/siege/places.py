"""A relay that has fewer places than there are idle clients."""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.machine import Entity, away
from benchmarks.siege.crowd import Crowd
from benchmarks.siege.network import Innocents, enemy
from benchmarks.siege.relay import RelayScene
from benchmarks.siege.scene import NEWCOMER_TIMEOUT, ready, until
from benchmarks.wire import Connection
from dmsg.keys import PubKey

PLACES = 500
"""Connections that the relay takes: by default 10,000, which take a minute to fill."""


def _idle(addresses: int) -> Callable[[float, str, str, str], None]:
    """Clients of ``addresses`` addresses that occupy every place, stay idle, and return when one of them is evicted."""

    def attack(seconds: float, host: str, port: str, key: str) -> None:
        where, server = (host, int(port)), PubKey.from_hex(key)
        # Each connection keeps its own address, as a machine does.
        crowd = Crowd(PLACES, lambda number: Connection(where, server, enemy(number % addresses), NEWCOMER_TIMEOUT))
        crowd.act(lambda one: None)
        ready()
        goes_on = until(seconds)
        while goes_on():
            crowd.act(lambda one: one.skip())
            time.sleep(0.2)

    return attack


class PlacesScene(RelayScene):
    """A pair that sends a frame to and fro, and clients from everywhere that connect."""

    attacks = {"idle clients of ten addresses": _idle(10), "idle clients of 100 addresses": _idle(100)}
    anchors = {}
    prepared = frozenset(attacks)

    def _start(self) -> Entity:
        self._innocents = Innocents()
        return Entity(
            "dmsg-server",
            "--listen=tcp:0:interface=127.0.0.1",
            "--key-file=server.key",
            "--create",
            f"--max-connections={PLACES}",
            core=away(),
        )

    def newcomer(self) -> None:
        Connection(self._where, self._key, self._innocents.next(), NEWCOMER_TIMEOUT).close()
