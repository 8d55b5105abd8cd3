"""The product's handshakes beside those of ``noiseprotocol``: every byte and every refusal the same."""

from __future__ import annotations

from hypothesis import given, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import HandshakeError
from dmsg.keys import SecKey
from dmsg.noise.handshake import Handshake, Pattern
from tests.noise.oracle import LibraryHandshake

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
    """With the same keys both say the same, to each other and of each other."""

    @given(st.sampled_from(Pattern), st.lists(keys, min_size=4, max_size=4), st.binary(max_size=40), payloads)
    def test_every_byte(self, pattern: Pattern, chosen: list[SecKey], prologue: bytes, carried: list[bytes]) -> None:
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
    def test_every_refusal(self, pattern: Pattern, which: int, damage: bytes | tuple[int, int] | int) -> None:
        """Other bytes, one byte changed, or cut short: both refuse, or neither does, in the same words."""
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
