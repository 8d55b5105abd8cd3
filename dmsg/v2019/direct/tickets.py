"""Tags by which the two ends of a direct link recognise each other before the first frame. No I/O, no clock.

The end that connects (the dialler) sends its tag at once. The end that accepts answers a valid tag with its own tag.
Both tags are computed from a secret that only the two ends know, so the port sends nothing to anybody else. A tag
neither proves a key nor protects data; the KK handshake of each transport does both.

A *ticket* is the accepting end's record of a tag that it expects.
"""

from __future__ import annotations

import hmac
from collections import OrderedDict
from hashlib import blake2b

from dmsg.errors import DropReason, HandshakeError
from dmsg.keys import PubKey

TAG_SIZE = 16
"""Number of bytes of the tag by which one end of a direct link recognises the other."""
LABEL = b"dmsg direct 1"
"""Prefix of the data that is hashed into a tag (domain separation)."""
MAX_TICKETS = 32
"""Maximum number of tickets of one port. Above it, the oldest ticket is evicted."""
TICKET_TIME = 60.0
"""Seconds for which a ticket is valid after it was last issued."""


def dialler_tag(secret: bytes) -> bytes:
    """Return the tag by which the connecting end of a direct link identifies itself.

    :param secret: 32 bytes that both ends know.
    """
    return blake2b(LABEL + b"c", digest_size=TAG_SIZE, key=secret).digest()


def listener_tag(secret: bytes) -> bytes:
    """Return the tag by which the accepting end of a direct link identifies itself; see :func:`dialler_tag`."""
    return blake2b(LABEL + b"l", digest_size=TAG_SIZE, key=secret).digest()


class Tickets:
    """Table of the tickets of a port. A ticket admits one peer, any number of times.

    :ivar evicted: number of tickets that were evicted to make room.
    """

    def __init__(self) -> None:
        self._tickets: OrderedDict[bytes, tuple[PubKey, bytes, float]] = OrderedDict()
        self.evicted = 0

    def issue(self, secret: bytes, peer: PubKey, now: float) -> None:
        """Admit ``peer``, which knows ``secret``, for ``TICKET_TIME`` seconds from now."""
        tag = dialler_tag(secret)
        self._tickets.pop(tag, None)
        self._tickets[tag] = peer, listener_tag(secret), now + TICKET_TIME
        if len(self._tickets) > MAX_TICKETS:
            self._tickets.popitem(last=False)
            self.evicted += 1

    def find(self, tag: bytes, now: float) -> tuple[PubKey, bytes] | None:
        """Return the peer that uses this tag, and the tag to answer with. Return None if there is no valid ticket."""
        peer, answer, until = self._tickets.get(tag, (None, b"", 0.0))
        return None if peer is None or now >= until else (peer, answer)


class _TagHandshake:
    """Handshake of a direct link; implements :class:`~dmsg.net.links.interfaces.LinkHandshake`."""

    def __init__(self, outgoing: bytes) -> None:
        self._outgoing = outgoing
        self._received = b""
        self.remote: PubKey | None = None

    def data_to_send(self) -> bytes:
        outgoing, self._outgoing = self._outgoing, b""
        return outgoing

    def receive_data(self, data: bytes) -> None:
        self._received += data
        if self.remote is None and len(self._received) >= TAG_SIZE:
            self.remote = self._peer_of(self._received[:TAG_SIZE])
            if self.remote is None:
                raise HandshakeError("the other end sent a wrong tag for this direct link", DropReason.HANDSHAKE_FAILED)

    def trailing_data(self) -> bytes:
        return self._received[TAG_SIZE:]

    def _peer_of(self, tag: bytes) -> PubKey | None:
        """Return the peer that uses this tag, or None if the tag is not valid."""
        raise NotImplementedError


class DiallerHandshake(_TagHandshake):
    """Handshake of the connecting end of a direct link.

    :param secret: 32 bytes that both ends know.
    :param peer: key of the other end.
    """

    def __init__(self, secret: bytes, peer: PubKey) -> None:
        super().__init__(dialler_tag(secret))
        self._expected = listener_tag(secret)
        self._peer = peer

    def _peer_of(self, tag: bytes) -> PubKey | None:
        return self._peer if hmac.compare_digest(tag, self._expected) else None


class ListenerHandshake(_TagHandshake):
    """Handshake of the accepting end of a direct link.

    :param tickets: tickets that are accepted.
    :param now: present time, in seconds of the clock by which the tickets were issued.
    """

    def __init__(self, tickets: Tickets, now: float) -> None:
        super().__init__(b"")
        self._tickets = tickets
        self._now = now

    def _peer_of(self, tag: bytes) -> PubKey | None:
        found = self._tickets.find(tag, self._now)
        if found is None:
            return None
        peer, self._outgoing = found
        return peer
