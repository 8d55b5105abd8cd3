"""What every store does, and the rules that do not depend on where it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from twisted.internet.defer import Deferred
from zope.interface import Attribute, Interface

from dmsg.discovery.entries.entry import Entry
from dmsg.discovery.entries.rules import NEVER, Deletion, Terms
from dmsg.errors import DmsgError

ROOM_AT_ONCE = 100
"""Entries that make room at a time, where there is too much in all: the rest in the next sweep, or POST."""
OVERHEAD = 1536
"""Bytes that an entry takes beside its JSON, and that a deleted one takes."""
TOMBSTONE_TTL = 86400.0
"""Seconds for which it is remembered that an entry was deleted, so that nobody posts it again."""
LATEST_LOOK = 3600.0
"""Seconds ahead for which a look at a server is planned at most; one that is planned for later was planned before the
clock was set back."""
KINDS = ("client", "server", "both")
"""Of entries: by the halves that they have."""

Dropped = Callable[[str, str, int], object]
"""Told why entries were dropped (``ended``, ``deleted``, ``address``, ``total``), whose, and how many.

``ended``: not posted again in time; ``deleted``: it need not be remembered any more that they were deleted;
``address``: their place had more than it may have; ``total``: there were too many in all, and their place had most.
"""


class StoreError(DmsgError):
    """The store cannot be opened or reached."""


class StoreContended(StoreError):
    """Other processes changed the same nameplate during each attempt to change it."""


class Due(NamedTuple):
    """A server that is to be looked at.

    :ivar json: its entry.
    :ivar place: who posted it.
    :ivar refreshes: see :class:`Terms`.
    :ivar listed: it was there at the last look, or the ones before that; of others nobody knows anything yet.
    """

    json: bytes
    place: str
    refreshes: bool
    listed: bool = False


class IEntryStore(Interface):
    """Entries by key."""

    failures: tuple[type[Exception], ...] = Attribute(
        "A tuple of the exceptions by which it fails that are not a fault of this program."
    )
    nameplates: INameplates = Attribute("Provides dmsg.discovery.store.base.INameplates: kept beside the entries.")

    def is_full(error: BaseException | None) -> bool:
        """Whether ``post`` fails with this because nothing can be written, though it can be read."""

    def post(entry: Entry, now: float, terms: Terms = ...) -> Deferred[bool]:
        """Store a verified entry in place of the key's present one.

        What is too much then, of its place or in all, is dropped, the oldest first.

        Fires with True for the first entry of a key, False for a later one.
        Fails with EntryInvalid when sequence or timestamp do not follow.
        """

    def get(static: str) -> Deferred[bytes]:
        """The JSON of a key's entry.  Fails with EntryNotFound."""

    def delete(deletion: Deletion, now: float) -> Deferred[None]:
        """Carry out a verified deletion.  Fails with EntryNotFound or EntryInvalid."""

    def available(most: int, since: float) -> Deferred[list[bytes]]:
        """JSON of at most ``most`` random servers with free connections posted after ``since``, checked."""

    def quiet(most: int, since: float) -> Deferred[list[bytes]]:
        """JSON of at most ``most`` random quiet servers that were seen after ``since``."""

    def listed(statics: Sequence[str], since: float) -> Deferred[list[bytes]]:
        """JSON of those of ``statics`` that are among what ``available`` draws from."""

    def due(most: int, now: float, next_look: float) -> Deferred[list[Due]]:
        """At most ``most`` servers that are to be looked at now, those first that wait longest.

        It is time for them again at ``next_look``.
        """

    def seen(
        static: str, target: str, at: float | None, next_look: float, lasts: float = ..., listed: bool = ...
    ) -> Deferred[None]:
        """A server was there at that time, or was not (None); look at it again at ``next_look``.

        :param target: the address that was looked at; if its entry has another by now, nothing is done.
        :param lasts: seconds for which a quiet one that was there is kept at least.
        :param listed: one that was not there stays listed if it is; else it is not before it was there again.
        """

    def set_back(now: float) -> Deferred[None]:
        """The clock may have been set back to ``now``: what is kept from later counts as posted and seen now.

        Without it a server that has gone stays listed until the clock is where it was, and nobody looks at it.
        """

    def sweep(now: float, most: int) -> Deferred[int]:
        """Drop at most ``most`` entries whose time is over; fires with how many."""

    def count() -> Deferred[int]:
        """Entries that are there."""

    def counts() -> Deferred[dict[str, int]]:
        """The same by kind: ``client``, ``server``, ``both``."""

    def size() -> Deferred[int]:
        """Bytes that are kept."""

    def close() -> Deferred[None]:
        """Let go of files and connections."""


def nobody_told(reason: str, place: str, number: int) -> None:
    """Tell nobody that entries were dropped."""


def listable(entry: Entry) -> bool:
    """Whether clients are sent there."""
    return entry.server is not None and entry.server.available_connections > 0


def kind(entry: Entry) -> str:
    """One of ``KINDS``."""
    if entry.server is None:
        return "client"
    return "server" if entry.client is None else "both"


def size_of(body: bytes) -> int:
    """What an entry counts."""
    return len(body) + OVERHEAD


def ends(now: float, lasts: float) -> float:
    """When an entry is dropped; finite, as databases want it."""
    return min(NEVER, now + lasts)


class INameplates(Interface):
    """Numbers that lead to keys."""

    failures: tuple[type[Exception], ...] = Attribute(
        "A tuple of the exceptions by which it fails that are not a fault of this program."
    )

    def is_full(error: BaseException | None) -> bool:
        """Whether ``claim`` fails with this because nothing can be written, though it can be read."""

    def claim(static: str, numbers: Sequence[int], place: str, most: float, now: float, ends: float) -> Deferred[int]:
        """Give a key the first of ``numbers`` that is free, until ``ends``; the one that it has is kept until then, and
        counts for the place of who asked last.

        :param place: the address block of who asks, which may have ``most`` at a time.

        Fires with the number, ``NONE_FREE`` or ``TOO_MANY``.
        """

    def look(number: int, now: float) -> Deferred[str]:
        """The key of a nameplate.  Fails with EntryNotFound."""

    def release(number: int, static: str, now: float) -> Deferred[None]:
        """Take a nameplate from a key.  Fails with EntryNotFound when the key does not have it."""
