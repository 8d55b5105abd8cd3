"""A stream's place on its channel: what :class:`~dmsg.messaging.streams.ChannelStream` sends over."""

from __future__ import annotations

from typing import Protocol

from dmsg.messaging.core.state import ClientChannel, State
from dmsg.messaging.core.table import ClientConnection
from dmsg.messaging.streams import ChannelStream
from dmsg.net.streams import carrier
from dmsg.net.streams.outbox import Ticket


class CarryingSession(carrier.CarryingSession, Protocol):
    """The link to a server, as a carrier needs it."""

    core: ClientConnection

    def taken(self, stream: ChannelStream) -> None:
        """The application has read some of what came."""

    def closed(self, stream: ChannelStream, reason: int) -> None:
        """The application, or this end in its name, has ended the stream."""


class ChannelCarrier(carrier.SessionCarrier[CarryingSession, ChannelStream]):
    """Knows the stream, its channel and the session; a channel carries one stream, which ends with it."""

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
        stream.sent += len(data)
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
        self.session.taken(self.stream)

    def close(self, reason: int) -> None:
        self.session.closed(self.stream, reason)
