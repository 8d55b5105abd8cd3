"""A message on its way through a relay, and what is asked of it on that way: read once.  No I/O."""

from __future__ import annotations

from dmsg.rmb.envelope.envelope_pb2 import Envelope
from dmsg.rmb.envelope.wire import (
    FAIL_FAST,
    decode,
    destination_of,
    error_envelope,
    has_tag,
    life_ends,
    source_of,
    ttl,
)
from dmsg.rmb.socket.confirm import Ledger, Message
from dmsg.rmb.twins.address import Session


class Header:
    """What a relay asks of an envelope.

    :ivar kind: ``request``, ``response``, ``error``, ``ping``, ``pong``, or empty.
    :ivar source: who sent it, as it says; (0, None) when it says nothing.
    :ivar destination: whom it is for; (0, None) when it says nothing.
    :ivar timestamp: seconds since 1970.
    :ivar expiration: seconds of life from then on.
    :ivar fail_fast: it is not to be kept.
    """

    __slots__ = ("destination", "expiration", "fail_fast", "kind", "source", "timestamp", "uid")

    def __init__(self, envelope: Envelope) -> None:
        self.uid = envelope.uid
        self.kind = envelope.WhichOneof("message") or ""
        self.source = source_of(envelope)
        self.destination = destination_of(envelope)
        self.timestamp = envelope.timestamp
        self.expiration = envelope.expiration
        tags = envelope.tags
        self.fail_fast = bool(tags) and has_tag(tags, FAIL_FAST)

    @classmethod
    def read(cls, data: bytes) -> Header:
        """:raises EnvelopeError: it is no envelope."""
        return cls(decode(data))

    @property
    def wants_answer(self) -> bool:
        """Its sender is told of an error: only of requests."""
        return self.kind == "request"

    def is_over(self, now: float) -> bool:
        """Its life is."""
        return ttl(self.timestamp, self.expiration, int(now)) is None

    def until(self, now: float) -> float:
        """When a relay forgets it, seconds since 1970."""
        return life_ends(self, now)


NOBODY = Session(0, None)


class Mail(Message):
    """A message with its header.

    :ivar header: None for what the relay itself says.
    :ivar destination: whom it is for; (0, None) for what the relay itself says.
    """

    __slots__ = ("destination", "header")

    def __init__(
        self, data: bytes, until: float, owner: Ledger | None, header: Header | None, sender: int | None = None
    ) -> None:
        """:param sender: the twin that sent it; None: the one that it names."""
        twin = header.source.twin if sender is None and header is not None else sender or 0
        Message.__init__(self, data, until, owner, None, twin)
        self.header = header
        self.destination = NOBODY if header is None else header.destination

    @property
    def wants_answer(self) -> bool:
        """Its sender is told of an error."""
        return self.header is not None and self.header.wants_answer

    def is_over(self, now: float) -> bool:
        """Its life is."""
        return now >= self.until if self.header is None else self.header.is_over(now)


def answer(header: Header, text: str, to: Session | None, now: float) -> Mail:
    """A relay's word on a request.

    :param to: whom the answer names as its destination.
    """
    envelope = error_envelope(header.uid, text, to, int(now))
    return Mail(envelope.SerializeToString(), now + envelope.expiration, None, None)
