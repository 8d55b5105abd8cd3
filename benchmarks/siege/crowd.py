"""Many connections of attackers to a relay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from benchmarks.siege.scene import LOST
from benchmarks.wire import Connection


class Crowd:
    """Connections, each with a key of its own and made again with another one when it is lost.

    :param connect: makes the connection of a number.
    """

    def __init__(self, size: int, connect: Callable[[int], Connection]) -> None:
        self._connect = connect
        self._connections: list[Connection | None] = [None] * size

    def act(self, do: Callable[[Connection], None]) -> None:
        """Call ``act`` for each connection that is open or can be opened."""
        for number in range(len(self._connections)):
            with suppress(*LOST):
                found = self._connections[number] or self._connect(number)
                self._connections[number] = None
                do(found)
                self._connections[number] = found

    def __len__(self) -> int:
        """Number of those who are connected."""
        return sum(one is not None for one in self._connections)
