"""What a relay keeps for sessions that are away or slow: what a queue has to do.

Every session has a queue of its own; what is for other relays is in one more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from twisted.internet.defer import Deferred
from zope.interface import Attribute, Interface

from dmsg.base.options import STORAGE, Number, option

FEDERATION = "relay.federation"
"""The name of the queue of what is for other relays; no session is called so."""
BATCH = 1000
"""Messages in one read: a receiver that catches up must do so faster than others send."""

BATCH_BYTES = 4 * 1024 * 1024
"""Bytes after which a read ends; one message may be larger."""
PART = 8
"""Of what is kept in all: the part of one twin."""
REFUSALS = ("the relay keeps as much as it may", "the relay keeps as much from twin {sender} as it may")
"""Why a message is not taken: of all that is kept, or of what its sender has there."""


@dataclass(frozen=True)
class QueueLimits:
    """How much is kept; sizes are in bytes.

    The messages that one twin sent may be the ``PART``-th part of ``total``, and twice ``size`` at least.
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
    def part(self) -> int:
        """Bytes that one twin may have sent of what is kept."""
        return max(self.total // PART, 2 * self.size)


QueueId: TypeAlias = int | bytes
"""Id of a message in a queue: a number in SQLite, an id of a stream in Redis."""


class Queued(NamedTuple):
    """A message that is kept.  Ids grow along a queue."""

    id: QueueId
    data: bytes


class QueueWatcher(Protocol):
    """Callbacks of a queue to the relay that uses it."""

    def dropped(self, session: str, number: int) -> None:
        """The oldest ``number`` messages of a session were deleted, because its queue was full."""

    def appended_elsewhere(self, name: str) -> None:
        """Another process appended a message to the queue of that name."""

    def connected_elsewhere(self, name: str) -> None:
        """The session of that name connected to another process."""


class RelayQueue(Interface):
    """Messages by session."""

    limits: QueueLimits = Attribute("How much is kept.")
    trouble: str | None = Attribute("Why nothing can be added now, as on a full disk; None when it can.")
    forgotten: int = Attribute("Number of delivered messages that the queue could not delete and will deliver again.")

    def append(session: str, data: bytes, until: float, sender: int = ...) -> Deferred[QueueId]:
        """Keep a message until a time.  Fires with its id once it survives the process.

        Fails with QueueUnavailable.

        :param sender: the twin that sent it; 0: the relay.
        """

    def read(session: str, after: QueueId | None) -> Deferred[list[Queued]]:
        """The oldest messages whose id is above ``after``; None means all."""

    def poll(sessions: Sequence[str]) -> Deferred[list[str]]:
        """Those of some sessions in whose queue is something that nobody told of."""

    def remove(session: str, ids: Sequence[QueueId]) -> None:
        """They are delivered: not read again, and deleted now, or as soon as that can be."""

    def expired(now: float) -> Deferred[list[tuple[str, bytes]]]:
        """Take out some messages whose time has passed."""

    def watch(watcher: QueueWatcher) -> None:
        """Call ``watcher`` from now on."""

    def present(sessions: Sequence[str]) -> None:
        """These sessions are connected to this process; said again every half minute."""

    def absent(session: str) -> None:
        """This one is not any more."""

    def connected_here(session: str) -> None:
        """It connected to this process: others drop theirs."""

    def take_federation() -> Deferred[list[Queued]]:
        """Some of what is for other relays and nobody has taken yet."""

    def federation_again() -> None:
        """What was taken and not dealt with is to be taken once more."""

    def elsewhere(session: str) -> Deferred[bool]:
        """Whether it is connected to another process on the same queue."""

    def close() -> Deferred[None]:
        """Let go of files and connections."""
