"""Data before invalid data in the same read is delivered, in each core and at each position."""

from __future__ import annotations

from random import Random
from typing import Any, cast

from hypothesis import given, strategies as st
from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import Factory
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import RemoteProtocolError
from dmsg.messaging.core.events import Opened as MessagingOpened, Requested as MessagingRequested
from dmsg.messaging.core.relay import Relay as MessagingRelay
from dmsg.messaging.core.table import ClientConnection as MessagingConnection
from dmsg.messaging.core.wire import Profile, encode_frame as messaging_frame
from dmsg.net.websocket import frames as websocket
from dmsg.noise.records import RecordOpener, RecordSealer
from dmsg.v2019.core.events import DataReceived, Requested
from dmsg.v2019.core.relay import Relay
from dmsg.v2019.core.table import ClientConnection
from dmsg.v2019.core.transports import TableSettings
from dmsg.v2019.core.wire import DRAIN, FWD, OK, REQUEST, Frame
from tests.messaging.core.test_relay import FakePort as MessagingPort
from tests.messaging.support import KEYS as MESSAGING_KEYS
from tests.support import KEYS, Accepting, Recorder
from tests.v2019.core.test_relay import FakePort
from tests.v2019.secure_support import SecureCase

KEY = bytes(range(32))
CUTS = st.lists(st.integers(0, 400), max_size=12)
PIECES = st.lists(st.binary(max_size=200), max_size=8)


def cut(stream: bytes, cuts: list[int]) -> list[bytes]:
    """Return the stream in pieces of these sizes, and its rest."""
    pieces = []
    for size in cuts:
        pieces.append(stream[:size])
        stream = stream[size:]
    return [*pieces, stream]


