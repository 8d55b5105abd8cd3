"""Accounting of the memory that a server uses for its clients, for its memory limit (:mod:`dmsg.base.memory`)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from weakref import WeakSet

from twisted.internet.interfaces import IReactorTime

from dmsg.base.memory import Holding, Memory
from dmsg.errors import DropReason
from dmsg.net.blocks import blocks_of
from dmsg.net.links.link import Link
from dmsg.net.memory_watch import MemoryWatch
from dmsg.servers.serving import AnyServing, ServedSession

RELEASE_AFTER = 3.0
"""Minimum seconds for which a link is idle before its cipher objects are released. They are released after twice this
time at the latest. The objects occupy 5 KiB, and it takes 3 us to create them again."""
MIN_REPORTED_SIZE = 4096
"""Number of bytes below which the buffers of a client are not counted."""
HANDSHAKE_SIZE = 8192
"""Number of bytes of memory that a handshake under way is assumed to use."""


class LinkHoldings(MemoryWatch[Link]):
    """Counter of the data buffered for the clients of one server, for each address block and key.

    :param factory: factory of the server's connections.
    :param memory: memory account, which drops data when its limit is exceeded.
    """

    holders = "clients"

    def __init__(self, reactor: IReactorTime, factory: AnyServing, memory: Memory) -> None:
        super().__init__(reactor, memory)
        self._factory = factory
        self._quiet: WeakSet[Link] = WeakSet()
        """Links without buffered data that became idle in the present interval of ``RELEASE_AFTER`` seconds."""
        self._quiet_before: WeakSet[Link] = WeakSet()
        """Links without buffered data that became idle in the previous interval of ``RELEASE_AFTER`` seconds."""
        self._release_at = reactor.seconds() + RELEASE_AFTER
        memory.add(self._holdings, self.log_dropped)

    def _holdings(self) -> Iterator[Holding]:
        self.next_check()
        stirred = self._factory.active_links
        for link in list(stirred):
            session = link.user
            if not isinstance(session, ServedSession) or link.remote is None:
                # A link without buffered data is removed from the table of active links. It is added again when it
                # reads or writes.
                stirred.pop(link, None)
                continue
            link.free_buffers()
            size = link.buffered_bytes + session.backlog
            if size < MIN_REPORTED_SIZE:
                # A link with few buffered bytes is not counted. It stays in the table unless it has no buffered bytes
                # at all.
                if not size:
                    stirred.pop(link, None)
                    self._quiet.add(link)
                continue
            age = self.age(link, link.written - link.queued(), link.written)
            block, *around = blocks_of(self._factory.counted_as(link))
            owner = (block.name, bytes(link.remote))
            yield Holding(owner, "queues", size, age, partial(link.abort, DropReason.MEMORY), tuple(around))
        for link in self._factory.handshaking_links:
            block, *around = blocks_of(self._factory.counted_as(link))
            age = self.now - link.made_at
            yield Holding((block.name,), "handshakes", HANDSHAKE_SIZE, age, link.evict, tuple(around))
        if self.now >= self._release_at:
            self._release_ciphers()

    def _release_ciphers(self) -> None:
        """Release the cipher objects of the links that were idle for ``RELEASE_AFTER`` seconds or more."""
        active = self._factory.active_links
        for link in self._quiet_before:
            if link not in active and link not in self._quiet:
                link.release_ciphers()
        self._quiet_before, self._quiet = self._quiet, WeakSet()
        self._release_at = self.now + RELEASE_AFTER
