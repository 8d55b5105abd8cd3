"""How many servers somebody may have listed: of the address that posts them, and of the host that they are at.

Whoever can post entries can make as many keys as he likes, and each server is
one that clients may connect to: without this a stranger has all clients look
for servers that are not there, or that are somebody else's.  It is kept in the
process: servers post again and again, and what is forgotten at a restart is
learned again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from dmsg.net.addresses import block_of, kind_of, literal

OF_POSTER = 32
"""Servers whose entries come from one address."""
OF_HOST = 32
"""Servers at one host."""
REMEMBERED = 16_384
"""Servers that are remembered; the one that posted longest ago is forgotten."""
FORGOTTEN_AFTER = 3600.0
"""Seconds after its last POST."""


class ServerQuota:
    """Counts servers."""

    def __init__(self) -> None:
        self._servers: OrderedDict[str, tuple[str, str, float]] = OrderedDict()
        self._counts: Counter[str] = Counter()

    def refusal(self, static: str, poster: str, host: str, now: float) -> str | None:
        """Why a server is one too many; None when it is not, and it is counted then.

        :param poster: the address from which its entry is posted; whoever is beside discovery may have as many as he
            likes.
        :param host: where it is.
        """
        self._forget(now)
        source = literal(poster)
        if source is None or kind_of(source) != "public":
            return None
        names = f"from {block_of(poster)}", f"at {block_of(host.lower())}"
        before = self._servers.pop(static, None)
        if before is not None:
            self._uncount(before)
        for name, most in zip(names, (OF_POSTER, OF_HOST), strict=True):
            if self._counts[name] >= most:
                return f"too many servers {name}"
        self._servers[static] = (*names, now)
        self._counts.update(names)
        return None

    def _forget(self, now: float) -> None:
        while self._servers:
            static, server = next(iter(self._servers.items()))
            if len(self._servers) <= REMEMBERED and now - server[2] < FORGOTTEN_AFTER:
                return
            del self._servers[static]
            self._uncount(server)

    def _uncount(self, server: tuple[str, str, float]) -> None:
        for name in server[:2]:
            self._counts[name] -= 1
            if not self._counts[name]:
                del self._counts[name]
