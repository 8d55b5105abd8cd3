"""Links of one server, counted by the address block of their client, and the handshakes in progress among them.

If too many handshakes are in progress, a newcomer evicts an older one instead of being refused. Otherwise an attacker
with silent connections would keep all clients out until these connections time out.
"""

from __future__ import annotations

from dmsg.net.blocks import BlockCounts, blocks_of
from dmsg.net.links.link import Link

MAX_HANDSHAKES = 512
"""Maximum number of handshakes in progress. Above it, a handshake of the block with most handshakes is evicted: the
oldest whose client has sent no valid message, or if there is none, the oldest."""


class LinkCounts:
    """Numbers of the links of one server, by address block.

    :param max_handshakes: maximum number of handshakes in progress.
    :ivar handshakes: links whose handshake is in progress, oldest first.
    """

    def __init__(self, max_handshakes: int) -> None:
        self._max_handshakes = max_handshakes
        # This is a dictionary instead of a set, because the order of a set depends on addresses in memory. A run of the
        # lab could then not be repeated from its seed.
        self.handshakes: dict[Link, None] = {}
        self._of_address = BlockCounts()
        self._shaking_of = BlockCounts()
        self._counted_as: dict[Link, str] = {}
        """Name under which each link is counted: its address block, or a unique name if the client's address is
        unknown."""
        self._last_unique_owner = 0
        """Number that was last given as a unique owner to a connection that is not counted under an address block."""

    def __len__(self) -> int:
        return len(self._counted_as)

    # --- links ---

    def add(self, link: Link, block: str | None, *, by_block: bool) -> None:
        """Count a link whose handshake begins.

        :param block: address block of the client; None if the client's address is unknown.
        :param by_block: whether the links of one block share their limits.
        """
        self.handshakes[link] = None
        self._count(link, block, by_block=by_block)

    def move(self, link: Link, block: str, *, by_block: bool) -> None:
        """Count a link under another block, because its proxy has named the client. Its handshake is in progress."""
        self._uncount(link)
        self._count(link, block, by_block=by_block)

    def remove(self, link: Link) -> None:
        """Stop counting a link, because it has ended."""
        self.end_handshake(link)
        self._uncount(link)

    def _count(self, link: Link, block: str | None, *, by_block: bool) -> None:
        """Count a link under its address block, or under a unique name if the client's address is unknown."""
        if block is not None and by_block:
            link.owner = block
            link.blocks = tuple(one.name for one in reversed(blocks_of(block)))
        else:
            # Behind a proxy, all clients have the same address, so each connection is counted under a unique name.
            self._last_unique_owner += 1
            link.owner = self._last_unique_owner
            link.blocks = (link.owner,)
        name = self._counted_as[link] = block or str(link.owner)
        self._of_address.add(name)
        self._shaking_of.add(name)

    def _uncount(self, link: Link) -> None:
        name = self._counted_as.pop(link, None)
        if name is not None:
            self._of_address.remove(name)
            if link in self.handshakes:
                self._shaking_of.remove(name)

    def name_of(self, link: Link) -> str:
        """Return the name under which a link is counted: its address block, or a unique name."""
        return self._counted_as.get(link, str(link.owner))

    def is_of_block(self, link: Link, block: str | None) -> bool:
        """Whether a link is counted under ``block``."""
        return self._counted_as.get(link) == block

    def is_crowded(self, block: str, limit: int) -> bool:
        """Whether ``block``, or a wider one, has as many links as the limit per address permits."""
        return bool(self._of_address.crowded_block(block, limit))

    def by_connections(self) -> dict[str, int]:
        """Return the number of addresses with 1, 2 to 9, 10 to 99, and 100 or more connections."""
        found = {"1": 0, "2-9": 0, "10-99": 0, "100-": 0}
        for _, count in self._of_address.narrow_blocks():
            found["1" if count < 2 else "2-9" if count < 10 else "10-99" if count < 100 else "100-"] += 1
        return found

    # --- handshakes in progress ---

    @property
    def has_room(self) -> bool:
        """Whether another handshake may begin without an eviction."""
        return len(self.handshakes) < self._max_handshakes

    def make_room(self) -> None:
        """Evict one handshake, so that silent connections cannot keep honest clients out.

        The victim is a handshake of the block with most handshakes: the oldest whose client has sent no valid message,
        or if there is none, the oldest.
        """
        heaviest = self._shaking_of.heaviest()
        silent = (link for link in self.handshakes if not link.has_spoken)
        victim = next((link for link in silent if self._counted_as[link] == heaviest), None)
        if victim is None:
            most = self._shaking_of.load(heaviest)
            of_most = [one for one in self.handshakes if self._shaking_of.load(self._counted_as[one]) >= most]
            victim = next((link for link in of_most if not link.has_spoken), next(iter(of_most), None))
        (victim or next(iter(self.handshakes))).evict()

    def end_handshake(self, link: Link) -> bool:
        """Remove a link from the handshakes in progress, because its handshake has succeeded or failed.

        :returns: whether the handshake was in progress.
        """
        if link not in self.handshakes:
            return False
        name = self._counted_as.get(link)
        if name is not None:
            self._shaking_of.remove(name)
        del self.handshakes[link]
        return True
