"""Table of this relay's twins whose messages must be verified here, because another relay has refused one of their
messages as unsigned.

A relay does not verify what its own twins send. But another relay counts unsigned messages against the relay that sends
them.  So a single twin could cause another relay to refuse this relay, with all its other twins.  Messages of the twins
in this table are therefore verified here before they are sent to another relay.
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

UNSIGNED_STATUS = 401
"""Status with which a relay of this package answers a message that its sender has not signed."""
UNVERIFIED_FOR = 600.0
"""Seconds for which the messages of a twin are verified here after another relay has refused one of them."""
MAX_UNVERIFIED = 10_000
"""Maximum number of twins in the table."""


class UnverifiedTwins:
    """Table of the twins whose messages are verified before they are forwarded.

    :param registry: registry with the keys of the twins.
    """

    def __init__(self, seconds: Callable[[], float], registry: TwinRegistry) -> None:
        """:param seconds: function that returns the seconds of a monotonic clock."""
        self._seconds = seconds
        self._registry = registry
        self._until: OrderedDict[int, float] = OrderedDict()

    def answered(self, data: bytes, code: int) -> None:
        """Process the status with which another relay answered a message. The status 401 adds the message's sender to
        the table."""
        if code == UNSIGNED_STATUS:
            remember(self._until, decode(data).source.twin, self._seconds() + UNVERIFIED_FOR, MAX_UNVERIFIED)

    async def refuses(self, data: bytes) -> bool:
        """Whether to refuse a message, because its source is a twin in the table and the signature is not that
        twin's."""
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
            # Without the registry no signature can be verified here. The message is forwarded, because the other relay
            # uses its own registry.
            return False
        return False
