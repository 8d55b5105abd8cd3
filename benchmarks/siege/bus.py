"""A relay of the message bus."""

from __future__ import annotations

import os
import socket
import time
from itertools import count

from benchmarks.machine import Entity, away
from benchmarks.rmb import KEY, Twins, WebSocket
from benchmarks.siege.scene import ENEMY, Attack, Scene, again, silent, until
from dmsg.net.websocket import frames
from dmsg.rmb.twins import token
from dmsg.rmb.twins.address import Session
from dmsg.rmb.twins.identity import Identity

ENEMY_TWIN = 4
"""Number of the enemy's twin in the registry; the innocent have the first three."""


def _enemy(port: str, sid: str | None = None, source: str = ENEMY) -> WebSocket:
    identity = Identity(f"0x{ENEMY_TWIN:064x}", "ed25519")
    return WebSocket(int(port), identity, Session(ENEMY_TWIN, sid), source)


def _pings(seconds: float, host: str, port: str) -> None:
    """Tiny frames, each of which wants an answer that nobody reads."""
    goes_on = until(seconds)

    def act() -> None:
        one = _enemy(port)
        block = frames.encode(frames.PING, b"12345678", KEY) * 4000
        while goes_on():
            one.socket.sendall(block)

    again(goes_on, act)


def _fragments(content: bytes) -> Attack:
    """Messages that come in fragments of ``content``, over several sessions."""

    def attack(seconds: float, host: str, port: str) -> None:
        goes_on = until(seconds)
        block = frames.encode(frames.MIDDLE, content, KEY) * 4000

        def act() -> None:
            some = [_enemy(port, f"small{number}") for number in range(8)]
            for one in some:
                one.socket.sendall(frames.encode(frames.BEGINNING, content, KEY))
            while goes_on():
                for one in some:
                    one.socket.sendall(block)

        again(goes_on, act)

    return attack


def _deaf(seconds: float, host: str, port: str) -> None:
    """Sessions that confirm nothing, and one that sends to all of them."""
    goes_on = until(seconds)

    def act() -> None:
        deaf = [_enemy(port, f"deaf{number}", f"127.0.0.{2 + number % 8}") for number in range(64)]
        sender = _enemy(port, "sender")
        large = [sender.message(one.session, bytes(1 << 20)) for one in deaf]
        for number in count():
            if not goes_on():
                return
            sender.socket.sendall(large[number % len(large)])

    again(goes_on, act)


def _unfinished(seconds: float, host: str, port: str) -> None:
    """Messages of 16 MiB that do not end."""
    goes_on = until(seconds)

    def act() -> None:
        held = [_enemy(port, f"slow{number}") for number in range(60)]
        head = b"\x82\xff" + (15 << 20).to_bytes(8, "big") + KEY
        for one in held:
            one.socket.sendall(head)
        while goes_on():
            for one in held:
                one.socket.sendall(bytes(1 << 16))

    again(goes_on, act)


def _bad_tokens(seconds: float, host: str, port: str) -> None:
    """Upgrades with a token that is signed by somebody else."""
    goes_on = until(seconds)
    stranger = Identity(f"0x{os.urandom(32).hex()}", "ed25519")

    def act() -> None:
        query = token.make(stranger, Session(ENEMY_TWIN), int(time.time()))
        head = (
            f"GET /?{query} HTTP/1.1\r\nHost: relay\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        ).encode()
        with socket.create_connection((host, int(port)), 5, (ENEMY, 0)) as connection:
            while goes_on():
                connection.sendall(head)
                if not connection.recv(65536):
                    return

    again(goes_on, act)


def _intake(seconds: float, host: str, port: str) -> None:
    """Send messages as another relay would, signed by nobody."""
    goes_on = until(seconds)

    def act() -> None:
        one = _enemy(port)
        body = bytearray(next(frames.Frames(True, 1 << 20).feed(one.message(Session(1))))[1])
        body[-20:] = bytes(20)
        request = f"POST / HTTP/1.1\r\nHost: relay\r\nContent-Length: {len(body)}\r\n\r\n".encode() + bytes(body)
        with socket.create_connection((host, int(port)), 5, (ENEMY, 0)) as connection:
            while goes_on():
                connection.sendall(request * 20)
                if not connection.recv(65536):
                    return

    again(goes_on, act)


class BusScene(Scene):
    """Two twins that send each other messages, and a third twin that connects."""

    attacks = {
        "pings": _pings,
        "fragments of one byte": _fragments(b"x"),
        "empty fragments": _fragments(b""),
        "deaf sessions": _deaf,
        "unfinished messages": _unfinished,
        "bad tokens": _bad_tokens,
        "forged messages of relays": _intake,
        "unfinished requests": lambda seconds, host, port: silent(seconds, (host, int(port)), b"GET /?x HTTP/1.1\r\n"),
    }

    def __init__(self) -> None:
        self._twins = Twins(ENEMY_TWIN)
        self.entity = Entity(
            "rmb-relay",
            "--domain=http://127.0.0.1",
            "--listen=tcp:0:interface=127.0.0.1",
            f"--registry={self._twins.url}",
            "--queue=sqlite:queue.sqlite",
            core=away(),
        )
        self._where = self.entity.address()
        for number in range(ENEMY_TWIN):
            self._twins.set(number, "http://127.0.0.1")
        self.restore()

    def restore(self) -> None:
        self._one, self._two = (self._session(number) for number in (1, 2))
        self._there, self._back = self._one.message(self._two.session), self._two.message(self._one.session)

    def _session(self, twin: int, sid: str | None = None) -> WebSocket:
        return WebSocket(self._where[1], self._twins.identities[twin - 1], Session(twin, sid))

    def there_and_back(self) -> None:
        for sender, message, receiver in (
            (self._one, self._there, self._two),
            (self._two, self._back, self._one),
        ):
            sender.socket.sendall(message)
            while not receiver.take():
                pass

    def newcomer(self) -> None:
        self._session(3, os.urandom(4).hex()).close()

    def words(self) -> list[str]:
        return [*map(str, self._where)]

    def close(self) -> None:
        self.entity.stop()
        self._twins.entity.stop()
