"""What an application wrote to a stream that is in no frame yet, and who waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from dmsg.base.buffers import NO_QUEUE, NO_TABLE

LARGEST_PIECE = 256 * 1024
"""Bytes of what is queued in one piece."""
SMALL_WRITE = 1024
"""Writes below so many bytes are joined at once: each costs more than it has."""
JOIN_SIZE = 32 * 1024
"""Small writes are joined into frames of up to this many bytes."""


class Ticket:
    """A caller of ``send`` and how many things it still waits for: frames, and what is queued."""

    __slots__ = ("deferred", "frames")

    def __init__(self, deferred: Deferred[None] | None) -> None:
        self.deferred = deferred
        self.frames = 1

    def fire(self, result: Failure | None) -> None:
        """Tell the caller, once."""
        deferred, self.deferred = self.deferred, None
        if deferred is not None and not deferred.called:
            deferred.callback(result)


class EndOfData(Ticket):
    """Marks the last piece of a stream: its sender says that no more data follows.  Never joined with data."""

    __slots__ = ()


def tickets_among(kept: Iterable[object]) -> list[Ticket | None]:
    """Return the tickets that come back from a core, which does not know what they are."""
    tickets: list[Ticket | None] = []
    for one in kept:
        assert one is None or isinstance(one, Ticket)
        tickets.append(one)
    return tickets


class Outbox:
    """The queue of one stream, in the order of its writes.

    :ivar waiting: pieces, be they empty, with who waits for them; of the first one a part may be taken already.
    :ivar size: bytes in it.
    :ivar tickets: callers that wait; when the stream ends they fail in this order, in which they came.
    """

    __slots__ = ("_offset", "size", "tickets", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[tuple[bytes | memoryview, Ticket | None]] = NO_QUEUE
        self._offset = 0
        self.size = 0
        self.tickets: dict[Ticket, None] = NO_TABLE

    def add(self, data: bytes, ticket: Ticket | None) -> None:
        """Queue a write."""
        self.size += len(data)
        queue = self.waiting
        if queue is NO_QUEUE:
            queue = self.waiting = deque()
        if ticket is None and len(data) < SMALL_WRITE and queue and queue[-1][1] is None:
            last = queue[-1][0]
            if len(last) < SMALL_WRITE:
                queue[-1] = (bytes(last) + data, None)
                return
        # a piece stays in memory until its last byte is acknowledged, so large writes are cut
        for start in range(0, len(data) or (ticket is not None), LARGEST_PIECE):
            if start and ticket is not None:
                ticket.frames += 1
            piece = data if len(data) <= LARGEST_PIECE else data[start : start + LARGEST_PIECE]
            queue.append((piece, ticket))

    def wait(self, ticket: Ticket) -> None:
        """Remember a caller that waits."""
        if self.tickets is NO_TABLE:
            self.tickets = {}
        self.tickets[ticket] = None

    def put_back(self, frames: Iterable[tuple[bytes | memoryview, Ticket | None]]) -> None:
        """What was taken and has not arrived goes before everything else."""
        if self._offset:
            data, ticket = self.waiting.popleft()
            self.waiting.appendleft((memoryview(data)[self._offset :], ticket))
            self._offset = 0
        again = list(frames)
        self.size += sum(len(data) for data, _ in again)
        self.waiting = deque([*again, *self.waiting])

    def rest(self) -> None:
        """Keep no room for pieces that may not come for long."""
        if not self.waiting:
            self.waiting = NO_QUEUE

    def take(self, largest: int) -> tuple[bytes | memoryview, Ticket | None]:
        """The next frame, of at most ``largest`` bytes; small writes that nobody waits for are joined.

        What is left of a large write, if it is small, is filled up with the next one: a frame of its own would
        cost each end and the server more than the copy.

        :raises IndexError: it is empty.
        """
        queue = self.waiting
        data, ticket = queue[0]
        size = len(data) - self._offset
        if size > largest:
            piece: bytes | memoryview = memoryview(data)[self._offset : self._offset + largest]
            self._offset += largest
            size = largest
            if ticket is not None:
                ticket.frames += 1  # and the rest goes on waiting
        else:
            queue.popleft()
            piece = memoryview(data)[self._offset :] if self._offset else data
            self._offset = 0
            if ticket is None and size < JOIN_SIZE and queue and queue[0][1] is None:
                piece, size = self._join(piece, size, largest)
        self.size -= size
        return piece, ticket

    def _join(self, first: bytes | memoryview, size: int, largest: int) -> tuple[bytes | memoryview, int]:
        """``first`` with the writes after it, up to ``JOIN_SIZE``, or with the begin of a large one."""
        parts: list[bytes | memoryview] = [first]
        queue = self.waiting
        while queue and queue[0][1] is None and size + len(queue[0][0]) <= JOIN_SIZE:
            data = queue.popleft()[0]
            parts.append(data)
            size += len(data)
        room = largest - size
        if room > 0 and queue and queue[0][1] is None and len(queue[0][0]) > JOIN_SIZE:
            # no more than what is there: the piece is larger than any room
            data = memoryview(queue[0][0])
            room = min(room, len(data) - 1)
            parts.append(data[:room])
            self._offset = room
            size += room
        return parts[0] if len(parts) == 1 else b"".join(parts), size

    def acknowledged(self, tickets: Iterable[Ticket | None]) -> None:
        """Frames of these callers have arrived."""
        for ticket in tickets:
            if ticket is not None:
                ticket.frames -= 1
                if not ticket.frames:
                    if self.tickets:
                        self.tickets.pop(ticket, None)
                    ticket.fire(None)

    def clear(self) -> list[Ticket]:
        """Nothing of it will be sent.

        :returns: who waited.
        """
        self.waiting = NO_QUEUE
        self.size = self._offset = 0
        waited, self.tickets = list(self.tickets), NO_TABLE
        return waited
