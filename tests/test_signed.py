"""Everything that is signed: whatever is changed in it changes what is signed, and known bytes stay as they are.

A field that is left out of what is signed is one that whoever carries the
message may write.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, cast

from twisted.trial.unittest import SynchronousTestCase

from dmsg.discovery.entries.entry import ClientMeta, Entry, EntrySignatureError, ServerMeta, Successor
from dmsg.discovery.entries.rules import Deletion
from dmsg.discovery.service.ranking import RankingError, read_ranking, sign_ranking
from dmsg.keys import SecKey
from dmsg.rmb.envelope import wire
from dmsg.rmb.envelope.envelope_pb2 import Envelope
from dmsg.rmb.errors import TokenError
from dmsg.rmb.twins import token
from dmsg.rmb.twins.address import Session
from dmsg.rmb.twins.identity import Identity
from dmsg.rmb.twins.twin import Twin
from dmsg.telemetry.receipts import Receipt, ReceiptError, Role, parse_receipt

KEYS = [SecKey.from_seed(b"signed %d" % number) for number in range(4)]


class SignedCase(SynchronousTestCase):
    def all_differ(self, signed: Iterable[tuple[str, bytes]]) -> None:
        """Assert that no two objects have the same signed bytes."""
        seen: dict[bytes, str] = {}
        for name, data in signed:
            self.assertNotIn(data, seen, f"{name} and {seen.get(data)}")
            seen[data] = name


def envelope(change: Callable[[Any], None] = lambda one: None, kind: str = "request") -> Any:
    """Return an envelope with all fields, one of them changed."""
    one = Envelope(uid="uid", tags="t", timestamp=1000, expiration=60, schema="s", federation="f", plain=b"payload")
    one.source.twin, one.source.connection = 1, "a"
    one.destination.twin, one.destination.connection = 2, "b"
    one.relays.extend(["r1", "r2"])
    if kind == "request":
        one.request.command = "command"
    elif kind == "error":
        one.error.code, one.error.message = 7, "text"
    else:
        getattr(one, kind).SetInParent()
    change(one)
    return one


def setting(path: str, value: Any) -> Callable[[Any], None]:
    def change(one: Any) -> None:
        *parents, name = path.split(".")
        for parent in parents:
            one = getattr(one, parent)
        setattr(one, name, value)

    return change


def clearing(path: str) -> Callable[[Any], None]:
    def change(one: Any) -> None:
        *parents, name = path.split(".")
        for parent in parents:
            one = getattr(one, parent)
        one.ClearField(name)

    return change


def relays(*names: str) -> Callable[[Any], None]:
    def change(one: Any) -> None:
        del one.relays[:]
        one.relays.extend(names)

    return change


FRAME_CHANGES: dict[str, Callable[[Any], None]] = {
    "uid": setting("uid", "uie"),
    "uid empty": setting("uid", ""),
    "tags": setting("tags", "u"),
    "tags empty": setting("tags", ""),
    "tags absent": clearing("tags"),
    "timestamp": setting("timestamp", 1001),
    "expiration": setting("expiration", 61),
    "times run together": lambda one: (setting("timestamp", 10006)(one), setting("expiration", 0)(one))[0],
    "source twin": setting("source.twin", 3),
    "source connection": setting("source.connection", "x"),
    "source connection empty": setting("source.connection", ""),
    "source connection absent": clearing("source.connection"),
    "source absent": clearing("source"),
    "source runs together": lambda one: (setting("source.twin", 11)(one), setting("source.connection", "")(one))[0],
    "destination twin": setting("destination.twin", 3),
    "destination connection": setting("destination.connection", "x"),
    "destination connection empty": setting("destination.connection", ""),
    "destination connection absent": clearing("destination.connection"),
    "destination absent": clearing("destination"),
    "schema": setting("schema", "x"),
    "schema absent": clearing("schema"),
    "federation": setting("federation", "x"),
    "federation absent": clearing("federation"),
    "schema and federation": lambda one: (setting("schema", "f")(one), setting("federation", "s")(one))[0],
    "a relay more": relays("r1", "r2", "r3"),
    "a relay less": relays("r1"),
    "relays the other way": relays("r2", "r1"),
    "relays together": relays("r1r2"),
    "relays cut otherwise": relays("r1r", "2"),
}


class EnvelopeTests(SignedCase):
    """The strict challenge, and the frame that a bound payload is sealed with."""

    def variants(self) -> Iterable[tuple[str, Any]]:
        for kind in ("request", "response", "error", "ping", "pong"):
            yield kind, envelope(kind=kind)
        for name, change in FRAME_CHANGES.items():
            yield name, envelope(change)
        yield "command", envelope(setting("request.command", "commanD"))
        yield "command empty", envelope(setting("request.command", ""))
        yield "code", envelope(setting("error.code", 8), "error")
        yield "text", envelope(setting("error.message", "texts"), "error")
        yield (
            "code and text",
            envelope(lambda one: (setting("error.code", 77)(one), setting("error.message", "ext")(one))[0], "error"),
        )

    def test_each_field_is_in_the_frame(self) -> None:
        """So a relay that changes one makes the payload unreadable."""
        self.all_differ((name, wire.frame_of_payload(one)) for name, one in self.variants())

    def test_each_field_is_in_the_strict_challenge(self) -> None:
        payloads = [
            (f"payload {which} {data!r}", envelope(setting(which, data)))
            for which, data in itertools.product(("plain", "cipher", "bound"), (b"payloae", b""))
        ]
        payloads.append(("payload absent", envelope(clearing("plain"))))
        everything = itertools.chain(self.variants(), payloads)
        self.all_differ((name, wire.strict_challenge(one)) for name, one in everything)

    def test_signed_bytes_exclude_the_signature(self) -> None:
        signed = envelope()
        before = wire.strict_challenge(signed), wire.frame_of_payload(signed), wire.challenge(signed)
        signed.signature, signed.strict_signature = b"x" * 65, b"y" * 65
        self.assertEqual(before, (wire.strict_challenge(signed), wire.frame_of_payload(signed), wire.challenge(signed)))

    def test_signed_bytes_match_handwritten_ones(self) -> None:
        """The bytes are written by hand from the documentation."""

        def item(data: bytes) -> bytes:
            return len(data).to_bytes(4, "big") + data

        head = [b"uid", b"t", b"s", b"f", b"1000", b"60", b"1", b"a", b"2", b"b"]
        tails = {
            "request": [b"request", b"command"],
            "error": [b"error", b"7", b"text"],
            "pong": [b"pong"],
        }
        for kind, tail in tails.items():
            frame = b"dmsg-rmb-envelope-1\0" + b"".join(map(item, [*head, *tail, b"2", b"r1", b"r2"]))
            self.assertEqual(frame, wire.frame_of_payload(envelope(kind=kind)))
            expected = hashlib.sha256(frame + item(b"plain") + item(b"payload")).digest()
            self.assertEqual(expected, wire.strict_challenge(envelope(kind=kind)))
        bare = Envelope(uid="u", timestamp=1, expiration=2)
        absent = b"\xff" * 4
        frame = b"dmsg-rmb-envelope-1\0" + item(b"u") + absent * 3 + item(b"1") + item(b"2") + absent * 4
        frame += item(b"") + item(b"0")
        self.assertEqual(frame, wire.frame_of_payload(bare))
        self.assertEqual(hashlib.sha256(frame + item(b"") + item(b"")).digest(), wire.strict_challenge(bare))


class EntryTests(SignedCase):
    """Entries, deletions, successions."""

    STATIC = KEYS[0].public.hex()
    ENTRY = Entry(
        "0.0.1",
        3,
        1000,
        STATIC,
        ClientMeta((KEYS[1].public.hex(),)),
        ServerMeta("host:1", 5, ""),
        successor=Successor.make(KEYS[0].public, KEYS[1]),
    )

    def test_each_field_of_an_entry(self) -> None:
        one, server = self.ENTRY, self.ENTRY.server
        assert server is not None
        changed = {
            "version": replace(one, version="0.0.2"),
            "sequence": replace(one, sequence=4),
            "timestamp": replace(one, timestamp=1001),
            "static": replace(one, static=KEYS[1].public.hex()),
            "servers": replace(one, client=ClientMeta((KEYS[2].public.hex(),))),
            "more servers": replace(one, client=ClientMeta((KEYS[1].public.hex(), KEYS[2].public.hex()))),
            "no servers": replace(one, client=ClientMeta(())),
            "null servers": replace(one, client=ClientMeta(None)),
            "no client": replace(one, client=None),
            "no server": replace(one, server=None),
            "address": replace(one, server=replace(server, address="host:2")),
            "connections": replace(one, server=replace(server, available_connections=6)),
            "port": replace(one, server=replace(server, port="1")),
            "no port": replace(one, server=replace(server, port=None)),
            "successor": replace(one, successor=Successor.make(KEYS[0].public, KEYS[2])),
            "its word": replace(one, successor=Successor(one.successor.static, "00" * 65)),  # type: ignore[union-attr]
            "no successor": replace(one, successor=None),
        }
        self.all_differ([("as it is", one.signing_json())] + [(n, e.signing_json()) for n, e in changed.items()])
        self.assertEqual(one.sign(KEYS[0]).signing_json(), one.signing_json())

    def test_each_field_of_a_deletion(self) -> None:
        """A signature of a deletion is not valid for an entry."""
        one = Deletion(self.STATIC, 3, 1000)
        others = (replace(one, static=KEYS[1].public.hex()), replace(one, sequence=4), replace(one, timestamp=1001))
        bare = Entry("0.0.1", 3, 1000, self.STATIC, ClientMeta(()))
        self.all_differ(
            (str(number), cast(Any, each).signing_json()) for number, each in enumerate((one, *others, bare))
        )
        self.assertEqual(
            one.signing_json(),
            f'{{"act":"delete","static":"{self.STATIC}","sequence":3,"timestamp":1000}}'.encode(),
        )

    def test_each_field_of_a_succession(self) -> None:
        old, new = KEYS[0].public, KEYS[1]
        good = Successor.make(old, new)
        good.verify(old.hex())
        self.assertRaises(EntrySignatureError, good.verify, KEYS[2].public.hex())
        for bad in (replace(good, static=KEYS[2].public.hex()), Successor(good.static, "ff" + good.signature[2:])):
            self.assertRaises(EntrySignatureError, bad.verify, old.hex())
        self.all_differ((f"{one} {two}", Successor.signing_json(one, two)) for one in ("a", "b") for two in ("a", "b"))
        # Neither key can sign in the other's place.
        forged = Successor(good.static, KEYS[0].sign(Successor.signing_json(old.hex(), good.static)).hex())
        self.assertRaises(EntrySignatureError, forged.verify, old.hex())


class ReceiptTests(SignedCase):
    def test_changing_any_byte_invalidates_the_signature(self) -> None:
        """Whichever is changed, nobody has signed it."""
        receipt = Receipt(Role.INITIATOR, bytes(16), KEYS[0].public, KEYS[1].public, KEYS[2].public, 5, 6)
        data = receipt.sign(KEYS[1])
        self.assertEqual(parse_receipt(data), receipt)
        for at in range(len(data)):
            self.assertRaises(ReceiptError, parse_receipt, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


class RankingTests(SignedCase):
    def test_changing_any_value_invalidates_the_signature(self) -> None:
        servers = [{"static": key.public.hex(), "weight": 1.0, "reasons": ["r"]} for key in KEYS[:2]]
        data = sign_ranking(servers, KEYS[3], 1000, 2000)
        read_ranking(data, KEYS[3].public)
        for old, new in (
            (b"1000", b"1001"),
            (b"2000", b"2001"),
            (b'"r"', b'"s"'),
            (b"1.0", b"2.0"),
            (KEYS[0].public.hex().encode(), KEYS[2].public.hex().encode()),
        ):
            self.assertIn(old, data)
            self.assertRaises(RankingError, read_ranking, data.replace(old, new, 1), KEYS[3].public)


class BusTests(SignedCase):
    """Signed objects of the bus: twins and tokens."""

    def test_each_field_of_a_twin(self) -> None:
        one = Twin(1, bytes(32), "relay", b"pk", True, 5)
        changed = (
            replace(one, account=b"\1" * 32),
            replace(one, relay="relays"),
            replace(one, relay=None),
            replace(one, pk=b"pl"),
            replace(one, pk=None),
            replace(one, strict=False),
            replace(one, counter=6),
        )
        self.all_differ((str(number), each.signed()) for number, each in enumerate((one, *changed)))
        self.assertEqual(one.signed(), replace(one, id=2, signature=b"x").signed())

    def test_each_claim_of_a_token(self) -> None:
        """Each letter of the token's text counts, too."""
        alice = Identity("//Alice", "ed25519")
        made = [
            token.make(alice, Session(twin, sid), now, ttl, unique=False, resends=bool(asks))
            for twin, sid, now, ttl, asks in itertools.product((1, 2), (None, "", "s"), (100, 101), (60, 61), (0, 1))
        ]
        self.all_differ((text, text.rpartition(".")[0].encode()) for text in made)
        text = made[0].encode()
        token.parse(text).check_signature(alice.account)
        for at in range(len(text)):
            for other in (b"A", b"B"):
                changed = text[:at] + other + text[at + 1 :]
                if changed == text:
                    continue
                try:
                    parsed = token.parse(changed)
                    parsed.check_signature(alice.account)
                except TokenError:
                    continue
                # The last character of a part has unused bits.
                self.assertEqual(parsed.signature, token.parse(text).signature)
                self.assertEqual(parsed.signed, token.parse(text).signed)

    def test_other_signed_objects_are_no_tokens(self) -> None:
        """The same key has signed an object of another kind."""
        alice = Identity("//Alice", "ed25519")
        claims = token._encode(b'{"sub":1,"iat":100,"exp":160}')
        for header, good in (
            (b'{"alg":"RS512"}', True),
            (b'{"alg":"RS512","typ":"JWT"}', True),
            (b'{"alg":"RS512","typ":"JWE"}', False),
            (b'{"alg":"RS512","typ":1}', False),
            (b'{"alg":"none"}', False),
            (b'{"typ":"JWT"}', False),
        ):
            signed = token._encode(header) + b"." + claims
            text = signed + b"." + token._encode(alice.sign(signed))
            try:
                token.parse(text).check_signature(alice.account)
            except TokenError:
                self.assertFalse(good, header)
            else:
                self.assertTrue(good, header)
