"""Encoding of envelopes in Protobuf, the bytes that their signatures cover, and their expiry. No I/O, no clock.

This module checks only the form of an envelope; :mod:`dmsg.rmb.session.seal` decides whether a message is accepted. The
format is that of the reference implementation (docs/rmb/protocol.md).

The field ``signature`` signs the MD5 of the fields, joined without delimiters (the "challenge").  So anyone who
transports a message can move characters from the end of one field to the next, and the signature stays valid. Peers of
this package therefore add a second signature over all fields with their lengths, the *strict* signature:
:func:`strict_challenge`.
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
"""Tag that tells relays not to store this message if its destination is not connected."""
MAX_MESSAGE = 16 * 1024 * 1024
"""Maximum size of an envelope in bytes. The reference implementation has the same limit for a websocket frame."""
MAX_UID = 256
"""Maximum length of a uid in characters."""
DEFAULT_EXPIRATION = 300
"""Lifetime in seconds of a relay's error messages, and of messages that are sent with expiration 0."""
SENT_EXPIRATION = 1800
"""Maximum lifetime in seconds of a message that clients and peers send."""
PONG = b"hello world"
JSON = "application/json"
"""Value of the field ``schema`` for payloads in JSON."""

# --- limits of this package ---

MAX_EXPIRATION = 3600
"""Maximum lifetime in seconds of a message that a receiver accepts. The reference implementation sends at most 1800
seconds."""
MAX_SKEW = 300
"""Maximum seconds by which a sender's clock may be ahead of the receiver's clock."""

STRICT_LABEL = b"dmsg-rmb-envelope-1\0"
_ABSENT = b"\xff\xff\xff\xff"
_make = tuple.__new__
"""Faster constructor of a Session. It takes half the time of the class, and relays make two sessions for each
message."""


def decode(data: bytes) -> Envelope:
    """Decode an envelope.

    :raises EnvelopeError: ``data`` is not an envelope.
    """
    envelope = Envelope()
    try:
        envelope.ParseFromString(data)
    except (DecodeError, ValueError) as error:
        raise EnvelopeError(f"not an envelope: {error}") from None
    return envelope


def source_of(envelope: Envelope) -> Session:
    """Return the source of an envelope; (0, None) if it has none."""
    source = envelope.source
    return _make(Session, (source.twin, source.connection if source.HasField("connection") else None))


def destination_of(envelope: Envelope) -> Session:
    """Return the destination of an envelope; (0, None) if it has none."""
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
    """Return the kind of a message: ``request``, ``response``, ``error``, ``ping``, ``pong``, or an empty text."""
    return envelope.WhichOneof("message") or ""


def payload_of(envelope: Envelope) -> bytes:
    """Return the payload as it was sent, plain or encrypted; empty if there is none."""
    which = envelope.WhichOneof("payload")
    payload: bytes = getattr(envelope, which) if which else b""
    return payload


def has_tag(tags: str, tag: str) -> bool:
    """Whether ``tag`` is one of ``tags``, which are separated by commas and white space."""
    return tag in tags and tag in tags.replace(",", " ").split()


class Tagged(Protocol):
    """Interface of objects with the tags of an envelope: the envelope itself, or its parsed header."""

    tags: str


def wants_fail_fast(envelope: Tagged) -> bool:
    """Whether the message has the tag :data:`FAIL_FAST`: relays must not store it if its destination is not
    connected."""
    return bool(envelope.tags) and has_tag(envelope.tags, FAIL_FAST)


# --- times ---


class Timed(Protocol):
    """Interface of objects with the times of an envelope: the envelope itself, or its parsed header.

    :ivar timestamp: seconds since 1970.
    :ivar expiration: lifetime in seconds after the timestamp.
    """

    timestamp: int
    expiration: int


def stamp(envelope: Envelope, now: int) -> None:
    """Set the timestamp to ``now``, and shorten the lifetime so that the message expires at the same time as before."""
    age = now - envelope.timestamp if envelope.timestamp and envelope.timestamp <= now else 0
    envelope.expiration = max(0, envelope.expiration - age)
    envelope.timestamp = now


def ttl(timestamp: int, expiration: int, now: int) -> int | None:
    """Return the remaining lifetime of a message in seconds; None if it has expired."""
    left = timestamp + expiration - now
    return left if left > 0 else None


def remaining_life(envelope: Timed, now: int) -> int | None:
    """Return the maximum seconds for which a relay may still store this message; None if it has expired.

    The result is at most :data:`MAX_EXPIRATION`.
    """
    left = ttl(envelope.timestamp, envelope.expiration, now)
    return None if left is None else min(left, MAX_EXPIRATION)


def life_ends(envelope: Timed, now: float) -> float:
    """Return the time, in seconds since 1970, at which a relay drops this message.

    If the message names a later time than receivers accept, the result is the time after which no receiver would
    accept the message.
    """
    expiration = envelope.expiration
    ends = envelope.timestamp + (min(MAX_EXPIRATION, expiration))
    latest = now + (MAX_SKEW + MAX_EXPIRATION)
    return float(ends) if ends < latest else latest


def times_error(envelope: Envelope, now: int) -> str | None:
    """Return why a receiver must refuse the times of this message; None if they are acceptable.

    The signature covers timestamp and expiration without a delimiter between them, so a relay can move digits from one
    to the other.  A message that lives 300 s could thus become one with a timestamp far in the future, which never
    expires.
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


def _address_text(address: Address) -> str:
    return f"{address.twin}{address.connection}"


def preimage(envelope: Envelope) -> bytes:
    """Return the bytes whose hash is :func:`challenge`."""
    parts = [
        envelope.uid,
        envelope.tags,
        f"{envelope.timestamp}{envelope.expiration}",
        _address_text(envelope.source),
        _address_text(envelope.destination),
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
    """Return the additional data with which a ``bound`` payload is encrypted: all fields except the payload.

    Before each field comes its length, 4 bytes big endian. The bytes ff ff ff ff stand for an absent field.
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
    """Change a ping into its answer: swap source and destination, append a greeting to the payload, keep all other
    fields."""
    source, destination = source_of(envelope), destination_of(envelope)
    envelope.pong.SetInParent()
    set_address(envelope.source, destination)
    set_address(envelope.destination, source)
    envelope.plain = (envelope.plain if envelope.WhichOneof("payload") == "plain" else b"") + PONG


def error_envelope(uid: str, text: str, to: Session | None, now: int) -> Envelope:
    """Return the error message with which a relay answers a request. It has no source and no signature.

    Clients recognise errors of relays by the missing source.
    """
    answer = Envelope(uid=uid, timestamp=now, expiration=DEFAULT_EXPIRATION)
    answer.error.code = 0
    answer.error.message = text
    if to is not None:
        set_address(answer.destination, to)
    return answer
