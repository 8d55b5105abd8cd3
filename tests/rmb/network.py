"""Relays and clients for tests: on real TCP, or in memory with a clock of their own."""

from __future__ import annotations

from typing import Any, cast

import treq
from twisted.internet import reactor
from twisted.internet.defer import Deferred, DeferredQueue
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase
from twisted.web.client import Agent

from dmsg.net.flush import TurnFlush
from dmsg.rmb.client import RmbClient
from dmsg.rmb.envelope import wire
from dmsg.rmb.envelope.cipher import Encryption
from dmsg.rmb.envelope.envelope_pb2 import Envelope
from dmsg.rmb.registry.table import TableRegistry
from dmsg.rmb.relay import periodic, presence, server
from dmsg.rmb.relay.federation import forward as federation
from dmsg.rmb.relay.queue.sqlite import SQLiteQueue
from dmsg.rmb.relay.server import RmbRelay
from dmsg.rmb.relay.settings import RelaySettings
from dmsg.rmb.socket.connect import connect
from dmsg.rmb.twins import token
from dmsg.rmb.twins.address import Session
from dmsg.rmb.twins.identity import Identity
from dmsg.rmb.twins.twin import Twin
from dmsg.testing.network import Network
from tests.support import some

SECRETS = {name: "0x" + (bytes([number]) * 32).hex() for number, name in enumerate(("A", "B", "C", "D"), 1)}


def queue_of(relay: RmbRelay) -> SQLiteQueue:
    """Return the queue of a relay that keeps its queue in SQLite."""
    queue = some(relay.switch).queue
    assert isinstance(queue, SQLiteQueue)
    return queue


class RawTwin:
    """Session that sends only what a test sends through it; a Receiver of :mod:`dmsg.rmb.socket.websocket`.

    :ivar answers_pings: whether the session answers pings at once, as websocket libraries do.
    :ivar resends: whether the session's token announces that it sends unconfirmed messages again; tokens of the
        reference's clients do not.
    """

    def __init__(self, identity: Identity, session: Session, url: str, reactor: Any) -> None:
        self._reactor = reactor
        self.identity, self.session, self.url = identity, session, url
        self.messages: DeferredQueue[Envelope] = DeferredQueue()
        self.raw: list[bytes] = []
        self.pongs: DeferredQueue[bytes] = DeferredQueue()
        self.pings: list[bytes] = []
        self.answers_pings = True
        self.resends = True
        self.socket: Any = None
        self.open: Deferred[None] = Deferred()
        self.closed: Deferred[str] = Deferred()

    async def connect(self, now: float, *, query: str | None = None) -> RawTwin:
        if query is None:
            query = token.make(self.identity, self.session, int(now), resends=self.resends)
        await connect(self._reactor, self.url, query, self, TurnFlush(self._reactor))
        await self.open
        return self

    def opened(self, socket: Any) -> None:
        self.socket = socket
        self.open.callback(None)

    def received(self, data: bytes) -> None:
        self.raw.append(data)
        self.messages.put(wire.decode(data))

    def ping_received(self, payload: bytes) -> None:
        self.pings.append(payload)
        if self.answers_pings:
            self.socket.pong(payload)

    def pong_received(self, payload: bytes) -> None:
        self.pongs.put(payload)

    def lost(self, why: str) -> None:
        self.socket = None
        if not self.open.called:
            self.open.errback(ConnectionError(why))
        self.closed.callback(why)

    def envelope(self, to: Session, command: str | None = "cmd", payload: bytes = b"x", **fields: Any) -> Envelope:
        """Return a request to ``to``, which is signed when it is sent; without a command, return a response."""
        envelope = Envelope(**{"uid": f"u-{len(self.raw)}", "expiration": 60, **fields})
        if command is None:
            envelope.response.SetInParent()
        else:
            envelope.request.command = command
        wire.set_address(envelope.source, self.session)
        wire.set_address(envelope.destination, to)
        envelope.plain = payload
        return envelope

    def send(self, envelope: Envelope, now: float = 0.0, *, sign: bool = True) -> bytes:
        if not envelope.timestamp:
            envelope.timestamp = int(now)
        if sign:
            envelope.signature = self.identity.sign(wire.challenge(envelope))
        data = envelope.SerializeToString()
        self.socket.send(data)
        return data

    def close(self) -> Deferred[str]:
        if self.socket is not None:
            self.socket.close()
        return self.closed

    def drop(self) -> Deferred[str]:
        """Close the connection without a closing frame."""
        if self.socket is not None:
            self.socket.abort()
        return self.closed


def pause(seconds: float = 0.0) -> Deferred[None]:
    return deferLater(reactor, seconds)


