"""What a client does with frames: its table of transports on one connection.

No I/O, no clock.  Bytes go in through :meth:`ClientConnection.receive_frames`,
events come out, frames to send collect until :meth:`ClientConnection.data_to_send`.

Control frames go through :data:`TRANSITIONS`; FWD and ACK test one attribute.
Where the 2019 client waits for each ACK, this one keeps a window in flight
(``WINDOW_BYTES``, ``WINDOW_FRAMES``); the receiving side is the reference's:
an ACK goes out on receipt while at most ``UNREAD_LIMIT`` bytes are unread,
later ones are held until the application has read.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from random import Random
from typing import Any

from dmsg.errors import CloseReason, DropReason, KeyFormatError, LocalProtocolError, RemoteProtocolError
from dmsg.keys import PubKey
from dmsg.transport.wire import (
    ACCEPT,
    ACK,
    CLOSE,
    FWD,
    HEADER_SIZE,
    ID_COUNT,
    IDS_PER_SIDE,
    MAX_FWD_DATA,
    OK,
    REQUEST,
    SEQUENCE_SIZE,
    UNREAD_LIMIT,
    WINDOW_BYTES,
    WINDOW_FRAMES,
    close_reason,
    encode_ack,
    encode_close,
    encode_frame,
    encode_fwd_header,
    parse_handshake_payload,
    unpack_header,
)

RECEIVE_LIMIT = 4 * 1024 * 1024
"""Bytes that a transport holds for an application that does not read; a
sender that goes on without ACKs loses the transport there."""
FRAME_OVERHEAD = 64
"""What each unread frame counts for besides its bytes."""
MAX_INCOMING = 4096
"""Transports of one connection that others opened."""


class State(Enum):
    """Where a transport is; None, no state, is an id without a transport."""

    REQUESTED = auto()
    OFFERED = auto()
    OPEN = auto()
    CLOSED = auto()


class Input(Enum):
    """What moves a transport from state to state."""

    SEND_REQUEST = auto()
    RECV_REQUEST = auto()
    SEND_ACCEPT = auto()
    RECV_ACCEPT = auto()
    RECV_CLOSE = auto()
    SEND_CLOSE = auto()


TRANSITIONS: dict[tuple[State | None, Input], State] = {
    (None, Input.SEND_REQUEST): State.REQUESTED,
    (None, Input.RECV_REQUEST): State.OFFERED,
    (State.OFFERED, Input.SEND_ACCEPT): State.OPEN,
    (State.OFFERED, Input.SEND_CLOSE): State.CLOSED,
    (State.OFFERED, Input.RECV_CLOSE): State.CLOSED,
    (State.REQUESTED, Input.RECV_ACCEPT): State.OPEN,
    (State.REQUESTED, Input.RECV_CLOSE): State.CLOSED,
    # "accept check failed" of the reference, for anything but ACCEPT and CLOSE
    (State.REQUESTED, Input.SEND_CLOSE): State.CLOSED,
    (State.OPEN, Input.RECV_CLOSE): State.CLOSED,
    (State.OPEN, Input.SEND_CLOSE): State.CLOSED,
    # what is missing is an error; two pairs of an open transport are no inputs
    # at all: ACCEPT and unknown types are ignored, as the reference does, and
    # REQUEST on a used id ends the connection
}


class ClientTransport:
    """One end of a transport.

    :ivar id: even when this side opened it, odd when the server assigned it.
    :ivar remote: the other client's key.
    :ivar user: whatever the shell wants to find again.
    :ivar in_flight: sequence -> (size, token) of what is not acknowledged.
    """

    __slots__ = (
        "_next_sequence",
        "held_acks",
        "held_size",
        "id",
        "in_flight",
        "in_flight_bytes",
        "initiator",
        "payload",
        "remote",
        "state",
        "unread",
        "user",
    )

    def __init__(self, transport_id: int, remote: PubKey, payload: bytes, initiator: bool, sequence: int) -> None:
        self.id = transport_id
        self.remote = remote
        self.payload = payload
        self.initiator = initiator
        self.state: State | None = None
        self.user: Any = None
        self.unread = 0
        self.held_size = 0
        self.held_acks: list[int] = []
        self.in_flight: dict[int, tuple[int, Any]] = {}
        self.in_flight_bytes = 0
        self._next_sequence = sequence

    @property
    def window_open(self) -> bool:
        """Another frame may be sent now."""
        return self.in_flight_bytes < WINDOW_BYTES and len(self.in_flight) < WINDOW_FRAMES


@dataclass(slots=True)
class Established:
    """The server's OK frame is there."""


@dataclass(slots=True)
class Requested:
    """Another client asks for ``transport``: answer with
    :meth:`ClientConnection.accept` or :meth:`ClientConnection.close`,
    unless its state is CLOSED meanwhile."""

    transport: ClientTransport


@dataclass(slots=True)
class Accepted:
    """``transport``, which this side opened, is open."""

    transport: ClientTransport


