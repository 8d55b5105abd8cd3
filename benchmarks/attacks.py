"""What enemies do, each in a process of its own: ``python -m benchmarks.attacks NAME SECONDS HOST PORT KEY``.

They come from addresses of their own, 127.0.0.2 and further; who must not suffer
from them is at 127.0.0.1.  Each ends by itself.  Traffic goes to loopback only.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count

from benchmarks.machine import raise_descriptor_limit
from benchmarks.wire import Connection, open_transport
from dmsg.errors import DmsgError
from dmsg.keys import PubKey, SecKey
from dmsg.transport.wire import FWD, REQUEST, encode_frame

Where = tuple[str, int]
ENEMY = "127.0.0.2"
LOST = (OSError, DmsgError, EOFError, AssertionError)
"""How a connection ends that somebody has had enough of."""


def _until(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() < end


def _again(goes_on: Callable[[], bool], act: Callable[[], None]) -> None:
    """Do it, and again when it is thrown out."""
    while goes_on():
        try:
            act()
        except LOST:
            time.sleep(0.02)


def _strays(per_record: int) -> Callable[[float, Where, PubKey], None]:
    def attack(seconds: float, where: Where, key: PubKey) -> None:
        goes_on = _until(seconds)
        frames = b"".join(encode_frame(FWD, 2 + 2 * (number % 2), b"") for number in range(per_record))

        def act() -> None:
            one = Connection(where, key, ENEMY)
            while goes_on():
                one.send(frames)
                one.skip()

        _again(goes_on, act)

    return attack


def _two_ids(seconds: float, where: Where, key: PubKey) -> None:
    """Two transports of one's own in turn, and nothing in their frames: none can be handed on together."""
    goes_on = _until(seconds)

    def act() -> None:
        one, two, three = (Connection(where, key, ENEMY) for _ in range(3))
        open_transport(one, two, 2)
        open_transport(one, three, 4)
        frames = b"".join(encode_frame(FWD, 2 + 2 * (number % 2), b"") for number in range(10_000))
        while goes_on():
            one.send(frames)
            for each in (one, two, three):
                each.skip()

    _again(goes_on, act)


def _requests(seconds: float, where: Where, key: PubKey) -> None:
    """REQUESTs for somebody who is not there."""
    goes_on = _until(seconds)

    def act() -> None:
        one = Connection(where, key, ENEMY)
        payload = bytes(one.key.public + SecKey.generate().public)
        frames = b"".join(encode_frame(REQUEST, 2 * number, payload) for number in range(1, 400))
        while goes_on():
            one.send(frames)
            one.skip()

    _again(goes_on, act)


def _silent(seconds: float, where: Where, key: PubKey) -> None:
    """Connections that say nothing, as many as go."""
    goes_on = _until(seconds)
    most = min(1500, raise_descriptor_limit() - 100)
    held: list[socket.socket] = []
    for number in count():
        if not goes_on():
            return
        if len(held) >= most:
            held.pop(0).close()
        with suppress(OSError):
            source = f"127.0.0.{2 + number % 100}"
            held.append(socket.create_connection(where, 1.0, (source, 0)))
        time.sleep(0.0004)


def _handshakes(seconds: float, where: Where, key: PubKey) -> None:
    """Whole handshakes, one after the other."""
    goes_on = _until(seconds)
    _again(goes_on, lambda: Connection(where, key, ENEMY).close())


def _deaf(seconds: float, where: Where, key: PubKey) -> None:
    """Sixty-four receivers that do not read, and one that sends to all of them."""
    goes_on = _until(seconds)

    def act() -> None:
        deaf = [Connection(where, key, f"127.0.0.{2 + number % 8}") for number in range(64)]
        sender = Connection(where, key, ENEMY)
        for number, one in enumerate(deaf):
            open_transport(sender, one, 2 + 2 * number)
        block = bytes(30_000)
        for number in count():
            if not goes_on():
                return
            own = 2 + 2 * (number % 64)
            sender.send(encode_frame(FWD, own, block) + encode_frame(FWD, own, block))

    _again(goes_on, act)


ATTACKS: dict[str, Callable[[float, Where, PubKey], None]] = {
    "strays, 13,000 a record": _strays(13_000),
    "strays, 300 a record": _strays(300),
    "two ids in turn": _two_ids,
    "requests": _requests,
    "silent connections": _silent,
    "handshakes": _handshakes,
    "deaf receivers": _deaf,
}
"""On a server of 2019, by what the table calls them."""


if __name__ == "__main__":
    name, seconds, host, port, key = sys.argv[1:]
    ATTACKS[name](float(seconds), (host, int(port)), PubKey.from_hex(key))
