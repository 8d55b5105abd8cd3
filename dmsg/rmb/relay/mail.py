"""Message on its way through a relay, and its header, which is parsed only once. No I/O."""

from __future__ import annotations

from dmsg.rmb.envelope.envelope_pb2 import Envelope
from dmsg.rmb.envelope.wire import (
    decode,
    destination_of,
    error_envelope,
    kind_of,
    life_ends,
    remaining_life,
    source_of,
    wants_fail_fast,
)
from dmsg.rmb.socket.confirm import Ledger, Message
from dmsg.rmb.twins.address import Session

ANSWERS = frozenset(("response", "error", "pong"))
"""Kinds of messages that answer an earlier message of their receiver."""


class Header:
    """Parsed fields of an envelope that a relay needs.

    :ivar kind: ``request``, ``response``, ``error``, ``ping``, ``pong``, or empty.
    :ivar source: sender according to the envelope, not verified; (0, None) if the envelope has none.
    :ivar destination: receiver according to the envelope; (0, None) if the envelope has none.
    :ivar timestamp: seconds since 1970.
    :ivar expiration: lifetime in seconds after the timestamp.
    :ivar tags: words separated by commas and white space.
    """

    __slots__ = ("destination", "expiration", "kind", "source", "tags", "timestamp", "uid")

    def __init__(self, envelope: Envelope) -> None:
        self.uid = envelope.uid
        self.kind = kind_of(envelope)
        self.source = source_of(envelope)
        self.destination = destination_of(envelope)
        self.timestamp = envelope.timestamp
        self.expiration = envelope.expiration
        self.tags = envelope.tags

    @classmethod
    def read(cls, data: bytes) -> Header:
        """Parse the header of an envelope.

        :raises EnvelopeError: ``data`` is not an envelope.
        """
        return cls(decode(data))

    @property
    def wants_answer(self) -> bool:
        """Whether the sender must be notified of an error. Only senders of requests are."""
        return self.kind == "request"

    @property
    def is_answer(self) -> bool:
        """Whether this message answers an earlier message of its receiver."""
        return self.kind in ANSWERS

    @property
    def fail_fast(self) -> bool:
        """Whether the message must not be queued if its destination is not connected."""
        return wants_fail_fast(self)

    def is_over(self, now: float) -> bool:
        """Whether the message has expired."""
        return remaining_life(self, int(now)) is None

    def until(self, now: float) -> float:
        """Return the time, in seconds since 1970, at which a relay drops the message."""
        return life_ends(self, now)


class Mail(Message):
    """Message from a session or another relay, with its parsed header."""

    __slots__ = ("destination", "header")

    def __init__(
        self, data: bytes, until: float, owner: Ledger | None, header: Header, sender: int | None = None
    ) -> None:
        """:param sender: number of the twin that sent the message; None uses the source in the header."""
        Message.__init__(self, data, until, owner, None, header.source.twin if sender is None else sender)
        self.header = header
        self.destination = header.destination

    @property
    def is_answer(self) -> bool:  # type: ignore[override]  # A property here, a class attribute in Message.
        """Whether this message answers an earlier message of its receiver."""
        return self.header.is_answer


def error_answer(header: Header, text: str, to: Session | None, now: float) -> Message:
    """Return the error message with which this relay answers a request.

    :param to: session that the error names as its destination.
    """
    envelope = error_envelope(header.uid, text, to, int(now))
    return Message(envelope.SerializeToString(), now + envelope.expiration, None)
