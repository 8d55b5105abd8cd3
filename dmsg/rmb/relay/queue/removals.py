"""Ids of delivered messages that the queue could not delete yet, so that readers skip these messages. No I/O."""

from __future__ import annotations

from collections.abc import Iterable

from dmsg.rmb.relay.queue.interface import QueuedMessage, QueueId

MAX_REMOVALS = 200_000
"""Maximum number of delivered messages whose ids are remembered until they are deleted. Above it, the oldest ids are
forgotten, and the messages with these ids are delivered again."""
MAX_BATCH = 500
"""Maximum number of messages that are deleted in one attempt."""


class Removals:
    """Ids of delivered messages that must still be deleted, grouped by the session of their queue.

    :ivar forgotten: number of ids that were forgotten above the maximum.
    """

    def __init__(self) -> None:
        self._ids: dict[tuple[str, QueueId], None] = {}
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, session: str, ids: Iterable[QueueId]) -> None:
        """Remember the ids of messages whose deletion has failed or is not finished yet."""
        for number in ids:
            self._ids[session, number] = None
        # Without a limit the ids could fill the memory. The message of a forgotten id is delivered twice, which
        # receivers recognise.
        while len(self._ids) > MAX_REMOVALS:
            del self._ids[next(iter(self._ids))]
            self.forgotten += 1

    def has(self, session: str, number: QueueId) -> bool:
        """Whether the message with this id must still be deleted."""
        return (session, number) in self._ids

    def done(self, session: str, ids: Iterable[QueueId]) -> None:
        """Forget the ids of messages that were deleted."""
        for number in ids:
            self._ids.pop((session, number), None)

    def oldest(self) -> dict[str, list[QueueId]]:
        """Return the ids remembered for longest, at most ``MAX_BATCH``, grouped by the session of their queue."""
        found: dict[str, list[QueueId]] = {}
        for (session, number), _ in zip(self._ids, range(MAX_BATCH), strict=False):
            found.setdefault(session, []).append(number)
        return found

    def without_removed(self, session: str, batch: list[QueuedMessage]) -> list[QueuedMessage]:
        """Return the messages of a batch except those that were delivered and must still be deleted."""
        return [one for one in batch if (session, one.id) not in self._ids] if self._ids else batch
