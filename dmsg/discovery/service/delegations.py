"""Counter of clients by the servers that their entries name. It covers clients that recently posted to this process. No
I/O.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from dmsg.base.bounded_tables import decrement

MAX_CLIENTS = 100_000
"""Maximum number of clients in the table. Beyond that, the client whose last POST is oldest is removed."""
CLIENT_LIFETIME = 3600.0
"""Seconds for which a client stays in the table after its last POST; clients post every half hour."""
MAX_SERVERS = 8
"""Maximum number of servers in the table for one client; further servers of its entry are ignored."""


class Delegations:
    """Table of the servers that each client's last entry names, with the number of clients per server."""

    def __init__(self) -> None:
        self._clients: OrderedDict[str, tuple[float, tuple[str, ...]]] = OrderedDict()
        self._of: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._clients)

    def posted(self, client: str, servers: Sequence[str] | None, now: float) -> None:
        """Record the servers that a client's accepted entry names."""
        named = tuple(dict.fromkeys((servers or ())[:MAX_SERVERS]))
        if self._clients.get(client, (0.0, ()))[1] != named:
            self._forget(client)
            for server in named:
                self._of[server] += 1
        if named:
            self._clients[client] = now, named
            self._clients.move_to_end(client)
        if len(self._clients) > MAX_CLIENTS:
            self._forget(next(iter(self._clients)))
        self.forget_silent(now)

    def forget_silent(self, now: float) -> None:
        """Forget clients that have stopped posting."""
        while self._clients:
            client = next(iter(self._clients))
            if now - self._clients[client][0] < CLIENT_LIFETIME:
                return
            self._forget(client)

    def count_of(self, server: str) -> int:
        """Return the number of clients that name this server."""
        return self._of[server]

    def most_named(self, number: int) -> list[tuple[str, int]]:
        """Return the servers that the largest numbers of clients name in their entries, with these numbers."""
        return self._of.most_common(number)

    def _forget(self, client: str) -> None:
        _, servers = self._clients.pop(client, (0.0, ()))
        for server in servers:
            decrement(self._of, server)
