"""Features that other clients offer in their entries, and the choice of encryption that depends on them.

Features that a client once offered are remembered. Otherwise an attacker could replay an old entry to make this client
use plain transports.
"""

from __future__ import annotations

from collections import OrderedDict

from dmsg.base.bounded_tables import remember
from dmsg.clients.entries import Entries
from dmsg.discovery.entries.entry import Entry
from dmsg.errors import DmsgError, EncryptionUnavailable
from dmsg.keys import PubKey
from dmsg.streams.core.agreement import FEATURE, UPGRADE_FEATURE
from dmsg.v2019.transport_streams import Encryption

SECURE_SEEN_SIZE = 65536
"""Maximum number of remembered pairs of a client and a feature that the client has offered. Clients to which this
client connects, and clients that connect to this one, are counted separately. Otherwise strangers could make this
client forget the features of the peers that its user has chosen."""


class OfferedFeatures:
    """Features that the peers of one client have offered.

    :param encryption: encryption policy of the client.
    :param entries: entries of other clients.
    """

    def __init__(self, encryption: Encryption, entries: Entries) -> None:
        self._encryption = encryption
        self._entries = entries
        self._seen: OrderedDict[tuple[PubKey, str], None] = OrderedDict()
        self._seen_of_initiators: OrderedDict[tuple[PubKey, str], None] = OrderedDict()

    def must_be_secure(self, remote: PubKey, entry: Entry, port: int) -> bool:
        """Return whether the transport to ``remote`` must be secure.

        :raises EncryptionUnavailable: the policy or the port requires a secure transport, but the remote offers none;
            or encryption is off, but the port requires it.
        """
        if self._encryption is Encryption.OFF:
            if port:
                raise EncryptionUnavailable("encryption is off, and ports other than 0 need encryption")
            return False
        if self.offers(remote, entry, FEATURE):
            return True
        if self._encryption is Encryption.REQUIRE:
            raise EncryptionUnavailable(
                f"{remote.short} does not offer secure transports, and this client requires them (see --encryption)"
            )
        if port:
            raise EncryptionUnavailable(
                f"{remote.short} does not offer secure transports, and ports other than 0 need them"
            )
        return False

    def offers(self, remote: PubKey, entry: Entry, feature: str) -> bool:
        """Return whether a client, to which this client connects, offers a feature in its signed entry, or has offered
        it in an earlier entry that this process has seen."""
        if entry.offers(feature):
            remember(self._seen, (remote, feature), None, SECURE_SEEN_SIZE)
            return True
        return self.has_offered(remote, feature)

    def has_offered(self, remote: PubKey, feature: str) -> bool:
        """Return whether a client has offered a feature in an entry that this process has seen."""
        return (remote, feature) in self._seen or (remote, feature) in self._seen_of_initiators

    async def of_initiator(self, remote: PubKey) -> frozenset[str]:
        """Return the features of an initiator that decide on encryption.

        :raises DmsgError: the look-up failed, and no earlier entry is known.
        """
        decisive = (FEATURE, UPGRADE_FEATURE)
        try:
            entry = await self._entries.get(remote)
        except DmsgError:
            known = frozenset(feature for feature in decisive if self.has_offered(remote, feature))
            if not known:
                # With no earlier entry, the error is passed on. An attacker who blocks the look-up must not cause a
                # plain transport.
                raise
            return known
        for feature in decisive:
            if entry.offers(feature):
                remember(self._seen_of_initiators, (remote, feature), None, SECURE_SEEN_SIZE)
        return frozenset(feature for feature in decisive if self.has_offered(remote, feature))
