"""Handshakes against the reference's transcripts."""

from __future__ import annotations

from hypothesis import given, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import DropReason, HandshakeError, LocalProtocolError
from dmsg.keys import SecKey, sha256
from dmsg.noise.handshake import MAX_FRAMED_MESSAGE, MAX_HANDSHAKE_MESSAGE, Handshake, Pattern
from dmsg.noise.records import RecordOpener, RecordSealer
from dmsg.noise.xk import MAX_LINK_MESSAGE, XKHandshake
from tests.support import SERVER_KEY, ciphers, vectors

CLIENT_KEY = SecKey.from_seed(b"client-a")


class VectorTests(SynchronousTestCase):
    """noise.json."""

    def setUp(self) -> None:
        self.vectors = vectors("noise")

    def _sides(self, case: dict) -> tuple[Handshake, Handshake]:  # type: ignore[type-arg]
        pattern = Pattern[case["pattern"]]
        static = {side: SecKey.from_hex(case[side]["static_sk"]) for side in ("initiator", "responder")}
        ephemeral = {side: SecKey.from_hex(case[side]["ephemeral_sk"]) for side in ("initiator", "responder")}
        return (
            Handshake(
                pattern,
                static["initiator"],
                initiator=True,
                remote=static["responder"].public,
                ephemeral=ephemeral["initiator"],
            ),
            Handshake(
                pattern,
                static["responder"],
                initiator=False,
                remote=static["initiator"].public if pattern is Pattern.KK else None,
                ephemeral=ephemeral["responder"],
            ),
        )

    def test_messages_and_keys(self) -> None:
        for case in self.vectors["handshakes"]:
            initiator, responder = self._sides(case)
            writer, reader = initiator, responder
            for message in case["messages"]:
                written = writer.write_message()
                self.assertEqual(written.hex(), message["message"])
                self.assertEqual(reader.read_message(written), b"")
                writer, reader = reader, writer
            assert initiator.result is not None and responder.result is not None
            keys = case["keys"]
            self.assertEqual(initiator.result.send_key.hex(), keys["initiator_send"])
            self.assertEqual(initiator.result.receive_key.hex(), keys["initiator_recv"])
            self.assertEqual(responder.result.send_key.hex(), keys["responder_send"])
            self.assertEqual(responder.result.receive_key.hex(), keys["responder_recv"])
            self.assertEqual(initiator.result.hash.hex(), case["handshake_hash"])
            self.assertEqual(responder.result.remote.hex(), case["initiator"]["static_pk"])

    def test_records_match_the_vectors(self) -> None:
        """Both directions are compared byte for byte, from the first record to the largest."""
        for case in self.vectors["handshakes"]:
            for direction, side in (("i2r", "initiator"), ("r2i", "responder")):
                key = bytes.fromhex(case["keys"][f"{side}_send"])
                sealer, opener = RecordSealer(key), RecordOpener(key)
                records = [record for record in case["records"] if record["dir"] == direction]
                self.assertGreaterEqual(len(records), 6)
                for record in records:
                    size = record["plaintext_len"]
                    # A long plaintext is the pattern 3, 10, 17, ..., and only its hash is recorded.
                    plaintext = (
                        bytes.fromhex(record["plaintext"])
                        if record.get("plaintext")
                        else bytes((3 + 7 * n) & 0xFF for n in range(size))
                    )
                    sealed = bytes(sealer.seal(plaintext))
                    self.assertEqual(sealer.sequence, record["seq"])
                    self.assertEqual((len(plaintext), len(sealed)), (size, record["record_len"]), record["name"])
                    self.assertEqual(sha256(sealed).hex(), record["record_sha256"], record["name"])
                    buffer = bytearray(200_000)
                    self.assertEqual(bytes(buffer[: opener.open_into(sealed, buffer, 0)]), plaintext)

    def test_refused_messages_raise_named_errors(self) -> None:
        """Every message that makes the reference fail or panic is a named error."""
        case = self.vectors["handshakes"][0]
        refusals = self.vectors["handshake_refusals"]["cases"]
        self.assertGreater(len(refusals), 10)
        for refusal in refusals:
            initiator, responder = self._sides(case)
            message = bytes.fromhex(refusal["message"])
            if "message 3" in refusal["name"]:
                responder.read_message(initiator.write_message())
                responder.write_message()
            if refusal["result"] == "ok":
                responder.read_message(message)
            else:
                self.assertRaises(HandshakeError, responder.read_message, message)

    def test_invalid_ephemeral_keys_are_refused(self) -> None:
        """The 49 bytes that end the reference's process, section 7.1 of its description."""
        for ephemeral in (
            bytes(33),
            b"\x04" + bytes(32),
            b"\x02" + b"\xff" * 32,
            b"\x02" + bytes(31) + b"\x05",
        ):
            responder = Handshake(Pattern.XK, SERVER_KEY, initiator=False)
            self.assertRaises(HandshakeError, responder.read_message, ephemeral + bytes(16))

    def test_replays_and_damage(self) -> None:
        """The reference accepts these records with a warning; here they end the connection."""
        key = bytes.fromhex(self.vectors["handshakes"][0]["keys"]["initiator_send"])
        highest = 0
        refused = []
        for case in self.vectors["replay"]["cases"]:
            body = bytes.fromhex(case["body"])
            opener = RecordOpener(key, highest)
            buffer = bytearray(70_000)
            end = opener.open_into(len(body).to_bytes(2, "big") + body, buffer, 0)
            if (error := opener.broken) is not None:
                self.assertEqual(end, 0)
                refused.append((case["name"], error.reason))
                if case["result"] == "ok":
                    self.assertLessEqual(int.from_bytes(body[:4], "big"), highest)
                    self.assertIs(error.reason, DropReason.REPLAYED_RECORD, case["name"])
                continue
            self.assertEqual(case["result"], "ok", case["name"])
            self.assertEqual(bytes(buffer[:end]).decode(), case["plaintext"])
            highest = opener.sequence
        self.assertEqual(highest, 2**32 - 1)
        self.assertEqual(len(refused), 11)


