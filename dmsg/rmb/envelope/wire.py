"""Envelopes: bytes, signed bytes, times.  Protobuf, no I/O, no clock.

What is signed is MD5 over a concatenation without borders ("challenge").
Fields can be moved across these borders by whoever carries the message, so
peers of this package add a second signature over all of it, with its borders:
:func:`strict_challenge`.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

from google.protobuf.message import DecodeError

from dmsg.rmb.envelope.envelope_pb2 import Address, Envelope
from dmsg.rmb.errors import EnvelopeError
from dmsg.rmb.twins.address import Session

# --- what the protocol says ---

FAIL_FAST = "fail-fast"
"""A tag: do not keep this message for a destination that is not connected."""
MAX_MESSAGE = 16 * 1024 * 1024
"""Bytes of an envelope; a frame of the reference has no more either."""
MAX_UID = 256
"""Bytes of a uid."""
DEFAULT_EXPIRATION = 300
"""Seconds, for messages that say 0."""
SENT_EXPIRATION = 1800
"""Seconds that peers give a message at most."""
PONG = b"hello world"
JSON = "application/json"
"""A schema."""

# --- what this package says ---

MAX_EXPIRATION = 3600
"""Seconds of life that a peer believes; nothing the reference sends has more."""
MAX_SKEW = 300
"""Seconds that the clock of a sender may be ahead of ours."""

STRICT_LABEL = b"dmsg-rmb-envelope-1\0"
_ABSENT = b"\xff\xff\xff\xff"
_make = tuple.__new__
"""A session in half the time that its class takes: relays make two of each message."""


def decode(data: bytes) -> Envelope:
    """The envelope in ``data``.

    :raises EnvelopeError: it is none.
    """
    envelope = Envelope()
    try:
        envelope.ParseFromString(data)
    except (DecodeError, ValueError) as error:
        raise EnvelopeError(f"not an envelope: {error}") from None
    return envelope


def source_of(envelope: Envelope) -> Session:
    """(0, None) when there is none."""
    source = envelope.source
    return _make(Session, (source.twin, source.connection if source.HasField("connection") else None))


def destination_of(envelope: Envelope) -> Session:
    """(0, None) when there is none."""
    destination = envelope.destination
    return _make(Session, (destination.twin, destination.connection if destination.HasField("connection") else None))


def set_address(address: Address, session: Session) -> None:
    """Write ``session`` into a field of an envelope."""
    address.twin = session.twin
    if session.sid is None:
        address.ClearField("connection")
    else:
        address.connection = session.sid


def kind_of(envelope: Envelope) -> str:
    """``request``, ``response``, ``error``, ``ping``, ``pong``, or empty."""
    return envelope.WhichOneof("message") or ""


def payload_of(envelope: Envelope) -> bytes:
    """The payload as it is, plain or encrypted; empty when there is none."""
    which = envelope.WhichOneof("payload")
    payload: bytes = getattr(envelope, which) if which else b""
    return payload


def has_tag(tags: str, tag: str) -> bool:
    """Tags are parted by commas and white space."""
    return tag in tags and tag in tags.replace(",", " ").split()


class Tagged(Protocol):
    """An envelope, or what was read of one."""

    tags: str


def wants_fail_fast(envelope: Tagged) -> bool:
    """The message is not to be kept."""
    return bool(envelope.tags) and has_tag(envelope.tags, FAIL_FAST)


# --- times ---


class Timed(Protocol):
    """An envelope, or what was read of one.

    :ivar timestamp: seconds since 1970.  :ivar expiration: seconds of life from then on.
    """

    timestamp: int
    expiration: int


def stamp(envelope: Envelope, now: int) -> None:
    """Set the timestamp to now and shorten the life by what has passed."""
    age = now - envelope.timestamp if envelope.timestamp and envelope.timestamp <= now else 0
    envelope.expiration = max(0, envelope.expiration - age)
    envelope.timestamp = now


def ttl(timestamp: int, expiration: int, now: int) -> int | None:
    """Seconds of life left; None when there are none."""
    left = timestamp + expiration - now
    return left if left > 0 else None


def life(envelope: Timed, now: int) -> int | None:
    """Seconds that a relay keeps this message at most; None when it has expired.

    A sender's word is taken up to :data:`MAX_EXPIRATION`.
    """
    left = ttl(envelope.timestamp, envelope.expiration, now)
    return None if left is None else min(left, MAX_EXPIRATION)


def life_ends(envelope: Timed, now: float) -> float:
    """When a relay forgets this message; a sender's word is taken as far as a receiver would."""
    expiration = envelope.expiration
    ends = envelope.timestamp + (min(MAX_EXPIRATION, expiration))
    latest = now + (MAX_SKEW + MAX_EXPIRATION)
    return float(ends) if ends < latest else latest


