"""Client that makes the handshake with a server, and then sends exactly the frames that a test passes to it."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.interfaces import IAddress
from twisted.internet.protocol import ClientFactory, Protocol
from twisted.python.failure import Failure

from dmsg.keys import PubKey, SecKey
from dmsg.noise.records import RecordOpener, RecordSealer
from dmsg.noise.xk import XKHandshake
from dmsg.v2019.core.wire import Frame, FrameBuffer

SPARE_SIZE = 70_000
"""Spare bytes of the buffer for decrypted data, in addition to the size of the received data. They hold more than the
longest record, because the received data may complete a record whose start arrived earlier."""


class RawClient(Protocol):
    """Client that sends exactly the frames that a test passes to it, on a real or simulated connection. It encrypts the
    frames, but never sends one by itself.

    :param ephemeral: ephemeral key of the handshake; None for a random one.
    :ivar frames: received frames that :meth:`take` has not returned yet.
    :ivar closed: whether the connection has ended.
    """

    def __init__(self, key: SecKey, server: PubKey, ephemeral: SecKey | None = None) -> None:
        self._handshake = XKHandshake(key, server, ephemeral=ephemeral)
        self._buffer = FrameBuffer()
        self.opener: RecordOpener | None = None
        self.key = key
        self.frames: list[Frame] = []
        self.closed = False

    def connectionMade(self) -> None:
        assert self.transport is not None
        self.transport.write(self._handshake.data_to_send())

    def dataReceived(self, data: bytes) -> None:
        assert self.transport is not None
        if self.opener is None:
            self._handshake.receive_data(data)
            self.transport.write(self._handshake.data_to_send())
            if self._handshake.remote is None:
                return
            assert self._handshake.keys is not None
            sending, receiving = self._handshake.keys
            self.sealer, self.opener = RecordSealer(sending), RecordOpener(receiving)
            data = self._handshake.trailing_data()
        scratch = bytearray(len(data) + SPARE_SIZE)
        self.frames += self._buffer.feed(bytes(scratch[: self.opener.open_into(data, scratch, 0)]))
        self.frames_changed()

    def frames_changed(self) -> None:
        """Hook for subclasses, which is called after frames were received or the connection has ended."""

    def send(self, plaintext: bytes) -> None:
        """Encrypt ``plaintext``, and send it as one record."""
        assert self.opener is not None and self.transport is not None
        self.transport.write(bytes(self.sealer.seal(plaintext)))

    def take(self) -> list[Frame]:
        """Return the frames that were received since the last call."""
        frames, self.frames = self.frames, []
        return frames

    def connectionLost(self, reason: Failure | None = None) -> None:
        self.closed = True
        self.frames_changed()


class RawFactory(ClientFactory[RawClient]):
    """Factory that connects one client, a :class:`RawClient`, which sends only the frames that a test passes to it.

    :param on_failed: called if no connection can be made.
    """

    noisy = False

    def __init__(self, client: RawClient, on_failed: Callable[[], None]) -> None:
        self._client = client
        self._on_failed = on_failed

    def buildProtocol(self, addr: IAddress | None) -> RawClient:
        return self._client

    def clientConnectionFailed(self, connector: object, reason: Failure) -> None:
        self._on_failed()
