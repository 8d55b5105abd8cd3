"""Interfaces that a delivery needs: the connection of its session, and the relay around it."""

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
        """Number of bytes that this process still has to send."""

    def send(self, data: bytes) -> None:
        """Send a message; it leaves at the end of the reactor turn."""

    def barrier(self, number: int) -> None:
        """Send a ping behind everything that was sent; the pong carries ``number`` back."""


class Store(Protocol[_Delivery_contra]):
    """Interface of the relay around a delivery: its queues and its timers."""

    def keep(self, session: Session, message: Message) -> Deferred[QueueId]:
        """Put a message into the session's queue; fires with its id."""

    def read(self, session: Session, after: QueueId | None) -> Deferred[list[QueuedMessage]]:
        """Return the oldest messages of the session's queue with ids above ``after``."""

    def remove(self, session: Session, ids: list[QueueId]) -> None:
        """Delete delivered messages from the session's queue."""

    def life_end(self, queued: QueuedMessage) -> float | None:
        """Return when the life of a queued message ends; None when it has ended, after telling the sender."""

    def mark_busy(self, delivery: _Delivery_contra) -> None:
        """Note that the delivery has messages in its window."""

    def note_waiting(self, delivery: _Delivery_contra) -> None:
        """Note that the delivery has messages in its line."""

    def ping_later(self, delivery: _Delivery_contra) -> None:
        """Call :meth:`~dmsg.rmb.relay.delivery.Delivery.ping_behind` after a short delay, which the store chooses."""

    def hand_later(self, delivery: _Delivery_contra) -> None:
        """Call :meth:`~dmsg.rmb.relay.delivery.Delivery.count_delivered` after this turn, until it returns True."""
