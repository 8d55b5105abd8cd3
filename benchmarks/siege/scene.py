"""Common parts of the scenes of the siege: an attacked entity, two innocent clients, newcomers, and attackers.

Attackers have addresses of their own: neighbours of the innocent clients, which are at 127.0.0.1, or many addresses of
other blocks (:mod:`benchmarks.siege.network`).  Each attack runs in a process of its own and ends by itself.  Traffic
goes to loopback only.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any, ClassVar

from benchmarks.machine import Entity, away, raise_descriptor_limit
from benchmarks.siege.verdict import Bounds
from dmsg.errors import DmsgError

INNOCENT = "127.0.0.1"
ENEMY = "127.0.0.2"
NEWCOMER_TIMEOUT = 5.0
"""Seconds without an answer after which a newcomer counts as refused."""
HONEST = "honest data, no attack"
LOST = (OSError, DmsgError, EOFError, AssertionError)
"""Errors with which an attacker's connection ends when the entity refuses it."""

Address = tuple[str, int]
Attack = Callable[..., None]
"""Called with seconds and the words of :meth:`Scene.words`."""


class Scene:
    """One attacked entity, with default limits.

    :cvar attacks: attacks, by their names in the table.
    :cvar anchors: attacks that only send data, and the load from which the cost of data is computed.
    :cvar prepared: attacks that call :func:`ready` when their preparation is finished; they are measured from then on.
    :cvar needs_public: whether the scene needs public addresses and IPv6, which only a namespace has.
    :cvar newcomers: number of newcomers at a time.
    :cvar bounds: bounds that differ from the usual ones.
    :ivar entity: the process whose memory and CPU time count.
    """

    attacks: ClassVar[dict[str, Attack]] = {}
    anchors: ClassVar[dict[str, str]] = {}
    prepared: ClassVar[frozenset[str]] = frozenset()
    needs_public: ClassVar[bool] = False
    newcomers: ClassVar[int] = 1
    bounds: ClassVar[Bounds] = Bounds()
    entity: Entity

    def there_and_back(self) -> None:
        """Do a round trip of an innocent client; its duration is in the table."""
        raise NotImplementedError

    def restore(self) -> None:
        """Connect the innocent again who were cut off.  Raises one of ``LOST`` when they are refused."""
        raise NotImplementedError

    def newcomer(self) -> None:
        """Let a newcomer connect, do its task, and leave.  Raises one of ``LOST`` if the newcomer is refused."""
        raise NotImplementedError

    def words(self) -> list[str]:
        """Return the arguments of an attack."""
        raise NotImplementedError

    def close(self) -> None:
        """End all processes."""
        raise NotImplementedError

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def listed_server(discovery: str) -> tuple[Entity, str]:
    """Start a dmsg server and wait until ``discovery``, a URL, lists it.  Return the process and its key, 66 digits."""
    entity = Entity(
        "dmsg-server",
        "--listen=tcp:0:interface=127.0.0.1",
        f"--discovery={discovery}",
        "--key-file=server.key",
        "--create",
        core=away(),
    )
    key = entity.wait_for(r"server ([0-9a-f]{66}) listens")[1]
    entity.wait_for("registered in discovery")
    return entity, key


def ready() -> None:
    """Say that an attack has made its preparations."""
    print("ready", flush=True)


def until(seconds: float) -> Callable[[], bool]:
    """Yield True until ``seconds`` have passed."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() < end


def again(goes_on: Callable[[], bool], act: Callable[[], None]) -> None:
    """Do it, and again when it is thrown out."""
    while goes_on():
        try:
            act()
        except LOST:
            time.sleep(0.02)


def silent(seconds: float, where: Address, first: bytes = b"") -> None:
    """Connections that say nothing, or no more than ``first``, as many as go."""
    goes_on = until(seconds)
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
            if first:
                held[-1].sendall(first)
        time.sleep(0.0004)
