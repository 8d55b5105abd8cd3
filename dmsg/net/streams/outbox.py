"""Send queue of a stream: written data that are not yet in frames, and the calls that wait for acknowledgements."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from dmsg.base.buffers import NO_QUEUE, NO_TABLE

LARGEST_PIECE = 256 * 1024
"""Maximum number of bytes of a piece in the queue. A larger write is split into several pieces."""
SMALL_WRITE = 1024
"""Size in bytes below which a write is joined with the previous write. As a separate piece, it would use more memory
for bookkeeping than for its bytes."""
JOIN_SIZE = 32 * 1024
"""Maximum number of bytes of small writes that are joined into one frame."""


class Ticket:
    """Pending call of ``send``, with the number of frames and queued pieces that are still to be acknowledged."""

    __slots__ = ("deferred", "frames")

    def __init__(self, deferred: Deferred[None] | None) -> None:
        self.deferred = deferred
        self.frames = 1

    def fire(self, result: Failure | None) -> None:
        """Fire the caller's Deferred with a result or Failure, unless it has fired."""
        deferred, self.deferred = self.deferred, None
        if deferred is not None and not deferred.called:
            deferred.callback(result)


class EndOfData(Ticket):
    """Ticket of the end of data. Its piece is never joined with data."""

    __slots__ = ()


def tickets_among(kept: Iterable[object]) -> list[Ticket | None]:
    """Return the given objects as tickets. A protocol core stores the ticket of each sent frame, but only with the type
    ``object``."""
    tickets: list[Ticket | None] = []
    for one in kept:
        assert one is None or isinstance(one, Ticket)
        tickets.append(one)
    return tickets


class Outbox:
    """Send queue of one stream, in the order of its writes.

    :ivar waiting: pieces with their tickets. A piece may be empty. The start of the first piece may already be in a
        frame.
    :ivar size: number of bytes in the queue.
    :ivar tickets: pending calls, in the order in which they were made. When the stream ends, they fail in this order.
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
        # Large writes are split, because a piece stays in memory until its last byte is acknowledged.
        for start in range(0, len(data) or (ticket is not None), LARGEST_PIECE):
            if start and ticket is not None:
                ticket.frames += 1
            piece = data if len(data) <= LARGEST_PIECE else data[start : start + LARGEST_PIECE]
            queue.append((piece, ticket))

    def wait(self, ticket: Ticket) -> None:
        """Add a pending call."""
        if self.tickets is NO_TABLE:
            self.tickets = {}
        self.tickets[ticket] = None

    def put_back(self, frames: Iterable[tuple[bytes | memoryview, Ticket | None]]) -> None:
        """Put frames that did not arrive back at the front of the queue."""
        if self._offset:
            # The start of the first piece is already in a frame, so only the rest of the piece belongs to the queue.
            data, ticket = self.waiting.popleft()
            self.waiting.appendleft((memoryview(data)[self._offset :], ticket))
            self._offset = 0
        again = list(frames)
        self.size += sum(len(data) for data, _ in again)
        self.waiting = deque([*again, *self.waiting])

    def free_if_empty(self) -> None:
        """Free the queue object if it is empty. There may be many idle streams, and an empty deque takes hundreds of
        bytes."""
        if not self.waiting:
            self.waiting = NO_QUEUE

    def take(self, largest: int) -> tuple[bytes | memoryview, Ticket | None]:
        """Remove and return the data of the next frame, with their ticket. Small writes without a ticket are joined.

        If only a small rest of a large write is left, the start of the next write is joined to it. A separate frame for
        the rest would cost both ends and the server more than the copy.

        :param largest: maximum number of bytes.
        :raises IndexError: the queue is empty.
        """
        queue = self.waiting
        data, ticket = queue[0]
        size = len(data) - self._offset
        if size > largest:
            # A view avoids a copy. It keeps the piece in memory until the frame is acknowledged.
            piece: bytes | memoryview = memoryview(data)[self._offset : self._offset + largest]
            self._offset += largest
            size = largest
            if ticket is not None:
                ticket.frames += 1  # The ticket now also waits for the rest of the piece.
        else:
            queue.popleft()
            piece = memoryview(data)[self._offset :] if self._offset else data
            self._offset = 0
            if ticket is None and size < JOIN_SIZE and queue and queue[0][1] is None:
                piece, size = self._join(piece, size, largest)
        self.size -= size
        return piece, ticket

    def _join(self, first: bytes | memoryview, size: int, largest: int) -> tuple[bytes | memoryview, int]:
        """Join ``first`` with the following writes, up to ``JOIN_SIZE`` bytes in total, or with the start of a large
        write."""
        parts: list[bytes | memoryview] = [first]
        queue = self.waiting
        while queue and queue[0][1] is None and size + len(queue[0][0]) <= JOIN_SIZE:
            data = queue.popleft()[0]
            parts.append(data)
            size += len(data)
        room = largest - size
        if room > 0 and queue and queue[0][1] is None and len(queue[0][0]) > JOIN_SIZE:
            # At least one byte stays in the queue, because the offset must be less than the length of the piece.
            data = memoryview(queue[0][0])
            room = min(room, len(data) - 1)
            parts.append(data[:room])
            self._offset = room
            size += room
        return parts[0] if len(parts) == 1 else b"".join(parts), size

    def acknowledged(self, tickets: Iterable[Ticket | None]) -> None:
        """Count acknowledged frames by their tickets, and fire each ticket that waits for no further frame."""
        for ticket in tickets:
            if ticket is not None:
                ticket.frames -= 1
                if not ticket.frames:
                    if self.tickets:
                        self.tickets.pop(ticket, None)
                    ticket.fire(None)

    def clear(self) -> list[Ticket]:
        """Clear the queue.

        :returns: the pending calls.
        """
        self.waiting = NO_QUEUE
        self.size = self._offset = 0
        waited, self.tickets = list(self.tickets), NO_TABLE
        return waited
