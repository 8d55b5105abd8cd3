"""Rules for replacing and deleting entries. No I/O.

Every store follows :func:`decide_post` and :func:`check_deletion`. These functions get the stored state of the key, the
posted entry or deletion, and the time. They return the state to write, or raise an error with the reason for a refusal.
After an error the store writes nothing.

Each new entry of a key has the next sequence number and a later timestamp. So an attacker who has recorded an entry
cannot replace a newer one with it. A deletion leaves a tombstone (:class:`Head`), because otherwise anybody could post
the deleted entry again.

The rules for replacing are those of the reference (seed document, "Iteration rules"). The reference has no deletions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime

from dmsg.discovery.entries.entry import Entry, EntryInvalid, SignedRequest, parse_request
from dmsg.discovery.entries.gojson import INT64, NULL_KEY, STRICT, UINT64, string_of

TOMBSTONE_TTL = 86400.0
"""Seconds for which the tombstone of a deleted entry is kept, so that nobody can post the entry again."""
NEVER = 1e18
"""Time that is never reached, in seconds since 1970."""
DELETE_ACT = "delete"
_UNIX_TO_YEAR_1 = 62135596800
"""Seconds from year 1 to 1970, which Go's ``time.Unix`` adds to a time. For large times this 64-bit addition overflows.
"""

WRONG_FIRST_SEQUENCE = "new entry has non-zero sequence"
WRONG_SEQUENCE = "sequence field of new entry is not sequence of old entry + 1"
WRONG_TIME = "previous entry timestamp is not set before current entry timestamp"
WRONG_DELETE_SEQUENCE = "sequence field of the deletion is not sequence of the entry"


def time_order(timestamp: int) -> str:
    """Return a timestamp as 20 digits. Their order as text is the order of timestamps in the reference.

    The reference compares ``time.Unix(ts, 0)``. This function adds the seconds from year 1 to 1970 in 64 bits, so
    timestamps above 9223371974719179007 wrap around and count as older than usual timestamps. All results have the same
    length, so that databases can compare them as text.
    """
    # Go's result is a signed number. Adding 2**63 makes it unsigned and keeps the order.
    return f"{(timestamp + _UNIX_TO_YEAR_1 + INT64) % UINT64:020d}"


def date_of(order: str) -> str:
    """Return the date and time of a result of :func:`time_order`, for people."""
    timestamp = (int(order) - _UNIX_TO_YEAR_1) % UINT64 - INT64
    return f"{datetime.fromtimestamp(timestamp / 1e9, UTC):%Y-%m-%d %H:%M:%S} UTC"


def next_sequence(sequence: int) -> int:
    """Return the next sequence number: uint64, which wraps to 0."""
    return (sequence + 1) % UINT64


@dataclass(frozen=True, slots=True)
class Head:
    """Sequence and time of a key's newest entry. After a deletion the store keeps them as a tombstone.

    Without a tombstone anybody could post a recorded first entry (sequence 0) of the key again.

    :ivar order: timestamp of the entry or, in a tombstone, of the deletion, as :func:`time_order` returns it.
    """

    sequence: int
    order: str
    deleted: bool = False
    deletion: bytes | None = None
    """JSON of the deletion; None if the entry is not deleted, or was deleted by an earlier version of dmsg."""


class DeletedLater(EntryInvalid):
    """Error: the key's entry was deleted, and the timestamp of the posted entry is not later than the deletion's.

    The error contains the deletion, because the poster needs the date of the deletion for the next attempt. The poster
    cannot look the date up, because the deleted entry no longer exists.

    :ivar deletion: JSON of the deletion, which the owner signed; None if it is no longer known.
    """

    def __init__(self, head: Head, entry: Entry) -> None:
        super().__init__(
            f"{WRONG_TIME}: the entry of this key was deleted at {date_of(head.order)}, by the clock of its owner, and "
            f"this one is of {date_of(time_order(entry.timestamp))}; was the clock set back?"
        )
        self.deletion = head.deletion


def check_iteration(head: Head | None, entry: Entry) -> bool:
    """Check that an entry may follow the stored one (seed document, "Iteration rules").

    :returns: whether this is the first entry of the key.
    :raises EntryInvalid: the entry's sequence is not the next one, or its timestamp is not later. The error is
        :class:`DeletedLater` if the key's previous entry was deleted after the timestamp of ``entry``.
    """
    if head is None or head.deleted:
        if entry.sequence != 0:
            raise EntryInvalid(WRONG_FIRST_SEQUENCE)
        # Only the time is compared with the tombstone's, because after a deletion the sequence starts again at 0.
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
    """Conditions under which a store keeps an entry.

    :ivar refreshes: whether the owner of the entry posts it again regularly. A server whose owner does not is *quiet*:
        discovery lists it after other servers, and only while checks reach it.
    :ivar checked: whether a server may be listed without a check. Otherwise it is listed after the first check that
        reaches it. A listed server that is posted again with the same address stays listed in both cases.
    :ivar place: address block of the poster; empty if unknown.
    :ivar most: maximum number of bytes of all stored entries that were posted from this block. For each wider block,
        the number is multiplied by the factor of the block.
    :ivar lasts: seconds after which the entry is dropped, unless it is posted again.
    """

    refreshes: bool = True
    checked: bool = True
    place: str = ""
    most: float = math.inf
    lasts: float = math.inf


def target(entry: Entry) -> str:
    """Return the server's address in an entry; empty if the entry has no server part."""
    return "" if entry.server is None else entry.server.address


