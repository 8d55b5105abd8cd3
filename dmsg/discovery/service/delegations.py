"""Who relays for how many: of the clients that posted an entry to this process lately.  No I/O."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from dmsg.base.tables import uncount

MAX_CLIENTS = 100_000
"""Clients that are remembered; one more, and the one that posted longest ago is not."""
LASTS = 3600.0
"""Seconds for which a client is remembered that posts no more: they post every half hour."""
MAX_SERVERS = 8
"""Servers of one client that count."""


class Delegations:
    """By client, the servers that its last entry names."""

    def __init__(self) -> None:
        self._clients: OrderedDict[str, tuple[float, tuple[str, ...]]] = OrderedDict()
        self._of: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._clients)

    def posted(self, client: str, servers: Sequence[str] | None, now: float) -> None:
        """Its entry was taken."""
        self._forget(client)
        named = tuple(dict.fromkeys((servers or ())[:MAX_SERVERS]))
        if named:
            self._clients[client] = now, named
            self._of.update(named)
        if len(self._clients) > MAX_CLIENTS:
            self._forget(next(iter(self._clients)))
        self.look(now)

    def look(self, now: float) -> None:
        """Forget who posts no more."""
        while self._clients:
            client = next(iter(self._clients))
            if now - self._clients[client][0] < LASTS:
                return
            self._forget(client)

    def of(self, server: str) -> int:
        """Clients that name it."""
        return self._of[server]

    def most(self, number: int) -> list[tuple[str, int]]:
        """The servers that most clients name."""
        return self._of.most_common(number)

    def _forget(self, client: str) -> None:
        _, servers = self._clients.pop(client, (0.0, ()))
        for server in servers:
            uncount(self._of, server)
