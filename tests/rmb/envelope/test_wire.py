"""Envelopes, signatures, encryption and tokens, byte for byte as recorded."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from hypothesis import given, strategies as st
from mnemonic import Mnemonic
from twisted.trial.unittest import SynchronousTestCase

from dmsg.rmb.envelope import wire
from dmsg.rmb.envelope.cipher import Encryption
from dmsg.rmb.envelope.envelope_pb2 import Backlog, Envelope
from dmsg.rmb.errors import CipherError, EnvelopeError, IdentityError, SignatureInvalid, TokenError
from dmsg.rmb.relay.limiter import FixedWindow
from dmsg.rmb.relay.ranker import Ranker
from dmsg.rmb.twins import token
from dmsg.rmb.twins.address import Session
from dmsg.rmb.twins.identity import DEV_WORDS, Identity, mini_secret, parse_account, ss58, verify
from dmsg.rmb.twins.twin import Twin
from tests.rmb.support import envelope_of, vectors

ALICE = {kind: Identity("//Alice", kind) for kind in ("ed25519", "sr25519")}


class EnvelopeTests(SynchronousTestCase):
    """challenges.json; upstream's sign_verify."""

    def test_signed_bytes_match_the_vectors(self) -> None:
        """Preimage, digest and ed25519 signature are as recorded; the sr25519 samples verify."""
        rows = vectors("challenges")["rows"]
        self.assertEqual(15, len(rows))
        for row in rows:
            envelope, expected = envelope_of(row), row["expect"]
            self.assertEqual(expected["preimage_hex"], wire.preimage(envelope).hex(), row["name"])
            digest = wire.challenge(envelope)
            self.assertEqual(expected["md5"], digest.hex(), row["name"])
            self.assertEqual(expected["ed25519_alice_signature_field"], ALICE["ed25519"].sign(digest).hex())
            for kind in ("ed25519_alice_signature_field", "sr25519_alice_signature_field_sample"):
                verify(bytes.fromhex(expected[kind]), digest, ALICE[kind[:7]].account)

    def test_envelopes_encode_to_the_recorded_bytes(self) -> None:
        """The protobuf bytes, unsigned and signed, and back."""
        for row in vectors("challenges")["rows"]:
            envelope, expected = envelope_of(row), row["expect"]
            self.assertEqual(expected["protobuf_unsigned_hex"], envelope.SerializeToString().hex(), row["name"])
            envelope.signature = bytes.fromhex(expected["ed25519_alice_signature_field"])
            signed = bytes.fromhex(expected["protobuf_signed_ed_hex"])
            self.assertEqual(wire.decode(signed), envelope)

    def test_an_empty_envelope_is_signed_and_verified(self) -> None:
        """An empty envelope signed by //Alice with sr25519 verifies with the account."""
        envelope = Envelope()
        signature = ALICE["sr25519"].sign(wire.challenge(envelope))
        verify(signature, wire.challenge(envelope), ALICE["sr25519"].account)
        self.assertEqual(parse_account("5GrwvaEF5zXb26Fz9rcQpDWS57CtERHpNehXCPcNoHGKutQY"), ALICE["sr25519"].account)

    def test_the_strict_challenge_has_no_collisions(self) -> None:
        """All recorded collisions differ in the strict challenge; kind and kind of payload are part of it."""
        rows = [row for row in vectors("challenges")["rows"] if row["name"].startswith("collision")]
        self.assertEqual(5, len(rows))
        self.assertEqual(2, len({wire.challenge(envelope_of(row)) for row in rows}))
        self.assertEqual(5, len({wire.strict_challenge(envelope_of(row)) for row in rows}))
        seen = set()
        for kind in ("response", "ping", "pong"):
            for payload in ("plain", "cipher", "bound"):
                envelope = Envelope(uid="u")
                getattr(envelope, kind).SetInParent()
                setattr(envelope, payload, b"x")
                seen.add(wire.strict_challenge(envelope))
        self.assertEqual(9, len(seen))

    def test_the_bytes_of_the_strict_challenge(self) -> None:
        """Each item follows its length; an absent item has the length ff ff ff ff."""

        def items(*values: str | None) -> bytes:
            encoded = [None if value is None else value.encode() for value in values]
            return b"".join(
                b"\xff\xff\xff\xff" if one is None else len(one).to_bytes(4, "big") + one for one in encoded
            )

        envelope = Envelope(uid="u", tags="t", timestamp=5, expiration=60, relays=["r1", "r2"])
        wire.set_address(envelope.source, Session(7, "s"))
        wire.set_address(envelope.destination, Session(8))
        head = wire.STRICT_LABEL + items("u", "t", None, None, "5", "60", "7", "s", "8", None)
        tail = items("2", "r1", "r2")
        for kind, body in (
            ("request", items("request", "c")),
            ("response", items("response")),
            ("error", items("error", "3", "m")),
            ("ping", items("ping")),
            ("pong", items("pong")),
        ):
            getattr(envelope, kind).SetInParent()
            if kind == "request":
                envelope.request.command = "c"
            elif kind == "error":
                envelope.error.code, envelope.error.message = 3, "m"
            self.assertEqual(wire.frame_of_payload(envelope), head + body + tail, kind)
            whole = head + body + tail + items("", "")
            self.assertEqual(wire.strict_challenge(envelope), hashlib.sha256(whole).digest())

    @given(st.binary(max_size=300))
    def test_random_bytes(self, data: bytes) -> None:
        """Random bytes are either decoded or raise EnvelopeError. All functions accept a decoded envelope."""
        try:
            envelope = wire.decode(data)
        except EnvelopeError:
            return
        wire.challenge(envelope), wire.strict_challenge(envelope)
        wire.source_of(envelope), wire.kind_of(envelope), wire.times_error(envelope, 5), wire.wants_fail_fast(envelope)

    def test_the_backlog_record_keeps_a_sent_request(self) -> None:
        """The record of a sent request."""
        recorded = vectors("peer_json")["backlog_protobuf"]
        self.assertEqual(recorded["hex"], Backlog(**recorded["fields"]).SerializeToString().hex())

    def test_stamp_and_ttl(self) -> None:
        """Upstream's types::stamp and types::ttl."""
        recorded = vectors("semantics")
        for now, timestamp, expiration, *expected in recorded["stamp"]["rows"]:
            envelope = Envelope(timestamp=timestamp, expiration=expiration)
            wire.stamp(envelope, now)
            self.assertEqual(expected, [envelope.timestamp, envelope.expiration])
        for now, timestamp, expiration, left in recorded["ttl"]["rows"]:
            self.assertEqual(left, wire.ttl(timestamp, expiration, now))

    def test_forged_times_are_refused(self) -> None:
        """A13: the recorded forgery that never expires has the honest message's signed bytes, and is refused."""
        rows = {row["name"][:12]: envelope_of(row) for row in vectors("challenges")["rows"]}
        honest, forged = rows["collision D1"], rows["collision D2"]
        self.assertEqual(wire.challenge(honest), wire.challenge(forged))
        now = honest.timestamp + 10
        self.assertIsNone(wire.times_error(honest, now))
        self.assertEqual("timestamp is in the future", wire.times_error(forged, now))
        for timestamp, expiration, why in (
            (now, 0, "message has no expiration"),
            (now - 10, 10, "message has expired"),
            (now, 3601, "expiration is more than 3600 seconds"),
            (now + 301, 10, "timestamp is in the future"),
            (now + 300, 10, None),
        ):
            self.assertEqual(why, wire.times_error(Envelope(timestamp=timestamp, expiration=expiration), now))

    def test_a_life_ends_as_the_sender_says_within_limits(self) -> None:
        """A receiver would refuse a longer life."""
        for timestamp, expiration, now, expected in (
            (1000, 60, 900.5, 1060.0),
            (1000, 3600, 1000.0, 4600.0),
            (1000, 10**9, 1000.0, 4600.0),
            (10**9, 60, 1000.0, 1000.0 + 300 + 3600),
            (4900, 60, 1000.0, 1000.0 + 300 + 3600),
            (4840, 60, 1000.0, 1000.0 + 300 + 3600),
            (4839, 60, 1000.0, 4899.0),
        ):
            self.assertEqual(
                wire.life_ends(Envelope(timestamp=timestamp, expiration=expiration), now), expected, timestamp
            )
        for timestamp, expiration, now, left in (
            (1000, 60, 1000, 60),
            (1000, 60, 1059, 1),
            (1000, 60, 1060, None),
            (1000, 4000, 1000, 3600),
            (1000, 4000, 1500, 3500),
        ):
            self.assertEqual(wire.remaining_life(Envelope(timestamp=timestamp, expiration=expiration), now), left)

    def test_the_payload_of_a_pong(self) -> None:
        """The payload follows the unencrypted one; an encrypted payload is for another receiver."""
        for which, expected in (("plain", b"xhello world"), ("cipher", b"hello world"), ("bound", b"hello world")):
            ping = Envelope()
            ping.ping.SetInParent()
            setattr(ping, which, b"x")
            wire.to_pong(ping)
            self.assertEqual((ping.plain, ping.WhichOneof("payload")), (expected, "plain"))

    def test_fail_fast_tags_are_recognised(self) -> None:
        """Tags that ask for fail-fast."""
        for tags, expected in vectors("semantics")["fail_fast"]["rows"]:
            envelope = Envelope() if tags is None else Envelope(tags=tags)
            self.assertEqual(expected, wire.wants_fail_fast(envelope), tags)

    def test_pong_and_error(self) -> None:
        """Pongs and errors that relays create."""
        ping = Envelope(uid="p1", timestamp=5, expiration=40)
        ping.ping.SetInParent()
        wire.set_address(ping.source, Session(7, "abc"))
        wire.set_address(ping.destination, Session(0))
        wire.to_pong(ping)
        self.assertEqual("pong", wire.kind_of(ping))
        self.assertEqual((Session(0), Session(7, "abc")), (wire.source_of(ping), wire.destination_of(ping)))
        self.assertEqual((b"hello world", 5, 40), (ping.plain, ping.timestamp, ping.expiration))
        error = wire.error_envelope("u", "text", Session(7), 100)
        self.assertFalse(error.HasField("source") or error.HasField("signature") or error.HasField("tags"))
        self.assertEqual(
            (100, 300, 0, "text"), (error.timestamp, error.expiration, error.error.code, error.error.message)
        )


