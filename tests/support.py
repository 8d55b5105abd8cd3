"""Helpers of several tests: vectors, keys of the vectors, a network in memory."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock
from twisted.test import iosim

from dmsg.keys import PubKey, SecKey
from dmsg.net.flush import TurnFlush
from dmsg.net.links.records import RecordLink
from dmsg.noise.records import RecordOpener, RecordSealer
from dmsg.noise.xk import XKHandshake
from dmsg.v2019.protocol import ServerFactory
from dmsg.v2019.session import ClientSession

VECTORS = Path(__file__).parent / "vectors"

SERVER_KEY = SecKey.from_seed(b"server-0")
KEYS = {"A": SecKey.from_seed(b"client-a"), "B": SecKey.from_seed(b"client-b"), "C": SecKey.from_seed(b"client-c")}

T = TypeVar("T")


def vectors(name: str) -> dict[str, Any]:
    """Return a file of recorded exchanges of the 2019 reference."""
    loaded: dict[str, Any] = json.loads((VECTORS / f"{name}.json").read_text())
    return loaded


def asynchronous(method: Callable[[Any], Awaitable[None]]) -> Callable[[Any], Deferred[None]]:
    """Turn a coroutine method into a test method."""

    def test(self: Any) -> Deferred[None]:
        running: Deferred[None] = Deferred.fromCoroutine(method(self))  # type: ignore[arg-type]
        # A test case in memory advances its own time.
        drive: Callable[[Deferred[None]], None] | None = getattr(self, "drive", None)
        if drive is not None:
            drive(running)
        return running

    test.__name__ = method.__name__
    test.__doc__ = method.__doc__
    return test


class Draws:
    """Replacement of Random that returns the draws of a vector, and then repeats the last one."""

    def __init__(self, *values: int) -> None:
        self.values = list(values)

    def randrange(self, stop: int) -> int:
        value = self.values.pop(0) if len(self.values) > 1 else self.values[0]
        assert 0 <= value < stop
        return value


class Recorder(Protocol):
    """Application that keeps the data and events that it gets."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.lost: Any = None

    @property
    def data(self) -> bytes:
        return b"".join(self.received)

    def dataReceived(self, data: bytes) -> None:
        self.received.append(data)

    def connectionLost(self, reason: Any = None) -> None:
        self.lost = reason


class Producer:
    """Producer that records its calls."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def pauseProducing(self) -> None:
        self.told.append("pause")

    def resumeProducing(self) -> None:
        self.told.append("resume")

    def stopProducing(self) -> None:
        self.told.append("stop")


class TurnClock(Clock):
    """Clock that makes calls without a delay in the next turn, as a reactor does."""

    def advance(self, amount: float) -> None:
        self.rightNow += amount
        self._sortCalls()
        for call in [call for call in self.calls if call.getTime() <= self.seconds()]:
            if call.active():
                self.calls.remove(call)
                call.called = 1
                call.func(*call.args, **call.kw)


def some(value: T | None) -> T:
    """Return a value that is None only while nothing runs, and is not None now."""
    assert value is not None
    return value


class Accepting(Factory):
    """Factory that keeps the protocols that it built."""

    noisy = False

    def __init__(self, protocol: Any = Recorder) -> None:
        self.protocol = protocol
        self.built: list[Any] = []

    def buildProtocol(self, addr: Any) -> Any:
        made: Any = self.protocol
        built = made()
        self.built.append(built)
        return built


class Carrier:
    """Stand-in for the transport that carries a stream, as far as the end of the stream uses it."""

    carrier: Any = None
    secure: Any = None
    delivered = (0, 0)


class JoinedNetwork:
    """One server and the clients that iosim pumps join to it, with one Clock.

    :ivar factory: factory of the server, which has a ``relay``.
    """

    def __init__(self, clock: Clock, factory: Any) -> None:
        self.clock = clock
        self.factory = factory
        self.pumps: list[iosim.IOPump] = []

    def join(self, client: Any, host: str | None = None) -> Any:
        """Connect any protocol to the server, with an address or without one; return the server's link."""
        server = self.factory.buildProtocol(None if host is None else SimpleNamespace(host=host))
        assert server is not None
        pump = iosim.connect(server, iosim.makeFakeServer(server), client, iosim.makeFakeClient(client), greet=False)
        self.pumps.append(pump)
        return server

    def settle(self) -> None:
        """Deliver all data, and let the pending turns end."""
        for _ in range(10_000):
            self.clock.advance(0)
            if not any([pump.pump() for pump in self.pumps]) and not any(
                call.getTime() <= self.clock.seconds() for call in self.clock.getDelayedCalls()
            ):
                self.factory.relay.check()
                return
        raise AssertionError("the network does not come to rest")


class MemoryNetwork(JoinedNetwork):
    """A dmsg server and its clients in memory."""

    def __init__(self, clock: Clock | None = None, **server_options: Any) -> None:
        clock = clock or Clock()
        # The server counts transport ids from 0x8001. Ids that a test writes itself are smaller, so they never collide.
        server_options.setdefault("random", Draws(0x4000))
        super().__init__(clock, ServerFactory(clock, SERVER_KEY, **server_options))

    def client(self, key: SecKey, accept: Factory | None = None, **options: Any) -> ClientSession:
        """Return a connected client."""
        turn = TurnFlush(self.clock)
        sessions: list[ClientSession] = []

        def make(remote: PubKey) -> ClientSession:
            session = ClientSession(self.clock, turn, key.public, remote, accept=lambda: accept, **options)
            sessions.append(session)
            return session

        link = RecordLink(self.clock, turn, XKHandshake(key, SERVER_KEY.public), make)
        self.join(link)
        self.settle()
        (session,) = sessions
        assert session.connected
        session.link = link  # type: ignore[attr-defined]  # tests cut it
        return session


def ciphers(handshake: XKHandshake) -> tuple[RecordSealer, RecordOpener]:
    """Return the sealer and the opener of one end whose handshake is done."""
    assert handshake.keys is not None
    return RecordSealer(handshake.keys[0]), RecordOpener(handshake.keys[1])