class LinkTests(SynchronousTestCase):
    """The handshake over a byte stream."""

    @given(st.lists(st.integers(1, 80), max_size=30))
    def test_handshakes_accept_any_chunking(self, sizes: list[int]) -> None:
        client = XKHandshake(CLIENT_KEY, SERVER_KEY.public)
        server = XKHandshake(SERVER_KEY)
        sides = [(client, server), (server, client)]
        for turn in range(3):
            writer, reader = sides[turn % 2]
            data = writer.data_to_send()
            for size in sizes:
                reader.receive_data(data[:size])
                data = data[size:]
            reader.receive_data(data)
        self.assertEqual(server.remote, CLIENT_KEY.public)
        self.assertEqual(client.remote, SERVER_KEY.public)
        buffer = bytearray(70_000)
        end = ciphers(server)[1].open_into(bytes(ciphers(client)[0].seal(b"hello")), buffer, 0)
        self.assertEqual(bytes(buffer[:end]), b"hello")

    def test_bytes_after_the_last_message_are_returned(self) -> None:
        client, server = XKHandshake(CLIENT_KEY, SERVER_KEY.public), XKHandshake(SERVER_KEY)
        server.receive_data(client.data_to_send())
        client.receive_data(server.data_to_send())
        server.receive_data(client.data_to_send() + b"more")
        self.assertEqual(server.trailing_data(), b"more")

    @given(st.binary(max_size=200))
    def test_random_bytes_are_a_named_error(self, data: bytes) -> None:
        server = XKHandshake(SERVER_KEY)
        try:
            server.receive_data(data)
        except HandshakeError:
            pass
        self.assertIsNone(server.remote)

    @given(st.integers(0, 2), st.integers(0, 70), st.integers(1, 255))
    def test_mutated_messages_never_succeed(self, which: int, where: int, change: int) -> None:
        client, server = XKHandshake(CLIENT_KEY, SERVER_KEY.public), XKHandshake(SERVER_KEY)
        try:
            for turn in range(3):
                writer, reader = (client, server) if turn % 2 == 0 else (server, client)
                data = bytearray(writer.data_to_send())
                if turn == which:
                    data[where % len(data)] ^= change
                reader.receive_data(bytes(data))
        except HandshakeError:
            pass
        else:
            # The server waits for bytes that never come, because the changed length is larger.
            self.assertIsNone(server.remote)

    def test_longer_messages_where_a_family_asks(self) -> None:
        """1,024 bytes are enough for 2019; what later programs put into a message has up to 4,094."""
        for size in (MAX_LINK_MESSAGE, MAX_LINK_MESSAGE + 1, MAX_FRAMED_MESSAGE, MAX_FRAMED_MESSAGE + 1):
            client = Handshake(Pattern.XK, CLIENT_KEY, initiator=True, remote=SERVER_KEY.public)
            message = client.write_message(bytes(size - 49))
            self.assertEqual(len(message), size)
            data = size.to_bytes(2, "big") + message
            for longest in (MAX_LINK_MESSAGE, MAX_FRAMED_MESSAGE):
                server = XKHandshake(SERVER_KEY, max_message=longest)
                if size <= longest:
                    server.receive_data(data)
                    self.assertEqual(len(server.data_to_send()), 51)
                else:
                    self.assertRaises(HandshakeError, server.receive_data, data)
        self.assertRaises(ValueError, XKHandshake, SERVER_KEY, max_message=MAX_FRAMED_MESSAGE + 1)

    def test_the_wrong_server_key(self) -> None:
        client = XKHandshake(CLIENT_KEY, CLIENT_KEY.public)
        self.assertRaises(HandshakeError, XKHandshake(SERVER_KEY).receive_data, client.data_to_send())

    def test_misuse_is_a_local_error(self) -> None:
        self.assertRaises(LocalProtocolError, Handshake, Pattern.XK, CLIENT_KEY, initiator=True)
        responder = Handshake(Pattern.XK, SERVER_KEY, initiator=False)
        self.assertRaises(LocalProtocolError, responder.write_message)


