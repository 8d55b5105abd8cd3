"""What every registry of twins can do, and the rule by which an entry changes."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.defer import Deferred
from zope.interface import Interface

from dmsg.rmb.errors import RegistryConflict, RegistryRefused
from dmsg.rmb.twins.twin import Twin

PAGE = 1000
"""Twins in one answer."""


class TwinRegistry(Interface):
    """Twins by id.

    Deferreds fail with TwinNotFound when there is no such twin, and with
    RegistryUnavailable when nobody knows; writing also with RegistryRefused.
    """

    def get(twin: int) -> Deferred[Twin]:
        """The twin with that id."""

    def id_by_account(account: bytes) -> Deferred[int]:
        """The id of the twin with that account, 32 bytes."""

    def put(statement: Twin) -> Deferred[Twin]:
        """Make a twin, or change it: a signed statement of its owner, who is known by the account.

        Its id is 0, or the one that it has.  Fires with the twin as it is then.
        """

    def twins(after: int, most: int) -> Deferred[list[Twin]]:
        """At most ``most`` twins with higher ids than ``after``, in order."""

    def watch(changed: Callable[[Twin], None]) -> None:
        """Call ``changed`` with every twin that was made or changed from now on."""

    def close() -> Deferred[None]:
        """Let go of files and connections."""


def follow(current: Twin | None, statement: Twin) -> None:
    """The rule of change: signed by the owner, with a higher counter than before.

    :raises RegistryRefused: it does not follow.
    """
    statement.check()
    if current is None:
        if statement.id:
            raise RegistryRefused("a new twin has no id yet")
        return
    if statement.id not in (0, current.id):
        raise RegistryConflict(f"this account is twin {current.id}, not {statement.id}")
    if statement.counter <= current.counter:
        raise RegistryConflict(f"counter {statement.counter} is not above {current.counter}")
