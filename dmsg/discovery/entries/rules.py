"""Rules for replacing and deleting entries. No I/O.

Every store uses :func:`decide_post` and :func:`check_deletion`.  They take the stored state of the key, the posted
entry or deletion, and the time. They return the state to write, or raise an error with the reason for a refusal, and
the store then writes nothing.

Sequences of a key grow by one and its timestamps grow, so a recorded entry can never replace a newer one. A deletion
leaves a tombstone (:class:`Head`), because otherwise anybody could post a deleted entry again.

The rules for replacing are the reference's (seed document, "Iteration rules"); those for deleting are our own.
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
"""Time that is never reached, in seconds since 1970."""
DELETE_ACT = "delete"
_UNIX_TO_YEAR_1 = 62135596800
"""Seconds that Go's ``time.Unix`` adds before comparing; this addition overflows."""

WRONG_FIRST_SEQUENCE = "new entry has non-zero sequence"
WRONG_SEQUENCE = "sequence field of new entry is not sequence of old entry + 1"
WRONG_TIME = "previous entry timestamp is not set before current entry timestamp"
WRONG_DELETE_SEQUENCE = "sequence field of the deletion is not sequence of the entry"


def time_order(timestamp: int) -> str:
    """Return 20 digits that sort in the order in which the reference compares timestamps.

    The reference compares ``time.Unix(ts, 0)``, which adds the seconds from year 1 to 1970 in 64 bits. Values
    above 9223371974719179007 wrap and count as older than any present one. The fixed width lets a database compare
    them.
    """
    # Adding 2**63 makes the signed result of Go's addition an unsigned number of the same order.
    return f"{(timestamp + _UNIX_TO_YEAR_1 + INT64) % UINT64:020d}"


def date_of(order: str) -> str:
    """Return the date of a ``time_order``, for people."""
    timestamp = (int(order) - _UNIX_TO_YEAR_1) % UINT64 - INT64
    return f"{datetime.fromtimestamp(timestamp / 1e9, UTC):%Y-%m-%d %H:%M:%S} UTC"


def next_sequence(sequence: int) -> int:
    """Return the next sequence number: uint64, which wraps to 0."""
    return (sequence + 1) % UINT64


@dataclass(frozen=True, slots=True)
class Head:
    """Sequence and time of a key's newest entry; kept as a tombstone after a deletion.

    Without a tombstone anybody could post an old first entry of a deleted key again.
    """

    sequence: int
    order: str
    deleted: bool = False
    deletion: bytes | None = None
    """JSON of the deletion; None if the entry exists, or if an earlier version of dmsg deleted it."""


class DeletedLater(EntryInvalid):
    """A key's new first entry is not newer than the deletion of its previous entry.

    The error carries the deletion, because its owner cannot look up the time: the entry no longer exists.

    :ivar deletion: JSON of the deletion, which the owner signed; None if it is no longer known.
    """

    def __init__(self, head: Head, entry: Entry) -> None:
        super().__init__(
            f"{WRONG_TIME}: the entry of this key was deleted at {date_of(head.order)}, by the clock of its owner, and "
            f"this one is of {date_of(time_order(entry.timestamp))}; was the clock set back?"
        )
        self.deletion = head.deletion


def check_iteration(head: Head | None, entry: Entry) -> bool:
    """Check the iteration rules (seed document, "Iteration rules").

    :returns: True for the first entry of a key.
    :raises EntryInvalid: the sequence or timestamp does not follow that of the stored entry; :class:`DeletedLater` if
        the key's entry was deleted later.
    """
    if head is None or head.deleted:
        if entry.sequence != 0:
            raise EntryInvalid(WRONG_FIRST_SEQUENCE)
        # Only the time is compared with a tombstone, because after a deletion a key begins again at sequence 0.
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

    :ivar refreshes: whether the server's owner posts the entry again regularly. If not, the server is *quiet*: it is
        listed after other servers, and only while checks reach it.
    :ivar checked: whether to list a server without a check. If not, it is listed after the first check that reaches it.
        A listed server that is posted again with the same address stays listed.
    :ivar place: address block of the poster; empty if unknown.
    :ivar most: maximum bytes of all stored entries that were posted from the poster's block. Each wider block may have
        this number times its factor.
    :ivar lasts: seconds after which the entry is dropped, unless it is posted again.
    """

    refreshes: bool = True
    checked: bool = True
    place: str = ""
    most: float = math.inf
    lasts: float = math.inf


def target(entry: Entry) -> str:
    """Return the address of a server's entry; empty for other entries."""
    return "" if entry.server is None else entry.server.address