class CoreTests(SynchronousTestCase):
    """Valid bytes are followed by invalid ones. Cut anywhere, the valid part is delivered first, and then the error."""

    @given(PIECES, CUTS, st.sampled_from(["short", "replayed", "damaged", "damaged and long"]))
    def test_records_before_a_bad_one_are_delivered(self, plain: list[bytes], cuts: list[int], kind: str) -> None:
        sealer, opener = RecordSealer(KEY), RecordOpener(KEY)
        stream = b"".join(bytes(sealer.seal(one)) for one in plain)
        number = sealer.sequence + 1
        bad = {
            "short": b"\0\3abc",
            "replayed": bytes(RecordSealer(KEY, sealer.sequence - 1).seal(b"again")),
            "damaged": b"\0\x28" + number.to_bytes(4, "big") + bytes(36),
            "damaged and long": b"\x40\0" + number.to_bytes(4, "big") + bytes(0x4000 - 4),
        }[kind]
        buffer = bytearray(200_000)
        end = 0
        for piece in cut(stream + bad + bytes(SEALED), cuts):
            end = opener.open_into(piece, buffer, end)
        self.assertEqual(bytes(buffer[:end]), b"".join(plain))
        self.assertIsInstance(opener.broken, RemoteProtocolError)

    @given(PIECES, CUTS, st.sampled_from([REQUEST, DRAIN]))
    def test_frames_before_a_bad_one_reach_the_client(self, plain: list[bytes], cuts: list[int], kind: int) -> None:
        local, remote = KEYS["A"].public, KEYS["B"].public
        core = ClientConnection(local, TableSettings(random=Random(0)))
        core.accepting = True
        start = bytearray(Frame(OK, 0, b"").encode() + Frame(REQUEST, 1, bytes(remote + local)).encode())
        _, (_, requested) = core.receive_frames(start, len(start))
        assert isinstance(requested, Requested)
        core.accept(requested.transport)
        core.ping(bytes(8))
        bad = Frame(REQUEST, 1, bytes(remote + local)) if kind == REQUEST else Frame(DRAIN, 0, b"\0")
        good = [Frame(FWD, 1, number.to_bytes(2, "big") + data) for number, data in enumerate(plain)]
        got = b""
        tail = b""
        for piece in cut(b"".join(one.encode() for one in [*good, bad, Frame(FWD, 1, b"\0\0behind")]), cuts):
            buffer = bytearray(tail + piece)
            taken, events = core.receive_frames(buffer, len(buffer))
            tail = bytes(buffer[taken:])
            got += b"".join(event.data for event in events if isinstance(event, DataReceived))
        self.assertEqual(got, b"".join(plain))
        self.assertIsNotNone(core.broken)

    @given(PIECES, CUTS, st.sampled_from([b"\x77\0\0\0\0", b"\x01\0\x02\0\x01x"]))
    def test_frames_before_a_bad_one_pass_the_relay(self, plain: list[bytes], cuts: list[int], bad: bytes) -> None:
        relay = Relay(random=Random(0))
        ports = [FakePort(), FakePort()]
        a, b = relay.add(KEYS["A"].public, ports[0]), relay.add(KEYS["B"].public, ports[1])
        relay.receive_frames(a, data := bytearray(Frame(REQUEST, 0, bytes(a.key + b.key)).encode()), len(data))
        (offered,) = [one for one in ports[1].take() if one.type == REQUEST]
        relay.receive_frames(b, data := bytearray(Frame(2, offered.id, offered.payload).encode()), len(data))
        good = b"".join(Frame(FWD, 0, number.to_bytes(2, "big") + one).encode() for number, one in enumerate(plain))
        tail = b""
        refused = None
        for piece in cut(good + bad, cuts):
            buffer = bytearray(tail + piece)
            try:
                taken = relay.receive_frames(a, buffer, len(buffer))
            except RemoteProtocolError as error:
                refused = error
                break
            tail = bytes(buffer[taken:])
        passed = [one.payload[2:] for one in ports[1].take() if one.type == FWD]
        self.assertEqual(passed, plain)
        self.assertEqual(refused is not None, bad[0] == 0x77)

    @given(PIECES, CUTS)
    def test_messaging_frames_before_a_bad_one_are_delivered(self, plain: list[bytes], cuts: list[int]) -> None:
        """The frames pass a relay and a client; the bad frame has an impossible size, in both profiles."""
        profile = Profile.SKYWIRE
        one = MessagingConnection(MESSAGING_KEYS["A"], profile)
        two = MessagingConnection(MESSAGING_KEYS["B"], profile)
        two.accepting = True
        relay = MessagingRelay(profile)
        ports = [MessagingPort(profile), MessagingPort(profile)]
        a = relay.add(MESSAGING_KEYS["A"].public, ports[0])
        b = relay.add(MESSAGING_KEYS["B"].public, ports[1])

        def up(peer: Any, core: MessagingConnection, tail: bytes = b"") -> None:
            data = bytearray(b"".join(bytes(part) for part in core.data_to_send()) + tail)
            relay.receive_frames(peer, data, len(data))

        def down(number: int, core: MessagingConnection) -> list[Any]:
            data = ports[number].sent
            taken, events = core.receive_frames(bytearray(data), len(data))
            del data[:taken]
            return events

        channel = one.open(MESSAGING_KEYS["B"].public)
        up(a, one)
        (requested,) = down(1, two)
        assert isinstance(requested, MessagingRequested)
        two.accept(requested.channel)
        up(b, two)
        (opened,) = down(0, one)
        assert isinstance(opened, MessagingOpened)
        for data in plain:
            one.send(channel, data)
        bad = messaging_frame(profile, 4, b"\0\0\0")[:0] + b"\0\0\4"
        self.assertRaises(RemoteProtocolError, up, a, one, bad)
        stream, ports[1].sent = bytes(ports[1].sent) + bad, bytearray()
        got, tail = b"", b""
        for piece in cut(stream, cuts):
            buffer = bytearray(tail + piece)
            taken, events = two.receive_frames(buffer, len(buffer))
            tail = bytes(buffer[taken:])
            got += b"".join(cast(Any, event).data for event in events)
        self.assertEqual(got, b"".join(plain))
        self.assertIsNotNone(two.broken)

    @given(PIECES, CUTS)
    def test_websocket_frames_before_a_bad_one_are_delivered(self, plain: list[bytes], cuts: list[int]) -> None:
        reader = websocket.Frames(True, 1000)
        stream = b"".join(websocket.encode(websocket.BINARY, one, b"abcd") for one in plain)
        stream += b"\x82\xff" + (2000).to_bytes(8, "big") + b"abcd"
        got: list[bytes] = []
        refused = False
        for piece in cut(stream, cuts):
            try:
                for _, content in reader.feed(piece):
                    got.append(content)
            except websocket.FrameTooLarge:
                refused = True
                break
        self.assertEqual((got, refused), (plain, True))


