"""Acknowledgements inside channels, as the Go code had them until 2019-04-15.  No I/O.

They are inside the ciphertext of Send frames, so servers know nothing of them::

    [ack]* [payload]?
    ack      0x01 | sequence(1) | SHA-256 of the payload's data (32)
    payload  0x00 | sequence(1) | data

The sequence is the lowest number that no unacknowledged payload of the sender has.
Source: ``internal/ioutil/ack.go`` of Skywire, March 2019.

That code loses data that is sent too fast.  It delivers messages in any order, overwrites data that its program has
not read with the next message, and writes only the last of several acknowledgements in one Send.  So this module keeps
one payload in flight and leaves a pause between two Sends (``GAP``).
"""

from __future__ import annotations

from hashlib import sha256

from dmsg.errors import CloseReason, HandshakeError, TransportClosed

PAYLOAD, ACK = 0, 1
PAYLOAD_HEAD = 2
"""Bytes that precede a payload's data."""
ACK_SIZE = 34
"""Bytes of one acknowledgement."""
MAX_ACKS = 8
"""Maximum number of acknowledgements in one Send; further ones go into the next Send."""
MAX_DUE = 256
"""Maximum number of unacknowledged payloads of the remote, which is the number of sequence numbers."""
ACK_INTERVAL = 0.1
"""Maximum seconds that an acknowledgement waits to be sent together with a payload, while a payload of this side is in
flight (Go: 100 ms)."""
GAP = 0.01
"""Seconds between two Sends, unless the remote has acknowledged the first."""
OVERHEAD = MAX_ACKS * ACK_SIZE + PAYLOAD_HEAD
"""Bytes of a message that acknowledgements and the payload's head may take, so that data must be that much shorter."""


def looks_acknowledged(message: bytes) -> bool:
    """Whether the first message of a channel uses acknowledgements, and thus is a payload with sequence number 0."""
    return message[:2] == b"\0\0"


class AckLayer:
    """Acknowledgement layer at one end of a channel.

    :ivar in_flight: number of unacknowledged payloads of this side: 0 or 1.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self._expected = b""
        self._due: list[bytes] = []
        self._read: list[bytes] = []

    @property
    def due(self) -> bool:
        """Whether an acknowledgement is due."""
        return bool(self._due)

    def payload(self, data: bytes | memoryview) -> bytes:
        """Return the message that carries ``data``, with acknowledgements that are due.

        :param data: at least ``OVERHEAD`` bytes shorter than the longest message.
        :raises AssertionError: a payload is in flight.
        """
        assert not self.in_flight
        self.in_flight = 1
        self._expected = sha256(data).digest()
        return b"".join((*self._take_due(), bytes((PAYLOAD, 0)), data))

    def acknowledgements(self) -> bytes:
        """Return a message of acknowledgements without a payload; empty if none is due."""
        return b"".join(self._take_due())

    def _take_due(self) -> list[bytes]:
        due, self._due = self._due[:MAX_ACKS], self._due[MAX_ACKS:]
        return due

    def receive(self, message: bytes) -> tuple[bytes | None, bool]:
        """Parse one message; return its data or None, and whether it acknowledges the payload in flight.

        Call :meth:`consumed` once the application has read the data.

        :raises HandshakeError: the message does not belong to this layer.
        :raises TransportClosed: the remote acknowledges other data than this side sent.
        """
        acknowledged = False
        position = 0
        while position < len(message) and message[position] == ACK:
            following = position + ACK_SIZE
            if following > len(message):
                raise HandshakeError("an acknowledgement is cut off")
            # This side keeps one payload in flight, so its sequence is always 0.  Any other acknowledgement is repeated
            # or belongs to nothing, and is ignored.
            if message[position + 1] == 0 and self.in_flight:
                if message[position + 2 : following] != self._expected:
                    raise TransportClosed(CloseReason.HASH_MISMATCH)
                self.in_flight = 0
                acknowledged = True
            position = following
        if position == len(message):
            return None, acknowledged
        if message[position] != PAYLOAD or position + PAYLOAD_HEAD > len(message):
            raise HandshakeError(
                "the message is neither a payload nor an acknowledgement; perhaps the remote uses no acknowledgements"
            )
        data = message[position + PAYLOAD_HEAD :]
        # A peer that ignores the sequence numbers could otherwise make this list grow without bound.
        if len(self._due) + len(self._read) >= MAX_DUE:
            raise HandshakeError("the remote sent more unacknowledged payloads than there are sequence numbers")
        self._read.append(bytes((ACK, message[position + 1])) + sha256(data).digest())
        return data, acknowledged

    def consumed(self) -> None:
        """Acknowledge everything received so far with the next Send, because the application has read it."""
        self._due += self._read
        self._read.clear()
