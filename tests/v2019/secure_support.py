"""Test case of two clients with secure transports on a server in memory, and of a server that changes their frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from twisted.internet.defer import Deferred
from twisted.internet.protocol import Factory
from twisted.trial.unittest import SynchronousTestCase

from dmsg.keys import SecKey
from dmsg.streams.core.budget import BUDGET
from dmsg.v2019.core.wire import Frame, FrameBuffer
from dmsg.v2019.session import ClientSession
from dmsg.v2019.transport_streams import Encryption, TransportStreams
from tests.support import KEYS, Accepting, MemoryNetwork


class SecureCase(SynchronousTestCase):
    """Test case in which A opens streams to B, which listens on port 7."""

    resume_timeout = 30.0
    encryption = Encryption.REQUIRE

    def setUp(self) -> None:
        self.budget_before = BUDGET.left
        self.network = MemoryNetwork()
        self.listeners: dict[int, Factory] = {7: Accepting()}
        self.streams: dict[str, TransportStreams] = {}
        self.sessions: dict[str, ClientSession] = {}
        for name in "AB":
            self.streams[name] = self.make_streams(KEYS[name], self.listeners if name == "B" else {})
            self.sessions[name] = self.network.client(KEYS[name], streams=self.streams[name])

    def tearDown(self) -> None:
        """Assert that no windows remain in the budget after all streams have ended."""
        for name, session in self.sessions.items():
            session.close()
            self.streams[name].stop()
        self.network.settle()
        for streams in self.streams.values():
            streams.stop()
            for stream in streams.all:
                stream.abortConnection()
        self.network.settle()
        self.assertEqual(BUDGET.left, self.budget_before)

    def make_streams(self, key: SecKey, listeners: dict[int, Factory]) -> TransportStreams:
        """Return the object that the sessions of a client share."""
        return TransportStreams(
            self.network.clock,
            key,
            listeners.get,
            lambda stream: cast(None, self.network.clock.callLater(0, stream.flush)),
            encryption=self.encryption,
            resume_timeout=self.resume_timeout,
        )

    @property
    def a(self) -> ClientSession:
        return self.sessions["A"]

    @property
    def b(self) -> ClientSession:
        return self.sessions["B"]

    def ask(self, port: int = 7, **options: Any) -> Deferred[Any]:
        """Send A's request, deliver it, and return the result."""
        opening = self.a.open(KEYS["B"].public, Accepting(), port=port, secure=True, **options)
        self.network.settle()
        return opening

    def open(self, port: int = 7, **options: Any) -> tuple[Any, Any]:
        """Open a stream from A to B; return both protocols."""
        one = self.successResultOf(self.ask(port, **options))
        return one, self.listeners[port].built[-1]  # type: ignore[attr-defined]

    def reconnect(self, name: str) -> ClientSession:
        """Replace the connection of a client by a new one."""
        session = self.sessions[name] = self.network.client(KEYS[name], streams=self.streams[name])
        return session

    def cut(self, name: str) -> None:
        """Lose the connection of a client."""
        self.sessions[name].link.transport.abortConnection()  # type: ignore[attr-defined]
        self.network.settle()

    def tamper(self, change: Callable[[list[Frame]], list[Frame]]) -> None:
        """Make the server change the frames that it delivers to B from now on."""
        relay = self.network.factory.relay
        port = relay.newest[KEYS["B"].public].port
        send = port.send
        buffer = FrameBuffer()

        def lie(data: Any) -> None:
            for frame in change(buffer.feed(bytes(data))):
                send(frame.encode())

        # The link's __slots__ forbid replacing the method on the link itself.
        class Liar:
            def __getattr__(self, name: str) -> Any:
                return lie if name == "send" else getattr(port, name)

        relay.newest[KEYS["B"].public].port = Liar()
