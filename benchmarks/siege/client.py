"""A client that serves others, attacked by its peers through a relay that means well."""

from __future__ import annotations

import os
import time
import urllib.request
from itertools import cycle
from typing import Any

from benchmarks.machine import Entity, away
from benchmarks.siege.crowd import Crowd
from benchmarks.siege.programs import Program
from benchmarks.siege.scene import ENEMY, NEWCOMER_TIMEOUT, Scene, again, listed_server, until
from benchmarks.wire import Connection
from dmsg.discovery.entries.entry import ClientMeta, Entry
from dmsg.keys import PubKey, SecKey
from dmsg.streams.core.agreement import Hello, Proposal
from dmsg.v2019.core.wire import ACK, CLOSE, FWD, REQUEST, encode_frame

VICTIM = r"""
import sys
from twisted.internet import reactor
from twisted.internet.protocol import Factory, Protocol
from dmsg.keys import SecKey
from dmsg.v2019.client import Client

class Echo(Protocol):
    def dataReceived(self, data):
        self.transport.write(data)

client = Client(reactor, SecKey.from_seed(sys.argv[2].encode()), [sys.argv[1]], encryption="prefer", min_servers=1)
client.listen(Factory.forProtocol(Echo))
client.startService()
client.when_online().addCallback(lambda _: print("online", flush=True))
reactor.run()
"""


def _connect(host: str, port: str, server: str) -> Connection:
    return Connection((host, int(port)), PubKey.from_hex(server), ENEMY)


def _requests(make: Any) -> Any:
    """REQUESTs whose payload ``make`` makes of the enemy's key and the victim's."""

    def attack(seconds: float, host: str, port: str, server: str, victim: str) -> None:
        goes_on = until(seconds)

        def act() -> None:
            one = _connect(host, port, server)
            payloads = make(one.key, PubKey.from_hex(victim))
            number = 0
            while goes_on():
                block = b""
                for _ in range(50):
                    number += 1
                    own = 2 * (number % 4000 + 1)
                    block += encode_frame(REQUEST, own, payloads[number % len(payloads)])
                    block += encode_frame(CLOSE, own, b"\0")
                one.send(block)
                one.skip()
                time.sleep(0.05)

        again(goes_on, act)

    return attack


def _random_bytes(seconds: float, host: str, port: str, server: str, victim: str) -> None:
    """Twenty connections of one address, all together 10,000 REQUESTs of random bytes a second."""
    goes_on = until(seconds)
    crowd = Crowd(20, lambda _: _connect(host, port, server))
    ids = cycle(range(2, 8000, 2))

    def ask(one: Connection) -> None:
        ends = bytes(one.key.public) + bytes(PubKey.from_hex(victim))
        one.send(b"".join(encode_frame(REQUEST, next(ids), ends + os.urandom(177)) for _ in range(25)))
        one.skip()

    while goes_on():
        crowd.act(ask)
        time.sleep(0.04)


def _said_again(own: SecKey, victim: PubKey) -> list[bytes]:
    """Return a valid REQUEST, repeatedly."""
    return [Proposal(own, victim, Hello()).payload]


def _new_ones(own: SecKey, victim: PubKey) -> list[bytes]:
    """Good REQUESTs, of which nothing follows."""
    return [Proposal(own, victim, Hello()).payload for _ in range(2000)]


def _false_ones(own: SecKey, victim: PubKey) -> list[bytes]:
    """Return REQUESTs of the right length, with a valid point and an invalid tag."""
    return [bytes(own.public) + bytes(victim) + bytes(SecKey.generate().public) + os.urandom(144) for _ in range(1000)]


def _deaf(seconds: float, host: str, port: str, server: str, victim: str) -> None:
    """Streams on which much is sent to be echoed, and nothing that comes back is ever acknowledged."""
    goes_on = until(seconds)

    def act() -> None:
        one = _connect(host, port, server)
        payload = bytes(one.key.public) + bytes(PubKey.from_hex(victim))
        for number in range(200):
            one.send(encode_frame(REQUEST, 2 + 2 * number, payload))
        block = bytes(2) + bytes(20_000)
        while goes_on():
            for number in range(200):
                if not goes_on():
                    return
                one.send(encode_frame(FWD, 2 + 2 * number, block))
            one.skip()

    again(goes_on, act)


class ClientScene(Scene):
    """A client whose transport is echoed, and other clients that open a transport."""

    attacks = {
        "a REQUEST said again": _requests(_said_again),
        "REQUESTs of which nothing follows": _requests(_new_ones),
        "false REQUESTs": _requests(_false_ones),
        "REQUESTs of random bytes": _random_bytes,
        "streams without ACKs": _deaf,
    }

    def __init__(self) -> None:
        self._discovery = Entity("dmsg-discovery", "--listen=tcp:0:interface=127.0.0.1", "--store=memory:", core=away())
        self._url = url = f"http://127.0.0.1:{self._discovery.address()[1]}"
        self._relay, self._server = listed_server(url)
        self._where = self._relay.address()
        self._victim = SecKey.from_seed(b"victim").public
        self.entity = Program("-c", VICTIM, url, "victim")
        self.entity.wait_for("online")
        self.restore()

    def restore(self) -> None:
        self._one, self._there = self._opened()
        self._sequence = 0

    def _opened(self) -> tuple[Connection, int]:
        one = Connection(self._where, PubKey.from_hex(self._server), timeout=NEWCOMER_TIMEOUT)
        # Only clients of 2019 may open plain transports, so the entry says that the client is of 2019.
        entry = Entry("0.0.1", 0, time.time_ns(), one.key.public.hex(), ClientMeta((self._server,))).sign(one.key)
        request = urllib.request.Request(f"{self._url}/discovery/entries", entry.to_json(), method="POST")
        with urllib.request.urlopen(request, timeout=10) as answer:
            answer.read()
        one.send(encode_frame(REQUEST, 2, bytes(one.key.public) + bytes(self._victim)))
        answer = one.receive()
        if answer.type == CLOSE:
            raise ConnectionError("refused")
        return one, 2

    def there_and_back(self) -> None:
        sequence = self._sequence.to_bytes(2, "big")
        self._sequence = (self._sequence + 1) % 65536
        self._one.send(encode_frame(FWD, self._there, sequence + bytes(64)))
        while (frame := self._one.receive()).type != FWD:
            if frame.type == CLOSE:
                raise ConnectionError("the stream has ended")
        self._one.send(encode_frame(ACK, self._there, frame.payload[:2]))

    def newcomer(self) -> None:
        self._opened()[0].close()

    def words(self) -> list[str]:
        return [*map(str, self._where), self._server, self._victim.hex()]

    def close(self) -> None:
        self.entity.stop()
        self._relay.stop()
        self._discovery.stop()
