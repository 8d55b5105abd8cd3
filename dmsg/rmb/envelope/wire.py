"""Encoding of envelopes: their bytes, their signed bytes, their times. Protobuf, without I/O and clock.

The functions convert between bytes and envelopes, and compute which bytes a signature covers and when a message
expires. They check the form only; :mod:`dmsg.rmb.session.seal` decides whether a message is accepted. The format is the
reference's (docs/rmb/protocol.md).

The field ``signature`` signs the MD5 of the fields, joined without delimiters ("challenge").  So anyone who carries a
message can move characters from one field to the next, and the signature stays valid. Peers of this package therefore
add a second signature over all fields with their lengths, the *strict* signature: :func:`strict_challenge`.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

from google.protobuf.message import DecodeError

from dmsg.rmb.envelope.envelope_pb2 import Address, Envelope
from dmsg.rmb.errors import EnvelopeError
from dmsg.rmb.twins.address import Session

# --- constants of the protocol ---

FAIL_FAST = "fail-fast"
"""Tag that tells relays not to store this message for a destination that is not connected."""
MAX_MESSAGE = 16 * 1024 * 1024
"""Maximum bytes of an envelope; the reference has the same limit for a frame."""
MAX_UID = 256
"""Maximum characters of a uid."""
DEFAULT_EXPIRATION = 300
"""Lifetime in seconds of a message that is sent with expiration 0."""
SENT_EXPIRATION = 1800
"""Maximum lifetime in seconds that clients and peers give to a message that they send."""
PONG = b"hello world"
JSON = "application/json"
"""Value of the field ``schema`` for payloads in JSON."""

# --- limits of this package ---

MAX_EXPIRATION = 3600
"""Maximum lifetime in seconds that a receiver accepts; the reference implementation sends at most 1800."""
MAX_SKEW = 300
"""Seconds by which a sender's clock may be ahead of the receiver's."""

STRICT_LABEL = b"dmsg-rmb-envelope-1\0"
_ABSENT = b"\xff\xff\xff\xff"
_make = tuple.__new__
"""Constructor of a Session that takes half the time of the class; relays make two sessions for each message."""


def decode(data: bytes) -> Envelope:
    """Decode an envelope.

    :raises EnvelopeError: ``data`` is no envelope.
    """
    envelope = Envelope()
    try:
        envelope.ParseFromString(data)
    except (DecodeError, ValueError) as error:
        raise EnvelopeError(f"not an envelope: {error}") from None
    return envelope


def source_of(envelope: Envelope) -> Session:
    """Return the source of an envelope; (0, None) when it has none."""
    source = envelope.source
    return _make(Session, (source.twin, source.connection if source.HasField("connection") else None))


def destination_of(envelope: Envelope) -> Session:
    """Return the destination of an envelope; (0, None) when it has none."""
    destination = envelope.destination
    return _make(Session, (destination.twin, destination.connection if destination.HasField("connection") else None))


def set_address(address: Address, session: Session) -> None:
    """Write ``session`` into an address field of an envelope."""
    address.twin = session.twin
    if session.sid is None:
        address.ClearField("connection")
    else:
        address.connection = session.sid


def kind_of(envelope: Envelope) -> str:
    """Return the kind: ``request``, ``response``, ``error``, ``ping``, ``pong``, or the empty text."""
    return envelope.WhichOneof("message") or ""


def payload_of(envelope: Envelope) -> bytes:
    """Return the payload as it was sent, plain or encrypted; empty when there is none."""
    which = envelope.WhichOneof("payload")
    payload: bytes = getattr(envelope, which) if which else b""
    return payload


def has_tag(tags: str, tag: str) -> bool:
    """Whether ``tag`` is among ``tags``, which are separated by commas and white space."""
    return tag in tags and tag in tags.replace(",", " ").split()


class Tagged(Protocol):
    """Interface of objects that have the tags of an envelope: the envelope itself, or its parsed header."""

    tags: str


def wants_fail_fast(envelope: Tagged) -> bool:
    """Whether relays must not store the message for a destination that is not connected."""
    return bool(envelope.tags) and has_tag(envelope.tags, FAIL_FAST)


# --- times ---


class Timed(Protocol):
    """Interface of objects that have the times of an envelope: the envelope itself, or its parsed header.

    :ivar timestamp: seconds since 1970.
    :ivar expiration: lifetime in seconds, from the timestamp on.
    """

    timestamp: int
    expiration: int


def stamp(envelope: Envelope, now: int) -> None:
    """Set the timestamp to ``now`` and shorten the lifetime by the message's age, so that the message expires at the
    same time as before."""
    age = now - envelope.timestamp if envelope.timestamp and envelope.timestamp <= now else 0
    envelope.expiration = max(0, envelope.expiration - age)
    envelope.timestamp = now


def ttl(timestamp: int, expiration: int, now: int) -> int | None:
    """Return the remaining lifetime in seconds; None when the message has expired."""
    left = timestamp + expiration - now
    return left if left > 0 else None


def remaining_life(envelope: Timed, now: int) -> int | None:
    """Return the maximum number of seconds for which a relay stores this message; None when it has expired.

    A lifetime above :data:`MAX_EXPIRATION` is reduced to that.
    """
    left = ttl(envelope.timestamp, envelope.expiration, now)
    return None if left is None else min(left, MAX_EXPIRATION)


def life_ends(envelope: Timed, now: float) -> float:
    """Return the time at which a relay drops this message: at the latest when no receiver would accept it any more."""
    expiration = envelope.expiration
    ends = envelope.timestamp + (min(MAX_EXPIRATION, expiration))
    latest = now + (MAX_SKEW + MAX_EXPIRATION)
    return float(ends) if ends < latest else latest


def times_error(envelope: Envelope, now: int) -> str | None:
    """Return why a receiver refuses the times of this message; None when they are acceptable.

    Timestamp and expiration are signed without a delimiter between them, so a relay can move digits from one to the
    other.  A message that lives 300 s could thus become one that never expires, with a timestamp far in the future.
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


