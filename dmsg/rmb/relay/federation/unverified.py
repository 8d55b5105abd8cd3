"""Twins of this relay that another relay refused, because their messages were not signed by them.

A relay does not verify what its own twins send, but another relay counts unsigned messages against the relay that
brings them. So one twin could have this relay refused there, with all its other twins. Messages of a doubted twin are
therefore verified here before another relay is asked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from dmsg.base.bounded_tables import remember
from dmsg.errors import DmsgError
from dmsg.rmb.envelope.wire import challenge, decode
from dmsg.rmb.errors import SignatureInvalid
from dmsg.rmb.registry.interface import TwinRegistry
from dmsg.rmb.twins.identity import verify

UNSIGNED = 401
"""Status that a relay of this package answers to a message that its sender has not signed."""
UNVERIFIED_FOR = 600.0
"""Seconds for which a twin is doubted."""
MAX_UNVERIFIED = 10_000
"""Maximum number of twins that are doubted at a time."""


class UnverifiedTwins:
    """Table of the twins that are doubted.

    :param registry: registry with the keys of twins.
    """

    def __init__(self, seconds: Callable[[], float], registry: TwinRegistry) -> None:
        """:param seconds: a clock that does not go back."""
        self._seconds = seconds
        self._registry = registry
        self._until: OrderedDict[int, float] = OrderedDict()

    def answered(self, data: bytes, code: int) -> None:
        """Record the status that another relay answered to a message."""
        if code == UNSIGNED:
            remember(self._until, decode(data).source.twin, self._seconds() + UNVERIFIED_FOR, MAX_UNVERIFIED)

    async def refuses(self, data: bytes) -> bool:
        """Whether a message names a doubted twin as its source and is not signed by that twin."""
        if not self._until:
            return False
        envelope = decode(data)
        twin = envelope.source.twin
        until = self._until.get(twin)
        if until is None:
            return False
        if until <= self._seconds():
            del self._until[twin]
            return False
        try:
            verify(envelope.signature, challenge(envelope), (await self._registry.get(twin)).account)
        except SignatureInvalid:
            return True
        except DmsgError:
            return False  # Without the registry nothing can be verified here; the other relay asks its own.
        return False
