"""Rules of a client of 2019 for its transports, as recorded exchanges with a server show them. No I/O.

The client opens and accepts plain transports only, and knows neither PING nor reasons.
"""

from __future__ import annotations

from collections import deque

from dmsg.errors import DropReason, RemoteProtocolError
from dmsg.keys import PubKey
from dmsg.v2019.core.wire import ACCEPT, ACK, CLOSE, FWD, HANDSHAKE_PAYLOAD_SIZE, OK, REQUEST, SEQUENCE_SIZE, Frame

BACKLOG = 20
"""Maximum number of accepted transports that the application has not taken yet. Further REQUESTs are refused."""
FIRST_ID, FIRST_SEQUENCE = 0x1000, 0x3000
"""First transport id of a connection, and first sequence number of a transport, in the recordings."""
_NUMBERS = 65536


class OldTransport:
    """Transport of a client of 2019.

    :ivar request: payload of the own REQUEST while it is not answered; None for a transport that is open.
    :ivar is_open: whether both ends have agreed to the transport, and neither has closed it.
    :ivar received: data that was received and not taken yet.
    :ivar unacknowledged: sequence numbers of the sent frames without an ACK, with the sizes of their data.
    :ivar acknowledged: number of acknowledged bytes.
    """

    def __init__(self, number: int, request: bytes | None, sequence: int) -> None:
        self.id = number
        self.request = request
        self.sequence = sequence
        self.is_open = request is None
        self.is_closed = False
        self.received: deque[bytes] = deque()
        self.unacknowledged: dict[int, int] = {}
        self.acknowledged = 0


class OldTransports:
    """Transports on one connection of a client of 2019.

    :param local: key of the client.
    :param first_id: id of the first transport that the client opens.
    :param sequence: sequence number of the first frame of each transport.
    :ivar accepted: accepted transports that the application has not taken yet.
    """

    def __init__(self, local: PubKey, first_id: int = FIRST_ID, sequence: int = FIRST_SEQUENCE) -> None:
        self._local = bytes(local)
        self._next_id = first_id
        self._sequence = sequence
        self._outgoing: list[Frame] = []
        self._transports: dict[int, OldTransport] = {}
        self._is_connected = False
        self.accepted: deque[OldTransport] = deque()

    def take(self) -> list[Frame]:
        """Return the frames to send."""
        frames, self._outgoing = self._outgoing, []
        return frames

    # --- what the application does ---

    def open(self, remote: PubKey) -> OldTransport:
        """Open a transport to another client."""
        payload = self._local + bytes(remote)
        transport = self._transports[self._next_id] = OldTransport(self._next_id, payload, self._sequence)
        self._next_id = (self._next_id + 2) % _NUMBERS
        self._send(REQUEST, transport.id, payload)
        return transport

    def write(self, transport: OldTransport, data: bytes) -> None:
        """Send data in one frame."""
        if transport.is_open:
            sequence = transport.sequence
            transport.sequence = (sequence + 1) % _NUMBERS
            transport.unacknowledged[sequence] = len(data)
            self._send(FWD, transport.id, sequence.to_bytes(SEQUENCE_SIZE, "big") + data)

    def close(self, transport: OldTransport) -> None:
        """Close a transport, or give up opening it."""
        if not transport.is_closed:
            self._forget(transport)
            self._send(CLOSE, transport.id, b"\0")

    # --- what the server sends ---

    def receive(self, frame: Frame) -> None:
        """Process a frame.

        :raises RemoteProtocolError: the client ends the connection.
        """
        transport = self._transports.get(frame.id)
        if not self._is_connected:
            if frame.type != OK:
                raise RemoteProtocolError(DropReason.UNKNOWN_FRAME)
            self._is_connected = True
        elif transport is None:
            self._receive_new(frame)
        elif transport.request is not None:
            self._receive_answer(transport, frame)
        elif frame.type == REQUEST:
            self.close(transport)
            raise RemoteProtocolError(DropReason.BAD_REQUEST)
        elif frame.type == CLOSE:
            self._forget(transport)
        elif frame.type == FWD:
            self._receive_data(transport, frame.payload)
        elif frame.type == ACK:
            self._receive_ack(transport, frame.payload)

    def _receive_new(self, frame: Frame) -> None:
        is_good = frame.id % 2 and len(frame.payload) == HANDSHAKE_PAYLOAD_SIZE
        if frame.type == REQUEST and is_good and frame.payload.endswith(self._local) and len(self.accepted) < BACKLOG:
            transport = self._transports[frame.id] = OldTransport(frame.id, None, self._sequence)
            self.accepted.append(transport)
            self._send(ACCEPT, frame.id, frame.payload)
        elif frame.type != CLOSE:
            self._send(CLOSE, frame.id, b"\0")

    def _receive_answer(self, transport: OldTransport, frame: Frame) -> None:
        if frame.type == ACCEPT and frame.payload == transport.request:
            transport.request = None
            transport.is_open = True
        elif frame.type == CLOSE:
            self._forget(transport)
        else:
            self.close(transport)

    def _receive_data(self, transport: OldTransport, payload: bytes) -> None:
        if len(payload) < SEQUENCE_SIZE:
            self.close(transport)
            return
        transport.received.append(payload[SEQUENCE_SIZE:])
        self._send(ACK, transport.id, payload[:SEQUENCE_SIZE])

    def _receive_ack(self, transport: OldTransport, payload: bytes) -> None:
        if len(payload) != SEQUENCE_SIZE:
            self.close(transport)
            return
        transport.acknowledged += transport.unacknowledged.pop(int.from_bytes(payload, "big"), 0)

    def _forget(self, transport: OldTransport) -> None:
        transport.is_open, transport.is_closed = False, True
        self._transports.pop(transport.id, None)

    def _send(self, kind: int, number: int, payload: bytes) -> None:
        self._outgoing.append(Frame(kind, number, payload))