class RmbCase(TestCase):
    """Test case with a registry in memory, relays on loopback, and twins A to D.

    :ivar reactor: the reactor of all of them.
    """

    timeout = 60
    reactor: Any = reactor
    host = "127.0.0.1"

    def setUp(self) -> None:
        # The same rounds, but tenths of a second long.
        self.patch(server, "ROUND_INTERVAL", 0.2)
        for module in (periodic, federation):
            self.patch(module, "SPILL_AFTER", 0.4)
        # Every relay of a test has just been started.
        self.patch(presence, "START_GRACE", 0.0)
        self.registry = TableRegistry()
        self.identities = {name: Identity(secret, "ed25519") for name, secret in SECRETS.items()}
        self.ids: dict[str, int] = {}
        self.relays: list[RmbRelay] = []
        self.raws: list[RawTwin] = []
        self.clients: list[Any] = []
        self.offset = 0.0

    def tearDown(self) -> Deferred[None]:  # type: ignore[override]  # trial waits for it
        return Deferred.fromCoroutine(self._tear_down())

    async def _tear_down(self) -> None:
        for raw in self.raws:
            if raw.socket is not None:
                await raw.drop()
        for client in self.clients:
            await client.stopService()
        for relay in self.relays:
            await relay.stopService()
        await self.registry.close()
        await self.pause(0)

    def pause(self, seconds: float = 0.0) -> Deferred[None]:
        return deferLater(self.reactor, seconds)

    def now(self) -> float:
        import time

        return time.time() + self.offset

    def twin(self, name: str, relay: str | None, *, pk: bool = False, strict: bool = False) -> int:
        """Add or change a twin; return its id."""
        identity = self.identities[name]
        current = None
        if name in self.ids:
            current = self.successResultOf(self.registry.get(self.ids[name]))
        key = Encryption(SECRETS[name]).pk if pk else None
        counter = 1 if current is None else current.counter + 1
        statement = Twin(0, identity.account, relay, key, strict, counter).sign(identity)
        self.ids[name] = self.successResultOf(self.registry.put(statement)).id
        return self.ids[name]

    async def relay(self, **options: Any) -> RmbRelay:
        """Start a relay; ``relay.url`` is its address for websockets, ``relay.domain`` its name in the registry."""
        settings = RelaySettings(
            **{"listen": ["tcp:0:interface=127.0.0.1"], "registry": "", "queue": "sqlite::memory:", **options}
        )
        relay = RmbRelay(self.reactor, settings, registry=self.registry, wall_clock=self.now)
        return await self.start(relay)

    async def start(self, relay: Any) -> Any:
        relay.startService()
        self.relays.append(relay)
        port = (await relay.ready)[0].getHost().port
        relay.url, relay.domain = f"ws://{self.host}:{port}", f"http://{self.host}:{port}"
        relay.port = port
        return relay

    async def named_relay(self, **options: Any) -> Any:
        """Start a relay that knows its own name, which is its address."""
        relay = await self.relay(domains=frozenset({"http://pending"}), **options)
        some(relay.switch).rules.domains = some(relay.switch).federation._domains = frozenset({cast(Any, relay).domain})
        return relay

    async def raw(self, name: str, relay: Any, sid: str | None = None, **options: Any) -> RawTwin:
        raw = RawTwin(self.identities[name], Session(self.ids[name], sid), relay.url, self.reactor)
        for option, value in options.items():
            setattr(raw, option, value)
        self.raws.append(raw)
        return await raw.connect(self.now())

    def client(self, name: str, *relays: Any, **options: Any) -> RmbClient:
        client = RmbClient(
            self.reactor,
            SECRETS[name],
            self.registry,
            [relay.url for relay in relays],
            **{"key_type": "ed25519", "wall_clock": self.now, **options},
        )
        self.clients.append(client)
        client.startService()
        return client

    async def status_of(
        self, url: str, method: str = "GET", data: bytes | None = None, **headers: str
    ) -> tuple[int, str]:
        """Return the answer to a plain HTTP request."""
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        agent = Agent(self.reactor)
        response = await treq.request(
            method, url, data=data, headers=cast(Any, names), agent=agent, reactor=self.reactor, persistent=False
        )
        return response.code, await response.text()

    async def until(self, condition: Any, seconds: float = 30.0) -> None:
        """Wait for the condition to become true.  The default is long enough for a busy machine."""
        deadline = self.reactor.seconds() + seconds
        while not condition():
            if self.reactor.seconds() > deadline:
                self.fail(f"that did not come about within {seconds:g} s")
            await self.pause(0.01)


class MemoryCase(RmbCase):
    """Test case with the same helpers on a host of the simulated network: without sockets, and with a clock that the
    test advances.
    """

    def setUp(self) -> None:
        super().setUp()
        self.network = Network(1)
        self.reactor = self.network.host("bus")
        self.host = self.reactor.address

    def now(self) -> float:
        return 1.7e9 + self.network.clock.seconds() + self.offset

    def drive(self, running: Deferred[Any]) -> None:
        """Advance the clock until the Deferred has fired."""
        self.network.run_until(lambda: running.called, 600.0)

    def tearDown(self) -> Deferred[None]:  # type: ignore[override]
        ending = Deferred.fromCoroutine(self._tear_down())
        self.drive(ending)
        return ending