class IdentityTests(SynchronousTestCase):
    """identities.json, signatures.json; upstream's identity tests and the Go SDK's sig_test."""

    def test_keys_of_words_seeds_and_junctions(self) -> None:
        """Public keys and addresses of both schemes."""
        recorded = vectors("identities")
        for row in recorded["rows"]:
            for kind in ("ed25519", "sr25519"):
                identity = Identity(row["uri"], kind)
                self.assertEqual(row[kind]["public"], identity.account.hex(), (row["uri"], kind))
                self.assertEqual(row[kind]["ss58"], identity.address)
        for constant in recorded["constants"]:
            if "words" in constant:
                self.assertEqual(constant["seed"], "0x" + mini_secret(constant["words"]).hex())
            elif "mnemonic" in constant:
                self.assertEqual(constant["ss58"], Identity(constant["mnemonic"], constant["key_type"]).address)
        for row in recorded["must_fail"]:
            for kind in ("ed25519", "sr25519"):
                self.assertRaises(IdentityError, Identity, row["secret"], kind)

    def test_ss58_addresses_round_trip(self) -> None:
        """SS58 both ways; one that was changed is refused."""
        for row in vectors("identities")["ss58_accounts"]["rows"]:
            account = bytes.fromhex(row["account_hex"])
            self.assertEqual(row["ss58"], ss58(account))
            self.assertEqual(account, parse_account(row["ss58"]))
            self.assertRaises(IdentityError, parse_account, row["ss58"][:-1] + "1")
        for text in ("", "5", "0x12", "5!", "x" * 100):
            self.assertRaises(IdentityError, parse_account, text)

    def test_secrets_of_every_form_give_their_identity(self) -> None:
        """The development words, passwords, soft junctions."""
        self.assertEqual(Identity("//Alice").account, Identity(DEV_WORDS + "//Alice").account)
        self.assertNotEqual(Identity("//Alice").account, Identity("//Alice///password").account)
        self.assertNotEqual(Identity("//Alice").account, Identity("//Alice/soft").account)
        self.assertRaises(IdentityError, Identity, "//Alice/soft", "ed25519")
        self.assertRaises(IdentityError, Identity, "//Alice", "rsa")
        self.assertNotIn("lobby", repr(Identity(DEV_WORDS)))

    def test_recorded_signatures_verify(self) -> None:
        """Recorded ones of both schemes verify; ed25519's are the same bytes; the rejects have their texts."""
        recorded = vectors("signatures")
        for row in recorded["rows"]:
            field, message = bytes.fromhex(row["signature_field"]), bytes.fromhex(row["msg"])
            verify(field, message, bytes.fromhex(row["public"]))
            if row["type"] == "ed25519":
                self.assertEqual(field, Identity(row["uri"], "ed25519").sign(message))
            changed = bytes([field[0] ^ 0x16]) + field[1:]
            self.assertRaises(SignatureInvalid, verify, changed, message, bytes.fromhex(row["public"]))
        first = recorded["rows"][0]
        for row in recorded["reject"]:
            error = self.assertRaises(
                SignatureInvalid,
                verify,
                bytes.fromhex(row["signature_field"]),
                bytes.fromhex(first["msg"]),
                bytes.fromhex(first["public"]),
            )
            self.assertEqual(row["error"], str(error), row["why"])
        error = self.assertRaises(SignatureInvalid, verify, None, b"", bytes(32))
        self.assertEqual("message is not signed", str(error))

    @given(st.binary(min_size=65, max_size=65), st.binary(min_size=32, max_size=32))
    def test_random_signatures_are_invalid(self, signature: bytes, account: bytes) -> None:
        """Random bytes raise SignatureInvalid and no other error."""
        for kind in (b"e", b"s", b""):
            field = kind + signature[: 65 - len(kind)]
            self.assertRaises(SignatureInvalid, verify, field, b"message", account)