@dataclass(slots=True)
class DataReceived:
    """User bytes, never empty; say :meth:`ClientConnection.consumed` when they are read."""

    transport: ClientTransport
    data: bytes


@dataclass(slots=True)
class Acknowledged:
    """The remote has the frame that was sent with ``token``."""

    transport: ClientTransport
    token: Any


@dataclass(slots=True)
class Closed:
    """``transport`` is over.

    :ivar refused: it never was open.
    :ivar by_remote: a CLOSE frame said so.
    """

    transport: ClientTransport
    reason: int
    refused: bool
    by_remote: bool


Event = Established | Requested | Accepted | DataReceived | Acknowledged | Closed


class ClientConnection:
    """The table of one connection to a server.

    :ivar accepting: a REQUEST is offered to the application; else answered with CLOSE.
    """

    def __init__(self, local: PubKey, *, random: Random | None = None) -> None:
        self.local = local
        self.transports: dict[int, ClientTransport] = {}
        self.accepting = False
        self.established = False
        self.incoming = 0
        self._random = random or Random()
        self._next_id = self._random.randrange(IDS_PER_SIDE) * 2
        self._outgoing: list[bytes] = []

    # --- what the application does ---

    def request(self, remote: PubKey) -> ClientTransport:
        """Open a transport; :class:`Accepted` or :class:`Closed` follows.

        :raises LocalProtocolError: all 32768 ids are in use.
        """
        transport_id = self._next_id
        if len(self.transports) - self.incoming >= IDS_PER_SIDE:
            raise LocalProtocolError("all transport ids of this connection are in use")
        while transport_id in self.transports:
            transport_id = (transport_id + 2) % ID_COUNT
        self._next_id = (transport_id + 2) % ID_COUNT
        payload = self.local + remote
        transport = self._add(transport_id, remote, payload, initiator=True)
        self._move(transport, Input.SEND_REQUEST)
        self._outgoing.append(encode_frame(REQUEST, transport_id, payload))
        return transport

    def accept(self, transport: ClientTransport) -> None:
        """Answer a REQUEST with ACCEPT.

        :raises LocalProtocolError: it is not waiting for an answer.
        """
        self._move(transport, Input.SEND_ACCEPT)
        self._outgoing.append(encode_frame(ACCEPT, transport.id, transport.payload))

    def send(self, transport: ClientTransport, data: bytes | memoryview, token: Any = None) -> None:
        """Send one FWD; :class:`Acknowledged` with the token follows.

        :param data: at most 65508 bytes.
        :raises LocalProtocolError: not open, window closed, or too long.
        """
        if transport.state is not State.OPEN:
            raise LocalProtocolError("transport is not open")
        size = len(data)
        if size > MAX_FWD_DATA or not transport.window_open:
            raise LocalProtocolError("window is closed or data is too long for one frame")
        sequence = transport._next_sequence
        transport._next_sequence = (sequence + 1) & 0xFFFF
        transport.in_flight[sequence] = (size, token)
        transport.in_flight_bytes += size
        outgoing = self._outgoing
        outgoing.append(encode_fwd_header(transport.id, sequence, size))
        if size:
            outgoing.append(data)  # type: ignore[arg-type]  # joined before anybody looks

    def consumed(self, transport: ClientTransport, size: int) -> None:
        """The application has read ``size`` bytes: held ACKs may go out."""
        transport.unread -= size
        if transport.held_acks and transport.unread < UNREAD_LIMIT and transport.state is State.OPEN:
            transport_id = transport.id
            self._outgoing.extend([encode_ack(transport_id, sequence) for sequence in transport.held_acks])
            transport.held_acks.clear()
            transport.held_size = 0

    def close(self, transport: ClientTransport, reason: int = CloseReason.UNSPECIFIED) -> None:
        """Send CLOSE; no event follows.  Closing what is closed does nothing."""
        if transport.state in (State.REQUESTED, State.OFFERED, State.OPEN):
            self._move(transport, Input.SEND_CLOSE)
            self._remove(transport)
            self._outgoing.append(encode_close(transport.id, reason))

    def data_to_send(self) -> bytes:
        """The frames to send; empties the buffer."""
        outgoing = self._outgoing
        if not outgoing:
            return b""
        data = b"".join(outgoing)
        outgoing.clear()
        return data

    # --- what the server sends ---

    def receive_frames(self, buffer: bytearray, end: int) -> tuple[int, list[Event]]:
        """Take the whole frames at the start of ``buffer``.

        :param end: where the plaintext in ``buffer`` ends.
        :returns: bytes taken (the rest is an unfinished frame) and the events.
        :raises RemoteProtocolError: the connection to the server has to end.
        """
        events: list[Event] = []
        transports = self.transports
        outgoing = self._outgoing
        view = memoryview(buffer)
        position = 0
        while end - position >= HEADER_SIZE:
            frame_type, transport_id, size = unpack_header(buffer, position)
            start = position + HEADER_SIZE
            following = start + size
            if following > end:
                break
            position = following
            transport = transports.get(transport_id)
            if transport is not None and transport.state is State.OPEN and self.established:
                if frame_type == FWD and size >= SEQUENCE_SIZE:
                    sequence = buffer[start] << 8 | buffer[start + 1]
                    size -= SEQUENCE_SIZE
                    if size:
                        transport.unread += size
                        if transport.unread > UNREAD_LIMIT:
                            transport.held_acks.append(sequence)
                            transport.held_size += size + FRAME_OVERHEAD
                            if transport.held_size > RECEIVE_LIMIT:
                                self._fail(transport, CloseReason.BUFFER_FULL, events)
                                continue
                        else:
                            outgoing.append(encode_ack(transport_id, sequence))
                        events.append(DataReceived(transport, bytes(view[start + SEQUENCE_SIZE : following])))
                    else:
                        outgoing.append(encode_ack(transport_id, sequence))
                    continue
                if frame_type == ACK and size == SEQUENCE_SIZE:
                    waiting = transport.in_flight.pop(buffer[start] << 8 | buffer[start + 1], None)
                    if waiting is not None:
                        transport.in_flight_bytes -= waiting[0]
                        events.append(Acknowledged(transport, waiting[1]))
                    continue
            self._receive_control(frame_type, transport_id, bytes(view[start:following]), transport, events)
        return position, events

    def _receive_control(
        self,
        frame_type: int,
        transport_id: int,
        payload: bytes,
        transport: ClientTransport | None,
        events: list[Event],
    ) -> None:
        if not self.established:
            if frame_type != OK:
                raise RemoteProtocolError(DropReason.NO_OK_FRAME, f"first frame of the server has type {frame_type:#x}")
            self.established = True
            events.append(Established())
        elif transport is None:
            if frame_type == REQUEST:
                self._on_request(transport_id, payload, events)
            elif frame_type != CLOSE:
                self._outgoing.append(encode_close(transport_id, CloseReason.NO_SUCH_TRANSPORT))
        elif frame_type == REQUEST and transport.state is not State.REQUESTED:
            raise RemoteProtocolError(DropReason.REQUEST_ON_USED_ID, "REQUEST on an id that is in use")
        elif frame_type == CLOSE:
            refused = transport.state is not State.OPEN
            self._move(transport, Input.RECV_CLOSE)
            self._remove(transport)
            events.append(Closed(transport, close_reason(payload), refused, by_remote=True))
        elif transport.state is State.REQUESTED:
            if frame_type == ACCEPT and payload == transport.payload:
                self._move(transport, Input.RECV_ACCEPT)
                events.append(Accepted(transport))
            else:
                self._fail(transport, CloseReason.BAD_FRAME, events)
        elif transport.state is State.OFFERED or frame_type in (FWD, ACK):
            # FWD and ACK of a wrong size, the right ones never come here; or
            # anything at all before the application has answered
            self._fail(transport, CloseReason.BAD_FRAME, events)
        # OK, ACCEPT and unknown types on an open transport mean nothing

    def _on_request(self, transport_id: int, payload: bytes, events: list[Event]) -> None:
        reason = CloseReason.BAD_REQUEST
        try:
            initiator, responder = parse_handshake_payload(payload)
            if transport_id & 1 and responder == self.local:
                if not self.accepting:
                    reason = CloseReason.REFUSED
                elif self.incoming >= MAX_INCOMING:
                    reason = CloseReason.TOO_MANY_TRANSPORTS
                else:
                    transport = self._add(transport_id, initiator, payload, initiator=False)
                    self._move(transport, Input.RECV_REQUEST)
                    events.append(Requested(transport))
                    return
        except KeyFormatError:
            pass  # the reference accepts any initiator, even the null key
        self._outgoing.append(encode_close(transport_id, reason))

    def _fail(self, transport: ClientTransport, reason: CloseReason, events: list[Event]) -> None:
        refused = transport.state is not State.OPEN
        self.close(transport, reason)
        events.append(Closed(transport, reason, refused, by_remote=False))

    # --- the table ---

    def _add(self, transport_id: int, remote: PubKey, payload: bytes, *, initiator: bool) -> ClientTransport:
        transport = ClientTransport(transport_id, remote, payload, initiator, self._random.randrange(0x10000))
        self.transports[transport_id] = transport
        if not initiator:
            self.incoming += 1
        return transport

    def _remove(self, transport: ClientTransport) -> None:
        del self.transports[transport.id]
        if not transport.initiator:
            self.incoming -= 1
        transport.held_acks.clear()

    @staticmethod
    def _move(transport: ClientTransport, what: Input) -> None:
        state = TRANSITIONS.get((transport.state, what))
        if state is None:
            raise LocalProtocolError(f"{what.name} in state {transport.state}")
        transport.state = state