SEALED = RecordSealer(KEY, 1000).seal(b"behind")


class Failing(Recorder):
    """A program with a fault."""

    def dataReceived(self, data: bytes) -> None:
        raise ValueError("of the program")


class SessionTests(SecureCase):
    """A server puts something bad behind good frames of one read."""

    def poison(self, kind: int) -> None:
        """Insert invalid data behind the next data for B, in the same record."""
        self.b.core.ping(bytes(8))  # From here on, the core reads DRAIN.
        done: list[bool] = []

        def change(frames: list[Frame]) -> list[Frame]:
            if done or not frames:
                return frames
            done.append(True)
            used = frames[-1].id
            bad = Frame(REQUEST, used, bytes(66)) if kind == REQUEST else Frame(DRAIN, 0, b"\0")
            return [*frames, bad]

        self.tamper(change)

    def test_data_before_an_error_is_delivered(self) -> None:
        """The data is delivered, and the stream continues over other connections: no data is missing or repeated."""
        for kind in (REQUEST, DRAIN):
            mine, theirs = self.open()
            self.poison(kind)
            mine.transport.write(b"x" * 1000)
            self.network.settle()
            self.assertFalse(self.b.connected, kind)
            self.assertEqual(theirs.data, b"x" * 1000)
            self.reconnect("B")
            self.cut("A")
            self.reconnect("A")
            self.network.settle()
            self.assertEqual((mine.lost, theirs.lost), (None, None))

    def test_a_close_before_an_error_is_delivered(self) -> None:
        mine, theirs = self.open()
        self.poison(DRAIN)
        mine.transport.loseConnection()
        self.network.settle()
        self.assertFalse(self.b.connected)
        self.assertTrue(theirs.lost and theirs.lost.check(ConnectionDone))

    def test_an_accept_before_an_error_is_delivered(self) -> None:
        """The answer to what B asks; its other streams are suspended, and hear of it in the end."""
        theirs = [self.open()[1] for _ in range(5)]
        self.listeners[9] = Accepting()
        self.streams["A"].factory = lambda port: self.listeners[9]
        self.poison(DRAIN)
        opening = self.b.open(KEYS["A"].public, Accepting(), port=9, secure=True)
        self.network.settle()
        self.assertFalse(self.b.connected)
        self.assertTrue(opening.called)
        opening.addErrback(lambda _: None)
        self.assertEqual(self.flushLoggedErrors(), [])
        self.assertEqual([one.lost for one in theirs], [None] * 5)
        self.network.clock.advance(self.resume_timeout + 1)
        self.network.settle()
        self.assertTrue(all(one.lost for one in theirs))

    def test_a_failing_event_ends_only_its_own_stream(self) -> None:
        """An error in a callback ends only its own stream. Other streams still get all data of the same read."""
        self.listeners[8] = Factory.forProtocol(Failing)
        good, theirs = self.open()
        bad = self.successResultOf(self.ask(8))
        session = self.b
        told = session._handle[DataReceived]

        def fail_once(one: Any, event: Any) -> None:
            if event.transport.carrier.stream.getHost().port == 8:
                raise RuntimeError("ours")
            told(one, event)

        session._handle = {**session._handle, DataReceived: fail_once}
        bad.transport.write(b"first")
        good.transport.write(b"second")
        self.network.settle()
        self.assertEqual(theirs.data, b"second")
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)
        self.network.settle()
        self.assertTrue(bad.lost)
        self.assertIsNone(good.lost)
        good.transport.write(b", third")
        self.network.settle()
        self.assertEqual(theirs.data, b"second, third")