def times_error(envelope: Envelope, now: int) -> str | None:
    """Why a receiver does not take these times; None when it does.

    The seconds are signed without a border between them: a message of 300 s
    has the same signed bytes as one that never ends, far in the future.
    """
    if ttl(envelope.timestamp, envelope.expiration, now) is None and envelope.expiration:
        return "message has expired"
    if envelope.timestamp > now + MAX_SKEW:
        return "timestamp is in the future"
    if not envelope.expiration:
        return "message has no expiration"
    if envelope.expiration > MAX_EXPIRATION:
        return f"expiration is more than {MAX_EXPIRATION} seconds"
    return None


# --- what is signed ---


def _place(address: Address) -> str:
    return f"{address.twin}{address.connection}"


def preimage(envelope: Envelope) -> bytes:
    """What :func:`challenge` hashes."""
    parts = [
        envelope.uid,
        envelope.tags,
        f"{envelope.timestamp}{envelope.expiration}",
        _place(envelope.source),
        _place(envelope.destination),
    ]
    kind = envelope.WhichOneof("message")
    if kind == "request":
        parts.append(envelope.request.command)
    elif kind == "error":
        parts.append(f"{envelope.error.code}{envelope.error.message}")
    parts += (envelope.schema, envelope.federation)
    return "".join(parts).encode() + payload_of(envelope) + "".join(envelope.relays).encode()


def challenge(envelope: Envelope) -> bytes:
    """The 16 bytes that the field ``signature`` is over.

    MD5 of uid, tags, timestamp, expiration, source, destination, command or
    error, schema, federation, payload and relays, one after the other.
    """
    return hashlib.md5(preimage(envelope), usedforsecurity=False).digest()


def _item(value: bytes | str | None) -> bytes:
    if value is None:
        return _ABSENT
    data = value.encode() if isinstance(value, str) else value
    return len(data).to_bytes(4, "big") + data


def _address_items(envelope: Envelope, name: str) -> tuple[bytes, bytes]:
    if not envelope.HasField(name):
        return _ABSENT, _ABSENT
    address = getattr(envelope, name)
    return (
        _item(str(address.twin)),
        _item(address.connection if address.HasField("connection") else None),
    )


def frame_of_payload(envelope: Envelope) -> bytes:
    """Everything but the payload, each item with its length: 4 bytes big endian, ff ff ff ff for an absent one.

    It is bound into payloads of the kind ``bound``, as additional data.
    """
    kind = kind_of(envelope)
    items: list[bytes] = [STRICT_LABEL, _item(envelope.uid)]
    items += (
        _item(getattr(envelope, name) if envelope.HasField(name) else None) for name in ("tags", "schema", "federation")
    )
    items += (_item(str(envelope.timestamp)), _item(str(envelope.expiration)))
    items += _address_items(envelope, "source")
    items += _address_items(envelope, "destination")
    items.append(_item(kind))
    if kind == "request":
        items.append(_item(envelope.request.command))
    elif kind == "error":
        items += (_item(str(envelope.error.code)), _item(envelope.error.message))
    items.append(_item(str(len(envelope.relays))))
    items += (_item(relay) for relay in envelope.relays)
    return b"".join(items)


def strict_challenge(envelope: Envelope) -> bytes:
    """The 32 bytes that the field ``strict_signature`` is over: SHA-256 of all, with its borders."""
    which = envelope.WhichOneof("payload")
    return hashlib.sha256(frame_of_payload(envelope) + _item(which or "") + _item(payload_of(envelope))).digest()


# --- what relays make ---


def to_pong(envelope: Envelope) -> None:
    """Turn a ping into the answer to it: addresses swapped, a greeting behind the payload, all else as sent."""
    source, destination = source_of(envelope), destination_of(envelope)
    envelope.pong.SetInParent()
    set_address(envelope.source, destination)
    set_address(envelope.destination, source)
    envelope.plain = (envelope.plain if envelope.WhichOneof("payload") == "plain" else b"") + PONG


def error_envelope(uid: str, text: str, to: Session | None, now: int) -> Envelope:
    """A relay's word on a request: no source, no signature.

    Clients know it by the absent source.
    """
    answer = Envelope(uid=uid, timestamp=now, expiration=DEFAULT_EXPIRATION)
    answer.error.code = 0
    answer.error.message = text
    if to is not None:
        set_address(answer.destination, to)
    return answer
