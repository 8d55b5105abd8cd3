"""Pauses of one's own process, which count against no twin, relay or registry."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet.defer import Deferred
from twisted.internet.testing import MemoryReactorClock
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.http_headers import Headers

from dmsg.rmb.errors import CallTimeout, RegistryUnavailable
from dmsg.rmb.registry.client import TIMEOUT, HTTPRegistry
from dmsg.rmb.relay.federation.post import POST_TIMEOUT, Poster
from tests.net.test_own_pauses import let_pause, pass_time
from tests.rmb.network import MemoryCase
from tests.support import asynchronous


class _Silent:
    """HTTP client whose requests get no answer."""

    def request(self, *args: object, **options: object) -> Deferred[Any]:
        return Deferred()


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