@dataclass(frozen=True, slots=True)
class PresentState:
    """State of a key in a store before a post.

    :ivar target: server's address in the stored entry; empty if the entry has no server part.
    :ivar checked: whether the server may be listed without a further check.
    """

    head: Head
    target: str
    checked: bool


@dataclass(frozen=True, slots=True)
class Replacement:
    """State that a store writes together with an accepted entry.

    :ivar first: whether the key had no entry before.
    :ivar checked: whether the entry's server may be listed at once.
    :ivar check_at: time of the server's next check, in seconds since 1970.
    :ivar keeps_check: whether an earlier planned check of the server stays as planned, and ``check_at`` is ignored.
    """

    first: bool
    checked: bool
    check_at: float
    keeps_check: bool


def decide_post(present: PresentState | None, entry: Entry, now: float, terms: Terms) -> Replacement:
    """Decide whether ``entry`` replaces the stored state of its key, and whether its server stays listed.

    :raises EntryInvalid: for the reasons of :func:`check_iteration`.
    """
    first = check_iteration(None if present is None else present.head, entry)
    if terms.checked:
        return Replacement(first, True, NEVER, False)
    if first or present is None or present.target != target(entry):
        return Replacement(first, False, now, False)
    # A server with the same address stays listed. Otherwise each refresh of the entry would remove the server from the
    # list until the next check.
    return Replacement(first, present.checked, now, terms.refreshes)


@dataclass(frozen=True, slots=True)
class Deletion(SignedRequest):
    """Signed request to delete the entry with a certain sequence.

    Its timestamp must be later than the entry's, so that nobody can replay it against a later entry of the key.
    """

    static: str
    sequence: int
    timestamp: int
    signature: str = ""

    def signing_json(self) -> bytes:
        return (
            f'{{"act":"{DELETE_ACT}","static":"{self.static}","sequence":{self.sequence},"timestamp":{self.timestamp}}}'
        ).encode()


def decode_deletion(body: bytes) -> Deletion:
    """Parse a deletion and verify its signature.

    :raises EntryDecodeError, EntryInvalid, EntrySignatureError: the deletion is malformed or not signed by its key.
    """
    members = parse_request(body, "deletion", DELETE_ACT, "delete an entry", ("sequence", "timestamp"))
    deletion = Deletion(
        static=STRICT.key(members["static"], "static"),
        sequence=STRICT.integer(members["sequence"], 0, UINT64, "sequence"),
        timestamp=STRICT.integer(members["timestamp"], -INT64, INT64, "timestamp"),
        signature=string_of(members["signature"], "signature").lower(),
    )
    # The null key is no point of the curve, so no signature can be valid for it. The reference has an error message of
    # its own for this case.
    if deletion.static == NULL_KEY:
        raise EntryInvalid("entry Keys is nil")
    deletion.verify()
    return deletion


def check_deletion(head: Head | None, deletion: Deletion) -> None:
    """Check that a deletion applies to the newest entry of its key.

    :raises EntryInvalid: the deletion names another sequence, or is not later than the entry.
    :raises KeyError: the key has no entry.
    """
    if head is None or head.deleted:
        raise KeyError(deletion.static)
    # The sequence limits the deletion to one entry, so nobody can replay it against a later one.
    if deletion.sequence != head.sequence:
        raise EntryInvalid(WRONG_DELETE_SEQUENCE)
    if time_order(deletion.timestamp) <= head.order:
        raise EntryInvalid(WRONG_TIME)