# --- signed bytes ---


def _place(address: Address) -> str:
    return f"{address.twin}{address.connection}"


def preimage(envelope: Envelope) -> bytes:
    """Return the bytes that :func:`challenge` hashes."""
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
    """Return the 16 bytes that the field ``signature`` signs.

    They are the MD5 of uid, tags, timestamp, expiration, source, destination, command or error, schema, federation,
    payload and relays, joined without delimiters.
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
    """Return the additional data of payloads of the kind ``bound``: everything but the payload.

    Each field is preceded by its length, 4 bytes big endian; ff ff ff ff stands for an absent field.
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
    """Return the 32 bytes that the field ``strict_signature`` signs: SHA-256 of all fields, each with its length."""
    which = envelope.WhichOneof("payload")
    return hashlib.sha256(frame_of_payload(envelope) + _item(which or "") + _item(payload_of(envelope))).digest()


# --- messages that relays make ---


def to_pong(envelope: Envelope) -> None:
    """Turn a ping into its answer: swap source and destination, append a greeting to the payload, and leave all other
    fields as they are."""
    source, destination = source_of(envelope), destination_of(envelope)
    envelope.pong.SetInParent()
    set_address(envelope.source, destination)
    set_address(envelope.destination, source)
    envelope.plain = (envelope.plain if envelope.WhichOneof("payload") == "plain" else b"") + PONG


def error_envelope(uid: str, text: str, to: Session | None, now: int) -> Envelope:
    """Build the error message with which a relay answers a request; it has no source and no signature.

    Clients recognise errors of relays by the absent source.
    """
    answer = Envelope(uid=uid, timestamp=now, expiration=DEFAULT_EXPIRATION)
    answer.error.code = 0
    answer.error.message = text
    if to is not None:
        set_address(answer.destination, to)
    return answer