@dataclass(frozen=True, slots=True)
class PresentState:
    """State of a key in a store before a post.

    :ivar target: address of the entry's server; empty for other entries.
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
    :ivar check_at: time of the next check of the server, in seconds since 1970.
    :ivar keeps_check: whether a check that is already planned is kept instead of ``check_at``.
    """

    first: bool
    checked: bool
    check_at: float
    keeps_check: bool


def decide_post(present: PresentState | None, entry: Entry, now: float, terms: Terms) -> Replacement:
    """Decide whether ``entry`` replaces what a store has of its key, and whether its server stays listed.

    :raises EntryInvalid: for the reasons of :func:`check_iteration`.
    """
    first = check_iteration(None if present is None else present.head, entry)
    if terms.checked:
        return Replacement(first, True, NEVER, False)
    if first or present is None or present.target != target(entry):
        return Replacement(first, False, now, False)
    # A server with the same address stays listed, because an owner who refreshes the entry must not lose its place.
    return Replacement(first, present.checked, now, terms.refreshes)


@dataclass(frozen=True, slots=True)
class Deletion:
    """Signed statement that the entry with this sequence is to be deleted.

    The statement names the act, so that no entry can pass for it. Its timestamp must be later than the entry's, so
    that it cannot be replayed against a later entry.
    """

    static: str
    sequence: int
    timestamp: int
    signature: str = ""

    def signing_json(self) -> bytes:
        """Return the JSON of the deletion that its signature covers."""
        return (
            f'{{"act":"{DELETE_ACT}","static":"{self.static}","sequence":{self.sequence},"timestamp":{self.timestamp}}}'
        ).encode()

    def to_json(self) -> bytes:
        """Return the body of the DELETE request."""
        return self.signing_json()[:-1] + f',"signature":"{self.signature}"}}'.encode()

    def sign(self, key: SecKey) -> Deletion:
        """Return the deletion signed with ``key``."""
        return replace(self, signature=key.sign(self.signing_json()).hex())


def decode_deletion(body: bytes) -> Deletion:
    """Parse a deletion and verify its signature.

    :raises EntryDecodeError, EntryInvalid, EntrySignatureError: the deletion is malformed or not signed by its key.
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
    # The null key is no point of the curve, so nobody can sign for it; the reference names this case in its own words.
    if deletion.static == NULL_KEY:
        raise EntryInvalid("entry Keys is nil")
    try:
        PubKey.from_hex(deletion.static).verify(deletion.signing_json(), Signature.from_hex(deletion.signature))
    except (KeyFormatError, SignatureError) as error:
        raise EntrySignatureError from error
    return deletion


def check_deletion(head: Head | None, deletion: Deletion) -> None:
    """Check that a deletion applies to the newest entry of its key.

    :raises EntryInvalid: the deletion names another sequence, or is not later than the entry.
    :raises KeyError: there is nothing to delete.
    """
    if head is None or head.deleted:
        raise KeyError(deletion.static)
    # The sequence ties the deletion to one entry: a recorded deletion deletes no later entry.
    if deletion.sequence != head.sequence:
        raise EntryInvalid(WRONG_DELETE_SEQUENCE)
    if time_order(deletion.timestamp) <= head.order:
        raise EntryInvalid(WRONG_TIME)
