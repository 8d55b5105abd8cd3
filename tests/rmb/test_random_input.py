"""Random input: requests that local programs push, and messages that a relay delivers to a peer."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, strategies as st
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.rmb.envelope.cipher import Encryption
from dmsg.rmb.envelope.envelope_pb2 import Envelope
from dmsg.rmb.errors import RegistryRefused
from dmsg.rmb.peer.local_json import LocalError, parse_request, parse_response
from dmsg.rmb.registry.cache import CachedRegistry
from dmsg.rmb.registry.table import TableRegistry
from dmsg.rmb.session.seal import MessageRejected, Seal
from dmsg.rmb.twins.address import Session
from dmsg.rmb.twins.identity import Identity
from dmsg.rmb.twins.twin import Twin
from tests.rmb.network import SECRETS

REQUEST = {"ver": 1, "cmd": "c", "exp": 1, "dat": "eA==", "dst": [2], "ret": "q", "now": 1, "ref": "r", "shm": "s"}
RESPONSE = {
    "ver": 1,
    "ref": "u",
    "dat": "eA==",
    "dst": "2:s",
    "now": 1,
    "shm": None,
    "err": {"code": 1, "message": "m"},
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
NOW = 1_800_000_000


class LocalTests(SynchronousTestCase):
    @given(st.binary(max_size=60))
    def test_bytes(self, raw: bytes) -> None:
        """LocalError, and nothing else."""
        self.assertRaises(LocalError, parse_request, raw)
        self.assertRaises(LocalError, parse_response, raw)

    @given(st.sampled_from(sorted({*REQUEST, *RESPONSE})), JSON)
    def test_random_members_raise_only_local_error(self, name: str, value: Any) -> None:
        """One member has a random value: parsing gives a message or raises LocalError."""
        for parse, good in ((parse_request, REQUEST), (parse_response, RESPONSE)):
            try:
                parse(json.dumps({**good, name: value}).encode())
            except LocalError as error:
                self.assertNotIn("\n", str(error))

    @given(st.sampled_from(["id", "account", "relay", "pk", "strict", "counter", "signature"]), JSON)
    def test_random_statements_raise_only_local_error(self, name: str, value: Any) -> None:
        """The same of a twin."""
        good = Twin(0, bytes(32), "r", b"x", True, 1, b"s").as_dict()
        try:
            Twin.from_dict({**good, name: value}).check()
        except RegistryRefused:
            pass


class SealTests(SynchronousTestCase):
    """A peer's first look at what a relay brings."""

    def setUp(self) -> None:
        self.registry = TableRegistry()
        self.addCleanup(self.registry.close)
        self.identity = Identity(SECRETS["A"], "ed25519")
        self.encryption = Encryption(SECRETS["A"])
        statement = Twin(0, self.identity.account, "r", self.encryption.pk, True, 1).sign(self.identity)
        self.twin = self.successResultOf(self.registry.put(statement))
        cached = CachedRegistry(self.registry, Clock())
        self.seal = Seal(self.identity, Session(1), cached, self.encryption)

    def open(self, data: bytes) -> Any:
        result: Deferred[Any] = Deferred.fromCoroutine(self.seal.open_message(data, NOW))
        found: list[Any] = []
        result.addBoth(found.append)
        return found[0]

    def good(self) -> bytes:
        envelope = Envelope(uid="u", timestamp=NOW, expiration=60, schema="s", tags="t")
        envelope.request.command = "c"
        return self.seal.seal_message(envelope, b"payload", self.twin, Session(1), NOW)

    def test_sealed_messages_are_opened(self) -> None:
        self.assertEqual(b"payload", self.open(self.good()).payload)

    @given(st.integers(0, 2**16), st.integers(1, 255))
    def test_changed_bytes_never_yield_another_message(self, place: int, change: int) -> None:
        """Changed bytes are refused, or give the message that was sealed."""
        good = self.good()
        data = bytearray(good)
        data[place % len(data)] ^= change
        result = self.open(bytes(data))
        if hasattr(result, "check"):
            self.assertTrue(result.check(MessageRejected), result)
        elif not result.by_relay:
            envelope = result.envelope
            told = (result.payload, envelope.uid, envelope.request.command, envelope.timestamp, envelope.expiration)
            self.assertEqual((b"payload", "u", "c", NOW, 60), told)

    @given(st.binary(max_size=200))
    def test_bytes(self, data: bytes) -> None:
        """Rejected, or what a relay may say without a signature."""
        result = self.open(data)
        self.assertTrue(result.check(MessageRejected) if hasattr(result, "check") else result.by_relay)
