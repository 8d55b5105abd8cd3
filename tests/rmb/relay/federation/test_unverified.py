"""Twins whose messages another relay refused as unsigned, by plain calls."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet.defer import Deferred, fail, succeed
from twisted.trial.unittest import SynchronousTestCase

from dmsg.rmb.envelope import wire
from dmsg.rmb.envelope.envelope_pb2 import Envelope
from dmsg.rmb.errors import RegistryUnavailable
from dmsg.rmb.relay.federation import unverified
from dmsg.rmb.relay.federation.unverified import UNSIGNED_STATUS, UnverifiedTwins
from dmsg.rmb.twins.identity import Identity
from dmsg.rmb.twins.twin import Twin

OWNER = Identity("0x" + "11" * 32, "ed25519")
STRANGER = Identity("0x" + "22" * 32, "ed25519")


class Registry:
    """Registry in which all twins belong to the same owner."""

    away = False

    def get(self, twin: int) -> Deferred[Twin]:
        if self.away:
            return fail(RegistryUnavailable("no answer"))
        return succeed(Twin(twin, OWNER.account, "here"))


class DoubtedTwinTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.registry = Registry()
        self.doubts = UnverifiedTwins(lambda: 0.0, cast(Any, self.registry))
        self.doubts.answered(self.message(7, None), UNSIGNED_STATUS)

    def message(self, twin: int, signer: Identity | None) -> bytes:
        envelope = Envelope(uid="u")
        envelope.source.twin = twin
        if signer is not None:
            envelope.signature = signer.sign(wire.challenge(envelope))
        return envelope.SerializeToString()

    def refuses(self, twin: int, signer: Identity | None) -> bool:
        return self.successResultOf(Deferred.fromCoroutine(self.doubts.refuses(self.message(twin, signer))))

    def test_messages_that_the_twin_signed_are_sent(self) -> None:
        self.assertEqual([self.refuses(7, one) for one in (OWNER, STRANGER, None)], [False, True, True])

    def test_the_other_relay_decides_while_the_registry_is_away(self) -> None:
        self.registry.away = True
        self.assertFalse(self.refuses(7, STRANGER))

    def test_the_twin_that_was_doubted_first_is_forgotten_first(self) -> None:
        self.patch(unverified, "MAX_UNVERIFIED", 2)
        for twin in (8, 9):
            self.doubts.answered(self.message(twin, None), UNSIGNED_STATUS)
        self.assertEqual([self.refuses(twin, None) for twin in (7, 8, 9)], [False, True, True])