class CipherTests(SynchronousTestCase):
    """e2e.json; upstream's test_shared_key."""

    def test_recorded_payloads_decrypt(self) -> None:
        """Public keys, shared keys, encrypted payloads, what is refused."""
        recorded = vectors("e2e")
        for row in recorded["keys"]["rows"]:
            self.assertEqual(row["public_compressed"], Encryption(row["secret"]).pk.hex())
        for row in recorded["shared"]["rows"]:
            a, b = Encryption(row["a"]), Encryption(row["b"])
            self.assertEqual(row["shared_key"], a.shared_key(b.pk).hex())
            self.assertEqual(row["shared_key"], b.shared_key(a.pk).hex())
        for row in recorded["aes_gcm"]["rows"]:
            sender, receiver = Encryption(row["sender"]), Encryption(row["receiver"])
            plain, field = bytes.fromhex(row["plain_hex"]), bytes.fromhex(row["cipher_field_hex"])
            self.assertEqual(field, sender.encrypt(plain, receiver.pk, bytes.fromhex(row["nonce"])))
            self.assertEqual(plain, receiver.decrypt(field, sender.pk))
        for row in recorded["aes_gcm"]["reject"]:
            error = self.assertRaises(CipherError, receiver.decrypt, bytes.fromhex(row["cipher_field_hex"]), sender.pk)
            self.assertEqual(row["error"], str(error))
        for row in recorded["legacy_derivation"]["rows"]:
            self.assertEqual(row["substrate_seed32"], mini_secret(row["mnemonic"]).hex())
            self.assertEqual(row["public_new"], Encryption(row["mnemonic"]).pk.hex())
            # Peers before 2024 used the ordinary BIP-39 seed. The owner of such a key passes it as a hex seed.
            seed = Mnemonic.to_seed(row["mnemonic"])[:32].hex()
            self.assertEqual((row["bip39_seed32"], row["public_legacy"]), (seed, Encryption("0x" + seed).pk.hex()))

    def test_encrypted_payloads_are_decrypted(self) -> None:
        """An empty payload is encrypted, too; invalid and short payloads are refused."""
        a, b = Encryption(DEV_WORDS), Encryption("0x" + "11" * 32)
        for data in (b"", b"hello world"):
            self.assertEqual(data, b.decrypt(a.encrypt(data, b.pk), a.pk))
            self.assertEqual(data, b.decrypt_bound(a.encrypt_bound(data, b.pk, b"frame"), a.pk, b"frame"))
        self.assertEqual(28, len(a.encrypt(b"", b.pk)))
        for bad in (b"", b"x" * 27, b"x" * 28, a.encrypt(b"x", a.pk)):
            self.assertRaises(CipherError, b.decrypt, bad, a.pk)
        self.assertRaises(CipherError, b.encrypt, b"x", bytes(33))
        self.assertRaises(IdentityError, Encryption, "//Alice")

    def test_bound_payloads_cannot_be_changed_or_reflected(self) -> None:
        """Bound fields cannot be changed, and a payload cannot be sent back to its sender."""
        a, b = Encryption(DEV_WORDS), Encryption("0x" + "11" * 32)
        sealed = a.encrypt_bound(b"x", b.pk, b"frame")
        self.assertRaises(CipherError, b.decrypt_bound, sealed, a.pk, b"other")
        self.assertRaises(CipherError, a.decrypt_bound, sealed, b.pk, b"frame")
        self.assertRaises(CipherError, b.decrypt, sealed, a.pk)


