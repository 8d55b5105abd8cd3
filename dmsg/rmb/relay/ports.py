"""Interfaces of the two objects that a delivery uses: the connection of its session, and the relay."""

from __future__ import annotations

from typing import Protocol, TypeVar

from twisted.internet.defer import Deferred

from dmsg.rmb.relay.queue.interface import QueuedMessage, QueueId
from dmsg.rmb.socket.confirm import Message
from dmsg.rmb.twins.address import Session

_Delivery_contra = TypeVar("_Delivery_contra", contravariant=True)


class Carrier(Protocol):
    """Interface of a session's connection."""

    @property
    def unsent(self) -> int:
        """Number of bytes that are not sent yet."""

    def send(self, data: bytes) -> None:
        """Send a message. It is written at the end of the reactor turn."""

    def barrier(self, number: int) -> None:
        """Send a ping with ``number`` after all messages sent so far. The pong returns the number."""


class Store(Protocol[_Delivery_contra]):
    """Interface that the relay offers to a delivery: access to the stored queue, and timers."""

    def keep(self, session: Session, message: Message) -> Deferred[QueueId]:
        """Store a message in the session's queue. The Deferred fires with the message's id."""

    def read(self, session: Session, after: QueueId | None) -> Deferred[list[QueuedMessage]]:
        """Return the oldest messages in the session's queue whose ids are above ``after``."""

    def remove(self, session: Session, ids: list[QueueId]) -> None:
        """Delete delivered messages from the session's queue."""

    def life_end(self, queued: QueuedMessage) -> float | None:
        """Return the time at which a stored message expires.  If it has expired, notify its sender and return None."""

    def mark_busy(self, delivery: _Delivery_contra) -> None:
        """Record that the delivery has messages in its window."""

    def note_waiting(self, delivery: _Delivery_contra) -> None:
        """Record that the delivery has messages in its backlog, which is its queue in memory."""

    def ping_later(self, delivery: _Delivery_contra) -> None:
        """Call :meth:`~dmsg.rmb.relay.delivery.Delivery.request_confirmation` after a short delay, which this object
        chooses."""

    def count_delivered_later(self, delivery: _Delivery_contra) -> None:
        """Call :meth:`~dmsg.rmb.relay.delivery.Delivery.count_delivered` after this reactor turn, and again until it
        returns True."""
