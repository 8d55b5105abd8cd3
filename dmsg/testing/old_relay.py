"""Server that behaves like a server of 2019, as far as recorded exchanges show its behaviour."""

from __future__ import annotations

from typing import Any

from dmsg.errors import DropReason, RemoteProtocolError
from dmsg.keys import PUBKEY_SIZE, PubKey
from dmsg.v2019.core.peers import ConnectionPort, RelayPeer
from dmsg.v2019.core.relay import Relay
from dmsg.v2019.core.wire import CLOSE, HANDSHAKE_PAYLOAD_SIZE, HEADER_SIZE, PING, REQUEST, encode_close
from dmsg.v2019.server import Server

VERSION = "0.0.1"
"""Field ``version`` of the entries of programs of 2019."""


class OldRelay(Relay):
    """Relay that follows four rules of 2019.

    It ends a connection after a PING. It refuses a REQUEST whose payload does not have 66 bytes, or whose destination
    is not connected. Its own CLOSE frames give no reason. When a connection ends, no REQUEST reaches other connections
    of the same key any more, as in the recorded exchange ``second_connection_of_a_key``.

    Payloads of other frames are forwarded unchanged, as in the recorded exchanges ``payloads_are_not_checked`` and
    ``close_payloads``.
    """

    pings = 0
    unreachable: frozenset[bytes] = frozenset()
    """Keys of connected clients that no REQUEST reaches, because an older connection of the same key has ended."""
    _is_forwarding = False
    """Whether the CLOSE that is being processed comes from the other client, so that its reason is kept."""

    def _receive_control(self, peer: Any, frame_type: int, own_id: int, payload: bytes) -> None:
        if frame_type == PING:
            self.pings += 1
            raise RemoteProtocolError(DropReason.UNKNOWN_FRAME)
        remote = payload[PUBKEY_SIZE:]
        if frame_type == REQUEST and (
            len(payload) != HANDSHAKE_PAYLOAD_SIZE or remote not in self.newest or remote in self.unreachable
        ):
            self._answer(peer, encode_close(own_id, 0))
            return
        self._is_forwarding = frame_type == CLOSE and own_id in peer.routes
        try:
            super()._receive_control(peer, frame_type, own_id, payload)
        finally:
            self._is_forwarding = False

    def add(self, key: PubKey, port: ConnectionPort) -> RelayPeer:
        self.unreachable -= {bytes(key)}
        return super().add(key, port)

    def _forget(self, peer: RelayPeer) -> None:
        super()._forget(peer)
        if self.connections.of_key(peer.key):
            self.unreachable |= {bytes(peer.key)}
        else:
            self.unreachable -= {bytes(peer.key)}

    def _answer(self, peer: Any, frame: bytes) -> None:
        if frame[0] == CLOSE and not self._is_forwarding:
            frame = frame[:HEADER_SIZE] + b"\0"
        super()._answer(peer, frame)


def make_old(server: Server, version: str = VERSION) -> None:
    """Let a server that has not started yet follow the rules of 2019.

    :param version: field ``version`` of its entry.
    """
    server.factory.relay.__class__ = OldRelay
    server.registration._mark = lambda _: version  # noqa: SLF001  # A server of today always says what it offers.
