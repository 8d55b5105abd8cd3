"""Reads into a kept buffer, by sockets of this process and no reactor."""

from __future__ import annotations

import socket
from typing import Any, cast

from twisted.internet.main import CONNECTION_DONE, CONNECTION_LOST
from twisted.internet.protocol import Protocol
from twisted.internet.tcp import Connection
from twisted.internet.testing import StringTransport
from twisted.trial.unittest import SynchronousTestCase

from dmsg.net.links.reading import COPIED_READ_SIZE, READ_SIZE, read_into_shared_buffer
from dmsg.net.socketopts import SEND_SIZE, queued_bytes, send_more, write_now


class Noting(Protocol):
    def __init__(self) -> None:
        self.data: list[bytes] = []

    def dataReceived(self, data: bytes) -> None:
        self.data.append(data)


class _Reactor:
    """Reactor that records its readers and writers."""

    def __init__(self) -> None:
        self.writing = 0

    def addWriter(self, one: Any) -> None:
        self.writing += 1

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class SocketCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.here, self.there = socket.socketpair()
        for one in (self.here, self.there):
            one.setblocking(False)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
            self.addCleanup(one.close)
        self.reactor = cast(Any, _Reactor())
        self.protocol = Noting()
        self.transport: Any = Connection(self.here, self.protocol, self.reactor)
        self.transport.connected = True


class ReadTests(SocketCase):
    def setUp(self) -> None:
        super().setUp()
        self.taken: list[bytes] = []
        self.views: list[Any] = []
        self.size = READ_SIZE
        self.assertTrue(read_into_shared_buffer(self.transport, self.take, self.most))

    def most(self) -> int:
        return self.size

    def take(self, view: memoryview) -> None:
        self.taken.append(bytes(view))
        self.views.append(view.obj)

    def test_reads_in_a_single_piece_are_not_copied(self) -> None:
        self.assertIs(self.transport.doRead(), None)
        self.assertEqual(self.taken, [])
        for size in (1, 100_000):
            self.there.sendall(bytes([size % 251]) * size)
            self.assertIs(self.transport.doRead(), None)
        self.assertEqual(self.taken, [b"\1", bytes([100_000 % 251]) * 100_000])
        self.assertEqual(self.protocol.data, [])
        self.assertIs(self.views[0], self.views[1], "the same buffer")

    def test_a_read_takes_no_more_than_the_protocol_wants(self) -> None:
        self.there.sendall(bytes(READ_SIZE + 5))
        sizes: list[int] = []
        while sum(sizes) < READ_SIZE + 5:
            self.transport.doRead()
            sizes = [len(one) for one in self.taken]
        self.assertLessEqual(max(sizes), READ_SIZE)

    def test_as_much_as_may_be_held(self) -> None:
        self.size = COPIED_READ_SIZE
        self.there.sendall(bytes(COPIED_READ_SIZE + 5))
        self.transport.doRead()
        self.transport.doRead()
        self.assertEqual(sum(map(len, self.taken)), COPIED_READ_SIZE + 5)
        self.assertLessEqual(max(map(len, self.taken)), COPIED_READ_SIZE)

    def test_the_end_of_the_connection_is_reported(self) -> None:
        self.there.sendall(b"last")
        self.there.close()
        self.assertIs(self.transport.doRead(), None)
        self.assertIs(self.transport.doRead(), CONNECTION_DONE)
        self.assertEqual(self.taken, [b"last"])

    def test_a_socket_error_ends_the_connection(self) -> None:
        self.here.close()
        self.assertIs(self.transport.doRead(), CONNECTION_LOST)

    def test_a_nested_read_uses_another_buffer(self) -> None:
        """A program may run the reactor within a callback; the nested read must not overwrite data that is being
        processed.
        """
        inner: list[bytes] = []

        def take(view: memoryview) -> None:
            if not inner:
                inner.append(b"")
                self.there.sendall(b"second")
                self.transport.doRead()
                inner[0] = bytes(view)

        read_into_shared_buffer(self.transport, take, self.most)
        self.there.sendall(b"first!")
        self.transport.doRead()
        self.assertEqual(inner, [b"first!"])

    def test_an_error_above_gives_the_buffer_back(self) -> None:
        def fail(view: memoryview) -> None:
            raise RuntimeError("ours")

        self.there.sendall(b"x")
        self.transport.doRead()
        read_into_shared_buffer(self.transport, fail, self.most)
        self.there.sendall(b"x")
        self.assertRaises(RuntimeError, self.transport.doRead)
        read_into_shared_buffer(self.transport, self.take, self.most)
        self.there.sendall(b"y")
        self.transport.doRead()
        self.assertIs(self.views[0], self.views[-1])

    def test_tls_may_begin_on_the_connection(self) -> None:
        self.transport.TLS = True
        self.there.sendall(b"x")
        self.transport.doRead()
        self.assertEqual((self.taken, self.protocol.data), ([], [b"x"]))

    def test_other_protocols_are_read_by_twisted(self) -> None:
        class Other(Connection):
            def doRead(self) -> None:
                pass

        other: Any = Other(self.there, self.protocol, self.reactor)
        self.assertFalse(read_into_shared_buffer(other, self.take, self.most))
        self.assertFalse(read_into_shared_buffer(StringTransport(), self.take, self.most))
        secure: Any = Connection(self.there, self.protocol, self.reactor)
        secure.TLS = True
        self.assertFalse(read_into_shared_buffer(secure, self.take, self.most))


class WriteTests(SocketCase):
    def received(self) -> bytes:
        data = b""
        while True:
            try:
                data += self.there.recv(1 << 20)
            except BlockingIOError:
                return data

    def test_a_write_goes_to_the_socket_at_once(self) -> None:
        """The link writes until the socket is full and does not wait for the reactor."""
        for size in (1, 100_000, 300_000):
            data = bytearray(range(250)) * (size // 250 + 1)
            write_now(self.transport, memoryview(data)[:size])
            self.assertEqual(self.received(), bytes(data[:size]))
        send_more(self.transport)
        self.assertEqual(self.transport.SEND_LIMIT, SEND_SIZE)
        write_now(self.transport, bytes(300_000))
        self.assertEqual((len(self.received()), queued_bytes(self.transport), self.reactor.writing), (300_000, 0, 0))

    def test_a_full_socket_leaves_a_copy_in_the_queue(self) -> None:
        """The remaining data is copied, because the buffer is reused."""
        self.here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        data = bytearray(b"abc" * 1_000_000)
        write_now(self.transport, memoryview(data))
        waiting = queued_bytes(self.transport)
        assert waiting
        data[:] = bytes(len(data))
        got = b""
        for _ in range(10_000):
            got += self.received()
            if not queued_bytes(self.transport):
                break
            self.transport.doWrite()
        self.assertEqual(got + self.received(), b"abc" * 1_000_000)
