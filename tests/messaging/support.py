"""Helpers of the Messaging System's tests: vectors, recorded randomness, a network in memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from coincurve import PublicKey
from twisted.internet.protocol import Factory
from twisted.internet.task import Clock

from dmsg.keys import PubKey, SecKey, Signature
from dmsg.messaging.core.dialect import Acks, Dialect
from dmsg.messaging.core.handshake import JSONHandshake
from dmsg.messaging.core.wire import Profile
from dmsg.messaging.protocol import ServerFactory
from dmsg.messaging.session import ClientSession
from dmsg.net.flush import TurnFlush
from dmsg.net.links.plain import PlainLink
from tests.support import VECTORS, JoinedNetwork, Recorder

ORDER = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141


def vectors(name: str) -> dict[str, Any]:
    """Return a file of recorded exchanges of the Go code of March 2019."""
    loaded: dict[str, Any] = json.loads((VECTORS / "messaging" / f"{name}.json").read_text())
    return loaded


def _keys() -> dict[str, SecKey]:
    """Return the secret keys A, B, S and X of the vectors."""
    return {key["name"][-1]: SecKey.from_hex(key["sec"]) for key in vectors("keys")["keys"]}


KEYS = _keys()


def sign_with(key: SecKey, k: int, payload: bytes) -> Signature:
    """Sign as the Go code does with the random number k: ECDSA over SHA-256, low s."""
    point = PublicKey.from_valid_secret(k.to_bytes(32, "big")).format(False)
    x, y = int.from_bytes(point[1:33], "big"), int.from_bytes(point[33:], "big")
    r = x % ORDER
    z = int.from_bytes(sha256(payload).digest(), "big")
    s = pow(k, -1, ORDER) * (z + r * int(key.hex(), 16)) % ORDER
    recovery = y & 1 | (2 if x >= ORDER else 0)
    if s > ORDER // 2:
        s, recovery = ORDER - s, recovery ^ 1
    return Signature(r.to_bytes(32, "big") + s.to_bytes(32, "big") + bytes((recovery,)))


class Randomness:
    """Random numbers of a recording, found by the public values that were made of them."""

    def __init__(self, calls: list[dict[str, Any]]) -> None:
        drawn = [bytes.fromhex(call["bytes"]) for call in calls]
        self._secrets = {}
        for one in drawn:
            if len(one) == 32 and 0 < int.from_bytes(one, "big") < ORDER:
                self._secrets[SecKey(one).public[1:]] = one

    def signer(self, key: SecKey, signature: str) -> Callable[[bytes], Signature]:
        """Return a function that signs with the k whose point is in this recorded signature."""
        k = int.from_bytes(self._secrets[bytes.fromhex(signature)[:32]], "big")
        return lambda payload: sign_with(key, k, payload)

    def ephemeral(self, message: bytes) -> SecKey:
        """Return the secret of the ephemeral key with which a Noise message begins."""
        return SecKey(self._secrets[message[1:33]])


class Network(JoinedNetwork):
    """Messaging server and its clients, in memory."""

    def __init__(self, profile: Profile = Profile.SEED, **server_options: Any) -> None:
        clock = Clock()
        self.profile = profile
        super().__init__(clock, ServerFactory(clock, KEYS["S"], profile, **server_options))

    @property
    def relay(self) -> Any:
        """Relay of the server."""
        return self.factory.relay

    def client(
        self,
        key: SecKey,
        accept: Factory | None = None,
        *,
        acks: Acks = False,
        two_ids: bool = False,
        host: str | None = None,
        **options: Any,
    ) -> Any:
        """Return a connected client."""
        dialect = Dialect(self.profile, acks, two_ids)
        turn = TurnFlush(self.clock)
        sessions: list[ClientSession] = []

        def make(remote: PubKey) -> ClientSession:
            session = ClientSession(self.clock, turn, key, remote, dialect, accept=lambda: accept, **options)
            sessions.append(session)
            return sessions[0]

        handshake = JSONHandshake(key, KEYS["S"].public, profile=self.profile)
        link = PlainLink(self.clock, turn, handshake, make)
        link.server_side = self.join(link, host)  # type: ignore[attr-defined]
        self.settle()
        (session,) = sessions
        assert session.connected
        session.link = link  # type: ignore[attr-defined]  # tests cut it
        return session

    def raw(self, key: SecKey) -> RawClient:
        """Return a connected client of plain frames."""
        client = RawClient(key, self.profile)
        client.server_side = self.join(client)
        self.settle()
        assert client.up
        return client

    def advance(self, seconds: float) -> None:
        """Advance the clock and deliver all data."""
        self.clock.advance(seconds)
        self.settle()


class RawClient(Recorder):
    """Client that sends and receives plain frames after the handshake."""

    server_side: Any = None

    def __init__(self, key: SecKey, profile: Profile) -> None:
        from dmsg.messaging.core.wire import FrameBuffer

        super().__init__()
        self.handshake = JSONHandshake(key, KEYS["S"].public, profile=profile)
        self.profile = profile
        self.up = False
        self._buffer = FrameBuffer(profile)
        self._lf = True
        self.frames: list[Any] = []
        self.key = key

    def connectionMade(self) -> None:
        assert self.transport is not None
        self.transport.write(self.handshake.data_to_send())

    def dataReceived(self, data: bytes) -> None:
        assert self.transport is not None
        if not self.up:
            self.handshake.receive_data(data)
            self.transport.write(self.handshake.data_to_send())
            if self.handshake.remote is None:
                return
            self.up = True
            data = self.handshake.trailing_data()
        if self._lf and data:
            self._lf = False
            data = data.removeprefix(b"\n")
        self.frames += self._buffer.feed(data)

    def send(self, frame_type: int, body: bytes) -> None:
        """Send a frame."""
        from dmsg.messaging.core.wire import encode_frame

        assert self.transport is not None
        self.transport.write(encode_frame(self.profile, frame_type, body))

    def take(self) -> list[tuple[int, bytes]]:
        """Return the frames since the last call."""
        frames, self.frames = [tuple(one) for one in self.frames], []
        return frames
