"""Interface of a relay's queues, which store messages for sessions that are slow or not connected.

Each session has its own queue. One more queue contains the messages for other relays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from twisted.internet.defer import Deferred
from zope.interface import Attribute, Interface

from dmsg.base.options import STORAGE, Number, option

FEDERATION = "relay.federation"
"""Name of the queue for other relays. No session can have this name."""
BATCH = 1000
"""Maximum number of messages in one read. Reads are large, so that a session that catches up gets messages faster than
others send new ones."""

BATCH_BYTES = 4 * 1024 * 1024
"""Number of bytes after which a read ends. The last message may exceed it."""
SENDER_DIVISOR = 8
"""Divisor of ``total``: the stored messages of one sender may use 1 / ``SENDER_DIVISOR`` of all storage."""
REFUSALS = (
    "the relay's stored messages have reached their limit",
    "the relay's stored messages from twin {sender} have reached their limit",
)
"""Reasons to refuse a message: all stored messages, or those of this sender, have reached their limit."""


@dataclass(frozen=True)
class QueueLimits:
    """Limits of the stored messages; sizes are in bytes.

    The messages of one sender may use a ``SENDER_DIVISOR``-th of ``total``, but at least twice ``size``.
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
        return max(self.total // SENDER_DIVISOR, 2 * self.size)


QueueId: TypeAlias = int | bytes
"""Id of a message in a queue: a number in SQLite, the id of a stream entry in Redis."""


class QueuedMessage(NamedTuple):
    """Message in a queue, with its id. Newer messages have higher ids."""

    id: QueueId
    data: bytes


class QueueWatcher(Protocol):
    """Callbacks by which a queue notifies its relay."""

    def dropped(self, session: str, number: int) -> None:
        """Called when the ``number`` oldest messages of a session were deleted, because its queue was full."""

    def appended_elsewhere(self, name: str) -> None:
        """Called when another process has appended a message to the queue with this name."""

    def connected_elsewhere(self, name: str) -> None:
        """Called when the session with this name has connected to another process."""


class RelayQueue(Interface):
    """Interface of the object with all queues of a relay, one for each session."""

    limits: QueueLimits = Attribute("Limits of the stored messages.")
    trouble: str | None = Attribute(
        "Reason why no message can be stored now, such as a full disk; None if messages can be stored."
    )
    forgotten: int = Attribute("Number of delivered messages that the queue could not delete and will deliver again.")

    def append(session: str, data: bytes, until: float, sender: int = ...) -> Deferred[QueueId]:
        """Store a message until it expires. The Deferred fires with its id when the message would survive the end of
        the process.

        The Deferred fails with QueueUnavailable.

        :param sender: number of the twin that sent the message; 0 for the relay.
        """

    def read(session: str, after: QueueId | None) -> Deferred[list[QueuedMessage]]:
        """Return the oldest messages whose ids are above ``after``; None stands for the beginning of the queue."""

    def poll(sessions: Sequence[str]) -> Deferred[list[str]]:
        """Return those sessions whose queues contain messages that were not announced."""

    def remove(session: str, ids: Sequence[QueueId]) -> None:
        """Remove delivered messages. They are never returned again, and are deleted now or as soon as possible."""

    def expired(now: float) -> Deferred[list[tuple[str, bytes]]]:
        """Remove and return some expired messages."""

    def watch(watcher: QueueWatcher) -> None:
        """Register the object whose callbacks this queue calls from now on."""

    def present(sessions: Sequence[str]) -> None:
        """Announce to other processes that these sessions are connected here. Called every half minute."""

    def note_absent(session: str) -> None:
        """Announce to other processes that this session is no longer connected here."""

    def note_connected(session: str) -> None:
        """Announce that this session has connected here. Other processes then end their connections of the same
        session."""

    def take_federation() -> Deferred[list[QueuedMessage]]:
        """Return some messages for other relays that no process has taken yet, and mark them as taken by this
        process."""

    def release_federation() -> None:
        """Make the messages that :meth:`take_federation` returned and that are not finished available again."""

    def is_elsewhere(session: str) -> Deferred[bool]:
        """Whether the session is connected to another process that uses the same queue."""

    def close() -> Deferred[None]:
        """Close files and connections."""
