"""Interface of stores, and rules that do not depend on the kind of store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from twisted.internet.defer import Deferred
from zope.interface import Attribute, Interface

from dmsg.discovery.entries.entry import Entry
from dmsg.discovery.entries.rules import NEVER, Deletion, Terms
from dmsg.errors import DmsgError

ROOM_AT_ONCE = 100
"""Maximum number of entries dropped at a time when the whole store is too large; the next sweep or post continues."""
OVERHEAD = 1536
"""Bytes that are counted for an entry in addition to its JSON; a tombstone counts as many bytes."""
TOMBSTONE_TTL = 86400.0
"""Seconds for which the tombstone of a deleted entry is kept, so that nobody can post the entry again."""
LATEST_CHECK = 3600.0
"""Maximum seconds into the future for which a check of a server is planned.  If a check is planned for a later time,
the clock was set back since then.
"""
KINDS = ("client", "server", "both")
"""Kinds of entries, by the parts (client, server) that they have."""

Dropped = Callable[[str, str, int], object]
"""Callback for dropped entries, with a reason, the poster's place, and the number of entries.

Reasons are ``ended`` (not posted again in time), ``deleted`` (an expired tombstone), ``address`` (the place exceeded
its limit) and ``total`` (the store was too large, and this place had most).
"""


class StoreError(DmsgError):
    """The store cannot be opened, or does not answer."""


class StoreContended(StoreError):
    """Other processes changed the same nameplate during each attempt to change it."""


class DueServer(NamedTuple):
    """Server whose check is due.

    :ivar json: JSON of its entry.
    :ivar place: address block of the poster.
    :ivar refreshes: see :class:`Terms`.
    :ivar listed: whether recent checks have found the server; False for a server that no check has found yet.
    """

    json: bytes
    place: str
    refreshes: bool
    listed: bool = False


class IEntryStore(Interface):
    """Interface of a store of entries by key."""

    failures: tuple[type[Exception], ...] = Attribute(
        "A tuple of the exceptions by which it fails that are not a fault of this program."
    )
    nameplates: INameplates = Attribute("Provides dmsg.discovery.store.base.INameplates: kept beside the entries.")

    def is_full(error: BaseException | None) -> bool:
        """Whether ``post`` fails with this error because nothing can be written, while reading still works."""

    def post(entry: Entry, now: float, terms: Terms = ...) -> Deferred[bool]:
        """Store a verified entry in place of the key's present one.

        If the poster's place or the whole store exceeds its limit then, the oldest entries are dropped.

        Fires with True for the first entry of a key, False for a later one.
        Fails with EntryInvalid if sequence or timestamp do not follow.
        """

    def get(static: str) -> Deferred[bytes]:
        """Return the JSON of a key's entry. Fails with EntryNotFound."""

    def delete(deletion: Deletion, now: float) -> Deferred[None]:
        """Apply a verified deletion. Fails with EntryNotFound or EntryInvalid."""

    def available(limit: int, since: float) -> Deferred[list[bytes]]:
        """Return the JSON of at most ``limit`` random checked servers with free connections, posted since ``since``."""

    def quiet(limit: int, since: float) -> Deferred[list[bytes]]:
        """Return the JSON of at most ``limit`` random quiet servers that a check has found since ``since``."""

    def listed(statics: Sequence[str], since: float) -> Deferred[list[bytes]]:
        """Return the JSON of the entries of those keys in ``statics`` that ``available`` could return."""

    def due(limit: int, now: float, next_check: float) -> Deferred[list[DueServer]]:
        """Return at most ``limit`` servers whose check is due, the longest overdue first.

        Plan the next check of each for ``next_check``, so that a check whose result is lost is repeated then.
        """

    def record_check(
        static: str, target: str, at: float | None, next_check: float, lasts: float = ..., listed: bool = ...
    ) -> Deferred[None]:
        """Record the result of a check, and plan the next one for ``next_check``.

        :param target: address that was checked; if the entry has another address by now, nothing is recorded.
        :param at: time at which the server was found; None if it was not.
        :param lasts: seconds for which the entry of a quiet server that was found is kept at least.
        :param listed: whether a server that was not found stays listed; if not, it is listed again once it is found.
        """

    def shift_times(now: float) -> Deferred[None]:
        """Correct times after the clock was set back to ``now``: times of posts and checks that are now in the future
        are set to ``now``.

        Without this a server that has ended would stay listed, without checks, until the clock reaches the old time
        again.
        """

    def sweep(now: float, limit: int) -> Deferred[int]:
        """Drop at most ``limit`` expired entries; fires with their number."""

    def count() -> Deferred[int]:
        """Return the number of entries."""

    def counts() -> Deferred[dict[str, int]]:
        """Return the number of entries by kind: ``client``, ``server``, ``both``."""

    def size() -> Deferred[int]:
        """Return the bytes of all stored entries."""

    def close() -> Deferred[None]:
        """Close files and connections."""


def ignore_dropped(reason: str, place: str, number: int) -> None:
    """Ignore dropped entries; the default of :data:`Dropped`."""


def is_listable(entry: Entry) -> bool:
    """Whether clients may be sent to the server of this entry."""
    return entry.server is not None and entry.server.available_connections > 0


def kind(entry: Entry) -> str:
    """Return the kind of an entry, one of ``KINDS``."""
    if entry.server is None:
        return "client"
    return "server" if entry.client is None else "both"


def size_of(body: bytes) -> int:
    """Return the bytes that are counted for an entry."""
    return len(body) + OVERHEAD


def ends(now: float, lasts: float) -> float:
    """Return the time when an entry is dropped; a finite number, because databases cannot store infinity."""
    return min(NEVER, now + lasts)


class INameplates(Interface):
    """Interface of a store of nameplates."""

    failures: tuple[type[Exception], ...] = Attribute(
        "A tuple of the exceptions by which it fails that are not a fault of this program."
    )

    def is_full(error: BaseException | None) -> bool:
        """Whether ``claim`` fails with this error because nothing can be written, while reading still works."""

    def claim(static: str, numbers: Sequence[int], place: str, limit: float, now: float, ends: float) -> Deferred[int]:
        """Assign to a key the first free one of ``numbers``, until ``ends``; a key that has a number keeps it.

        The number is counted for the address block of the latest claim.

        :param place: address block of the client, which may have ``limit`` numbers at a time.

        Fires with the number, ``NONE_FREE`` or ``TOO_MANY``.
        """

    def find(number: int, now: float) -> Deferred[str]:
        """Return the key of a nameplate. Fails with EntryNotFound."""

    def release(number: int, static: str, now: float) -> Deferred[None]:
        """Delete a nameplate of a key. Fails with EntryNotFound if the key does not have it."""
