"""Keys that are exchanged behind a code."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, strategies as st
from twisted.internet.error import ConnectionDone
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from dmsg.apps.codes.pairing import PAIR_TIMEOUT, Pairing, PairingError, signed_bytes
from dmsg.apps.codes.pake import Role
from dmsg.keys import SecKey
from tests.net.test_own_pauses import let_pause, pass_time

ALICE, BOB, EVE = (SecKey.from_seed(b"pair %d" % number) for number in range(3))
BINDING = bytes(range(32))


class End:
    """One end of a pairing, with its messages and its result."""

    def __init__(self, role: Role, key: SecKey, binding: bytes = BINDING, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        self.pairing = Pairing(self.clock, role, key)
        transport: Any = StringTransport()
        transport.binding = binding
        self.transport = transport
        self.key: list[Any] = []
        self.done: list[Any] = []
        self.pairing.key.addBoth(self.key.append)
        self.pairing.done.addBoth(self.done.append)
        self.pairing.makeConnection(self.transport)

    def said(self) -> bytes:
        data: bytes = self.transport.value()
        self.transport.clear()
        return data

    def hears(self, data: bytes) -> None:
        self.pairing.dataReceived(data)

    def hears_json(self, **message: Any) -> None:
        body = json.dumps(message).encode()
        self.hears(len(body).to_bytes(4, "big") + body)


class PairingTests(SynchronousTestCase):
    """Alice made the code, Bob typed it."""

    def setUp(self) -> None:
        self.alice, self.bob = End(Role.SENDER, ALICE), End(Role.RECEIVER, BOB)

    def test_both_sides_receive_the_other_key(self) -> None:
        here, there = self.alice.said(), self.bob.said()
        for byte in here:
            self.bob.hears(bytes((byte,)))
        self.alice.hears(there)
        self.assertEqual((self.alice.key, self.bob.key), ([BOB.public], [ALICE.public]))
        self.alice.pairing.confirm_stored()
        self.bob.hears(self.alice.said())
        self.assertEqual(self.bob.done, [])
        self.bob.pairing.confirm_stored()
        self.alice.hears(self.bob.said())
        self.assertEqual((self.alice.done, self.bob.done), ([None], [None]))
        self.assertEqual(self.alice.clock.getDelayedCalls(), [])

    def refused(self, end: End) -> str:
        self.assertEqual(len(end.key), 1)
        end.key[0].trap(PairingError)
        self.assertTrue(end.transport.disconnecting)
        self.assertEqual(end.clock.getDelayedCalls(), [])
        return str(end.key[0].value)

    def test_a_key_signed_by_another_key_is_refused(self) -> None:
        """Eve cannot give Bob's key for hers, nor repeat what he has signed elsewhere, nor send back Alice's own."""
        key = BOB.public.hex()
        for signature in (
            EVE.sign(signed_bytes(Role.RECEIVER, BINDING, BOB.public)),
            BOB.sign(signed_bytes(Role.RECEIVER, bytes(32), BOB.public)),
            BOB.sign(signed_bytes(Role.SENDER, BINDING, BOB.public)),
        ):
            alice = End(Role.SENDER, ALICE)
            alice.hears_json(key=key, signature=signature.hex())
            self.assertIn("did not prove its key", self.refused(alice))
        self.alice.hears(self.alice.said())
        self.assertIn("did not prove its key", self.refused(self.alice))

    def test_the_same_key_at_both_ends(self) -> None:
        other = End(Role.RECEIVER, ALICE)
        self.alice.hears(other.said())
        self.assertIn("the same key", self.refused(self.alice))

    def test_a_side_that_does_not_store_the_key_fails_both(self) -> None:
        self.alice.hears(self.bob.said())
        self.bob.hears(self.alice.said())
        self.bob.pairing.refuse("it did not keep the key")
        self.alice.pairing.confirm_stored()
        self.alice.hears(self.bob.said())
        self.assertIn("did not keep", str(self.alice.done[0].value))
        self.bob.pairing.connectionLost(Failure(ConnectionDone()))
        self.assertEqual(self.bob.done, [])

    def test_a_silent_side_times_out(self) -> None:
        self.alice.clock.advance(PAIR_TIMEOUT)
        self.assertIn("did not answer", self.refused(self.alice))

    def test_pauses_of_this_process_do_not_count(self) -> None:
        clock = self.alice.clock
        let_pause(clock)
        alice = End(Role.SENDER, self.alice.pairing._key, clock=clock)
        clock.advance(10 * PAIR_TIMEOUT)
        pass_time(clock, 0.96 * PAIR_TIMEOUT)
        self.assertEqual(alice.key, [])
        pass_time(clock, 0.1 * PAIR_TIMEOUT)
        self.assertIn("did not answer", self.refused(alice))

    def test_a_side_that_leaves_fails_the_pairing(self) -> None:
        self.alice.pairing.connectionLost(Failure(ConnectionDone()))
        self.assertEqual(len(self.alice.key), 1)
        self.bob.hears(self.alice.said())
        self.bob.pairing.confirm_stored()
        self.bob.pairing.connectionLost(Failure(ConnectionDone()))
        self.assertEqual(len(self.bob.done), 1)

    @given(st.one_of(st.binary(max_size=60), st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=9))))
    def test_random_messages_raise_only_pairing_errors(self, what: Any) -> None:
        alice = End(Role.SENDER, ALICE)
        if isinstance(what, bytes):
            alice.hears(what)
        else:
            alice.hears_json(**what)
        self.assertEqual(alice.done, [])
        self.assertFalse(alice.key and not isinstance(alice.key[0], Failure))
        if not alice.key:
            alice.pairing.key.cancel()
