"""Twins of this relay whose messages another relay refused, because they are not signed by them.

A relay does not verify what its twins send, and another relay counts what is not signed against this one: a twin
could have it refused there, with all its others.  So what a doubted twin sends is verified here before another relay
is asked.
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
"""What a relay of this package answers to a message that its sender has not signed."""
DOUBT_FOR = 600.0
"""Seconds for which a twin is doubted."""
MAX_DOUBTED = 10_000
"""Twins that are doubted at a time."""


class Doubts:
    """Who is doubted.

    :param registry: has the keys of twins.
    """

    def __init__(self, seconds: Callable[[], float], registry: TwinRegistry) -> None:
        """:param seconds: a clock that does not go back."""
        self._seconds = seconds
        self._registry = registry
        self._until: OrderedDict[int, float] = OrderedDict()

    def answered(self, data: bytes, code: int) -> None:
        """Another relay answered a message with ``code``."""
        if code == UNSIGNED:
            remember(self._until, decode(data).source.twin, self._seconds() + DOUBT_FOR, MAX_DOUBTED)

    async def refuses(self, data: bytes) -> bool:
        """Whether a message is of a twin that is doubted, and not signed by it."""
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
            return False  # the registry is away: the other relay has its own
        return False
