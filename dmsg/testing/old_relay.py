"""Server that behaves like a server of 2019, as far as recorded exchanges show its behaviour."""

from __future__ import annotations

from typing import Any

from dmsg.errors import DropReason, RemoteProtocolError
from dmsg.keys import PUBKEY_SIZE
from dmsg.v2019.core.relay import Relay
from dmsg.v2019.core.wire import HANDSHAKE_PAYLOAD_SIZE, PING, REQUEST, encode_close
from dmsg.v2019.server import Server

VERSION = "0.0.1"
"""Field ``version`` of the entries of programs of 2019."""


class OldRelay(Relay):
    """Relay that ends a connection after a PING, and that refuses, without a reason, a REQUEST that is not 66 bytes
    long or that is for a client that is not connected.

    Payloads of other frames are forwarded unchanged, as in the recorded exchanges ``payloads_are_not_checked`` and
    ``close_payloads``.
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


def make_old(server: Server, version: str = VERSION) -> None:
    """Let a server that has not started yet follow the rules of 2019.

    :param version: field ``version`` of its entry.
    """
    server.factory.relay.__class__ = OldRelay
    server.registration._mark = lambda _: version  # noqa: SLF001  # A server of today always says what it offers.
