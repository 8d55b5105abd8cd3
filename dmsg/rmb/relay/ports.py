"""What the delivery to a session needs of what is around it: the session's connection, and the relay."""

from __future__ import annotations

from typing import Protocol, TypeVar

from twisted.internet.defer import Deferred

from dmsg.rmb.relay.queue.interface import Queued, QueueId
from dmsg.rmb.socket.confirm import Message
from dmsg.rmb.twins.address import Session

_Delivery_contra = TypeVar("_Delivery_contra", contravariant=True)


class Carrier(Protocol):
    """The connection of a session."""

    @property
    def unsent(self) -> int:
        """Bytes that this process still has to send."""

    def send(self, data: bytes) -> None:
        """Send a message; it leaves at the end of the reactor turn."""

    def barrier(self, number: int) -> None:
        """Send a ping behind everything that was sent; its answer brings ``number`` back."""


class Store(Protocol[_Delivery_contra]):
    """What a delivery needs of the relay around it."""

    def keep(self, session: Session, message: Message) -> Deferred[QueueId]:
        """Put a message into the session's queue; fires with its id."""

    def read(self, session: Session, after: QueueId | None) -> Deferred[list[Queued]]:
        """The oldest of the session's queue behind ``after``."""

    def remove(self, session: Session, ids: list[QueueId]) -> None:
        """They were delivered."""

    def until(self, queued: Queued) -> float | None:
        """When the life of a queued message ends; None when it has, and was answered."""

    def busy(self, delivery: _Delivery_contra) -> None:
        """It has something in its window from now on."""

    def waits(self, delivery: _Delivery_contra) -> None:
        """It has something in its line from now on."""

    def ping_later(self, delivery: _Delivery_contra) -> None:
        """Call :meth:`~dmsg.rmb.relay.delivery.Delivery.ping_behind` in a while."""

    def hand_later(self, delivery: _Delivery_contra) -> None:
        """Call :meth:`~dmsg.rmb.relay.delivery.Delivery.hand` after this turn, and again as long as that says so."""
