"""Bystanders of a random walk: two correct clients, and a check that misbehaving servers do not harm them.

The bystanders have a stream over an honest server to which no faults happen. One of the bystanders is also connected to
the misbehaving servers, and has another stream over them.
"""

from __future__ import annotations

from collections.abc import Iterable

from twisted.python.failure import Failure

from dmsg.errors import DropReason
from dmsg.net.streams.transports import stream_of
from dmsg.testing.lab import Lab
from dmsg.testing.promise import Fixed, PromiseBroken, Talker, Talkers
from dmsg.v2019.server import Server

HARBOUR = "harbour"
"""Name of the honest server."""
PORT = 8
DELAY = 0.01
"""Seconds that a packet takes between a bystander and the honest server."""
PIECE = 10_000
"""Size in bytes of a piece of data. A bystander sends a piece when the previous one is acknowledged."""
SLOWED_AT_MOST = 3.0
"""Maximum factor by which a piece of data may take longer during the walk than before the walk."""
BLAMING_REASONS = frozenset(
    {
        DropReason.BAD_FRAME,
        DropReason.BAD_RECEIPT,
        DropReason.BAD_RECORD,
        DropReason.BAD_REQUEST,
        DropReason.DESTINATION_RATE,
        DropReason.FLOOD,
        DropReason.FLOODED_BEFORE,
        DropReason.ID_IN_USE,
        DropReason.NOT_ADMITTED,
        DropReason.RATE_LIMITED,
        DropReason.SEND_BUFFER_FULL,
        DropReason.TOO_MANY_FROM_ADDRESS,
        DropReason.TOO_MANY_PER_PAIR,
        DropReason.TOO_MANY_TRANSPORTS,
        DropReason.UNKNOWN_FRAME,
    }
)
"""Drop reasons that blame a client. In a walk, only the lying servers do anything wrong, so an honest server must
never count a drop for one of these reasons.
"""


def check_blame(servers: Iterable[tuple[str, Server]]) -> None:
    """Check that honest servers have counted no drop that blames a client (:data:`BLAMING_REASONS`).

    :raises PromiseBroken: a server has counted such a drop.
    """
    for name, server in servers:
        blamed = {
            reason.value: n for reason, n in server.factory.relay.drops.items() if n and reason in BLAMING_REASONS
        }
        if blamed:
            raise PromiseBroken(f"the honest {name} has charged a fault to somebody who did nothing wrong: {blamed}")


class Bystanders:
    """Two clients, ``carol`` and ``dave``, with a stream over an honest server.

    :ivar slowest: maximum seconds that a piece of data took during the walk.
    :ivar usual: maximum seconds that a piece of data took before the walk.
    """

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        network = lab.network
        self._server = lab.add_server(HARBOUR)
        key = lab.key(HARBOUR).public
        self.carol = lab.add_client("carol", only=[key], min_servers=1)
        self.dave = lab.add_client("dave", prefer=[key], min_servers=3, resume_timeout=3600.0)
        for name in ("carol", "dave"):
            for path in network.both_ways(network.host(name), network.host(HARBOUR)):
                path.delay = DELAY
        self.usual = self.slowest = 0.0
        self._talkers = Talkers()
        self._ends: tuple[Talker, ...] = ()
        self._since: dict[Talker, float] = {}
        self._spoilt: set[Talker] = set()

    def start(self) -> None:
        """Connect the two clients, and measure how long a piece of data takes without faults."""
        lab = self._lab
        self.dave.listen(self._talkers, PORT)
        one = self._talkers.pair(self._lab.seed * 10 + 9)
        lab.result(self.carol.connect(self.dave.public_key, Fixed(one), PORT, via=self._lab.key(HARBOUR).public))
        assert one.other is not None
        self._ends = (one, one.other)
        lab.network.run_until(lambda: all(end.transport is not None for end in self._ends))
        # The first of the two pieces also waits for the first ACK of the new stream, so only the second one is
        # measured.
        for _ in range(2):
            self.slowest = 0.0
            self.say()
            lab.network.run_until(lambda: not self._since)
        self.usual, self.slowest = self.slowest, 0.0
        self._peers = [peer for peer in self._server.factory.relay.peers if peer.key in self._keys()]

    def _keys(self) -> tuple[bytes, bytes]:
        return bytes(self.carol.public_key), bytes(self.dave.public_key)

    def say(self) -> None:
        """Let each end send a piece of data if its previous piece is acknowledged."""
        for end in self._ends:
            if end not in self._since and end.lost is None:
                self._since[end] = self._lab.clock.seconds()
                end.sent += PIECE
                sending = stream_of(end).send(end.next_bytes(PIECE))
                sending.addCallbacks(self._arrived, self._failed, (end,), errbackArgs=(end,))
        # The clock is advanced by 0, which flushes the streams. Otherwise the pieces would be sent only with the next
        # event of the lab.
        self._lab.clock.advance(0)

    def _arrived(self, _: None, end: Talker) -> None:
        end.acknowledged += PIECE
        took = self._lab.clock.seconds() - self._since.pop(end)
        if end in self._spoilt:
            self._spoilt.discard(end)
        else:
            self.slowest = max(self.slowest, took)

    def _failed(self, failure: Failure, end: Talker) -> None:
        end.failures.append(failure)
        self._since.pop(end, None)

    def forgive(self) -> None:
        """Do not measure the pieces of data that are in flight now. A test calls this method before it sets the clock
        forward by a large step, which would make these pieces look slow."""
        self._spoilt.update(self._since)

    def check(self) -> None:
        """Check that the two clients were not disconnected, banned or slowed down.

        :raises PromiseBroken: one of these has happened.
        """
        self._talkers.check()
        for end in self._ends:
            if end.lost is not None:
                raise PromiseBroken(f"the stream of the bystanders ended: {end.lost.value}")
        gone = [peer for peer in self._peers if peer not in self._server.factory.relay.peers]
        if gone or self.carol.streams.resumed:
            raise PromiseBroken("a connection of the bystanders was cut")
        now = self._lab.clock.seconds()
        waiting = max((now - since for end, since in self._since.items() if end not in self._spoilt), default=0.0)
        slowest = max(self.slowest, waiting)
        if self.usual and slowest > SLOWED_AT_MOST * self.usual:
            raise PromiseBroken(
                f"a piece that the bystanders exchange takes {slowest:.3f} s instead of {self.usual:.3f} s"
            )
