"""Handshakes compared with the documented use of ``noiseprotocol``: equal bytes and refusals, and no secret is left."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from unittest.mock import patch
from weakref import ref

from hypothesis import given, strategies as st
from noise.connection import NoiseConnection
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import HandshakeError, LocalProtocolError
from dmsg.keys import SecKey
from dmsg.noise.handshake import MAX_HANDSHAKE_MESSAGE, TEMPLATES, Handshake, Pattern
from dmsg.noise.suite import BACKEND, Secp256k1KeyPair
from tests.noise.oracle import PLAIN_BACKEND, LibraryHandshake

KEYS = [SecKey.from_seed(bytes([n])) for n in range(1, 5)]
MESSAGES = {Pattern.XK: 3, Pattern.KK: 2}

Side = Handshake | LibraryHandshake
keys = st.binary(min_size=1, max_size=32).map(SecKey.from_seed)
payloads = st.lists(st.binary(max_size=40), min_size=3, max_size=3)


def sides(
    kind: type[Handshake] | type[LibraryHandshake], pattern: Pattern, chosen: list[SecKey], prologue: bytes
) -> tuple[Side, Side]:
    """Initiator and responder of ``kind``: the statics and the ephemerals are ``chosen``."""
    static, other, ephemeral, other_ephemeral = chosen
    remote = static.public if pattern is Pattern.KK else None
    return (
        kind(pattern, static, initiator=True, remote=other.public, prologue=prologue, ephemeral=ephemeral),
        kind(pattern, other, initiator=False, remote=remote, prologue=prologue, ephemeral=other_ephemeral),
    )


class OracleTests(SynchronousTestCase):
    """With the same keys, this package and the library send the same bytes, and each reads the bytes of the other."""

    @given(st.sampled_from(Pattern), st.lists(keys, min_size=4, max_size=4), st.binary(max_size=40), payloads)
    def test_messages_equal_the_librarys(
        self, pattern: Pattern, chosen: list[SecKey], prologue: bytes, carried: list[bytes]
    ) -> None:
        own, library = (sides(kind, pattern, chosen, prologue) for kind in (Handshake, LibraryHandshake))
        for turn in range(MESSAGES[pattern]):
            writer, reader = turn % 2, 1 - turn % 2
            message = own[writer].write_message(carried[turn])
            self.assertEqual(message, library[writer].write_message(carried[turn]))
            self.assertEqual(own[reader].read_message(message), carried[turn])
            self.assertEqual(library[reader].read_message(message), carried[turn])
        for one, two in zip(own, library, strict=True):
            self.assertIsNotNone(one.result)
            self.assertEqual(one.result, two.result)

    @given(
        st.sampled_from(Pattern),
        st.integers(0, 2),
        st.one_of(
            st.binary(max_size=120),
            st.tuples(st.integers(0, 120), st.integers(0, 255)),
            st.integers(0, 120),
        ),
    )
    def test_refusals_equal_the_librarys(
        self, pattern: Pattern, which: int, damage: bytes | tuple[int, int] | int
    ) -> None:
        """Bytes that are random, changed or truncated: either both refuse them with the same error, or neither does."""
        which %= MESSAGES[pattern]
        said = []
        for kind in (Handshake, LibraryHandshake):
            both = sides(kind, pattern, KEYS, b"")
            for turn in range(which):
                both[1 - turn % 2].read_message(both[turn % 2].write_message())
            message = bytearray(both[which % 2].write_message())
            if isinstance(damage, bytes):
                message[:] = damage
            elif isinstance(damage, tuple):
                message[damage[0] % len(message)] ^= damage[1]
            else:
                del message[damage:]
            try:
                said.append(repr(both[1 - which % 2].read_message(bytes(message))))
            except HandshakeError as error:
                said.append(str(error))
        self.assertEqual(*said)


class SharedTemplateTests(SynchronousTestCase):
    """Handshakes of one pattern share what the library looked up, and nothing else."""

    def setUp(self) -> None:
        self.before = {pattern: dict(vars(template)) for pattern, template in TEMPLATES.items()}

    def tearDown(self) -> None:
        for pattern, template in TEMPLATES.items():
            self.assertEqual(vars(template), self.before[pattern])

    @staticmethod
    def agree(pattern: Pattern, chosen: list[SecKey]) -> tuple[Side, Side]:
        both = sides(Handshake, pattern, chosen, b"")
        for turn in range(MESSAGES[pattern]):
            both[1 - turn % 2].read_message(both[turn % 2].write_message())
        return both

    @given(st.lists(st.integers(0, 3), min_size=12, max_size=12))
    def test_interleaved_handshakes_do_not_disturb_each_other(self, order: list[int]) -> None:
        """Four handshakes take their turns in any order."""
        running = [sides(Handshake, pattern, KEYS, bytes([n])) for n in range(2) for pattern in Pattern]
        turns = [0] * len(running)
        for which in [*order, *range(4), *range(4), *range(4)]:
            turn = turns[which]
            if turn < MESSAGES[list(Pattern)[which % 2]]:
                running[which][1 - turn % 2].read_message(running[which][turn % 2].write_message())
                turns[which] += 1
        for which, both in enumerate(running):
            alone = sides(LibraryHandshake, list(Pattern)[which % 2], KEYS, bytes([which // 2]))
            for turn in range(turns[which]):
                alone[1 - turn % 2].read_message(alone[turn % 2].write_message())
            self.assertEqual([one.result for one in both], [one.result for one in alone])

    def test_handshakes_run_in_threads(self) -> None:
        barrier = Barrier(4)

        def work(_: int) -> list[object]:
            barrier.wait(5)
            return [self.agree(pattern, KEYS)[0].result for pattern in Pattern for _ in range(10)]

        with ThreadPoolExecutor(4) as pool:
            done = list(pool.map(work, range(4)))
        self.assertEqual(done, done[:1] * 4)

    def test_abandoned_handshakes_are_freed_without_the_garbage_collector(self) -> None:
        """The garbage collector rarely runs in servers."""
        gc.disable()
        self.addCleanup(gc.enable)
        for pattern in Pattern:
            one, two = sides(Handshake, pattern, KEYS, b"")
            two.read_message(one.write_message())
            try:  # The method assertRaises() would keep the frames alive.
                one.read_message(bytes(49))
            except HandshakeError:
                pass
            assert isinstance(one, Handshake)
            state = ref(one._state)
            del one
            self.assertIsNone(state())

    def test_finished_handshakes_hold_no_secret_key(self) -> None:
        for pattern in Pattern:
            for side in self.agree(pattern, KEYS):
                assert isinstance(side, Handshake)
                self.assertIsNone(side._state)
                for call in (side.write_message, lambda side=side: side.read_message(bytes(49))):
                    self.assertRaises(LocalProtocolError, call)

    def test_two_lasting_keys_agree_once(self) -> None:
        """Only the KK pattern uses the cache; other agreements of a lasting key are not stored."""
        statics = [SecKey.generate(), SecKey.generate()]
        asked = []
        ecdh = SecKey.ecdh

        def count(own: SecKey, other: bytes) -> bytes:
            asked.append(own)
            return ecdh(own, other)  # type: ignore[arg-type]

        with patch.object(SecKey, "ecdh", count):
            self.agree(Pattern.KK, [*statics, SecKey.generate(), SecKey.generate()])
            first = len(asked)
            self.agree(Pattern.KK, [*statics, SecKey.generate(), SecKey.generate()])
            self.agree(Pattern.XK, [*statics, SecKey.generate(), SecKey.generate()])
        self.assertEqual((first, len(asked) - first), (8, 6 + 6))
        self.assertEqual([list(one._shared) for one in statics], [[statics[1].public], [statics[0].public]])

    def test_messages_that_are_too_long(self) -> None:
        responder = sides(Handshake, Pattern.KK, KEYS, b"")[1]
        self.assertRaises(HandshakeError, responder.read_message, bytes(MAX_HANDSHAKE_MESSAGE + 1))


class OtherPatternTests(SynchronousTestCase):
    """Programs may use the functions for patterns that dmsg has not."""

    def test_each_with_the_functions_of_the_library(self) -> None:
        """The test covers patterns that derive three keys at once, and records after a rekey."""
        for pattern in (b"XX", b"IK", b"XXpsk3", b"NNpsk0"):
            both = []
            for which, backend in enumerate((BACKEND, PLAIN_BACKEND)):
                side = NoiseConnection.from_name(b"Noise_%s_Secp256k1_ChaChaPoly_SHA256" % pattern, backend)
                keypairs = side.noise_protocol.keypairs
                keypairs["s"] = Secp256k1KeyPair.of(KEYS[which])
                if pattern == b"IK" and not which:
                    keypairs["rs"] = Secp256k1KeyPair.of_remote(KEYS[1].public)
                if b"psk" in pattern:
                    side.set_psks(bytes(32))
                (side.set_as_responder if which else side.set_as_initiator)()
                side.start_handshake()
                both.append(side)
            turn = 0
            while not both[0].handshake_finished:
                payload = b"carried %d" % turn
                self.assertEqual(both[1 - turn % 2].read_message(bytes(both[turn % 2].write_message(payload))), payload)
                turn += 1
            self.assertEqual(both[0].get_handshake_hash(), both[1].get_handshake_hash())
            for one, two in (both, both[::-1]):
                self.assertEqual(two.decrypt(bytes(one.encrypt(b"said"))), b"said")
                one.rekey_outbound_cipher()
                two.rekey_inbound_cipher()
                self.assertEqual(two.decrypt(bytes(one.encrypt(b"again"))), b"again")
