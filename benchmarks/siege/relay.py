"""A relay of 2019's protocol."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count

from benchmarks.machine import Entity, away
from benchmarks.siege.crowd import Crowd
from benchmarks.siege.scene import ENEMY, HONEST, INNOCENT, NEWCOMER_TIMEOUT, Scene, again, silent, until
from benchmarks.wire import Connection, open_transport
from dmsg.keys import PubKey, SecKey
from dmsg.v2019.core.wire import FWD, REQUEST, encode_frame


def _strays(per_record: int) -> Callable[[float, str, str, str], None]:
    def attack(seconds: float, host: str, port: str, key: str) -> None:
        goes_on, where, server = until(seconds), (host, int(port)), PubKey.from_hex(key)
        frames = b"".join(encode_frame(FWD, 2 + 2 * (number % 2), b"") for number in range(per_record))

        def act() -> None:
            one = Connection(where, server, ENEMY)
            while goes_on():
                one.send(frames)
                one.skip()

        again(goes_on, act)

    return attack


def _behind_nat(seconds: float, host: str, port: str, key: str) -> None:
    """Six connections that stray, from the address of the innocent; each comes again as somebody else."""
    goes_on, where, server = until(seconds), (host, int(port)), PubKey.from_hex(key)
    frames = b"".join(encode_frame(FWD, 2 + 2 * (number % 2), b"") for number in range(13_000))
    crowd = Crowd(6, lambda _: Connection(where, server, INNOCENT))

    def stray(one: Connection) -> None:
        one.send(frames)
        one.skip()

    while goes_on():
        crowd.act(stray)
        time.sleep(0.02)


def _two_ids(seconds: float, host: str, port: str, key: str) -> None:
    """Send empty frames of two transports of the attacker in turn, so that the relay cannot pass them on together."""
    goes_on, where, server = until(seconds), (host, int(port)), PubKey.from_hex(key)

    def act() -> None:
        one, two, three = (Connection(where, server, ENEMY) for _ in range(3))
        open_transport(one, two, 2)
        open_transport(one, three, 4)
        frames = b"".join(encode_frame(FWD, 2 + 2 * (number % 2), b"") for number in range(10_000))
        while goes_on():
            one.send(frames)
            for each in (one, two, three):
                each.skip()

    again(goes_on, act)


def _requests(seconds: float, host: str, port: str, key: str) -> None:
    """REQUESTs for somebody who is not there."""
    goes_on, where, server = until(seconds), (host, int(port)), PubKey.from_hex(key)

    def act() -> None:
        one = Connection(where, server, ENEMY)
        payload = bytes(one.key.public + SecKey.generate().public)
        frames = b"".join(encode_frame(REQUEST, 2 * number, payload) for number in range(1, 400))
        while goes_on():
            one.send(frames)
            one.skip()

    again(goes_on, act)


def _handshakes(seconds: float, host: str, port: str, key: str) -> None:
    """Whole handshakes, one after the other."""
    goes_on, where, server = until(seconds), (host, int(port)), PubKey.from_hex(key)
    again(goes_on, lambda: Connection(where, server, ENEMY).close())


def _deaf(seconds: float, host: str, port: str, key: str) -> None:
    """Sixty-four receivers that do not read, and one that sends to all of them."""
    goes_on, where, server = until(seconds), (host, int(port)), PubKey.from_hex(key)

    def act() -> None:
        deaf = [Connection(where, server, f"127.0.0.{2 + number % 8}") for number in range(64)]
        sender = Connection(where, server, ENEMY)
        for number, one in enumerate(deaf):
            open_transport(sender, one, 2 + 2 * number)
        block = bytes(30_000)
        for number in count():
            if not goes_on():
                return
            own = 2 + 2 * (number % 64)
            sender.send(encode_frame(FWD, own, block) + encode_frame(FWD, own, block))

    again(goes_on, act)


def _honest(seconds: float, host: str, port: str, key: str) -> None:
    """A sender, as fast as it goes, and a receiver that reads all of it: what relaying costs, and no attack."""
    goes_on, where, server = until(seconds), (host, int(port)), PubKey.from_hex(key)

    def act() -> None:
        sender, receiver = Connection(where, server, ENEMY), Connection(where, server, ENEMY)
        open_transport(sender, receiver, 2)
        block = encode_frame(FWD, 2, bytes(30_000))
        while goes_on():
            sender.send(block + block)
            receiver.skip()

    again(goes_on, act)


class RelayScene(Scene):
    """A pair that sends a frame to and fro, and clients that connect."""

    attacks = {
        "strays, 13,000 a record": _strays(13_000),
        "strays, 300 a record": _strays(300),
        "six that stray behind one NAT": _behind_nat,
        "two ids in turn": _two_ids,
        "requests": _requests,
        "silent connections": lambda seconds, host, port, key: silent(seconds, (host, int(port))),
        "handshakes": _handshakes,
        HONEST: _honest,
        "deaf receivers": _deaf,
    }
    anchors = {"deaf receivers": HONEST}

    def _start(self) -> Entity:
        return Entity(
            "dmsg-server", "--listen=tcp:0:interface=127.0.0.1", "--key-file=server.key", "--create", core=away()
        )

    def __init__(self) -> None:
        self.entity = self._start()
        self._key = PubKey.from_hex(self.entity.wait_for(r"server ([0-9a-f]{66}) listens")[1])
        self._where = self.entity.address()
        self.restore()

    def restore(self) -> None:
        self._one, self._two = Connection(self._where, self._key), Connection(self._where, self._key)
        their_id = open_transport(self._one, self._two, 2)
        self._there, self._back = encode_frame(FWD, 2, bytes(66)), encode_frame(FWD, their_id, bytes(66))

    def there_and_back(self) -> None:
        self._one.send(self._there)
        self._two.receive()
        self._two.send(self._back)
        self._one.receive()

    def newcomer(self) -> None:
        Connection(self._where, self._key, timeout=NEWCOMER_TIMEOUT).close()

    def words(self) -> list[str]:
        return [*map(str, self._where), self._key.hex()]

    def close(self) -> None:
        self.entity.stop()
