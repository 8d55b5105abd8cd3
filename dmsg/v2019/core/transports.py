"""Table of the transports of one connection to a server: ids, states, output buffer and receipts.

This base class chooses the ids of new transports, applies ``TRANSITIONS``, and writes CLOSE, PING and receipts. Its
subclasses add handshakes (:mod:`dmsg.v2019.core.handshakes`) and the processing of frames
(:class:`~dmsg.v2019.core.table.ClientConnection`). No I/O, no clock.

Invariants: a transport is in the table from its REQUEST until its CLOSE or the loss of the connection. Ids that this
client chooses are even, and ids that the server assigns are odd, so the two sides never choose the same id. On a direct
link between two clients, the caller chooses even ids and the other client odd ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from random import Random

from dmsg.base.pool import BufferPool
from dmsg.errors import CloseReason, LocalProtocolError
from dmsg.keys import PubKey, SecKey
from dmsg.streams.core.budget import Budget
from dmsg.telemetry.receipts import Receipt, Role, transport_identity
from dmsg.v2019.core.state import TRANSITIONS, ClientTransport, Input, State
from dmsg.v2019.core.wire import (
    ACK,
    CLOSE,
    HEADER_SIZE,
    ID_COUNT,
    IDS_PER_SIDE,
    MAX_FRAME_PAYLOAD,
    PING,
    RECEIPT,
    encode_close,
    encode_frame,
    pack_header,
)

FRAMES = BufferPool(HEADER_SIZE + MAX_FRAME_PAYLOAD, 16)
"""Pool of buffers for large encrypted frames, each in use until the link takes the frame at the end of the reactor
turn."""


class Side(Enum):
    """Side of a connection, which decides who chooses even ids, who sends OK first, and who answers PING."""

    CLIENT = auto()
    """Client of a server: chooses even ids, waits for the server's OK."""
    CALLER = auto()
    """Client that opened a direct link to another client: chooses even ids, sends OK first, answers PING."""
    CALLED = auto()
    """Client that accepted a direct link from another client: chooses odd ids, answers OK with OK, answers PING."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSettings:
    """Settings of the table of one connection.

    :ivar key: secret key for secure transports and receipts. Without it, only plain transports are accepted.
    :ivar random: generator of the first id and of the first sequence numbers.
    :ivar budget: memory budget from which receive windows grow; by default that of the process.
    :ivar receipts_to: key of the server if it gets receipts for the data that it delivers, otherwise None.
    :ivar refusal: called before the handshake of a REQUEST is computed, with the initiator's key and ephemeral key. The
        ephemeral key is None in a plain REQUEST. The function returns the reason to refuse the REQUEST, or None.
    :ivar make_room: called with the requester's key; evicts an incoming transport to make room for a new one. Returns
        False if none may be evicted.
    :ivar is_own_check: called when a plain REQUEST from this client's own key arrives. Returns whether the REQUEST
        belongs to a check of a client's reachability, so that it is refused.
    :ivar side: side of the connection: client of a server, or one end of a direct link between two clients.
    """

    key: SecKey | None = None
    random: Random | None = None
    budget: Budget | None = None
    receipts_to: PubKey | None = None
    refusal: Callable[[bytes, bytes | None], CloseReason | None] = lambda initiator, ephemeral: None
    make_room: Callable[[PubKey | None], bool] = lambda initiator: False
    is_own_check: Callable[[], bool] = lambda: False
    side: Side = Side.CLIENT


PLAIN_CLIENT = TableSettings()
"""Settings of a client of a server that has only plain transports."""


class TransportTable:
    """Table of one connection's transports, with the frames to send.

    :ivar incoming: number of transports that other clients opened.
    """

    def __init__(self, local: PubKey, settings: TableSettings = PLAIN_CLIENT) -> None:
        self.local = local
        self.side = settings.side
        self._parity = int(settings.side is Side.CALLED)
        """Lowest bit of the ids that this table chooses."""
        self._receipts_to = settings.receipts_to if settings.key is not None else None
        self._key = settings.key
        self._due: list[ClientTransport] = []
        self._pinged = False
        """Whether a PING was sent. After it, the server may send PONG, DRAIN and NOTICE."""
        self.transports: dict[int, ClientTransport] = {}
        self.incoming = 0
        self.removed: list[ClientTransport] = []
        """Closed transports that may still refer to a carrier. The session deletes these references after it has
        handled the events."""
        self._random = settings.random or Random()
        self._next_id = self._random.randrange(IDS_PER_SIDE) * 2 + self._parity
        self._outgoing: list[bytes | tuple[bytearray, int]] = []
        """Data to send, in order. An item is bytes (a frame, or a part of one), or a pair of a buffer from ``FRAMES``
        and the length of the frame in it."""
        self.is_lost = False
        """Whether the connection is lost, so that no receipts can be sent over it."""

    @property
    def has_free_id(self) -> bool:
        """Whether this client can choose an id for another REQUEST."""
        return len(self.transports) - self.incoming < IDS_PER_SIDE

    def _free_id(self) -> int:
        # Ids count up and wrap around, so that an id is reused as late as possible.
        transport_id = self._next_id
        if not self.has_free_id:
            raise LocalProtocolError("all transport ids of this connection are in use: close some transports first")
        while transport_id in self.transports:
            transport_id = (transport_id + 2) % ID_COUNT
        self._next_id = (transport_id + 2) % ID_COUNT
        return transport_id

    def _add(self, transport_id: int, remote: PubKey, payload: bytes, *, initiator: bool) -> ClientTransport:
        transport = ClientTransport(transport_id, remote, payload, initiator, self._random.randrange(0x10000))
        self.transports[transport_id] = transport
        if not initiator:
            self.incoming += 1
        return transport

    def _remove(self, transport: ClientTransport, *, was_open: bool) -> None:
        if was_open and not self.is_lost and (receipt := self.receipt(transport)) is not None:
            self.hand_in([receipt])
        # The transport may be missing, because the table is cleared when the connection is lost.
        if self.transports.pop(transport.id, None) is not None and not transport.initiator:
            self.incoming -= 1
        transport.held_acks.clear()
        self.removed.append(transport)
        self.withdraw(transport)

    @staticmethod
    def withdraw(transport: ClientTransport) -> None:
        """Discard the transport's answer to a RESUME, because it cannot be confirmed any more."""
        answer, transport.answer = transport.answer, None
        if answer is not None:
            answer.end.answers.pop(transport, None)

    @staticmethod
    def _move(transport: ClientTransport, event: Input) -> None:
        state = TRANSITIONS.get((transport.state, event))
        if state is None:
            raise LocalProtocolError(f"{event.name} is not possible for a transport in state {transport.state}")
        transport.state = state

    # --- frames to send ---

    def ping(self, payload: bytes) -> None:
        """Send a PING. :class:`~dmsg.v2019.core.events.Ponged` follows. The server must support PING."""
        self._pinged = True
        self._outgoing.append(encode_frame(PING, 0, payload))

    def close(self, transport: ClientTransport, reason: int = CloseReason.UNSPECIFIED) -> None:
        """Close a transport and send CLOSE. No event follows. If the transport is closed already, do nothing."""
        state = transport.state
        if state is not None and state is not State.CLOSED:
            self._move(transport, Input.SEND_CLOSE)
            self._remove(transport, was_open=state is State.OPEN)
            if transport.secure is not None and state is State.OPEN:
                if transport.ack_due:
                    # A due ACK is sent before the CLOSE, because the remote must know which data have arrived.
                    transport.ack_due = False
                    payload = transport.secure.seal_ack()
                    self._outgoing += (pack_header(ACK, transport.id, len(payload)), payload)
                payload = transport.secure.seal_close(reason)
                self._outgoing.append(encode_frame(CLOSE, transport.id, payload))
            else:
                self._outgoing.append(encode_close(transport.id, reason))

    def data_to_send(self) -> bytes:
        """Return the frames to send, including due ACKs, and clear the output buffer."""
        pieces: list[bytes] = []
        self.send_through(lambda piece: pieces.append(bytes(piece)))
        return b"".join(pieces)

    def send_through(self, send: Callable[[bytes | memoryview], object]) -> None:
        """Pass the frames to send, including due ACKs, to ``send``, and clear the output buffer.

        :param send: called with one or more whole frames. A memoryview is valid only until the call returns.
        """
        outgoing = self._outgoing
        if self._due:
            for transport in self._due:
                transport.ack_due = False
                if transport.secure is not None and transport.state is State.OPEN:
                    payload = transport.secure.seal_ack()
                    outgoing += (pack_header(ACK, transport.id, len(payload)), payload)
            self._due.clear()
        if not outgoing:
            return
        self._outgoing = []
        # Small pieces are joined. Large frames are passed separately, because copying a frame would take as long as
        # encrypting it.
        small: list[bytes] = []
        for piece in outgoing:
            if not isinstance(piece, tuple):
                small.append(piece)
                continue
            if small:
                send(b"".join(small))
                small.clear()
            frame, size = piece
            send(memoryview(frame)[:size])
            FRAMES.give_back(frame)
        if small:
            send(b"".join(small))

    # --- receipts ---

    def _identify(self, transport: ClientTransport, accept: bytes) -> None:
        # Upgrades, which are only used with servers of 2019, have no receipts. No server could compute the identity of
        # an upgraded transport, because no server can tell which frames contain the handshake.
        if self._receipts_to is not None and not transport.upgrade:
            transport.identity = transport_identity(transport.payload, accept)

    def receipt(self, transport: ClientTransport) -> bytes | None:
        """Return the signed receipt for the data that the server delivered over a closed transport.

        :returns: None if the receipt was returned before, or if the server gets none.
        """
        identity, transport.identity = transport.identity, None
        if identity is None:
            return None
        assert self._receipts_to is not None and self._key is not None
        receipt = Receipt(
            Role.INITIATOR if transport.initiator else Role.RESPONDER,
            identity,
            self._receipts_to,
            self.local,
            transport.remote,
            *transport.says_delivered,
        )
        return receipt.sign(self._key)

    def hand_in(self, receipts: Iterable[bytes]) -> None:
        """Queue a RECEIPT frame for each of ``receipts``, which this client has signed."""
        self._outgoing.extend(encode_frame(RECEIPT, 0, receipt) for receipt in receipts)
