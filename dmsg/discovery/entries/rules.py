"""Rules for replacing and deleting entries.  No I/O.

The reference's rules (seed document, "Iteration rules"), and those of deletion, which it does not have.  Every store
takes its decisions from :func:`decide_post` and :func:`check_deletion`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from dmsg.discovery.entries.entry import Entry, EntryInvalid, EntrySignatureError
from dmsg.discovery.entries.gojson import INT64, NULL_KEY, STRICT, UINT64, EntryDecodeError, string_of
from dmsg.errors import KeyFormatError, SignatureError
from dmsg.keys import PubKey, SecKey, Signature

NEVER = 1e18
"""Seconds since 1970."""
DELETE_ACT = "delete"
_UNIX_TO_YEAR_1 = 62135596800
"""What Go's ``time.Unix`` adds before it compares, and which overflows."""

WRONG_FIRST_SEQUENCE = "new entry has non-zero sequence"
WRONG_SEQUENCE = "sequence field of new entry is not sequence of old entry + 1"
WRONG_TIME = "previous entry timestamp is not set before current entry timestamp"
WRONG_DELETE_SEQUENCE = "sequence field of the deletion is not sequence of the entry"


def time_order(timestamp: int) -> str:
    """20 digits that compare as the reference compares timestamps.

    It compares ``time.Unix(ts, 0)``, which adds the seconds from year 1 to
    1970 in 64 bits: values above 9223371974719179007 wrap and count as older
    than any present one.  Fixed width, so that a database can compare it.
    """
    return f"{(timestamp + _UNIX_TO_YEAR_1 + INT64) % UINT64:020d}"


def date_of(order: str) -> str:
    """Return the date behind a ``time_order``, for people."""
    timestamp = (int(order) - _UNIX_TO_YEAR_1) % UINT64 - INT64
    return f"{datetime.fromtimestamp(timestamp / 1e9, UTC):%Y-%m-%d %H:%M:%S} UTC"


def next_sequence(sequence: int) -> int:
    """uint64, wraps."""
    return (sequence + 1) % UINT64


@dataclass(frozen=True, slots=True)
class Head:
    """What is known of a key's newest entry, also after it was deleted.

    A deletion leaves it behind, so that an old first entry, which anybody may
    have kept, cannot be posted again.
    """

    sequence: int
    order: str
    deleted: bool = False
    deletion: bytes | None = None
    """JSON of the deletion; None when the entry is there, or an earlier version deleted it."""


class DeletedLater(EntryInvalid):
    """A first entry is not later than the deletion of the one before.

    Its owner cannot look up when that was: the entry is gone.

    :ivar deletion: JSON of the deletion, which the owner signed; None if it is not known any more.
    """

    def __init__(self, head: Head, entry: Entry) -> None:
        super().__init__(
            f"{WRONG_TIME}: the entry of this key was deleted at {date_of(head.order)}, by the clock of its owner, and "
            f"this one is of {date_of(time_order(entry.timestamp))}; was the clock set back?"
        )
        self.deletion = head.deletion


def check_iteration(head: Head | None, entry: Entry) -> bool:
    """The iteration rules (seed document, "Iteration rules").

    :returns: True for the first entry of a key.
    :raises EntryInvalid: sequence or timestamp do not follow; :class:`DeletedLater` of a key that was deleted.
    """
    if head is None or head.deleted:
        if entry.sequence != 0:
            raise EntryInvalid(WRONG_FIRST_SEQUENCE)
        if head is not None and time_order(entry.timestamp) <= head.order:
            raise DeletedLater(head, entry)
        return True
    if entry.sequence != next_sequence(head.sequence):
        raise EntryInvalid(WRONG_SEQUENCE)
    if time_order(entry.timestamp) <= head.order:
        raise EntryInvalid(WRONG_TIME)
    return False


@dataclass(frozen=True, slots=True)
class Terms:
    """How an entry is kept.

    :ivar refreshes: a server's owner posts it again and again; else it is *quiet*: listed behind others for as long as
        it is seen.
    :ivar checked: a server is listed without anybody having looked at it; else it is looked at first, and listed when
        it was there.  One that posts again from where it was seen stays listed.
    :ivar place: the address block that posted it; empty: nobody knows.
    :ivar most: bytes that the place may have; the blocks of addresses around it as many times as much as their factor.
    :ivar lasts: seconds after which it is dropped, unless it is posted again.
    """

    refreshes: bool = True
    checked: bool = True
    place: str = ""
    most: float = math.inf
    lasts: float = math.inf


