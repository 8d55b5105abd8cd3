"""What every store of nameplates does."""

from __future__ import annotations

from collections.abc import Sequence

from twisted.internet.defer import Deferred
from zope.interface import Attribute, Interface


class INameplates(Interface):
    """Numbers that lead to keys."""

    failures = Attribute("A tuple of the exceptions by which it fails that are not a fault of this program.")

    def is_full(error: BaseException) -> bool:
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
