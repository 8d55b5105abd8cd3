"""REQUESTs of other clients on one connection: which are refused, and when their handshakes are computed. No I/O.

The checks of a REQUEST are ordered by their cost. REQUESTs for secure transports that pass the cheap checks wait,
because handshakes take long: a few are computed after each read, and the others in later reactor turns.
"""

from __future__ import annotations

from itertools import islice

from dmsg.errors import CloseReason, HandshakeError, KeyFormatError
from dmsg.keys import PUBKEY_SIZE, PubKey
from dmsg.streams.core.agreement import Offer, is_secure
from dmsg.v2019.core.events import Event, Requested
from dmsg.v2019.core.handshakes import SecureTable
from dmsg.v2019.core.state import ClientTransport, Input
from dmsg.v2019.core.transports import PLAIN_CLIENT, TableSettings
from dmsg.v2019.core.wire import ACCEPT, HANDSHAKE_PAYLOAD_SIZE, encode_close, encode_frame

MAX_INCOMING = 4096
"""Maximum number of transports of one connection that other clients have opened."""
HANDSHAKES_A_TURN = 8
"""Maximum number of handshakes that are computed after the frames of a read, and in each later reactor turn. The limit
keeps frames of open transports from waiting for many handshakes."""
UNREAD_REQUESTS = 8192
"""Maximum number of REQUESTs of one connection whose handshake is not computed yet. Further REQUESTs are refused."""


class RequestTable(SecureTable):
    """Table of one connection's transports that also answers the REQUESTs of other clients.

    :ivar accepting: whether REQUESTs are passed to the application. If not, they are answered with CLOSE.
    """

    def __init__(self, local: PubKey, settings: TableSettings = PLAIN_CLIENT) -> None:
        super().__init__(local, settings)
        self.accepting = False
        self.make_room = settings.make_room
        self._is_own_check = settings.is_own_check
        self.unread_requests: dict[int, bytes] = {}
        """REQUESTs whose handshake is not computed yet, by transport id, the oldest first. See
        :meth:`read_requests`."""

    def accept(self, transport: ClientTransport) -> None:
        """Answer a REQUEST with ACCEPT.

        :raises LocalProtocolError: the transport is not waiting for an answer.
        """
        self._move(transport, Input.SEND_ACCEPT)
        self._outgoing.append(encode_frame(ACCEPT, transport.id, transport.payload))

    def read_requests(self) -> list[Event]:
        """Compute the next few handshakes of ``unread_requests``, and return their events."""
        events: list[Event] = []
        for transport_id in list(islice(self.unread_requests, HANDSHAKES_A_TURN)):
            payload = self.unread_requests.pop(transport_id)
            try:
                assert self._key is not None
                offer = Offer(self._key, payload)
            except KeyFormatError:
                # The reference accepts any key of an initiator, even the null key. This client accepts valid keys only.
                self._refuse(transport_id, CloseReason.BAD_REQUEST)
            except HandshakeError:
                self._refuse(transport_id, CloseReason.NOT_AUTHENTIC)
            else:
                self._offer(transport_id, payload, offer, events)
        return events

    def _on_request(self, transport_id: int, payload: bytes, events: list[Event]) -> None:
        secure = is_secure(payload)
        mine = payload[PUBKEY_SIZE:HANDSHAKE_PAYLOAD_SIZE] == self.local
        if not mine or transport_id & 1 == self._parity or (secure and self._key is None):
            self._refuse(transport_id, CloseReason.BAD_REQUEST)
        elif not secure and payload[:PUBKEY_SIZE] == self.local and self._is_own_check():
            # Limits do not apply to a check. A refusal because of a limit would say nothing about the reachability.
            self._refuse(transport_id, CloseReason.REFUSED)
        elif not self.accepting:
            self._refuse(transport_id, CloseReason.REFUSED)
        elif (unseen := self._check_unseen(payload)) is not None:
            # This check comes before all expensive work, even before the initiator's key is parsed.
            self._refuse(transport_id, unseen)
        elif not secure:
            self._offer(transport_id, payload, None, events)
        elif len(self.unread_requests) >= UNREAD_REQUESTS:
            self._refuse(transport_id, CloseReason.RATE_LIMITED)
        else:
            self.unread_requests[transport_id] = payload

    def _offer(self, transport_id: int, payload: bytes, offer: Offer | None, events: list[Event]) -> None:
        try:
            initiator = PubKey.shared(bytes(payload[:PUBKEY_SIZE]))
        except KeyFormatError:
            # The reference accepts any key of an initiator, even the null key. This client accepts valid keys only.
            self._refuse(transport_id, CloseReason.BAD_REQUEST)
            return
        # An initiator that has not proved its key is passed as None, so that it cannot displace confirmed transports.
        if self.incoming >= MAX_INCOMING and not self.make_room(None if offer is None else initiator):
            self._refuse(transport_id, CloseReason.TOO_MANY_TRANSPORTS)
            return
        transport = self._add(transport_id, initiator, payload, initiator=False)
        transport.offer = offer
        transport.is_secure = offer is not None
        self._move(transport, Input.RECV_REQUEST)
        events.append(Requested(transport))

    def _refuse(self, transport_id: int, reason: CloseReason) -> None:
        self._outgoing.append(encode_close(transport_id, reason))