def target(entry: Entry) -> str:
    """Where a server is; empty: it is none."""
    return "" if entry.server is None else entry.server.address


@dataclass(frozen=True, slots=True)
class Present:
    """State of a key in a store before a post.

    :ivar target: address of the entry's server; empty: it is none.
    :ivar checked: whether the server may be listed without a further look.
    """

    head: Head
    target: str
    checked: bool


@dataclass(frozen=True, slots=True)
class Replacement:
    """State that a store writes together with an accepted entry.

    :ivar first: whether the key had no entry before.
    :ivar checked: whether the entry's server may be listed at once.
    :ivar look_at: time of the next look at the server, in seconds since 1970.
    :ivar keeps_look: whether a look that is already planned is kept instead of ``look_at``.
    """

    first: bool
    checked: bool
    look_at: float
    keeps_look: bool


def decide_post(present: Present | None, entry: Entry, now: float, terms: Terms) -> Replacement:
    """Decide whether ``entry`` replaces what a store has of its key, and whether its server stays listed.

    :raises EntryInvalid: as :func:`check_iteration` does.
    """
    first = check_iteration(None if present is None else present.head, entry)
    if terms.checked:
        return Replacement(first, True, NEVER, False)
    if first or present is None or present.target != target(entry):
        return Replacement(first, False, now, False)
    return Replacement(first, present.checked, now, terms.refreshes)


@dataclass(frozen=True, slots=True)
class Deletion:
    """A signed statement that the entry with this sequence is to go.

    It names the act, so that no entry can pass for it, and its timestamp must
    be later than the entry's, so that it works once.
    """

    static: str
    sequence: int
    timestamp: int
    signature: str = ""

    def signing_json(self) -> bytes:
        """What is signed."""
        return (
            f'{{"act":"{DELETE_ACT}","static":"{self.static}","sequence":{self.sequence},"timestamp":{self.timestamp}}}'
        ).encode()

    def to_json(self) -> bytes:
        """The body of the DELETE request."""
        return self.signing_json()[:-1] + f',"signature":"{self.signature}"}}'.encode()

    def sign(self, key: SecKey) -> Deletion:
        """This deletion with the signature of ``key``."""
        return replace(self, signature=key.sign(self.signing_json()).hex())


def decode_deletion(body: bytes) -> Deletion:
    """A deletion whose signature holds.

    :raises EntryDecodeError, EntryInvalid, EntrySignatureError: it does not.
    """
    known = frozenset({"act", "static", "sequence", "timestamp", "signature"})
    members = STRICT.members(STRICT.parse(body), known, "deletion")
    for name in ("act", "static", "sequence", "timestamp", "signature"):
        if members.get(name) is None:
            raise EntryDecodeError(f"deletion has no {name}")
    if members["act"] != DELETE_ACT:
        raise EntryDecodeError(f'act is not "{DELETE_ACT}"')
    deletion = Deletion(
        static=STRICT.key(members["static"], "static"),
        sequence=STRICT.integer(members["sequence"], 0, UINT64, "sequence"),
        timestamp=STRICT.integer(members["timestamp"], -INT64, INT64, "timestamp"),
        signature=string_of(members["signature"], "signature").lower(),
    )
    if deletion.static == NULL_KEY:
        raise EntryInvalid("entry Keys is nil")
    try:
        PubKey.from_hex(deletion.static).verify(deletion.signing_json(), Signature.from_hex(deletion.signature))
    except (KeyFormatError, SignatureError) as error:
        raise EntrySignatureError from error
    return deletion


def check_deletion(head: Head | None, deletion: Deletion) -> None:
    """:raises EntryInvalid: it names another entry, or is not later than it.

    :raises KeyError: there is nothing to delete.
    """
    if head is None or head.deleted:
        raise KeyError(deletion.static)
    if deletion.sequence != head.sequence:
        raise EntryInvalid(WRONG_DELETE_SEQUENCE)
    if time_order(deletion.timestamp) <= head.order:
        raise EntryInvalid(WRONG_TIME)
