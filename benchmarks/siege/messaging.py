"""A server of the older system."""

from __future__ import annotations

from itertools import count

from benchmarks.machine import Entity, away
from benchmarks.messaging import PROFILE, Connection
from benchmarks.siege.scene import ENEMY, Scene, again, silent, until
from dmsg.keys import PubKey, SecKey
from dmsg.messaging.core.wire import OPEN_CHANNEL, SEND, encode_frame


def _connect(host: str, port: str, key: str, source: str = ENEMY) -> Connection:
    return Connection((host, int(port)), PubKey.from_hex(key), source).up()


def _handshakes(seconds: float, host: str, port: str, key: str) -> None:
    """Whole handshakes, one after the other: two signatures each."""
    again(until(seconds), lambda: _connect(host, port, key).close())


def _flood(seconds: float, host: str, port: str, key: str, frames: bytes) -> None:
    """The same frames on one link, again and again."""
    goes_on = until(seconds)

    def act() -> None:
        one = _connect(host, port, key)
        while goes_on():
            one.socket.sendall(frames)
            one.skip()

    again(goes_on, act)


def _opens(seconds: float, host: str, port: str, key: str) -> None:
    """OpenChannels to somebody who is not there."""
    absent = bytes(SecKey.generate().public)
    bodies = (bytes((number % 256,)) + absent + bytes(49) for number in range(400))
    _flood(seconds, host, port, key, b"".join(encode_frame(PROFILE, OPEN_CHANNEL, body) for body in bodies))


def _strays(seconds: float, host: str, port: str, key: str) -> None:
    """Frames for unknown channels, as small as possible."""
    bodies = (bytes((number % 256,)) + bytes(22) for number in range(3000))
    _flood(seconds, host, port, key, b"".join(encode_frame(PROFILE, SEND, body) for body in bodies))


def _deaf(seconds: float, host: str, port: str, key: str) -> None:
    """Receivers that do not read, and one that sends to all of them."""
    goes_on = until(seconds)

    def act() -> None:
        deaf = [_connect(host, port, key, f"127.0.0.{2 + number % 8}") for number in range(64)]
        sender = _connect(host, port, key)
        for number, one in enumerate(deaf):
            sender.open(one, number)
        block = bytes(30_000)
        for number in count():
            if not goes_on():
                return
            sender.socket.sendall(encode_frame(PROFILE, SEND, bytes((number % 64,)) + block))

    again(goes_on, act)


class MessagingScene(Scene):
    """A channel whose ends send to and fro, and links that come."""

    attacks = {
        "handshakes": _handshakes,
        "silent connections": lambda seconds, host, port, key: silent(seconds, (host, int(port)), b'{"version"'),
        "opens": _opens,
        "strays": _strays,
        "deaf receivers": _deaf,
    }

    def __init__(self) -> None:
        self.entity = Entity(
            "dmsg-messaging-server",
            "--listen=tcp:0:interface=127.0.0.1",
            "--key-file=server.key",
            "--create",
            "--drain-timeout=0",
            core=away(),
        )
        self._key = self.entity.wait_for(r"server ([0-9a-f]{66}) listens")[1]
        self._where = self.entity.address()
        self.restore()

    def restore(self) -> None:
        self._one, self._two = self._link(), self._link()
        self._there = bytes((1,)) + bytes(66)
        self._back = bytes((self._one.open(self._two, 1),)) + bytes(66)

    def _link(self) -> Connection:
        return Connection(self._where, PubKey.from_hex(self._key)).up()

    def there_and_back(self) -> None:
        self._one.send(SEND, self._there)
        self._two.receive()
        self._two.send(SEND, self._back)
        self._one.receive()

    def newcomer(self) -> None:
        self._link().close()

    def words(self) -> list[str]:
        return [*map(str, self._where), self._key]

    def close(self) -> None:
        self.entity.stop()
