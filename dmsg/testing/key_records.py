"""Records of a random walk of discovery: what is known about the entry of a key, and in which state the entry is."""

from __future__ import annotations

from dmsg.discovery.entries.dialects import Dialect
from dmsg.discovery.entries.entry import Entry
from dmsg.errors import DmsgError
from dmsg.keys import SecKey
from dmsg.testing.promise import PromiseBroken

ABSENT, POSTING, STORED, DELETING = STATES = ("absent", "posting", "stored", "deleting")
"""States of the entry of a key, in the order of the table's columns. While a request is under way, the entry is
``POSTING`` or ``DELETING``, whether it is stored or not."""
OWNER, TWIN, OTHER_OWNER, DISCOVERY = "its owner", "the twin", "another owner", "discovery"
"""Parties: roles of a host for an entry. A ``TWIN`` is another program with the key of the entry."""


class KeyRecord:
    """Knowledge of a walk about the entry of one key.

    :ivar acknowledged: number of changes that discovery has acknowledged.
    :ivar newest: timestamp of the newest acknowledged entry, in nanoseconds since 1970.
    :ivar posting: number of entries that were sent and not answered yet.
    :ivar deleting: number of deletions that were sent and not answered yet.
    :ivar deletions: number of deletions that have ended.
    :ivar is_stored: whether discovery had an entry of the key at the last check.
    :ivar may_be_deleted: whether a deletion was sent after the newest acknowledged entry, or at the same time.
    :ivar dead: entries that an acknowledged deletion has removed. None of them may be stored again.
    """

    def __init__(self, key: SecKey) -> None:
        self.key = key
        self.acknowledged = 0
        self.newest = 0
        self.posting = self.deleting = self.deletions = 0
        self.is_stored = False
        self.may_be_deleted = False
        self.dead: set[bytes] = set()

    @property
    def state(self) -> str:
        """State of the entry, one of ``STATES``."""
        if self.deleting or self.posting:
            return DELETING if self.deleting else POSTING
        return STORED if self.is_stored else ABSENT

    def posted(self, entry: Entry, deletions: int) -> None:
        """Note that an entry was acknowledged.

        :param deletions: number of deletions that had ended when the entry was sent.
        """
        self.acknowledged += 1
        if entry.timestamp > self.newest:
            self.newest = entry.timestamp
            # The answer to a deletion may arrive before that to a POST which discovery has executed earlier.
            self.may_be_deleted = self.deleting > 0 or self.deletions > deletions

    def check(self, body: bytes | None, stranger: bytes) -> None:
        """Check the entry that discovery stores.

        :param stranger: key of the stranger, which no honest entry contains.
        :param body: JSON of the entry; None if there is none.
        :raises PromiseBroken: an acknowledged change is lost, or somebody else has changed the entry.
        """
        self.is_stored = body is not None
        if body is None:
            if self.newest and not self.may_be_deleted:
                raise PromiseBroken("an acknowledged entry is lost")
            return
        if stranger in body:
            raise PromiseBroken("a stranger has changed the entry of another key")
        try:
            entry = Dialect.SEED.decode_signed(body)
        except DmsgError as error:
            raise PromiseBroken(f"discovery stores an entry that its key has not signed: {error}") from None
        if entry.static != self.key.public.hex():
            raise PromiseBroken("discovery stores the entry of a key under another key")
        if entry.timestamp < self.newest:
            raise PromiseBroken("an acknowledged entry was replaced by an older one")
        if body in self.dead:
            raise PromiseBroken("a deleted entry came back")
