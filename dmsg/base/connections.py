"""A server's connections by the keys at their other ends.

Of a key the newest is the one that gets what is new: who connects again has
often lost the older one without having noticed.  Older ones keep what they
have, since it may be another program that works.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from dmsg.base.ports import Port
from dmsg.errors import DropReason


class CountedConnection(Protocol):
    """Connection that can be told apart and counted.

    :ivar closing: it ends already.
    :ivar frames_in: frames that came from it, ``bytes_in``: their bytes.
    """

    closing: bool
    frames_in: int
    bytes_in: int

    @property
    def key(self) -> bytes:
        """Key of the connection's owner."""


class ClosableConnection(CountedConnection, Protocol):
    """A connection that a relay can end."""

    @property
    def port(self) -> Port:
        """The other end."""


P = TypeVar("P", bound=CountedConnection)
PeerT = TypeVar("PeerT", bound=ClosableConnection)


class Connections(Generic[P]):
    """All connections of one server.

    :param most: connections of one key.
    :ivar all: in the order in which they came.
    :ivar newest: key -> its newest connection; names only connections that are here.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.all: dict[P, None] = {}
        self.newest: dict[bytes, P] = {}
        self._of_key: dict[bytes, list[P]] = {}
        self._frames_gone = 0
        self._bytes_gone = 0

    def add(self, connection: P) -> P | None:
        """Add a connection, which becomes the newest of its key.

        :returns: one that is to be ended, because its key has too many: the oldest that does not end already.
        """
        self.all[connection] = None
        self.newest[connection.key] = connection
        same = self._of_key.setdefault(connection.key, [])
        same.append(connection)
        if len(same) <= self._most:
            return None
        return next((one for one in same if not one.closing), None)

    def remove(self, connection: P) -> None:
        """Remove a connection; its counters are kept.

        :raises KeyError: it was not here.
        """
        del self.all[connection]
        same = self._of_key[connection.key]
        same.remove(connection)
        if not same:
            del self._of_key[connection.key], self.newest[connection.key]
        elif self.newest[connection.key] is connection:
            self.newest[connection.key] = same[-1]
        self._frames_gone += connection.frames_in
        self._bytes_gone += connection.bytes_in

    def of_key(self, key: bytes) -> Sequence[P]:
        """Return the connections of a key, oldest first."""
        return self._of_key.get(key, ())

    @property
    def frames(self) -> int:
        """Frames received since the start."""
        return self._frames_gone + sum(one.frames_in for one in self.all)

    @property
    def frame_bytes(self) -> int:
        """Bytes of frames received since the start."""
        return self._bytes_gone + sum(one.bytes_in for one in self.all)

    def check(self) -> None:
        """:raises AssertionError: the tables disagree."""
        for key, newest in self.newest.items():
            assert newest.key == key and newest in self.all
        assert self.newest.keys() == self._of_key.keys()
        assert sum(map(len, self._of_key.values())) == len(self.all)


class ConnectionTable(Generic[PeerT]):
    """Base of the table of a relay.

    :param most: connections of one key.
    :ivar peers: all connections, in the order in which they came.
    :ivar newest: key -> the newest connection of that key.
    :ivar drops: how often each :class:`DropReason` occurred.
    """

    def __init__(self, most: int) -> None:
        self.connections: Connections[PeerT] = Connections(most)
        self.newest, self.peers = self.connections.newest, self.connections.all
        self.drops: Counter[DropReason] = Counter()

    @property
    def frames(self) -> int:
        """Frames received since the start."""
        return self.connections.frames

    @property
    def frame_bytes(self) -> int:
        """Bytes of frames received since the start."""
        return self.connections.frame_bytes

    def _add_peer(self, peer: PeerT) -> None:
        """Add a connection; the oldest one of its key ends if there are too many."""
        oldest = self.connections.add(peer)
        if oldest is not None:
            self._end_peer(oldest, DropReason.REPLACED)

    def _end_peer(self, peer: PeerT, reason: DropReason) -> None:
        if not peer.closing:
            peer.closing = True
            self.drops[reason] += 1
            peer.port.close(reason)