class TurnTests(SynchronousTestCase):
    """Messages out of turn, and the longest one."""

    def test_messages_out_of_turn_are_refused(self) -> None:
        for pattern in Pattern:
            client = Handshake(pattern, CLIENT_KEY, initiator=True, remote=SERVER_KEY.public)
            server = Handshake(
                pattern, SERVER_KEY, initiator=False, remote=CLIENT_KEY.public if pattern is Pattern.KK else None
            )
            error = self.assertRaises(LocalProtocolError, server.write_message)
            self.assertIn("the other side's turn", str(error))
            message = client.write_message()
            server.read_message(message)
            error = self.assertRaises(LocalProtocolError, server.read_message, message)
            self.assertIn("this side's turn", str(error))

    def test_the_longest_message(self) -> None:
        around = len(Handshake(Pattern.XK, CLIENT_KEY, initiator=True, remote=SERVER_KEY.public).write_message())
        for more, error in ((0, None), (1, "too long")):
            client = Handshake(Pattern.XK, CLIENT_KEY, initiator=True, remote=SERVER_KEY.public)
            server = Handshake(Pattern.XK, SERVER_KEY, initiator=False)
            message = client.write_message(bytes(MAX_HANDSHAKE_MESSAGE - around)) + bytes(more)
            if error is None:
                self.assertEqual(len(server.read_message(message)), MAX_HANDSHAKE_MESSAGE - around)
            else:
                self.assertIn(error, str(self.assertRaises(HandshakeError, server.read_message, message)))
