"""Interface of a relay's queues, which store messages for sessions that are not connected or slow.

Each session has a queue of its own; one more queue holds the messages for other relays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from twisted.internet.defer import Deferred
from zope.interface import Attribute, Interface

from dmsg.base.options import STORAGE, Number, option

FEDERATION = "relay.federation"
"""Name of the queue for other relays; no session can have this name."""
BATCH = 1000
"""Number of messages in one read: reads are large, so that a session that catches up gets messages faster than others
send new ones."""

BATCH_BYTES = 4 * 1024 * 1024
"""Bytes after which a read ends; the last message may exceed it."""
PART = 8
"""Divisor of ``total``: the stored messages of one sender may use this fraction of all storage."""
REFUSALS = ("the relay keeps as much as it may", "the relay keeps as much from twin {sender} as it may")
"""Reasons to refuse a message: all stored messages have reached the limit, or those of its sender have."""


@dataclass(frozen=True)
class QueueLimits:
    """Limits of the stored messages; sizes are in bytes.

    The messages of one sender may use a ``PART``-th of ``total``, but at least twice ``size``.
    """

    messages: int = option(
        10_000,
        "Messages to keep for one session; further messages evict the oldest",
        Number(1, 10**7, "messages"),
        name="queue-length",
        group=STORAGE,
    )
    size: int = option(
        64 * 1024 * 1024,
        "MiB of messages to keep for one session; further messages evict the oldest",
        Number(1, 10**5, "MiB"),
        name="queue-size",
        group=STORAGE,
    )
    total: int = option(
        4 * 1024 * 1024 * 1024,
        "MiB of messages to keep for all sessions; further messages are refused",
        Number(1, 10**7, "MiB"),
        name="queue-total",
        group=STORAGE,
    )

    @property
    def sender_size(self) -> int:
        """Maximum bytes of the stored messages of one sender."""
        return max(self.total // PART, 2 * self.size)


QueueId: TypeAlias = int | bytes
"""Id of a message in a queue: a number in SQLite, an id of a stream in Redis."""


class QueuedMessage(NamedTuple):
    """Message in a queue, with its id; newer messages have higher ids."""

    id: QueueId
    data: bytes


class QueueWatcher(Protocol):
    """Callbacks with which a queue notifies the relay that uses it."""

    def dropped(self, session: str, number: int) -> None:
        """Count the ``number`` oldest messages of a session, which were deleted because its queue was full."""

    def appended_elsewhere(self, name: str) -> None:
        """Read the queue of that name, to which another process has appended a message."""

    def connected_elsewhere(self, name: str) -> None:
        """End the session of that name, which has connected to another process."""


class RelayQueue(Interface):
    """Interface of all queues of a relay, by session."""

    limits: QueueLimits = Attribute("How much is kept.")
    trouble: str | None = Attribute("Why nothing can be added now, as on a full disk; None when it can.")
    forgotten: int = Attribute("Number of delivered messages that the queue could not delete and will deliver again.")

    def append(session: str, data: bytes, until: float, sender: int = ...) -> Deferred[QueueId]:
        """Store a message until it expires; the Deferred fires with its id once the message would survive the end of
        the process.

        Fails with QueueUnavailable.

        :param sender: the twin that sent it; 0 for the relay.
        """

    def read(session: str, after: QueueId | None) -> Deferred[list[QueuedMessage]]:
        """Return the oldest messages with ids above ``after``; None means from the beginning."""

    def poll(sessions: Sequence[str]) -> Deferred[list[str]]:
        """Return the sessions whose queues contain messages that were not announced."""

    def remove(session: str, ids: Sequence[QueueId]) -> None:
        """Remove delivered messages: never read them again, and delete them now or as soon as possible."""

    def expired(now: float) -> Deferred[list[tuple[str, bytes]]]:
        """Remove and return some expired messages."""

    def watch(watcher: QueueWatcher) -> None:
        """Register the object whose callbacks this queue calls from now on."""

    def present(sessions: Sequence[str]) -> None:
        """Announce to other processes that these sessions are connected here; repeated every half minute."""

    def note_absent(session: str) -> None:
        """Announce that this session is no longer connected here."""

    def note_connected(session: str) -> None:
        """Announce that this session has connected here, so that other processes end their connections of the same
        session."""

    def take_federation() -> Deferred[list[QueuedMessage]]:
        """Take some of the messages for other relays that no process has taken yet."""

    def release_federation() -> None:
        """Return the messages that were taken and not finished to the queue."""

    def is_elsewhere(session: str) -> Deferred[bool]:
        """Whether the session is connected to another process on the same queue."""

    def close() -> Deferred[None]:
        """Close files and connections."""