class TokenTests(SynchronousTestCase):
    """jwt.json; upstream's token tests."""

    def test_tokens_are_accepted_and_refused_as_in_the_table(self) -> None:
        """A15: valid tokens are accepted, and all others are refused with the text of the table."""
        now = 1_800_000_000
        for row in vectors("jwt")["rows"]:
            for name in ("ed25519_token", "sr25519_token_sample", "token"):
                if name not in row:
                    continue
                text = row[name].encode()
                if row["expect"].startswith("401"):
                    error = self.assertRaises(TokenError, lambda text=text: token.parse(text).check_times(now))
                    if "jwt has expired" in row["expect"]:
                        self.assertEqual("jwt has expired", str(error))
                    continue
                parsed = token.parse(text)
                self.assertEqual(row["claims"]["sub"], parsed.session.twin)
                self.assertEqual(row["claims"].get("sid"), parsed.session.sid)
                kind = {b"e": "ed25519", b"s": "sr25519"}[parsed.signature[:1]]
                parsed.check_signature(ALICE[kind].account)
                self.assertRaises(TokenError, parsed.check_signature, bytes(32))

    def test_the_upstream_sample_parses(self) -> None:
        sample = vectors("jwt")["upstream_sample"]
        parsed = token.parse(sample["token"].encode())
        self.assertEqual((Session(7), 1673267150, 60), (parsed.session, parsed.issued, parsed.expires))
        self.assertEqual(sample["signature_len"], len(parsed.signature))

    def test_made_tokens_equal_the_recorded_bytes(self) -> None:
        """create_token: the claims, in the reference's order; the same bytes as recorded for ed25519."""
        for signer in ALICE.values():
            parsed = token.parse(token.make(signer, Session(100), 1000, 20).encode())
            self.assertEqual((100, 1000, 1020), (parsed.session.twin, parsed.issued, parsed.expires))
            parsed.check_signature(signer.account)
        row = vectors("jwt")["rows"][0]
        made = token.make(
            ALICE["ed25519"], Session(100), 1700000000, 4102444800 - 1700000000, unique=False, resends=False
        )
        self.assertEqual(row["ed25519_token"], made)

    def test_tokens_are_unique_and_state_the_resend_rule(self) -> None:
        """Each token differs from the last, and states that its session sends unconfirmed messages again, unless the
        caller says otherwise.
        """
        signer = ALICE["ed25519"]
        one, two = (token.make(signer, Session(100), 1000) for _ in range(2))
        self.assertNotEqual(one, two)
        self.assertTrue(token.parse(one.encode()).resends)
        self.assertFalse(token.parse(token.make(signer, Session(100), 1000, resends=False).encode()).resends)
        self.assertFalse(token.Token(Session(1), 0, 1, b"", b"").resends)

    def test_malformed_tokens_raise_the_errors_of_the_reference(self) -> None:
        """The error texts are those of the reference."""

        def said(text: bytes) -> str:
            return str(self.assertRaises(TokenError, token.parse, text))

        def part(text: str) -> bytes:
            return token._encode(text.encode())

        self.assertIn("No claims component", said(b"e30"))
        self.assertIn("No signature component", said(b"e30.e30"))
        self.assertIn("Too many components", said(b"e30.e30.e30.e30"))
        self.assertIn("type Hs256 but found", said(part('{"alg":"HS256"}') + b".e30.e30"))
        self.assertIn("type none but found", said(part('{"alg":5}') + b".e30.e30"))
        long = part('{"alg":"%s"}' % ("x" * 30))
        self.assertIn("type X" + "x" * 19 + " but found", said(long + b".e30.e30"))
        half = part('{"sub":1,"iat":1,"exp":2,"sid":"\\ud800"}')
        self.assertIn("sid is not a text", said(part('{"alg":"RS512"}') + b"." + half + b".e30"))

    def test_expired_and_future_tokens_are_refused(self) -> None:
        """Equal is still good; the future and more than a day are not."""
        parsed = token.parse(token.make(ALICE["ed25519"], Session(1), 1000, 60).encode())
        parsed.check_times(1060)
        for now in (1061, 699):
            self.assertRaises(TokenError, parsed.check_times, now)
        longer = token.parse(token.make(ALICE["ed25519"], Session(1), 1000, token.MAX_TTL + 1).encode())
        self.assertRaises(TokenError, longer.check_times, 1000)

    def test_lengths_and_numbers_at_their_limits(self) -> None:
        """The cases also contain characters outside of the alphabet of base64url."""

        def made(**claims: Any) -> bytes:
            claims = {"sub": 1, "iat": 100, "exp": 160, **claims}
            head = token._encode(b'{"alg":"RS512"}')
            return head + b"." + token._encode(json.dumps(claims, separators=(",", ":")).encode()) + b".e30"

        for claims, good in (
            ({"sid": "s" * 256}, True),
            ({"sid": "s" * 257}, False),
            ({"sid": 5}, False),
            ({"sub": 0}, True),
            ({"sub": 2**32 - 1}, True),
            ({"sub": 2**32}, False),
            ({"sub": -1}, False),
            ({"sub": True}, False),
            ({"iat": 2**64 - 1}, True),
            ({"iat": 2**64}, False),
            ({"exp": 2**64 - 1}, True),
            ({"exp": 2**64}, False),
            ({"exp": 1.5}, False),
            ({"ack": 1}, True),
        ):
            if good:
                self.assertEqual(token.parse(made(**claims)).resends, False)
            else:
                self.assertRaises(TokenError, token.parse, made(**claims))
        whole = made()
        for rest, good in ((token.MAX_TOKEN - len(whole), True), (token.MAX_TOKEN - len(whole) + 1, False)):
            text = whole + b"A" * rest
            if good:
                self.assertGreater(len(token.parse(text).signature), 2000)
            else:
                self.assertRaises(TokenError, token.parse, text)
        for end in (b"e3+", b"e3/", b"e3A=", b"+/=", b"e"):
            self.assertRaises(TokenError, token.parse, whole[:-3] + end)

    @given(st.one_of(st.binary(max_size=100), st.text("eyJ.{}01=", max_size=100).map(str.encode)))
    def test_random_bytes(self, data: bytes) -> None:
        """Random bytes raise TokenError and no other error."""
        try:
            token.parse(data)
        except TokenError as error:
            self.assertTrue(str(error).startswith("jwt"))


