"""The transports of one connection to a server: their ids and states, what is to be sent, what is signed at the end.

:class:`~dmsg.v2019.core.table.ClientConnection` adds what frames do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random

from dmsg.base.pool import BufferPool
from dmsg.errors import CloseReason, LocalProtocolError
from dmsg.keys import PubKey, SecKey
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
"""For large frames, until they are handed on: at the end of the turn in which they were sealed."""
LARGE = 16 * 1024
"""Bytes of user data from which a frame has a buffer of its own; as ``DIRECT_SIZE`` of links, which take such a one
where it lies."""


class TransportTable:
    """What is there, and what is to be sent.

    :param key: signs receipts.
    :param receipts_to: the server's key, if it is to have receipts for what it delivers.
    :ivar incoming: transports that others opened.
    """

    def __init__(
        self,
        local: PubKey,
        *,
        key: SecKey | None = None,
        random: Random | None = None,
        receipts_to: PubKey | None = None,
    ) -> None:
        self.local = local
        self._receipts_to = receipts_to if key is not None else None
        self._key = key
        self._due: list[ClientTransport] = []
        self._pinged = False
        """The server was shown that this client knows PING, and so PONG, DRAIN and NOTICE."""
        self.transports: dict[int, ClientTransport] = {}
        self.incoming = 0
        self.removed: list[ClientTransport] = []
        """Those that are over and may still have a carrier, which whoever handles the events takes from them."""
        self._random = random or Random()
        self._next_id = self._random.randrange(IDS_PER_SIDE) * 2
        self._outgoing: list[bytes | tuple[bytearray, int]] = []
        """Pieces of frames, and whole frames in buffers of ``FRAMES`` with their length."""
        self.lost = False
        """The connection is gone: nothing can be handed in any more."""

    @property
    def has_free_id(self) -> bool:
        """Another transport can be asked for."""
        return len(self.transports) - self.incoming < IDS_PER_SIDE

    def _free_id(self) -> int:
        transport_id = self._next_id
        if not self.has_free_id:
            raise LocalProtocolError("all transport ids of this connection are in use")
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
        if was_open and not self.lost and (receipt := self.receipt(transport)) is not None:
            self.hand_in([receipt])
        # a connection that was lost has forgotten its transports already
        if self.transports.pop(transport.id, None) is not None and not transport.initiator:
            self.incoming -= 1
        transport.held_acks.clear()
        self.removed.append(transport)
        self.withdraw(transport)

    @staticmethod
    def withdraw(transport: ClientTransport) -> None:
        """Forget the answer to a RESUME: nobody can confirm it any more."""
        answer, transport.answer = transport.answer, None
        if answer is not None:
            answer.end.answers.pop(transport, None)

    @staticmethod
    def _move(transport: ClientTransport, what: Input) -> None:
        state = TRANSITIONS.get((transport.state, what))
        if state is None:
            raise LocalProtocolError(f"{what.name} in state {transport.state}")
        transport.state = state

    # --- what is to be sent ---

    def ping(self, payload: bytes) -> None:
        """Ask the server, which must know of it, for :class:`~dmsg.v2019.core.events.Ponged`."""
        self._pinged = True
        self._outgoing.append(encode_frame(PING, 0, payload))

    def close(self, transport: ClientTransport, reason: int = CloseReason.UNSPECIFIED) -> None:
        """Send CLOSE; no event follows.  Closing what is closed does nothing."""
        state = transport.state
        if state is not None and state is not State.CLOSED:
            self._move(transport, Input.SEND_CLOSE)
            self._remove(transport, was_open=state is State.OPEN)
            if transport.secure is not None and state is State.OPEN:
                if transport.ack_due:  # what came is acknowledged, also when the end is all that follows
                    transport.ack_due = False
                    payload = transport.secure.seal_ack()
                    self._outgoing += (pack_header(ACK, transport.id, len(payload)), payload)
                payload = transport.secure.seal_close(reason)
                self._outgoing.append(encode_frame(CLOSE, transport.id, payload))
            else:
                self._outgoing.append(encode_close(transport.id, reason))

    def data_to_send(self) -> bytes:
        """The frames to send, with the ACKs that are due; empties the buffer."""
        pieces: list[bytes] = []
        self.send_through(lambda piece: pieces.append(bytes(piece)))
        return b"".join(pieces)

    def send_through(self, send: Callable[[bytes | memoryview], object]) -> None:
        """Hand the frames to ``send``, with the ACKs that are due; empties the buffer.

        :param send: gets whole frames; what it gets is there until it returns.
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

    # --- what is signed at the end ---

    def _identify(self, transport: ClientTransport, accept: bytes) -> None:
        # a server that takes receipts carries secure transports, and does not know the messages of an upgrade
        if self._receipts_to is not None and not transport.upgrade:
            transport.identity = transport_identity(transport.payload, accept)

    def receipt(self, transport: ClientTransport) -> bytes | None:
        """Say, signed and once, what the server has delivered over a transport that is over.

        :returns: None if that was said, or is not asked for.
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
        """Send receipts that are kept from a connection before."""
        self._outgoing.extend(encode_frame(RECEIPT, 0, receipt) for receipt in receipts)
