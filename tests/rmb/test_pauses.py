"""Pauses of one's own process, which count against no twin, relay or registry."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from twisted.internet.defer import Deferred, succeed
from twisted.internet.testing import MemoryReactorClock, StringTransport, StringTransportWithDisconnection
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.http_headers import Headers

from dmsg.rmb.errors import CallTimeout, RegistryUnavailable
from dmsg.rmb.peer.files import IDLE_TIMEOUT, FileUploads, _Incoming
from dmsg.rmb.registry import tfchain
from dmsg.rmb.registry.client import TIMEOUT, HTTPRegistry
from dmsg.rmb.registry.tfchain import TfchainRegistry
from dmsg.rmb.relay.federation.post import POST_TIMEOUT, Poster
from dmsg.rmb.socket.websocket import CLOSE_TIMEOUT, HANDSHAKE_TIMEOUT, Socket
from dmsg.testing.bus_lab import BusLab
from tests.net.test_own_pauses import PausingClock, let_pause, pass_time
from tests.rmb.network import MemoryCase
from tests.support import asynchronous, some


class _Silent:
    """HTTP client whose requests get no answer."""

    def request(self, *args: object, **options: object) -> Deferred[Any]:
        return Deferred()

    post = request


class _Endless:
    """HTTP client whose requests are answered with bodies that never end."""

    def post(self, *args: object, **options: object) -> Deferred[Any]:
        return succeed(SimpleNamespace(code=200, deliverBody=lambda body: body.makeConnection(StringTransport())))


class RequestTests(SynchronousTestCase):
    """HTTP requests of a relay and of a peer."""

    def setUp(self) -> None:
        self.clock = MemoryReactorClock()
        let_pause(self.clock)

    def check(self, asking: Deferred[Any], seconds: float) -> None:
        """Check that a request fails after ``seconds`` in which this process does not pause."""
        pass_time(self.clock, 1.0)
        self.clock.advance(10 * seconds)
        pass_time(self.clock, 0.96 * seconds - 1.0)
        self.assertNoResult(asking)
        pass_time(self.clock, 0.1 * seconds)
        self.assertTrue(asking.called)

    def test_a_request_to_another_relay(self) -> None:
        poster = Poster(self.clock, plain=True)
        poster._agent = cast(Any, _Silent())
        asking = Deferred.fromCoroutine(poster._ask("http://192.0.2.1", Headers(), b""))
        self.check(asking, POST_TIMEOUT)
        self.assertIsNone(self.successResultOf(asking))

    def test_a_request_to_the_registry(self) -> None:
        registry = HTTPRegistry(self.clock, "http://192.0.2.1")
        registry._http = cast(Any, _Silent())
        asking = Deferred.fromCoroutine(registry._ask("GET", "/twins/1"))
        self.check(asking, TIMEOUT)
        self.failureResultOf(asking, RegistryUnavailable)

    def test_a_request_to_a_node_of_tfchain(self) -> None:
        registry = TfchainRegistry(self.clock, "ws://192.0.2.1")
        registry._http = cast(Any, _Silent())
        asking = registry.get(1)
        self.check(asking, tfchain.TIMEOUT)
        self.failureResultOf(asking, RegistryUnavailable)

    def test_the_answer_of_a_node_of_tfchain(self) -> None:
        registry = TfchainRegistry(self.clock, "ws://192.0.2.1")
        registry._http = cast(Any, _Endless())
        asking = registry.get(1)
        self.check(asking, tfchain.TIMEOUT)
        self.failureResultOf(asking, RegistryUnavailable)


class SocketTests(SynchronousTestCase):
    """Handshakes of websockets."""

    def setUp(self) -> None:
        self.clock = PausingClock()
        self.transport = StringTransportWithDisconnection()
        self.socket = Socket()
        self.socket.reactor = self.clock
        self.socket.transport = cast(Any, self.transport)
        self.transport.protocol = cast(Any, SimpleNamespace(connectionLost=lambda reason: None))

    def test_an_opening_or_closing_handshake(self) -> None:
        for seconds in (HANDSHAKE_TIMEOUT, CLOSE_TIMEOUT):
            self.transport.connected = True
            self.socket._give_up_after(seconds)
            pass_time(self.clock, seconds / 2)
            self.clock.advance(60.0)
            self.assertTrue(self.transport.connected)
            pass_time(self.clock, 0.6 * seconds)
            self.assertEqual((self.transport.connected, self.clock.getDelayedCalls()), (False, []))


class UploadTests(SynchronousTestCase):
    """Files that other peers upload to a peer."""

    def test_an_upload(self) -> None:
        clock = PausingClock()
        directory = Path(self.mktemp())
        directory.mkdir()
        uploads = FileUploads(clock, directory, cast(Any, None), cast(Any, None), clock.seconds)
        key = (1, "file")
        uploads._incoming[key] = _Incoming(directory / "file", 10, None)
        for _ in range(2):
            uploads._touch(key)
            pass_time(clock, 5.0)
            clock.advance(10 * IDLE_TIMEOUT)
            pass_time(clock, 0.8 * IDLE_TIMEOUT)
            self.assertIn(key, uploads._incoming)
        pass_time(clock, 0.2 * IDLE_TIMEOUT)
        self.assertEqual((uploads._incoming, clock.getDelayedCalls()), ({}, []))


class CallTests(MemoryCase):
    """Calls of a client on a host that is paused."""

    def paused(self, waiting: Deferred[Any], seconds: float) -> None:
        """Pause the host for longer than ``seconds``, of which half have passed then."""
        self.network.run(seconds / 2)
        self.reactor.pause()
        self.network.run(2 * seconds)
        self.reactor.resume()
        self.network.run(0.3 * seconds)
        self.assertNoResult(waiting)

    @asynchronous
    async def test_a_call_to_another_twin(self) -> None:
        relay = await self.named_relay()
        for name in "AB":
            self.twin(name, None)
        a, b = self.client("A", relay), self.client("B", relay)
        await a.when_online()
        await b.when_online()
        b.serve("x", lambda request: Deferred())
        calling = Deferred.fromCoroutine(a.call(self.ids["B"], "x", timeout=20.0))
        self.paused(calling, 20.0)
        await self.assertFailure(calling, CallTimeout)

    @asynchronous
    async def test_the_wait_for_the_registry(self) -> None:
        self.twin("A", None)
        client = self.client("A")
        client.ready = Deferred()
        waiting = Deferred.fromCoroutine(client.when_online(20.0))
        self.paused(waiting, 20.0)
        await self.assertFailure(waiting, CallTimeout)


class SuspendedTests(SynchronousTestCase):
    """All machines are suspended at once, while messages and their confirmations are on their way."""

    def test_nobody_is_blamed(self) -> None:
        lab = BusLab(1, Path(self.mktemp()))
        lab._directory.mkdir()
        self.addCleanup(lab.stop)
        for name in ("r1", "r2"):
            lab.add_server(name)
        twins = [lab.add_twin(name, relay) for name, relay in (("A", "r1"), ("B", "r2"), ("C", "r1"))]
        lab.settle()
        lab.delay_all()
        for twin in twins:
            twin.serve("echo", lambda request: request.payload)
        links = [link for twin in twins for link in some(twin.uplink).links]
        sockets = [link._socket for link in links]
        pairs = [(one, two) for one in twins for two in twins if one is not two]
        for number in range(40):
            calls = [
                Deferred.fromCoroutine(one.call(some(two.twin).id, "echo", b"%d" % number, timeout=300.0))
                for one, two in pairs
            ]
            lab.network.run(0.011 * number)
            lab.network.suspend(100.0)
            lab.network.run(10.0)
            self.assertEqual({self.successResultOf(call).payload for call in calls}, {b"%d" % number})
        self.assertEqual([link._socket for link in links], sockets)
        for relay in lab.servers.values():
            self.assertEqual(some(relay.switch).rules.drops, {})
