"""Acknowledgements inside channels, as the Go code sent them until 2019-04-15.  No I/O.

They are encrypted inside Send frames, so servers cannot see them. The plaintext of a Send is::

    [ack]* [payload]?
    ack      0x01 | sequence(1) | SHA-256 of the payload's data (32)
    payload  0x00 | sequence(1) | data

A payload gets the lowest sequence number that none of the sender's unacknowledged payloads has. Source:
``internal/ioutil/ack.go`` of Skywire, March 2019.

The Go code loses data that are sent too fast, for three reasons. It delivers messages in any order. A new message
overwrites data that the Go program has not read yet. Of several acknowledgements that would share one Send, the Go code
sends only the last. This module therefore sends a payload only after the previous payload was acknowledged, and leaves
a pause between two Sends (``SEND_GAP``).
"""

from __future__ import annotations

from hashlib import sha256

from dmsg.errors import CloseReason, HandshakeError, TransportClosed

PAYLOAD, ACK = 0, 1
PAYLOAD_HEAD = 2
"""Number of bytes of a payload before its data."""
ACK_SIZE = 34
"""Size of one acknowledgement in bytes."""
MAX_ACKS = 8
"""Maximum number of acknowledgements in one Send. Further acknowledgements go into the next Send."""
MAX_DUE = 256
"""Maximum number of the remote's payloads that this side has not acknowledged. There are as many different sequence
numbers."""
ACK_INTERVAL = 0.1
"""Maximum seconds that an acknowledgement waits, so that it can be sent in the same Send as a payload. It waits only
while a payload of this side is unacknowledged. (The Go code uses 100 ms.)"""
SEND_GAP = 0.01
"""Minimum seconds between two Sends, with one exception: when the payload of the first Send is acknowledged, the second
Send may follow at once."""
OVERHEAD = MAX_ACKS * ACK_SIZE + PAYLOAD_HEAD
"""Number of bytes of a message that are reserved for acknowledgements and the payload's head. The longest data are this
many bytes shorter than the longest message."""


def looks_acknowledged(message: bytes) -> bool:
    """Whether the first message of a channel is a payload with sequence number 0, so that its sender uses
    acknowledgements."""
    return message[:2] == b"\0\0"


class AckLayer:
    """Acknowledgement layer at one end of a channel.

    :ivar in_flight: number of unacknowledged payloads that this side has sent: 0 or 1.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self._expected = b""
        self._due: list[bytes] = []
        self._read: list[bytes] = []

    @property
    def due(self) -> bool:
        """Whether an acknowledgement must be sent."""
        return bool(self._due)

    def payload(self, data: bytes | memoryview) -> bytes:
        """Return a message that contains ``data`` and acknowledgements that are due.

        :param data: data of the payload, at least ``OVERHEAD`` bytes shorter than the longest message.
        :raises AssertionError: an earlier payload is not acknowledged yet.
        """
        assert not self.in_flight
        self.in_flight = 1
        self._expected = sha256(data).digest()
        return b"".join((*self._take_due(), bytes((PAYLOAD, 0)), data))

    def acknowledgements(self) -> bytes:
        """Return a message of due acknowledgements without a payload; empty if none is due."""
        return b"".join(self._take_due())

    def _take_due(self) -> list[bytes]:
        due, self._due = self._due[:MAX_ACKS], self._due[MAX_ACKS:]
        return due

    def receive(self, message: bytes) -> tuple[bytes | None, bool]:
        """Parse one message. Return its data, or None, and whether it acknowledges this side's payload.

        Call :meth:`consumed` once the application has read the data.

        :raises HandshakeError: the message does not have the format of this layer.
        :raises TransportClosed: the remote acknowledges data that this side did not send.
        """
        acknowledged = False
        position = 0
        while position < len(message) and message[position] == ACK:
            following = position + ACK_SIZE
            if following > len(message):
                raise HandshakeError("an acknowledgement is cut off")
            # This side has at most one unacknowledged payload, so its sequence number is always 0. Any other
            # acknowledgement is a repetition or matches no payload, and is ignored.
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
        # Without this limit, a peer that ignores the sequence numbers could make the lists grow without bound.
        if len(self._due) + len(self._read) >= MAX_DUE:
            raise HandshakeError("the remote sent more unacknowledged payloads than there are sequence numbers")
        self._read.append(bytes((ACK, message[position + 1])) + sha256(data).digest())
        return data, acknowledged

    def consumed(self) -> None:
        """Mark all data received so far as read by the application, so that the next Send acknowledges them."""
        self._due += self._read
        self._read.clear()
