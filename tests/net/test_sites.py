"""Web sites as others write them, at a public key: Klein, Flask under Twisted's WSGI, aiohttp behind a TCP port."""

from __future__ import annotations

import asyncio
import json
import threading
from importlib.util import find_spec
from typing import Any
from unittest import skipUnless

import treq
from klein import Klein
from twisted.internet import reactor
from twisted.internet.defer import maybeDeferred
from twisted.internet.endpoints import TCP4ClientEndpoint
from twisted.internet.protocol import Factory
from twisted.python.threadpool import ThreadPool
from twisted.web.client import Agent
from twisted.web.server import Site
from twisted.web.wsgi import WSGIResource

from dmsg import DmsgClientEndpoint, DmsgEndpointFactory, PubKey
from dmsg.apps.splice import SpliceFactory
from tests.net.support import EntityCase
from tests.support import Accepting, asynchronous


class AiohttpThread:
    """An aiohttp site on a loop of its own."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self.port = 0
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)
        self._thread.start()
        self._ready.wait(20)

    async def _serve(self) -> None:
        from aiohttp import web

        async def answer(request: Any) -> Any:
            # The answer has a URL with the requested host, as redirects have.
            return web.json_response({"host": request.host, "url": str(request.url), "peer": request.remote})

        app = web.Application()
        app.router.add_get("/page", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        self._over = asyncio.Event()
        self._ready.set()
        await self._over.wait()
        await runner.cleanup()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(20)
        self._loop.close()


class SiteTests(EntityCase):
    """A site says which host was asked for and who asks, and neither is an error of its own."""

    async def network(self) -> None:
        url = await self.start_discovery()
        await self.start_server(f"--discovery={url}")
        self.bob = await self.start_client(url, min_servers=1)
        self.alice = await self.start_client(url, min_servers=1)
        self.http = treq.client.HTTPClient(Agent.usingEndpointFactory(reactor, DmsgEndpointFactory(self.alice)))

    def listen(self, factory: Any) -> None:
        port = self.bob.listen(factory, 80)
        self.addCleanup(lambda: maybeDeferred(port.stopListening))

    async def raw(self, request: bytes) -> bytes:
        """Return the answer to these bytes."""
        one: Any = await DmsgClientEndpoint(self.alice, self.bob.public_key, 80).connect(Accepting())
        one.transport.write(request)
        await self.until(lambda: one.data and one.lost)
        return bytes(one.data)

    async def looked_at(self, expected_peer: str) -> None:
        key: PubKey = self.bob.public_key
        for host in (key.text, f"{key.text}.dmsg", key.text.upper()):
            answer = await self.http.get(f"http://{host}/page")
            told = await answer.json()
            self.assertEqual((answer.code, told["host"].lower()), (200, host.lower()))
            self.assertEqual(told["url"].lower(), f"http://{host}/page".lower())
            self.assertEqual(told["peer"], expected_peer)

    @asynchronous
    async def test_a_klein_site_sees_host_and_peer(self) -> None:
        await self.network()
        app = Klein()

        @app.route("/page")
        def page(request: Any) -> bytes:
            host = request.getRequestHostname().decode()
            peer = request.getClientAddress().host
            url = request.prePathURL().decode()
            return json.dumps({"host": host, "url": url, "peer": peer}).encode()

        self.listen(Site(app.resource()))
        await self.looked_at(self.alice.public_key.text)
        self.assertIn(b"200 OK", await self.raw(b"GET /page HTTP/1.0\r\n\r\n"))
        without = await self.raw(b"GET /page HTTP/1.1\r\nConnection: close\r\n\r\n")
        self.assertIn(b"200 OK", without)
        self.assertIn(self.bob.public_key.text.encode(), without)
        self.assertEqual(self.flushLoggedErrors(), [])

    @skipUnless(find_spec("flask"), "flask is not installed")
    @asynchronous
    async def test_a_flask_site_sees_host_and_peer(self) -> None:
        import flask

        await self.network()
        app = flask.Flask("site")

        @app.route("/page")
        def page() -> Any:
            request = flask.request
            return {"host": request.host, "url": request.url, "peer": request.environ.get("REMOTE_ADDR")}

        pool = ThreadPool(1, 1)
        pool.start()
        self.addCleanup(pool.stop)
        self.listen(Site(WSGIResource(reactor, pool, app)))
        await self.looked_at(self.alice.public_key.text)
        self.assertIn(b"200 OK", await self.raw(b"GET /page HTTP/1.0\r\n\r\n"))

    @skipUnless(find_spec("aiohttp"), "aiohttp is not installed")
    @asynchronous
    async def test_an_aiohttp_site_behind_expose_sees_its_host(self) -> None:
        await self.network()
        site = AiohttpThread()
        self.addCleanup(site.stop)
        endpoint = TCP4ClientEndpoint(reactor, "127.0.0.1", site.port)
        exposed: Factory = SpliceFactory(endpoint.connect, on_failed=lambda failure: None)
        self.listen(exposed)
        await self.looked_at("127.0.0.1")
