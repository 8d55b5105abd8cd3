"""Interface of all registries of twins, and the check whether a statement may replace an entry."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.defer import Deferred
from zope.interface import Interface

from dmsg.rmb.errors import RegistryConflict, RegistryRefused
from dmsg.rmb.twins.twin import Twin

PAGE = 1000
"""Maximum number of twins in one answer."""


class TwinRegistry(Interface):
    """Registry of twins by id.

    Deferreds fail with TwinNotFound if there is no such twin, and with RegistryUnavailable if the registry does not
    answer. Those of :meth:`put` may also fail with RegistryRefused.
    """

    def get(twin: int) -> Deferred[Twin]:
        """Return the twin with this id."""

    def id_by_account(account: bytes) -> Deferred[int]:
        """Return the id of the twin with this account (32 bytes)."""

    def put(statement: Twin) -> Deferred[Twin]:
        """Create or change a twin by a statement that the owner of its account has signed.

        The id in the statement is 0 or the twin's id. The Deferred fires with the stored twin.
        """

    def twins(after: int, limit: int) -> Deferred[list[Twin]]:
        """Return at most ``limit`` twins with ids above ``after``, in the order of their ids."""

    def watch(on_change: Callable[[Twin], None]) -> None:
        """Call ``on_change`` with every twin that is created or changed from now on."""

    def close() -> Deferred[None]:
        """Close files and connections."""


def follow(current: Twin | None, statement: Twin) -> None:
    """Check that a statement may replace the current entry, or create one if there is none.

    The owner must have signed the statement, and its counter must be higher than that of the current entry.

    :raises RegistryRefused: the statement may not be stored.
    """
    statement.check()
    if current is None:
        if statement.id:
            raise RegistryRefused("the statement has an id, but its account has no twin")
        return
    if statement.id not in (0, current.id):
        raise RegistryConflict(f"this account is twin {current.id}, not {statement.id}")
    if statement.counter <= current.counter:
        raise RegistryConflict(f"counter {statement.counter} is not above {current.counter}")
