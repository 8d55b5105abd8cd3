"""Program's end of a stream that the agent carries: the transport of an application's protocol."""

from __future__ import annotations

import json
from collections import deque

from twisted.internet.interfaces import IProtocol, IReactorTime, ITransport
from twisted.internet.protocol import Protocol

from dmsg.agent.wire import (
    END_FRAME,
    WINDOW,
    WINDOW_FRAMES,
    Answer,
    Kind,
    WireError,
    encode_close,
    encode_count,
    encode_frame,
    parse_close,
    parse_count,
)
from dmsg.errors import CloseReason
from dmsg.keys import PubKey
from dmsg.net.flush import TurnFlush
from dmsg.net.streams.address import DmsgAddress
from dmsg.net.streams.outbox import EndOfData, Ticket
from dmsg.net.streams.stream import StreamTransport

MAX_FRAME = 32768
"""Maximum bytes of a frame to the agent."""


class LocalStream(StreamTransport):
    """Transport of an application's protocol, whose stream the agent carries."""

    _carrier: LocalCarrier
    binding: bytes | None = None

    @property
    def _leaves_closing_to_remote(self) -> bool:
        # This end only sends CLOSE to the agent. The agent then closes the stream to the peer, and reports when that
        # stream has ended.
        return True

    @property
    def acknowledged_bytes(self) -> int | None:  # type: ignore[override]
        return self._carrier.acknowledged - int(self._end_acknowledged) if self.secure else None

    def _count_unacknowledged(self) -> int:
        return self._carrier.bytes_in_flight

    def _may_have_all(self) -> bool:
        # As in ClientStream, the peer of a secure stream sends an ACK as soon as data arrives. If there is no ACK, the
        # peer does not have the data. The peer of a plain stream may have all data without having sent an ACK.
        return not self.secure and super()._may_have_all()

    def note_suspended(self, seconds: float | None) -> None:
        """Record since when no transport carries the stream, as the agent reports.

        :param seconds: seconds since the stream lost its transport; None while a transport carries it.
        """
        self.away_since = None if seconds is None else self._reactor.seconds() - seconds


class LocalCarrier:
    """Carrier: binds a stream of this program to its connection to the agent."""

    confirms = True

    def __init__(self, transport: ITransport, turn: TurnFlush, server: PubKey | None) -> None:
        self._transport = transport
        self._turn = turn
        self.server = server
        self.stream: LocalStream
        self._in_flight: deque[tuple[int, Ticket | None]] = deque()
        self.bytes_in_flight = self.acknowledged = 0
        self._closed = False

    def may_send(self) -> bool:
        return not self._closed and self.bytes_in_flight < WINDOW and len(self._in_flight) < WINDOW_FRAMES

    def send(self, data: bytes | memoryview, ticket: Ticket | None) -> None:
        self._in_flight.append((len(data), ticket))
        self.bytes_in_flight += len(data)
        self._transport.write(END_FRAME if ticket.__class__ is EndOfData else encode_frame(Kind.DATA, data))

    def flush(self) -> None:
        """Do nothing, because ``send`` has already written the data to the socket."""

    def in_flight(self) -> int:
        return len(self._in_flight)

    def consumed(self, size: int) -> None:
        if not self._closed:
            self._transport.write(encode_count(Kind.READ, size))

    def close(self, reason: int) -> None:
        if not self._closed:
            self._closed = True
            self._transport.write(encode_close(reason))
            self._transport.loseConnection()

    def schedule(self) -> None:
        self._turn.add_stream(self.stream)

    # --- frames from the agent ---

    def received(self, kind: Kind, payload: bytes) -> None:
        """Handle a frame from the agent.

        :raises WireError: the agent may not send this frame.
        """
        if kind is Kind.DATA:
            self.stream.data_received(payload)
        elif kind is Kind.TAKEN:
            count = parse_count(payload)
            if count > len(self._in_flight):
                raise WireError("the agent acknowledged more frames than were sent")
            done = [self._in_flight.popleft() for _ in range(count)]
            size = sum(size for size, _ in done)
            self.bytes_in_flight -= size
            self.acknowledged += size
            self.stream.acknowledged_all([ticket for _, ticket in done], count)
        elif kind is Kind.END and self.stream.can_half_close:
            self.stream.data_ended()
        elif kind is Kind.CLOSE:
            self.ended(parse_close(payload))
        elif kind is Kind.WAY:
            self._on_way(payload)
        else:
            raise WireError(f"an agent may not send {kind.name}")

    def _on_way(self, payload: bytes) -> None:
        try:
            content = json.loads(payload)
            server, away = content["server"], content["away"]
            self.server = None if server is None else PubKey.from_hex(server)
            self.stream.note_suspended(None if away is None else float(away))
        except (ValueError, TypeError, KeyError):
            raise WireError("a WAY frame does not name a server") from None

    @property
    def closed(self) -> bool:
        """Whether either side has sent CLOSE; later frames are ignored."""
        return self._closed

    def ended(self, reason: int) -> None:
        """End the stream, because the agent has closed it or the connection to the agent is lost."""
        self._closed = True
        self._transport.loseConnection()
        self.stream.carrier_closed(reason)


class OpenedStream:
    """Description of a stream, parsed from the agent's answer.

    :raises WireError: the answer does not describe a stream.
    """

    def __init__(self, answer: Answer) -> None:
        try:
            self.peer = DmsgAddress(PubKey.from_hex(answer["peer"]), int(answer["peer_port"]))
            self.host = DmsgAddress(PubKey.from_hex(answer["host"]), int(answer["port"]))
            self.server = None if answer["server"] is None else PubKey.from_hex(answer["server"])
            self.secure = bool(answer["secure"])
            # Agents before 0.2 do not send this field.
            self.half_close = answer.get("half_close") is True
            self.binding = None if answer["binding"] is None else bytes.fromhex(answer["binding"])
        except (KeyError, TypeError, ValueError):
            raise WireError("the agent's answer does not describe a stream") from None

    def start(self, reactor: IReactorTime, connection: Protocol, turn: TurnFlush, protocol: IProtocol) -> LocalCarrier:
        """Create the stream on ``connection``, connect ``protocol`` to it, and return the stream's carrier."""
        assert connection.transport is not None
        carrier = LocalCarrier(connection.transport, turn, self.server)
        stream = carrier.stream = LocalStream(reactor, carrier, self.host, self.peer, MAX_FRAME)
        stream.secure, stream.binding, stream.can_half_close = self.secure, self.binding, self.half_close
        stream.start(protocol)
        return carrier


LOST = CloseReason.PEER_DISCONNECTED
"""Close reason of a stream whose connection to the agent was lost."""
