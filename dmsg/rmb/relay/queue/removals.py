"""Delivered messages that the queue could not delete yet: they are not read again, and are deleted later.  No I/O."""

from __future__ import annotations

from collections.abc import Iterable

from dmsg.rmb.relay.queue.interface import Queued, QueueId

MAX_REMOVALS = 200_000
"""Ids that are remembered; beyond, the oldest are forgotten, and delivered a second time."""
AT_ONCE = 500
"""Messages deleted in one try."""


class Removals:
    """Ids of such messages, by session.

    :ivar forgotten: ids for which there was no room.
    """

    def __init__(self) -> None:
        self._ids: dict[tuple[str, QueueId], None] = {}
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, session: str, ids: Iterable[QueueId]) -> None:
        """These could not be deleted, or are being deleted."""
        for number in ids:
            self._ids[session, number] = None
        while len(self._ids) > MAX_REMOVALS:
            del self._ids[next(iter(self._ids))]
            self.forgotten += 1

    def has(self, session: str, number: QueueId) -> bool:
        """Whether it is one of them."""
        return (session, number) in self._ids

    def done(self, session: str, ids: Iterable[QueueId]) -> None:
        """These are deleted."""
        for number in ids:
            self._ids.pop((session, number), None)

    def some(self) -> dict[str, list[QueueId]]:
        """The oldest of them, by session."""
        found: dict[str, list[QueueId]] = {}
        for (session, number), _ in zip(self._ids, range(AT_ONCE), strict=False):
            found.setdefault(session, []).append(number)
        return found

    def left(self, session: str, batch: list[Queued]) -> list[Queued]:
        """What of a read is not one of them."""
        return [one for one in batch if (session, one.id) not in self._ids] if self._ids else batch
