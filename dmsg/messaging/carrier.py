"""Carrier that binds a :class:`~dmsg.messaging.streams.ChannelStream` to its channel and its session."""

from __future__ import annotations

from typing import Protocol

from dmsg.messaging.core.state import ClientChannel, State
from dmsg.messaging.core.table import ClientConnection
from dmsg.messaging.streams import ChannelStream
from dmsg.net.streams import carrier
from dmsg.net.streams.outbox import Ticket


class CarryingSession(carrier.CarryingSession, Protocol):
    """Interface that carriers need of a session with a server of the Messaging System."""

    core: ClientConnection

    def data_taken(self, stream: ChannelStream) -> None:
        """Resume reading the link if the application of ``stream`` has read enough of its data."""

    def closed(self, stream: ChannelStream, reason: int) -> None:
        """Close the channel of ``stream``, because this side has ended the stream."""


class ChannelCarrier(carrier.SessionCarrier[CarryingSession, ChannelStream]):
    """Carrier of a stream on a channel.  A channel carries one stream, which ends with the channel."""

    __slots__ = ("channel",)

    def __init__(self, session: CarryingSession, channel: ClientChannel) -> None:
        super().__init__(session)
        self.channel = channel

    @property
    def confirms(self) -> bool:
        return self.stream.acks is not None

    def may_send(self) -> bool:
        if not (self.session.writable and self.writable) or self.channel.state is not State.OPEN:
            return False
        acks = self.stream.acks
        return acks is None or acks.may_send()

    def send(self, data: bytes | memoryview, ticket: Ticket | None) -> None:
        stream = self.stream
        stream.sent_bytes += len(data)
        if stream.acks is not None:
            stream.acks.send(data, ticket)
            return
        self.session.core.send(self.channel, data)
        stream.acknowledged(ticket)

    def in_flight(self) -> int:
        acks = self.stream.acks
        return acks.in_flight if acks is not None else 0

    def consumed(self, size: int) -> None:
        self.stream.unread -= size
        self.stream.acks_consumed()
        self.session.data_taken(self.stream)

    def close(self, reason: int) -> None:
        self.session.closed(self.stream, reason)
