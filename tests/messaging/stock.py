"""Client that behaves as the Go code of March and April 2019, including the errors that end its process.

Options choose one id or two, and whether the layer of acknowledgements is present.  Received data is not checked
beyond what that code checks.  Where the Go code would panic, the reason is added to :attr:`StockClient.panics`.

Made from that code: one id or two, with its layer of acknowledgements or without, and no second thought about what it
gets.  What would panic there is an entry of :attr:`StockClient.panics` here.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Any

from dmsg.errors import HandshakeError, RemoteProtocolError
from dmsg.keys import PubKey, SecKey
from dmsg.messaging.core.agreement import Offer, Proposal
from dmsg.messaging.core.handshake import JSONHandshake
from dmsg.messaging.core.secure import ChannelCiphers
from dmsg.messaging.core.wire import CHANNEL_CLOSED, CHANNEL_OPENED, CLOSE_CHANNEL, OPEN_CHANNEL, SEND, Profile
from tests.messaging.support import RawClient

ACK_INTERVAL = 0.1


class StockChannel:
    """A channel of the Go client, and the layer of acknowledgements on it.

    :ivar written: unacknowledged data by sequence number; ``writes``: number of writes.
    """

    def __init__(self, client: StockClient, name: int) -> None:
        self.client = client
        self.name = name
        self.ciphers: ChannelCiphers | None = None
        self.proposal: Proposal | None = None
        self.received: list[bytes] = []
        self.written: dict[int, bytes] = {}
        self.pending: dict[int, bytes] = {}
        self.writes = 0
        self.over = False
        self.closing = False
        self.refused = False

    def write(self, data: bytes) -> None:
        """Do what Go's Write does; Write would also wait for the acknowledgement."""
        if not self.client.acks:
            self.client.send_message(self, data)
            return
        sequence = next(number for number in range(255) if number not in self.written)
        self.written[sequence] = data
        self.client.send_message(self, self._acks() + bytes((0, sequence)) + data)

    def _acks(self) -> bytes:
        """Return the acknowledgements of all received data; the loop of the Go code keeps only the last one."""
        last = b""
        for sequence in sorted(self.pending):
            last = bytes((1, sequence)) + sha256(self.pending[sequence]).digest()
        self.pending.clear()
        return last

    def flush(self) -> None:
        """Send acknowledgements without a payload."""
        packet = self._acks()
        if packet and not self.over:
            self.client.send_message(self, packet)

    def message(self, plain: bytes) -> None:
        """Handle a decrypted message."""
        if not self.client.acks:
            self.received.append(plain)
            self.client.got(self, plain)
            return
        while plain and plain[0] != 0:
            if len(plain) < 34:
                self.client.panics.append("slice bounds out of range")
                return
            written = self.written.pop(plain[1], None)
            if written is not None:
                if sha256(written).digest() != plain[2:34]:
                    self.client.panics.append("invalid CRC")
                self.writes += 1
            plain = plain[34:]
        if not plain:
            return
        if len(plain) < 2:
            self.client.panics.append("index out of range")
            return
        self.pending[plain[1]] = plain[2:]
        self.received.append(plain[2:])
        self.client.later(ACK_INTERVAL, self.flush)
        self.client.got(self, plain[2:])

    def close(self) -> None:
        """Do what Go's Close does: acknowledge, then close."""
        self.flush()
        self.closing = True
        self.client.send(CLOSE_CHANNEL, bytes((self.name,)))

    @property
    def data(self) -> bytes:
        """Return all received data."""
        return b"".join(self.received)


class StockClient(RawClient):
    """Client of the Go code.

    :param later: ``callLater`` of a clock.
    :param got: the application's function, called with received data.
    :ivar panics: reasons for which the process would have ended.
    """

    def __init__(
        self,
        key: SecKey,
        server: PubKey,
        later: Callable[..., Any],
        *,
        two_ids: bool,
        acks: bool,
        got: Callable[[StockChannel, bytes], None] = lambda channel, data: None,
    ) -> None:
        super().__init__(key, Profile.SKYWIRE)
        self.handshake = JSONHandshake(key, server, profile=Profile.SKYWIRE)
        self.later = later
        self.two_ids = two_ids
        self.acks = acks
        self.got = got
        self.channels: dict[int, StockChannel] = {}
        self.accepted: list[StockChannel] = []
        self.panics: list[str] = []

    def dataReceived(self, data: bytes) -> None:
        super().dataReceived(data)
        for frame_type, body in self.take():
            self.frame(frame_type, body)

    def _add(self, channel: StockChannel) -> int:
        number = next((one for one in range(255) if one not in self.channels), None)
        if number is None:
            self.panics.append("no free channels")
            return 0
        self.channels[number] = channel
        return number

    def dial(self, remote: PubKey) -> StockChannel:
        """Do what Go's OpenChannel does."""
        channel = StockChannel(self, 0)
        channel.name = number = self._add(channel)
        channel.proposal = Proposal(self.key, remote, Profile.SKYWIRE)
        self.send(OPEN_CHANNEL, bytes((number,)) + remote + channel.proposal.message)
        return channel

    def send_message(self, channel: StockChannel, plain: bytes) -> None:
        """Send a SEND frame."""
        if channel.ciphers is None:
            self.panics.append("write before the handshake is done")
            return
        sealed = channel.ciphers.seal(plain)
        self.send(SEND, bytes((channel.name,)) + len(sealed).to_bytes(2, "big") + sealed)

    def frame(self, frame_type: int, body: bytes) -> None:
        """Do what Go's ``onData`` does with a frame."""
        if frame_type == OPEN_CHANNEL:
            self._open(body)
            return
        channel = self.channels.get(body[0])
        if channel is None:
            return
        if frame_type == CLOSE_CHANNEL:
            del self.channels[body[0]]
            channel.over = True
            self.send(CHANNEL_CLOSED, bytes((channel.name,)))
        elif frame_type == CHANNEL_CLOSED:
            if self.two_ids:
                channel.name = body[0]
            # Otherwise nothing waits for the answer, and the id stays in use.
            if channel.ciphers is None or channel.closing:
                channel.refused = channel.ciphers is None
                channel.over = True
                del self.channels[body[0]]
        elif frame_type == CHANNEL_OPENED:
            assert channel.proposal is not None
            message = body[1:]
            if self.two_ids:
                channel.name, message = body[1], body[2:]
            try:
                channel.ciphers = channel.proposal.process_answer(message)
            except (HandshakeError, RemoteProtocolError):
                self.panics.append("ChannelOpened is not understood; the first write panics")
        elif frame_type == SEND:
            assert channel.ciphers is not None
            channel.message(channel.ciphers.open(body[3:]))

    def _open(self, body: bytes) -> None:
        channel = StockChannel(self, body[0])
        try:
            offer = Offer(self.key, PubKey(body[1:34]), body[34:], Profile.SKYWIRE)
        except HandshakeError:
            self.send(CHANNEL_CLOSED, body[:1])
            return
        if self.two_ids:
            own = self._add(channel)
        else:
            own = body[0]
            self.channels[own] = channel
        self.accepted.append(channel)
        channel.ciphers, message = offer.accept()
        self.send(CHANNEL_OPENED, bytes((body[0], own) if self.two_ids else (own,)) + message)
