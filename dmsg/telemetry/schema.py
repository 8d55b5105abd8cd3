"""Schema of the events that the entities write and the pipeline reads.

Pure data, and the only code that :mod:`dmsg.telemetry` and :mod:`dmsg.analytics` share. An event is one
JSON object on one line: the fields of ``ENVELOPE``, then those of its type. An absent field was not
measured; that is not the same as 0.

Rules for changes: a new field or a new type keeps ``SCHEMA_VERSION``. A field whose meaning changes gets a
new name. A reader rejects events of an unknown version and keeps their lines in quarantine.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

SCHEMA_VERSION = 1

SEGMENT_SUFFIX = ".jsonl.gz"
"""Suffix of the names of sealed files."""
EVENTS_PREFIX, RECEIPTS_PREFIX = "events-", "receipts-"
"""Prefixes of the names of sealed files. Receipts have files of their own, because they are verified before they
count."""

MAX_LINE = 16 * 1024
"""Longest line in bytes; a longer line is not an event."""


class Type(StrEnum):
    """Type of a field, as represented in JSON."""

    STRING = "string"
    LONG = "long"
    BOOLEAN = "boolean"
    HISTOGRAM = "histogram"
    """Array of :data:`BUCKETS` counts."""


@dataclass(frozen=True, slots=True)
class Field:
    """Field of an event."""

    name: str
    type: Type
    text: str


# --- histograms --------------------------------------------------------------

BUCKETS = 34
"""Number of buckets of a latency histogram."""
FIRST_BOUND = 0.0001
"""Upper bound of the first bucket, in seconds. Each next bound is larger by the factor sqrt(2); the last bucket has
none."""
BOUNDS = tuple(FIRST_BOUND * 2 ** (index / 2) for index in range(BUCKETS - 1))
"""Upper bounds in seconds of all buckets but the last: 100 us to 6.55 s."""

# --- the envelope ------------------------------------------------------------

ENVELOPE = (
    Field("v", Type.LONG, "version of the schema, 1"),
    Field("type", Type.STRING, "which event it is"),
    Field("producer", Type.STRING, "who writes: a server's public key (66 hex digits), a discovery's name"),
    Field("role", Type.STRING, "server or discovery"),
    Field("boot", Type.STRING, "32 hex digits, chosen at random when the process starts"),
    Field("seq", Type.LONG, "0, 1, 2 ... without gaps within a boot: with producer and boot the event's identity"),
    Field("ts", Type.LONG, "when, in ms since 1970, UTC, by the machine's clock"),
    Field("mono", Type.LONG, "ms since the process started, by a clock that nobody sets"),
)

# --- fields that several events have -----------------------------------------

_PEER = Field("peer", Type.STRING, "the client, a pseudonym of 16 hex digits, or its key if the operator says so")
_SRC = Field("src", Type.STRING, "the client that asked for the transport, as peer")
_DST = Field("dst", Type.STRING, "the client that it asked for, as peer")
_FORMER = Field(
    "former", Type.BOOLEAN, "of a transport from before the server's start, which it does not know; absent if it does"
)
_REASON = Field("reason", Type.STRING, "why: a close or drop reason in small letters (docs/protocol)")
_SOURCE = Field("source", Type.STRING, "where from: a pseudonym, changed each day, of the network (/24, /48)")
_COUNT = Field("n", Type.LONG, "how many such occurrences the event stands for")
_SESSION = Field("session", Type.LONG, "number of the connection within the boot")
_TRANSPORT = Field(
    "transport",
    Type.STRING,
    "32 hex digits: the first half of SHA-256 over 'dmsg transport 1', REQUEST and ACCEPT payload, which both "
    "clients know too; absent before ACCEPT",
)
_SECURE = Field("secure", Type.BOOLEAN, "the transport is encrypted from end to end")
_DURATION = Field("duration_ms", Type.LONG, "how long it was there")
_ACCEPT = Field("accept_ms", Type.LONG, "from REQUEST to ACCEPT; absent if it was never accepted")
_ACCEPT_US = Field("accept_us", Type.LONG, "the same in microseconds: of small times a millisecond says little")
_COUNTERS = (
    Field("data_ab", Type.LONG, "bytes of user data taken from src for dst since the transport's last event"),
    Field("data_ba", Type.LONG, "the other way"),
    Field("frames_ab", Type.LONG, "FWD frames from src to dst since the last event"),
    Field("frames_ba", Type.LONG, "the other way"),
    Field("acks_ab", Type.LONG, "ACK frames of dst for what src sent, since the last event"),
    Field("acks_ba", Type.LONG, "the other way"),
    Field(
        "rtt",
        Type.HISTOGRAM,
        "samples of the time from a FWD to its ACK at the relay, since the last event; absent without samples. A "
        "sample is taken when a direction was silent for a second or more: only then is it certain what an ACK is for",
    ),
)

# --- events ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EventType:
    """Type of an event."""

    name: str
    writers: str
    text: str
    fields: tuple[Field, ...]


EVENTS = (
    EventType(
        "start",
        "all",
        "The process begins to write.",
        (
            Field("version", Type.STRING, "of dmsg"),
            Field("capacity", Type.LONG, "clients that a server takes"),
            Field("keys", Type.STRING, "hashed or clear: how clients are named"),
            Field("names", Type.STRING, "8 hex digits: who has the same names clients alike; clear, if by their keys"),
        ),
    ),
    EventType("stop", "all", "The process ends in order; without it, it was killed.", ()),
    EventType(
        "heartbeat",
        "all",
        "Once a minute. Counts are of the interval, not since the start.",
        (
            Field("interval_ms", Type.LONG, "since the last heartbeat, or since the start"),
            Field("sessions", Type.LONG, "connected clients"),
            Field("transports", Type.LONG, "open transports"),
            Field("capacity", Type.LONG, "clients that a server takes"),
            Field("handshakes", Type.LONG, "handshakes under way"),
            Field("frames", Type.LONG, "frames received"),
            Field("bytes", Type.LONG, "bytes of frames received"),
            Field("entries", Type.LONG, "entries that a discovery has"),
            Field("requests", Type.LONG, "requests that a discovery answered"),
            Field("lag_ms", Type.LONG, "the longest that a timer of the process was late"),
            Field("cpu_ms", Type.LONG, "processor time used"),
            Field("rss_kb", Type.LONG, "memory, in KiB"),
            Field("registered", Type.BOOLEAN, "discovery has taken the server's last entry"),
            Field("lost", Type.LONG, "events that could not be written"),
        ),
    ),
    EventType(
        "session_open",
        "server",
        "A client is connected.",
        (_PEER, _SESSION, Field("handshake_ms", Type.LONG, "how long its handshake took")),
    ),
    EventType(
        "session_close",
        "server",
        "A client is gone.",
        (
            _PEER,
            _SESSION,
            _REASON,
            _DURATION,
            Field("frames", Type.LONG, "frames received from it"),
            Field("bytes", Type.LONG, "bytes of frames received from it"),
        ),
    ),
    EventType(
        "handshake_fail",
        "server",
        "A connection ended before its client was known. What repeats within a minute is one event.",
        (_REASON, _SOURCE, _COUNT),
    ),
    EventType(
        "transport_open",
        "server",
        "A transport was accepted.",
        (_TRANSPORT, _SRC, _DST, _SECURE, _ACCEPT, _ACCEPT_US),
    ),
    EventType(
        "transport_refuse",
        "server",
        "A REQUEST was refused by the server. What repeats within a minute is one event.",
        (
            _SRC,
            _DST,
            _REASON,
            _COUNT,
            Field("targets", Type.LONG, "how many different clients were asked for, counted up to 1024"),
        ),
    ),
    EventType(
        "transport_progress",
        "server",
        "A transport that is open for long, every 5 minutes if anything passed.",
        (_TRANSPORT, _SRC, _DST, _SECURE, *_COUNTERS),
    ),
    EventType(
        "transport_close",
        "server",
        "A transport, or a REQUEST for one, is over.",
        (
            _TRANSPORT,
            _SRC,
            _DST,
            _SECURE,
            _REASON,
            Field("by", Type.STRING, "src, dst, or server: who ended it"),
            _DURATION,
            _ACCEPT,
            _ACCEPT_US,
            *_COUNTERS,
            Field("total_ab", Type.LONG, "bytes of user data taken from src for dst, of its whole life"),
            Field("total_ba", Type.LONG, "the other way"),
            Field(
                "dropped_ab",
                Type.LONG,
                "bytes of those that were not handed on: for them there was no room, or they were in dst's queue when "
                "its connection ended, and then a share of what was there; absent if there are none",
            ),
            Field("dropped_ba", Type.LONG, "the other way"),
        ),
    ),
    EventType(
        "drop",
        "server",
        "How often something was refused or ended since the last heartbeat, one event a reason.",
        (_REASON, _COUNT),
    ),
    EventType(
        "receipt",
        "server",
        "What a client says was delivered to and from it, signed (docs/pipeline/receipts.md). In files of their own.",
        (
            Field("receipt", Type.STRING, "the signed bytes, in hex"),
            _PEER,
            _FORMER,
        ),
    ),
    EventType(
        "receipt_checked",
        "verifier",
        "A receipt whose signature was checked, as `dmsg analytics verify` writes it; identity and time are the "
        "receipt's.",
        (
            Field("reason", Type.STRING, "why it is not believed; absent if it is"),
            _TRANSPORT,
            Field("server", Type.STRING, "over which server, its key in hex"),
            Field("signer", Type.STRING, "whose word it is: a pseudonym of the pipeline, or the key"),
            Field("partner", Type.STRING, "the other end, as signer"),
            Field("initiator", Type.BOOLEAN, "the signer asked for the transport"),
            Field("delivered_out", Type.LONG, "bytes that the other end has acknowledged to the signer"),
            Field("delivered_in", Type.LONG, "bytes that the signer has received"),
            _PEER,
            _FORMER,
        ),
    ),
    EventType(
        "entry",
        "discovery",
        "An entry was posted or deleted.",
        (
            Field("subject", Type.STRING, "whose: a server's key, a client's pseudonym"),
            Field("is_server", Type.BOOLEAN, "it is a server's entry"),
            Field("result", Type.STRING, "first, next or deleted"),
            Field("sequence", Type.LONG, "of the entry"),
            Field("available", Type.LONG, "connections that the server still takes"),
            Field("clock_ms", Type.LONG, "of a server's: the time that it names, less that of this machine"),
            Field("delegated", Type.LONG, "servers that a client names"),
        ),
    ),
    EventType(
        "entry_refuse",
        "discovery",
        "A request was refused. What repeats within a minute is one event.",
        (_REASON, _SOURCE, _COUNT),
    ),
    EventType(
        "lookup_fail",
        "discovery",
        "Somebody asked for an entry that is not there. What repeats within a minute is one event.",
        (
            _SOURCE,
            _COUNT,
            Field("targets", Type.LONG, "how many different clients were asked for, counted up to 1024"),
        ),
    ),
    EventType(
        "segment_end",
        "all",
        "The last line of a file.",
        (
            Field("lines", Type.LONG, "lines before this one"),
            Field("sha256", Type.STRING, "of their bytes, hex"),
            Field("recovered", Type.BOOLEAN, "the process that wrote them was killed; this line is of the next one"),
        ),
    ),
)

EVENT = {event.name: event for event in EVENTS}


def columns() -> tuple[Field, ...]:
    """Return every field once, those of the envelope first: the columns of a table that can hold any event.

    :raises TypeError: two events give a field different types.
    """
    known: dict[str, Field] = {}
    for field in (*ENVELOPE, *(field for event in EVENTS for field in event.fields)):
        before = known.setdefault(field.name, field)
        if before.type is not field.type:
            raise TypeError(f"{field.name} is {before.type} and {field.type}")
    return tuple(known.values())


def markdown() -> str:
    """Return the tables of docs/pipeline/events.md."""
    parts = ["## Envelope\n", _table(ENVELOPE)]
    for event in EVENTS:
        parts += [f"## `{event.name}`\n", f"Written by: {event.writers}. {event.text}\n"]
        if event.fields:
            parts.append(_table(event.fields))
    return "\n".join(parts)


def _table(fields: tuple[Field, ...]) -> str:
    rows = [f"| `{field.name}` | {field.type} | {field.text} |" for field in fields]
    return "\n".join(["| field | type | what |", "|---|---|---|", *rows]) + "\n"