class SemanticsTests(SynchronousTestCase):
    """semantics.json: sessions, limiter, ranker, relays of a twin."""

    def test_session_names_parse_as_in_the_reference(self) -> None:
        """parse_stream_id."""
        for row in vectors("semantics")["session_id"]["rows"]:
            session = Session.parse(row["text"])
            self.assertEqual((row["twin"], row["sid"], row["redis_key"]), (*session, session.stream))
            self.assertEqual(session, Session.parse(row["redis_key"]))
        for text in ("", "x", ":a", "-1", "4294967296", "1" * 5000, "1:" + "x" * 257):
            self.assertRaises(ValueError, Session.parse, text)
        for text, shown in (("x" * 81, repr("x" * 80) + " is not"), ("1:" + "x" * 257, repr("x" * 40) + "... has")):
            self.assertIn(shown, str(self.assertRaises(ValueError, Session.parse, text)))

    def test_the_limiter_counts_as_the_reference(self) -> None:
        """test_exceed_count, test_exceed_size; what is too large for any window is not counted."""
        for row in vectors("semantics")["fixed_window"]["rows"]:
            limiter = FixedWindow(row["count"], row["size"], window=row["window"])
            self.assertEqual(row["ok"], [limiter.measure(1, size, 100.0) for size in row["messages"]])
            if row.get("after_window_sleep"):
                self.assertTrue(limiter.measure(1, 1, 105.0))
        limiter = FixedWindow(2, 10, limit=2)
        self.assertFalse(limiter.measure(1, 11, 0.0))
        self.assertEqual([True, True, False], [limiter.measure(1, 1, 0.0) for _ in range(3)])
        self.assertTrue(limiter.measure(2, 1, 0.0) and limiter.measure(3, 1, 0.0))
        self.assertEqual(2, len(limiter))

    def test_the_ranker_orders_as_the_reference(self) -> None:
        """test_downvoted_at_last, test_order_by_failure_rate, test_rank_healing."""
        first, second, third = vectors("semantics")["ranker"]["rows"]
        ranker = Ranker()
        for relay in first["downvotes"]:
            ranker.downvote(relay, 0.0)
        self.assertEqual(first["last"], ranker.order(first["input"], 1.0)[-1])
        ranker = Ranker()
        for relay in second["downvotes"]:
            ranker.downvote(relay, 0.0)
        self.assertEqual(second["result"], ranker.order(second["input"], 1.0))
        self.assertEqual(third["failure_rate"], ranker.rate("bing.com", 3600.0))
        self.assertEqual(2.0, Ranker(1800).rate("x", 0) + 2.0)

    def test_relays_of_a_twin(self) -> None:
        """The text and the set."""
        for text, expected in vectors("semantics")["relay_domains"]["rows"]:
            self.assertEqual(set(expected), Twin(1, bytes(32), text).relays)
        self.assertEqual(frozenset(), Twin(1, bytes(32)).relays)
