"""A message on its way through a relay, and what is asked of it on that way: read once.  No I/O."""

from __future__ import annotations

from dmsg.rmb.envelope.envelope_pb2 import Envelope
from dmsg.rmb.envelope.wire import (
    decode,
    destination_of,
    error_envelope,
    kind_of,
    life,
    life_ends,
    source_of,
    wants_fail_fast,
)
from dmsg.rmb.socket.confirm import Ledger, Message
from dmsg.rmb.twins.address import Session

ANSWERS = frozenset(("response", "error", "pong"))
"""Kinds of messages for which their receiver asked."""


class Header:
    """What a relay asks of an envelope.

    :ivar kind: ``request``, ``response``, ``error``, ``ping``, ``pong``, or empty.
    :ivar source: who sent it, as it says; (0, None) when it says nothing.
    :ivar destination: whom it is for; (0, None) when it says nothing.
    :ivar timestamp: seconds since 1970.
    :ivar expiration: seconds of life from then on.
    :ivar tags: parted by commas and white space.
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
        """:raises EnvelopeError: it is no envelope."""
        return cls(decode(data))

    @property
    def wants_answer(self) -> bool:
        """Its sender is told of an error: only of requests."""
        return self.kind == "request"

    @property
    def is_answer(self) -> bool:
        """Whether its receiver asked for it: it is nothing that its sender chose to send."""
        return self.kind in ANSWERS

    @property
    def fail_fast(self) -> bool:
        """It is not to be kept."""
        return wants_fail_fast(self)

    def is_over(self, now: float) -> bool:
        """Its life is."""
        return life(self, int(now)) is None

    def until(self, now: float) -> float:
        """When a relay forgets it, seconds since 1970."""
        return life_ends(self, now)


class Mail(Message):
    """A message that somebody sent, with its header."""

    __slots__ = ("destination", "header")

    def __init__(
        self, data: bytes, until: float, owner: Ledger | None, header: Header, sender: int | None = None
    ) -> None:
        """:param sender: the twin that sent it; None: the one that it names."""
        Message.__init__(self, data, until, owner, None, header.source.twin if sender is None else sender)
        self.header = header
        self.destination = header.destination

    @property
    def is_answer(self) -> bool:  # type: ignore[override]  # of others it is fixed
        """Whether its receiver asked for it."""
        return self.header.is_answer


def answer(header: Header, text: str, to: Session | None, now: float) -> Message:
    """A relay's word on a request.

    :param to: whom the answer names as its destination.
    """
    envelope = error_envelope(header.uid, text, to, int(now))
    return Message(envelope.SerializeToString(), now + envelope.expiration, None)
