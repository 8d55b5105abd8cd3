"""What a client remembers of the features of others, while strangers send it plain REQUESTs."""

from __future__ import annotations

from dataclasses import replace

from twisted.internet.defer import Deferred, fail, succeed
from twisted.trial.unittest import SynchronousTestCase

from dmsg.discovery.entries.entry import ClientMeta, Entry, with_feature
from dmsg.errors import DiscoveryError
from dmsg.keys import PubKey, SecKey
from dmsg.streams.core.agreement import FEATURE, UPGRADE_FEATURE
from dmsg.testing import Lab
from dmsg.v2019 import offered_features
from dmsg.v2019.client import Client
from dmsg.v2019.transport_streams import Encryption

STRANGERS = 10


def entry_of(key: PubKey, *, is_old: bool = False) -> Entry:
    """Return an entry of a client of today, or one of an older program that did not encrypt."""
    entry = Entry(version="0.0.1", sequence=0, timestamp=0, static=str(key), client=ClientMeta(()))
    if is_old:
        return entry
    return replace(entry, version=with_feature(with_feature(entry.version, FEATURE, True), UPGRADE_FEATURE, True))


class RememberedFeaturesTests(SynchronousTestCase):
    """The policy "prefer", and a discovery that returns an older entry after the first contact."""

    def setUp(self) -> None:
        self.patch(offered_features, "SECURE_SEEN_SIZE", 6)
        lab = Lab(seed=1)
        host = lab.network.host("alice")
        self.client = Client(host.reactor, lab.key("alice"), lab.lookups(host), encryption="prefer")
        self.assertIs(self.client.encryption, Encryption.PREFER)
        self.answers: dict[PubKey, Entry] = {}
        self.patch(self.client._entries, "get", self.look_up)
        self.friend = SecKey.generate().public

    def look_up(self, key: PubKey) -> Deferred[Entry]:
        found = self.answers.get(key)
        return fail(DiscoveryError("no answer")) if found is None else succeed(found)

    def features_of(self, key: PubKey) -> frozenset[str]:
        """Features that decide about a plain REQUEST of this key."""
        look_up = self.client.streams.features_of
        assert look_up is not None
        return self.successResultOf(look_up(key))

    def let_strangers_connect(self) -> None:
        for _ in range(STRANGERS):
            stranger = SecKey.generate().public
            self.answers[stranger] = entry_of(stranger)
            self.features_of(stranger)

    def test_strangers_displace_no_peer_to_which_this_client_connects(self) -> None:
        self.assertTrue(self.client._offered.must_be_secure(self.friend, entry_of(self.friend), 0))
        self.let_strangers_connect()
        self.assertTrue(self.client._offered.must_be_secure(self.friend, entry_of(self.friend, is_old=True), 0))
        self.answers[self.friend] = entry_of(self.friend, is_old=True)
        self.assertIn(FEATURE, self.features_of(self.friend))
        del self.answers[self.friend]
        self.assertIn(FEATURE, self.features_of(self.friend))

    def test_initiators_are_remembered_too(self) -> None:
        self.answers[self.friend] = entry_of(self.friend)
        self.features_of(self.friend)
        self.assertTrue(self.client._offered.must_be_secure(self.friend, entry_of(self.friend, is_old=True), 0))

    def test_both_tables_are_bounded(self) -> None:
        for _ in range(STRANGERS):
            key = SecKey.generate().public
            self.client._offered.must_be_secure(key, entry_of(key), 0)
        self.let_strangers_connect()
        self.assertEqual((len(self.client._offered._seen), len(self.client._offered._seen_of_initiators)), (6, 6))
