"""Client side of one connection to a server: processes received frames, and maintains the table of transports. No I/O,
no clock.

:meth:`ClientConnection.receive_frames` processes received bytes and returns events. Frames to send are collected until
:meth:`~dmsg.v2019.core.transports.TransportTable.data_to_send`.

The caller handles events after the whole read, so the transport of an event may already be closed. A protocol error of
the server ends the connection, after the events before the error were returned (:attr:`ClientConnection.broken`). A
protocol error of a remote ends only its transport.

Control frames are checked with the table ``TRANSITIONS``. FWD and ACK test one attribute instead. The 2019 client waits
for each ACK; this client keeps a window of frames in flight (``WINDOW_BYTES``, ``WINDOW_FRAMES`` of
:mod:`dmsg.v2019.core.wire`). The receiving side follows the reference. While at most ``UNREAD_LIMIT`` bytes are unread,
it acknowledges frames on receipt. Further ACKs are withheld until the application has read.

A secure transport (:mod:`dmsg.streams.core.agreement`, :mod:`dmsg.streams.core.secure`) uses the same frames with
encrypted payloads, and one ACK for all frames of a read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import ClassVar

from dmsg.base.pool import DIRECT_SIZE
from dmsg.errors import (
    CloseReason,
    DropReason,
    KeyFormatError,
    LocalProtocolError,
    RemoteProtocolError,
    close_reason_text,
)
from dmsg.keys import PubKey
from dmsg.streams.core.agreement import Proposal
from dmsg.streams.core.secure import MAX_SECURE_DATA, SecureEnd
from dmsg.v2019.core.events import (
    Accepted,
    Acknowledged,
    Closed,
    Confirmed,
    DataReceived,
    Draining,
    EndedBy,
    Established,
    Event,
    Noticed,
    Ponged,
)
from dmsg.v2019.core.requests import RequestTable
from dmsg.v2019.core.state import ClientTransport, Input, State
from dmsg.v2019.core.transports import FRAMES, PLAIN_CLIENT, Side, TableSettings
from dmsg.v2019.core.wire import (
    ACCEPT,
    ACK,
    CLOSE,
    DRAIN,
    FWD,
    HEADER_SIZE,
    MAX_FWD_DATA,
    MAX_NOTICE,
    MAX_PING,
    NOTICE,
    OK,
    OK_FRAME,
    PING,
    PONG,
    REQUEST,
    SEQUENCE_SIZE,
    UNREAD_LIMIT,
    close_reason,
    encode_ack,
    encode_frame,
    encode_fwd_header,
    pack_header,
    pack_header_into,
    parse_drain,
    unpack_header,
)

RECEIVE_LIMIT = 4 * 1024 * 1024
"""Maximum bytes that a plain transport buffers for an application that does not read. A sender that exceeds the limit,
although ACKs are withheld, loses the transport."""
FRAME_OVERHEAD = 64
"""Number of bytes that are counted for each unread frame in addition to its data, because its bookkeeping uses
memory."""
_Handler = Callable[["ClientConnection", ClientTransport, int, bytes, list[Event]], None]


class ClientConnection(RequestTable):
    """Client's end of one connection to a server, with the table of its transports.

    :param local: public key of this client.
    """

    def __init__(self, local: PubKey, settings: TableSettings = PLAIN_CLIENT) -> None:
        super().__init__(local, settings)
        if self.side is Side.CALLER:
            self._outgoing.append(OK_FRAME)
        self._answered: set[int] = set()
        """Ids without a transport for which a CLOSE was sent during the present read."""
        self.established = False
        self.broken: RemoteProtocolError | None = None
        """Protocol error for which the connection must end. Once it is set, no bytes are processed. The events of
        earlier frames are still returned."""
        self.has_frames_left = False
        """Whether the last read may have left whole frames unprocessed."""

    # --- called by the application ---

    def request(
        self, remote: PubKey, proposal: Proposal | None = None, end: SecureEnd | None = None, told_window: int = 0
    ) -> ClientTransport:
        """Open a transport. :class:`Accepted` or :class:`Closed` follows.

        :param proposal: first handshake message of a secure transport; None opens a plain transport.
        :param end: end of the stream to resume over the transport; None begins a new stream.
        :param told_window: receive window in bytes that the proposal states.
        :raises LocalProtocolError: all 32768 ids are in use.
        """
        transport_id = self._free_id()
        payload = self.local + remote if proposal is None else proposal.payload
        transport = self._add(transport_id, remote, payload, initiator=True)
        transport.proposal = proposal
        transport.is_secure = proposal is not None
        transport.upgrade = proposal is not None and proposal.upgrade
        transport.secure = end
        transport.told_window = told_window
        self._move(transport, Input.SEND_REQUEST)
        self._outgoing.append(encode_frame(REQUEST, transport_id, payload))
        return transport

    def send(self, transport: ClientTransport, data: bytes | memoryview, ticket: object = None) -> None:
        """Send one FWD frame. When it is acknowledged, ``Acknowledged`` or ``AcknowledgedAll`` with the ticket follows.

        :param data: at most 65508 bytes, or 65492 on a secure transport.
        :raises LocalProtocolError: the transport is not open, its window is closed, or the data are too long.
        """
        if transport.state is not State.OPEN:
            raise LocalProtocolError("the transport is not open: nothing can be sent")
        size = len(data)
        if size > MAX_FWD_DATA or not transport.window_open:
            raise LocalProtocolError("window is closed or data is too long for one frame")
        if transport.secure is not None:
            if size > MAX_SECURE_DATA:
                raise LocalProtocolError("data is too long for one frame of a secure transport")
            if size >= DIRECT_SIZE:
                frame = FRAMES.take()
                end = transport.secure.seal_into(memoryview(frame), HEADER_SIZE, data, ticket)
                pack_header_into(frame, 0, FWD, transport.id, end - HEADER_SIZE)
                self._outgoing.append((frame, end))
                return
            payload = transport.secure.seal_data(data, ticket)
            self._outgoing += (pack_header(FWD, transport.id, len(payload)), payload)
            return
        # The first sequence number is random, as in the reference.
        sequence = transport.next_sequence
        transport.next_sequence = (sequence + 1) & 0xFFFF
        transport.in_flight[sequence] = (size, ticket)
        transport.in_flight_bytes += size
        outgoing = self._outgoing
        outgoing.append(encode_fwd_header(transport.id, sequence, size))
        if size:
            outgoing.append(data)  # type: ignore[arg-type]  # bytes.join takes a memoryview, too

    def probe(self, transport: ClientTransport, ticket: object = None) -> None:
        """Send a FWD without data. The remote acknowledges it even while the window is closed.

        :raises LocalProtocolError: the transport is not open or not secure, or frames are in flight.
        """
        end = transport.secure
        if transport.state is not State.OPEN or end is None or end.in_flight or end.unproven is not None:
            raise LocalProtocolError("this transport cannot be probed in its present state")
        payload = end.seal_data(b"", ticket)
        self._outgoing += (pack_header(FWD, transport.id, len(payload)), payload)

    def send_end(self, transport: ClientTransport, ticket: object = None) -> None:
        """Half-close the stream: announce that no more data follow. The frame is acknowledged like data.

        :raises LocalProtocolError: the transport is not open, its window is closed, or the remote does not support
            half-close.
        """
        end = transport.secure
        if transport.state is not State.OPEN or end is None or not end.half_close or not end.may_send:
            raise LocalProtocolError("this transport cannot be half-closed in its present state")
        payload = end.seal_end(ticket)
        self._outgoing += (pack_header(FWD, transport.id, len(payload)), payload)

    def consumed(self, transport: ClientTransport, size: int) -> None:
        """Record that the application has read ``size`` bytes. Send withheld ACKs, or a larger window, if it has read
        enough."""
        if transport.is_secure:
            if transport.secure is not None and transport.secure.consume(size) and not transport.ack_due:
                transport.ack_due = True
                self._due.append(transport)
            return
        transport.unread -= size
        if transport.held_acks and transport.unread < UNREAD_LIMIT and transport.state is State.OPEN:
            transport_id = transport.id
            self._outgoing.extend([encode_ack(transport_id, sequence) for sequence in transport.held_acks])
            transport.held_acks.clear()
            transport.held_size = 0

    # --- frames from the server ---

    # This loop processes every frame of the client. It handles data and ACKs of open transports itself, because a call
    # for each frame would cost more than the rest of the work.
    def receive_frames(self, buffer: bytearray, end: int, limit: int = sys.maxsize) -> tuple[int, list[Event]]:  # noqa: C901, PLR0912, PLR0915
        """Process the whole frames at the start of ``buffer``.

        :param end: length of the plaintext in ``buffer``.
        :param limit: maximum number of frames to process. When it is reached, :attr:`has_frames_left` is set, and the
            caller must pass the rest again.
        :returns: number of processed bytes, and the events. See :attr:`broken`, too.
        """
        events: list[Event] = []
        transports = self.transports
        outgoing = self._outgoing
        view = memoryview(buffer)
        position = 0
        self._answered.clear()
        while end - position >= HEADER_SIZE and self.broken is None and limit:
            limit -= 1
            frame_type, transport_id, size = unpack_header(buffer, position)
            start = position + HEADER_SIZE
            following = start + size
            if following > end:
                break
            position = following
            transport = transports.get(transport_id)
            if transport is not None and transport.state is State.OPEN and self.established:
                if transport.is_secure:
                    if FWD <= frame_type <= ACK:
                        self._receive_secure(transport, frame_type, view[start:following], events)
                        continue
                elif frame_type == FWD and size >= SEQUENCE_SIZE:
                    sequence = buffer[start] << 8 | buffer[start + 1]
                    size -= SEQUENCE_SIZE
                    if size:
                        transport.unread += size
                        # A sender of 2019 waits for each ACK, and withheld ACKs are its only back-pressure.
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
                elif frame_type == ACK and size == SEQUENCE_SIZE:
                    # An ACK of an unknown sequence is ignored, as in the reference.
                    waiting = transport.in_flight.pop(buffer[start] << 8 | buffer[start + 1], None)
                    if waiting is not None:
                        transport.in_flight_bytes -= waiting[0]
                        events.append(Acknowledged(transport, waiting[1]))
                    continue
            try:
                self._receive_control(frame_type, transport_id, bytes(view[start:following]), transport, events)
            except RemoteProtocolError as error:
                self.broken = error  # The session handles the error after the events of earlier frames.
                break
            # A handshake counts as the number of frames that take equally long. Otherwise a read full of REQUESTs would
            # keep the reactor from all other work.
            if self._handshake_cost:
                limit = max(0, limit - self._handshake_cost)
                self._handshake_cost = 0
        self.has_frames_left = not limit
        if self.unread_requests:
            events += self.read_requests()
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
            self._on_first(frame_type, payload, events)
        elif frame_type in (PONG, DRAIN, NOTICE) and self._pinged:
            self._on_server_frame(frame_type, payload, events)
        elif frame_type == PING and self.side is not Side.CLIENT:
            self._on_ping(payload)
        elif transport is None:
            self._on_unknown(frame_type, transport_id, payload, events)
        elif frame_type == REQUEST and transport.state is not State.REQUESTED:
            raise RemoteProtocolError(DropReason.REQUEST_ON_USED_ID, "a REQUEST has an id that is in use")
        elif frame_type == CLOSE:
            self._on_close(transport, payload, events)
        else:
            self._BY_STATE[transport.state](self, transport, frame_type, payload, events)

    def _on_unknown(self, frame_type: int, transport_id: int, payload: bytes, events: list[Event]) -> None:
        if transport_id in self.unread_requests:
            if frame_type == REQUEST:
                raise RemoteProtocolError(DropReason.REQUEST_ON_USED_ID, "a REQUEST has an id that is in use")
            del self.unread_requests[transport_id]
            if frame_type != CLOSE:
                self._refuse(transport_id, CloseReason.BAD_FRAME)
        elif frame_type == REQUEST:
            self._on_request(transport_id, payload, events)
        elif frame_type != CLOSE and transport_id not in self._answered:
            # One CLOSE answers all frames of this id in a read. Otherwise a remote could make this client flood the
            # server, which would then disconnect this client.
            self._answered.add(transport_id)
            self._refuse(transport_id, CloseReason.NO_SUCH_TRANSPORT)

    def _on_first(self, frame_type: int, payload: bytes, events: list[Event]) -> None:
        if frame_type == CLOSE:
            who = "server" if self.side is Side.CLIENT else "the other client"
            text = f"{who} refuses this client: {close_reason_text(close_reason(payload))}"
            raise RemoteProtocolError(DropReason.REFUSED, text)
        if frame_type != OK:
            raise RemoteProtocolError(
                DropReason.NO_OK_FRAME, f"the server's first frame has type {frame_type:#x}, not OK"
            )
        self.established = True
        if self.side is Side.CALLED:
            self._outgoing.append(OK_FRAME)
        events.append(Established())

    def _on_close(self, transport: ClientTransport, payload: bytes, events: list[Event]) -> None:
        if transport.answer is not None:
            self._resume_stream(transport, transport.answer, CLOSE, payload, events)
        end = transport.secure
        said = None
        if end is not None and transport.state in (State.OPEN, State.ANSWERED):
            if end.unproven is not None and len(payload) > 1:
                self._prove(transport, end, CLOSE, payload, events)
            said = end.open_close(payload)
            if said is not None and transport.state is State.ANSWERED:
                # The first frame of the initiator is an authentic CLOSE. It proves that the initiator has the keys, and
                # ends the transport.
                self._move(transport, Input.RECV_CONFIRM)
                events.append(Confirmed(transport))
        refused = transport.state is not State.OPEN
        self._move(transport, Input.RECV_CLOSE)
        self._remove(transport, was_open=not refused)
        reason = close_reason(payload) if said is None else said
        by = EndedBy.UNAUTHENTICATED if said is None else EndedBy.REMOTE
        events.append(Closed(transport, reason, refused, by, end))

    def _on_answer(self, transport: ClientTransport, frame_type: int, payload: bytes, events: list[Event]) -> None:
        if frame_type == ACCEPT and transport.proposal is not None and not transport.upgrade:
            self._on_secure_accept(transport, payload, events)
        elif frame_type != ACCEPT or payload != transport.payload:
            self._fail(transport, CloseReason.BAD_FRAME, events)
        elif transport.upgrade:
            self._move(transport, Input.RECV_INVITATION)
            transport.prefaced = 0
        else:
            self._move(transport, Input.RECV_ACCEPT)
            events.append(Accepted(transport))

    def _on_early(self, transport: ClientTransport, frame_type: int, payload: bytes, events: list[Event]) -> None:
        """Close the transport, because its initiator sent a frame before this end has answered."""
        self._fail(transport, CloseReason.BAD_FRAME, events)

    def _on_misfit(self, transport: ClientTransport, frame_type: int, payload: bytes, events: list[Event]) -> None:
        """Close the transport for a FWD or ACK of a wrong size. Ignore OK, ACCEPT and unknown types."""
        if frame_type in (FWD, ACK):
            self._fail(transport, CloseReason.BAD_FRAME, events)

    _BY_STATE: ClassVar[dict[State | None, _Handler]] = {
        State.REQUESTED: _on_answer,
        State.AGREEING: RequestTable._upgrade,  # noqa: SLF001  # of its base
        State.INVITED: RequestTable._upgrade,  # noqa: SLF001  # of its base
        State.ANSWERED: RequestTable._confirm,  # noqa: SLF001  # of its base
        State.OFFERED: _on_early,
        State.OPEN: _on_misfit,
    }
    """Handlers, by state, of frames other than REQUEST and CLOSE. ``receive_frames`` handles data of open transports
    itself."""

    def _on_server_frame(self, frame_type: int, payload: bytes, events: list[Event]) -> None:
        if frame_type == PONG:
            events.append(Ponged(payload))
            return
        if frame_type == NOTICE:
            if 0 < len(payload) <= MAX_NOTICE:
                events.append(Noticed(payload[0], payload[1:].decode("ascii", "replace")))
            return
        try:
            events.append(Draining(*parse_drain(payload)))
        except KeyFormatError as error:
            raise RemoteProtocolError(DropReason.BAD_FRAME, f"a DRAIN frame is malformed: {error}") from None

    def _on_ping(self, payload: bytes) -> None:
        """Answer a PING of the other client on a direct link, as a server would."""
        if len(payload) > MAX_PING:
            raise RemoteProtocolError(DropReason.BAD_FRAME, "a PING frame is malformed")
        self._outgoing.append(encode_frame(PONG, 0, payload))
