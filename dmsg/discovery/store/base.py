"""Interfaces of stores, and functions and limits that all stores share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from twisted.internet.defer import Deferred
from zope.interface import Attribute, Interface

from dmsg.discovery.entries.entry import Entry
from dmsg.discovery.entries.rules import NEVER, Deletion, Terms
from dmsg.errors import DmsgError

ROOM_AT_ONCE = 100
"""Maximum number of entries that one POST or sweep drops because the whole store is too large. The next POST or sweep
drops more if needed.
"""
OVERHEAD = 1536
"""Bytes that are counted for an entry in addition to its JSON. A tombstone, which has no JSON, counts as this many."""
LATEST_CHECK = 3600.0
"""Maximum seconds from now until a planned check of a server. A check that is planned for a later time shows that the
clock was set back after the check was planned.
"""
KINDS = ("client", "server", "both")
"""Kinds of entries: those with a client part only, with a server part only, and with both."""

Dropped = Callable[[str, str, int], object]
"""Callback for dropped entries. Its arguments are a reason, the poster's place (address block), and the number of
entries.

The reasons are ``ended`` (the entry was not posted again in time), ``deleted`` (a tombstone expired), ``address`` (the
place exceeded its limit) and ``total`` (the store exceeded its limit, and this place had the most bytes in it).
"""


class StoreError(DmsgError):
    """Error: the store cannot be opened, or does not answer."""


class StoreContended(StoreError):
    """Error: each attempt to change a nameplate failed, because other processes changed it at the same time."""


class DueServer(NamedTuple):
    """Server whose check is due.

    :ivar json: JSON of its entry.
    :ivar place: address block of the poster.
    :ivar refreshes: whether the owner of the entry posts it regularly; see
        :class:`~dmsg.discovery.entries.rules.Terms`.
    :ivar listed: whether the server is listed, because a check has found it, and not too many checks have failed since.
    """

    json: bytes
    place: str
    refreshes: bool
    listed: bool = False


class IEntryStore(Interface):
    """Interface of a store of entries, one for each key."""

    failures: tuple[type[Exception], ...] = Attribute(
        "Types of the exceptions with which the store fails for reasons outside this program."
    )
    nameplates: INameplates = Attribute("Store of nameplates in the same database, which provides INameplates.")

    def is_full(error: BaseException | None) -> bool:
        """Whether this error of ``post`` means that the store can be read but not written, for example because a disk
        is full.
        """

    def post(entry: Entry, now: float, terms: Terms = ...) -> Deferred[bool]:
        """Store a verified entry in place of the key's present one.

        If the entries of the poster's address block, or those of the whole store, then exceed their limit, the oldest
        of them are dropped.

        Fires with True for the first entry of a key, False for a later one. Fails with EntryInvalid if the entry may
        not replace the present one (:func:`~dmsg.discovery.entries.rules.check_iteration`).
        """

    def get(static: str) -> Deferred[bytes]:
        """Return the JSON of a key's entry. Fails with EntryNotFound."""

    def delete(deletion: Deletion, now: float) -> Deferred[None]:
        """Apply a verified deletion. Fails with EntryNotFound or EntryInvalid."""

    def available(limit: int, since: float) -> Deferred[list[bytes]]:
        """Return the entries' JSON of at most ``limit`` servers, drawn at random.

        Only listed servers that post regularly, have posted since ``since`` and have free connections are returned.
        """

    def quiet(limit: int, since: float) -> Deferred[list[bytes]]:
        """Return the entries' JSON of at most ``limit`` quiet servers that a check has found since ``since``, drawn at
        random.
        """

    def listed(statics: Sequence[str], since: float) -> Deferred[list[bytes]]:
        """Return the entries' JSON of those servers with keys in ``statics`` that meet the conditions of the method
        ``available``.
        """

    def due(limit: int, now: float, next_check: float) -> Deferred[list[DueServer]]:
        """Return at most ``limit`` servers whose check is due, the longest overdue first.

        The next check of each is planned for ``next_check``, in case no result of this check is recorded.
        """

    def record_check(
        static: str, target: str, at: float | None, next_check: float, lasts: float = ..., listed: bool = ...
    ) -> Deferred[None]:
        """Record the result of a check, and plan the next one for ``next_check``.

        :param target: address that was checked. If the entry has another address by now, nothing is recorded.
        :param at: time at which the check found the server; None if it did not.
        :param lasts: minimum number of seconds for which the entry of a quiet server is kept after the check found the
            server.
        :param listed: whether a server that was not found stays listed. If not, it is listed again when a check finds
            it.
        """

    def shift_times(now: float) -> Deferred[None]:
        """Correct the times of POSTs and checks after the clock was set back to ``now``: those in the future are set to
        ``now``.

        Otherwise, a server that has ended would stay listed, without checks, until the clock reached the old time
        again.
        """

    def sweep(now: float, limit: int) -> Deferred[int]:
        """Drop at most ``limit`` expired entries; fires with the number of dropped entries."""

    def count() -> Deferred[int]:
        """Return the number of entries."""

    def counts() -> Deferred[dict[str, int]]:
        """Return the number of entries by kind: ``client``, ``server``, ``both``."""

    def size() -> Deferred[int]:
        """Return the number of bytes that are counted for all stored entries."""

    def close() -> Deferred[None]:
        """Close files and connections."""


def ignore_dropped(reason: str, place: str, number: int) -> None:
    """Do nothing; the default for callbacks of type :data:`Dropped`."""


def is_listable(entry: Entry) -> bool:
    """Whether an entry has a server part that reports free connections."""
    return entry.server is not None and entry.server.available_connections > 0


def kind(entry: Entry) -> str:
    """Return the kind of an entry, one of ``KINDS``."""
    if entry.server is None:
        return "client"
    return "server" if entry.client is None else "both"


def size_of(body: bytes) -> int:
    """Return the number of bytes that are counted for an entry with this JSON."""
    return len(body) + OVERHEAD


def ends(now: float, lasts: float) -> float:
    """Return the time at which an entry expires. The result is finite, because databases cannot store infinity."""
    return min(NEVER, now + lasts)


class INameplates(Interface):
    """Interface of a store of nameplates."""

    failures: tuple[type[Exception], ...] = Attribute(
        "Types of the exceptions with which the store fails for reasons outside this program."
    )

    def is_full(error: BaseException | None) -> bool:
        """Whether this error of ``claim`` means that the store can be read but not written, for example because a disk
        is full.
        """

    def claim(static: str, numbers: Sequence[int], place: str, limit: float, now: float, ends: float) -> Deferred[int]:
        """Assign a nameplate to a key until the time ``ends``. Fires with the number, ``NONE_FREE`` or ``TOO_MANY``.

        A key that has a nameplate keeps its number. Otherwise the key gets the first of ``numbers`` that is free.

        :param place: address block of the client, for which the nameplate is counted from now on.
        :param limit: maximum number of nameplates of this block.
        """

    def find(number: int, now: float) -> Deferred[str]:
        """Return the key of a nameplate. Fails with EntryNotFound."""

    def release(number: int, static: str, now: float) -> Deferred[None]:
        """Delete the nameplate ``number`` of a key. Fails with EntryNotFound if the key does not have it."""
