"""The acknowledgements that Go laid into channels until 2019-04-15.  No I/O.

They are inside what a Send carries, so servers know nothing of them::

    [ack]* [payload]?
    ack      0x01 | sequence(1) | SHA-256 of the payload's data (32)
    payload  0x00 | sequence(1) | data

The sequence is the lowest number that no unacknowledged payload of the sender has.
Source: ``internal/ioutil/ack.go`` of Skywire, March 2019.

That code loses what is sent too fast: it delivers messages in any order, reads
the next one over data that its program has not taken, and of several
acknowledgements in one Send writes the last only.  So one payload is under way at a
time here, and nothing is sent right behind anything else (``GAP``).
"""

from __future__ import annotations

from hashlib import sha256

from dmsg.errors import CloseReason, HandshakeError, TransportClosed

PAYLOAD, ACK = 0, 1
PAYLOAD_HEAD = 2
"""Bytes before a payload's data."""
ACK_SIZE = 34
"""Bytes of one acknowledgement."""
MAX_ACKS = 8
"""Acknowledgements in one Send; more of them go in the next one."""
MAX_DUE = 256
"""Payloads of the remote that are not acknowledged yet: as many as there are sequence numbers."""
ACK_INTERVAL = 0.1
"""Seconds that an acknowledgement waits at most for something to go with, while a payload of this side is
under way (Go: 100 ms)."""
GAP = 0.01
"""Seconds between two Sends, unless the remote has shown that it has the first."""
OVERHEAD = MAX_ACKS * ACK_SIZE + PAYLOAD_HEAD
"""Bytes by which a payload's data is shorter than the longest message."""


def looks_acknowledged(message: bytes) -> bool:
    """Whether the first message of a channel is one of this layer: its first payload has the sequence number 0."""
    return message[:2] == b"\0\0"


class AckLayer:
    """One end of a channel.

    :ivar in_flight: payloads of this side that are not acknowledged: 0 or 1.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self._expected = b""
        self._due: list[bytes] = []
        self._read: list[bytes] = []

    @property
    def due(self) -> bool:
        """Something is to be acknowledged."""
        return bool(self._due)

    def payload(self, data: bytes | memoryview) -> bytes:
        """What to send for ``data``, which is at most ``OVERHEAD`` shorter than a message may be.

        :raises AssertionError: one is under way.
        """
        assert not self.in_flight
        self.in_flight = 1
        self._expected = sha256(data).digest()
        return b"".join((*self._take_due(), bytes((PAYLOAD, 0)), data))

    def acknowledgements(self) -> bytes:
        """What to send when there is no payload to go with; empty when nothing is due."""
        return b"".join(self._take_due())

    def _take_due(self) -> list[bytes]:
        due, self._due = self._due[:MAX_ACKS], self._due[MAX_ACKS:]
        return due

    def receive(self, message: bytes) -> tuple[bytes | None, bool]:
        """Take one message: its data, None if it has none, and whether it acknowledges what is under way.

        :meth:`consumed` is to follow when the data is taken.

        :raises HandshakeError: it is no message of this layer.
        :raises TransportClosed: the remote has other data than was sent.
        """
        acknowledged = False
        position = 0
        while position < len(message) and message[position] == ACK:
            following = position + ACK_SIZE
            if following > len(message):
                raise HandshakeError("an acknowledgement that is cut off")
            if message[position + 1] == 0 and self.in_flight:
                if message[position + 2 : following] != self._expected:
                    raise TransportClosed(CloseReason.HASH_MISMATCH)
                self.in_flight = 0
                acknowledged = True
            position = following
        if position == len(message):
            return None, acknowledged
        if message[position] != PAYLOAD or position + PAYLOAD_HEAD > len(message):
            raise HandshakeError("neither a payload nor an acknowledgement: the remote does not acknowledge")
        data = message[position + PAYLOAD_HEAD :]
        if len(self._due) + len(self._read) >= MAX_DUE:
            raise HandshakeError("more payloads at a time than there are sequence numbers")
        self._read.append(bytes((ACK, message[position + 1])) + sha256(data).digest())
        return data, acknowledged

    def consumed(self) -> None:
        """The program has taken all that was received: it is acknowledged with the next Send."""
        self._due += self._read
        self._read.clear()
