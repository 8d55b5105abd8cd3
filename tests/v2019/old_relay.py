"""Relay with the rules of the 2019 server, as far as recorded exchanges show them."""

from __future__ import annotations

from typing import Any

from dmsg.errors import DropReason, RemoteProtocolError
from dmsg.keys import PUBKEY_SIZE
from dmsg.v2019.core.relay import Relay
from dmsg.v2019.core.wire import HANDSHAKE_PAYLOAD_SIZE, PING, REQUEST, encode_close


class OldRelay(Relay):
    """Relay that ends a connection after a PING, and that refuses, without a reason, a REQUEST that is not 66 bytes
    long or that is for a client that is not connected.

    Payloads of other frames are passed on as they are, as in ``payloads_are_not_checked`` and ``close_payloads`` of
    ``tests/vectors/server_rules.json``.
    """

    pings = 0

    def _receive_control(self, peer: Any, frame_type: int, own_id: int, payload: bytes) -> None:
        if frame_type == PING:
            self.pings += 1
            raise RemoteProtocolError(DropReason.UNKNOWN_FRAME)
        if frame_type == REQUEST and (
            len(payload) != HANDSHAKE_PAYLOAD_SIZE or payload[PUBKEY_SIZE:] not in self.newest
        ):
            self._answer(peer, encode_close(own_id, 0))
            return
        super()._receive_control(peer, frame_type, own_id, payload)
