"""What a server holds for its clients: a source of :mod:`dmsg.base.memory`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from twisted.internet.interfaces import IReactorTime

from dmsg.base.memory import Holding, Memory
from dmsg.errors import DropReason
from dmsg.net.blocks import blocks_of
from dmsg.net.links.link import Link
from dmsg.net.memory_watch import Looks
from dmsg.servers.serving import AnyServing, ServedSession

SMALL = 4096
"""Bytes below which what waits for a client is not worth a look."""
HANDSHAKE_SIZE = 8192
"""Bytes that a handshake under way is taken to hold."""


class LinkHoldings(Looks[Link]):
    """What waits for the clients of one server, by address block and key.

    :param factory: of the server.
    """

    what = "clients"

    def __init__(self, reactor: IReactorTime, factory: AnyServing, memory: Memory) -> None:
        super().__init__(reactor, memory)
        self._factory = factory
        memory.add(self._holdings, self.tell)

    def _holdings(self) -> Iterator[Holding]:
        self.next_look()
        stirred = self._factory.stirred
        for link in list(stirred):
            session = link.user
            if not isinstance(session, ServedSession) or link.remote is None:
                # it will read or write before it holds anything
                stirred.discard(link)
                continue
            link.shed()
            size = link.holds + session.backlog
            if size < SMALL:
                # what it holds now may stay until somebody else makes it more
                if not size:
                    stirred.discard(link)
                continue
            age = self.age(link, link.written - link.queued(), link.written)
            block, *around = blocks_of(link.address)
            owner = (block.name, bytes(link.remote))
            yield Holding(owner, "queues", size, age, partial(link.abort, DropReason.MEMORY), tuple(around))
        for link in self._factory.shaking:
            block, *around = blocks_of(link.address)
            age = self.now - link.made_at
            yield Holding((block.name,), "handshakes", HANDSHAKE_SIZE, age, link.evict, tuple(around))
