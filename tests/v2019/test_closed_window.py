"""A sender whose window is closed notices that the frame which would open it never comes."""

from __future__ import annotations

from twisted.internet.protocol import Protocol
from twisted.trial.unittest import SynchronousTestCase

from dmsg.net.streams.transports import stream_of
from dmsg.streams.carrier import ClientStream
from dmsg.streams.streams import PROBE_AFTER, STALL_CHECK, STALL_TIME
from dmsg.testing.lab import Lab
from dmsg.v2019.core.wire import ACK, FrameBuffer, encode_frame
from tests.support import Accepting

SIZE = 2_000_000


class Reader(Protocol):
    """Counts what it gets."""

    received = 0

    def dataReceived(self, data: bytes) -> None:
        self.received += len(data)


class ClosedWindowTests(SynchronousTestCase):
    """The receiver's application has stopped reading, and all data in flight are acknowledged."""

    def setUp(self) -> None:
        self.lab = Lab(seed=3)
        self.server = self.lab.add_server("server-1")
        self.alice = self.lab.add_client("alice", min_servers=1)
        bob = self.lab.add_client("bob", min_servers=1)
        self.lab.settle()
        factory = Accepting(Reader)
        bob.listen(factory, 7)
        sender = self.lab.result(self.alice.connect(bob.public_key, Accepting(), 7))
        stream = stream_of(sender)
        assert isinstance(stream, ClientStream)
        self.stream = stream
        self.lab.result(self.stream.send(b"x"))
        self.reader = factory.built[0]
        stream_of(self.reader).pauseProducing()
        self.stream.write(bytes(SIZE))
        end = self.stream.secure_end
        self.lab.network.run_until(lambda: end.peer_window == 0 and not end.in_flight)
        self.assertTrue(self.stream.unsent)

    def swallow_acks(self) -> list[int]:
        """Let the server drop each ACK for the sender on the present transport. Return the ids of these ACKs."""
        peer = next(one for one in self.server.factory.relay.peers if one.key == self.alice.public_key)
        send, frames = peer.port.send, FrameBuffer()
        swallowed: list[int] = []

        def swallow(data: bytes | bytearray | memoryview) -> None:
            for frame in frames.feed(bytes(data)):
                if frame.type == ACK and frame.id == (swallowed or [frame.id])[0]:
                    swallowed.append(frame.id)
                else:
                    send(encode_frame(frame.type, frame.id, bytes(frame.payload)))

        self.patch(peer.port, "send", swallow)
        return swallowed

    def test_a_swallowed_window_does_not_stop_the_stream_for_good(self) -> None:
        swallowed = self.swallow_acks()
        stream_of(self.reader).resumeProducing()
        self.lab.network.run_until(lambda: bool(swallowed))
        before = self.reader.received
        self.lab.network.run(PROBE_AFTER / 2)
        self.assertEqual(self.reader.received, before, "nothing tells the sender of the window")
        # One probe is sent into the closed window, and its ACK is swallowed, too. So the stream stalls and resumes.
        self.lab.network.run_until(
            lambda: self.reader.received == SIZE + 1, 2 * (PROBE_AFTER + 2 * STALL_TIME + 4 * STALL_CHECK)
        )

    def test_a_reader_that_stays_paused_costs_one_frame_in_each_time(self) -> None:
        end = self.stream.secure_end
        sent = end._seal_nonce  # noqa: SLF001
        self.lab.network.run(3 * PROBE_AFTER + 4 * STALL_CHECK)
        self.assertIn(end._seal_nonce - sent, (2, 3))  # noqa: SLF001
        self.assertEqual((end.generation, end.peer_window, len(end.in_flight)), (0, 0, 0))
