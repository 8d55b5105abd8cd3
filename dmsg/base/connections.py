"""Table of a server's connections, by the public keys of their clients.

New requests for a key go to its newest connection: when a client connects again, it has often lost its older
connection, and the server may not know this yet.  Older connections keep their transports, because another program with
the same key may still use them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from dmsg.base.ports import Port
from dmsg.errors import DropReason


class CountedConnection(Protocol):
    """Interface of a connection that :class:`Connections` can contain.

    :ivar closing: whether the connection is being closed.
    :ivar frames_in: number of frames received from the connection.
    :ivar bytes_in: number of bytes in these frames.
    """

    closing: bool
    frames_in: int
    bytes_in: int

    @property
    def key(self) -> bytes:
        """Public key of the client."""


class ClosableConnection(CountedConnection, Protocol):
    """Interface of a connection that a relay can close."""

    @property
    def port(self) -> Port:
        """Output of the connection, to which the relay writes frames."""


P = TypeVar("P", bound=CountedConnection)
PeerT = TypeVar("PeerT", bound=ClosableConnection)


class Connections(Generic[P]):
    """Table of all connections of one server.

    :param limit: maximum number of connections of one key.
    :ivar all: all connections, in the order in which they were added.
    :ivar newest: newest connection in the table for each key.
    """

    def __init__(self, limit: int) -> None:
        self._most = limit
        self.all: dict[P, None] = {}
        self.newest: dict[bytes, P] = {}
        self._of_key: dict[bytes, list[P]] = {}
        self._frames_gone = 0
        self._bytes_gone = 0

    def add(self, connection: P) -> P | None:
        """Add a connection, which becomes the newest of its key.

        :returns: connection that the caller must close; None if the key has at most ``limit`` connections. It is the
            key's oldest connection that is not being closed.
        """
        self.all[connection] = None
        self.newest[connection.key] = connection
        same = self._of_key.setdefault(connection.key, [])
        same.append(connection)
        if len(same) <= self._most:
            return None
        return next((one for one in same if not one.closing), None)

    def remove(self, connection: P) -> None:
        """Remove a connection. Its frames and bytes remain in the totals.

        :raises KeyError: the connection is not in the table.
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
        """Number of frames received since the server started."""
        return self._frames_gone + sum(one.frames_in for one in self.all)

    @property
    def frame_bytes(self) -> int:
        """Number of bytes in the frames received since the server started."""
        return self._bytes_gone + sum(one.bytes_in for one in self.all)

    def check(self) -> None:
        """Check that the parts of the table agree; for tests.

        :raises AssertionError: they do not agree.
        """
        for key, newest in self.newest.items():
            assert newest.key == key and newest in self.all
        assert self.newest.keys() == self._of_key.keys()
        assert sum(map(len, self._of_key.values())) == len(self.all)


class ConnectionTable(Generic[PeerT]):
    """Base class of a relay's table of connections.

    :param limit: maximum number of connections of one key.
    :ivar peers: all connections, in the order in which they were added.
    :ivar newest: newest connection of each key.
    :ivar drops: number of dropped frames and refused clients, for each :class:`DropReason`.
    """

    def __init__(self, limit: int) -> None:
        self.connections: Connections[PeerT] = Connections(limit)
        self.newest, self.peers = self.connections.newest, self.connections.all
        self.drops: Counter[DropReason] = Counter()

    @property
    def frames(self) -> int:
        """Number of frames received since the server started."""
        return self.connections.frames

    @property
    def frame_bytes(self) -> int:
        """Number of bytes in the frames received since the server started."""
        return self.connections.frame_bytes

    def _add_peer(self, peer: PeerT) -> None:
        """Add a connection. If its key then has too many, close the oldest connection of the key."""
        oldest = self.connections.add(peer)
        if oldest is not None:
            self._end_peer(oldest, DropReason.REPLACED)

    def _end_peer(self, peer: PeerT, reason: DropReason) -> None:
        if not peer.closing:
            peer.closing = True
            self.drops[reason] += 1
            peer.port.close(reason)
