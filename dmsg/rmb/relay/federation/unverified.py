"""Table of this relay's twins whose signatures are not trusted, because another relay refused a message of theirs as
unsigned.

A relay does not verify what its own twins send, but another relay counts unsigned messages against the relay that sends
them.  So a single twin could make another relay refuse this relay, and with it all its other twins.  Messages of the
twins in this table are therefore verified here before another relay is asked.
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
"""Seconds for which the messages of a twin are verified here after another relay has refused one."""
MAX_UNVERIFIED = 10_000
"""Maximum number of twins in the table, whose messages are verified here."""


class UnverifiedTwins:
    """Table of the twins whose messages are verified before they are forwarded.

    :param registry: registry with the keys of twins.
    """

    def __init__(self, seconds: Callable[[], float], registry: TwinRegistry) -> None:
        """:param seconds: a clock that does not go back."""
        self._seconds = seconds
        self._registry = registry
        self._until: OrderedDict[int, float] = OrderedDict()

    def answered(self, data: bytes, code: int) -> None:
        """Record the status that another relay answered to a message; 401 adds the message's sender to the table."""
        if code == UNSIGNED:
            remember(self._until, decode(data).source.twin, self._seconds() + UNVERIFIED_FOR, MAX_UNVERIFIED)

    async def refuses(self, data: bytes) -> bool:
        """Whether a message names a twin of the table as its source and is not signed by that twin."""
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
            # Without the registry no signature can be verified here, so the message is forwarded; the other relay asks
            # its own registry.
            return False
        return False
