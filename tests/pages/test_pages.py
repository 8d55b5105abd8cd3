"""Pages of real entities, over TCP; ``long_browser`` looks at them in a browser."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import treq
from twisted.internet import reactor
from twisted.internet.defer import Deferred, ensureDeferred, gatherResults, maybeDeferred
from twisted.internet.task import deferLater

from dmsg.keys import SecKey
from dmsg.pages import site
from dmsg.pages.sampler import MAX_WATCHERS
from tests.net.support import LOOPBACK, EntityCase
from tests.support import asynchronous


class PageCase(EntityCase):
    """A discovery and a server with pages."""

    async def network(self, *options: str) -> None:
        self.url = await self.start_discovery(f"--metrics={LOOPBACK}", *options)
        self.server = await self.start_server(f"--discovery={self.url}", f"--metrics={LOOPBACK}", *options)

    async def start_collector(self) -> Any:
        """Start a collector of the discovery's network, which accepts no sender."""
        from dmsg.tap import collector as tap

        senders = Path(self.mktemp())
        senders.write_text("")
        parsed = tap.Options()
        parsed.parseOptions(
            [
                f"--{name}={value}"
                for name, value in (("store", self.mktemp()), ("senders", senders), ("metrics", LOOPBACK))
            ]
            + [f"--discovery={self.url}", f"--key-file={self.mktemp()}", "--create"]
        )
        service: Any = tap.makeService(parsed, reactor)
        service.startService()
        self.addCleanup(service.stopService)
        collector = service.entity
        await collector.ready
        return collector

    def base(self, entity: Any) -> str:
        return f"http://127.0.0.1:{entity.metrics_port.getHost().port}"

    async def get(self, url: str, **options: Any) -> tuple[Any, str]:
        response: Any = await treq.get(url, persistent=False, **options)
        return response, await response.text()


class PageTests(PageCase):
    """Content of the pages, and access to them."""

    @asynchronous
    async def test_the_page_of_a_server_shows_its_state(self) -> None:
        await self.network()
        client = await self.start_client(self.url)
        response, text = await self.get(self.base(self.server) + "/")
        self.assertEqual(response.code, 200)
        self.assertEqual(response.headers.getRawHeaders("content-type"), ["text/html; charset=utf-8"])
        policy = response.headers.getRawHeaders("content-security-policy")[0]
        self.assertIn("default-src 'none'", policy)
        for expected in (
            "<h1>dmsg server</h1>",
            self.server._key.public.hex(),
            "Nothing needs attention.",
            '<dd class="plain">1 of 10000</dd>',
            self.server._key.public.text,
            f'title="{client.public_key.text}, in logs and JSON: {client.public_key}">{client.public_key.short}…<',
            "no data waits for a client",
            "<svg",
        ):
            self.assertIn(expected, text)
        # The page loads nothing from elsewhere, and contains nothing that the policy forbids.
        self.assertEqual(set(re.findall(r'(?:src|href)="([^"]*)"', text)), {"page.css", "page.js"})
        self.assertNotRegex(text, r"<script>|<style|style=|onclick|https?://")
        for name in ("page.css", "page.js"):
            response, text = await self.get(f"{self.base(self.server)}/{name}")
            self.assertEqual(response.code, 200)
        for path, code in (("nothing", 404), ("page", 404), ("live/x", 404), ("%ff", 400)):
            response, text = await self.get(f"{self.base(self.server)}/{path}")
            self.assertEqual(response.code, code, path)
        response = await treq.post(self.base(self.server) + "/", persistent=False)
        self.assertEqual(response.code, 405)
        await response.content()

    @asynchronous
    async def test_the_page_of_discovery_shows_its_state(self) -> None:
        await self.network()
        client = await self.start_client(self.url)
        # The numbers of the store are as old as the last check.
        text = ""
        while "listed</td>" not in text:
            _, text = await self.get(self.base(self.discovery) + "/")
            await deferLater(reactor, 0.2)
        server = self.server._key.public
        cell = f'title="{server.text}, in logs and JSON: {server}">{server.short}…<'
        self.assertIn("<h1>dmsg discovery</h1>", text)
        self.assertRegex(text, f"{cell}.*listed")
        self.assertRegex(text, f'Clients per server.*{cell}.*<td class="number">1</td>')
        for asked, expected in (
            (client.public_key.hex(), f"Entry of {client.public_key.short}….*Reached through server.*{cell}"),
            (client.public_key.text, f"Entry of {client.public_key.short}….*Reached through server.*{cell}"),
            (server.hex(), r"Server: address.*127\.0\.0\.1:\d+"),
            (SecKey.generate().public.hex(), "this key has no entry"),
            ("<script>alert(1)</script>", "not a public key"),
        ):
            response, text = await self.get(self.base(self.discovery) + "/", params={"key": asked})
            self.assertEqual(response.code, 200)
            self.assertRegex(text, expected)
            self.assertNotIn("<script>alert", text)
        _, health = await self.get(self.base(self.discovery) + "/health")
        self.assertEqual(json.loads(health), {"status": "ok", "entries": 2})
        _, metrics = await self.get(self.base(self.discovery) + "/metrics")
        self.assertIn("dmsg_discovery_entries 2.0", metrics)

    @asynchronous
    async def test_the_page_of_a_collector_shows_its_state(self) -> None:
        await self.network()
        collector = await self.start_collector()
        collector.factory.newest["02ab"] = 1.0
        collector.factory.refusals["no room"] += 2
        _, text = await self.get(self.base(collector) + "/")
        for expected in (
            "<h1>dmsg collector</h1>",
            # With a space between the two texts of the key.
            f"<code>{collector.client.public_key.text}</code> <small>in logs and JSON: "
            f"<code>{collector.client.public_key}<",
            "1 sender sent no file for at least",
            r"no room</td><td class=\"number\">2</td>",
            "Uptime.*Started.*Memory of the process",
        ):
            self.assertRegex(text, expected)

    @asynchronous
    async def test_the_page_is_served_to_authorised_viewers_only(self) -> None:
        await self.network()
        for headers, code in (
            ({"Host": "evil.example"}, 403),
            ({"X-Forwarded-For": "127.0.0.1"}, 403),
            ({}, 200),
        ):
            for path in ("/", "/live") if code != 200 else ("/",):
                response, _ = await self.get(self.base(self.server) + path, headers=headers)
                self.assertEqual(response.code, code, (path, headers))
        # Paths for Prometheus and other monitors stay open.
        for path in ("/metrics", "/health"):
            response, _ = await self.get(self.base(self.server) + path, headers={"Host": "evil.example"})
            self.assertEqual(response.code, 200)
            # A page in a browser gets no answer, because its host name may have been pointed here since the page was
            # loaded.
            response, text = await self.get(self.base(self.server) + path, headers={"Sec-Fetch-Mode": "cors"})
            self.assertEqual((response.code, text), (403, "requests from pages of other sites are refused\n"))
            response, _ = await self.get(self.base(self.server) + path, headers={"Sec-Fetch-Mode": "navigate"})
            self.assertEqual(response.code, 200)

    @asynchronous
    async def test_a_page_of_another_site_takes_no_place(self) -> None:
        """A page of another site may open any number of EventSources in the browser of a user who has access."""
        await self.network()
        live = self.base(self.server) + "/live"
        headers: Any
        for headers in (
            {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
            {"Sec-Fetch-Site": "same-site"},
            {"Origin": "http://evil.example"},
            {"Origin": "null"},
        ):
            for _ in range(MAX_WATCHERS + 1):
                response, _ = await self.get(live, headers=headers)
                self.assertEqual(response.code, 403, headers)
        own_pages: Any = ({"Sec-Fetch-Site": "same-origin"}, {"Origin": live.removesuffix("/live")})
        watching = [
            await treq.get(live, headers=headers, persistent=False)
            for headers in own_pages
            for _ in range(MAX_WATCHERS // 2)
        ]
        self.assertEqual({one.code for one in watching}, {200})
        await self.server.stop_for_test()
        for one in watching:
            await one.content()

    @asynchronous
    async def test_a_token_opens_the_page(self) -> None:
        token = Path(self.mktemp())
        token.write_text("0123456789abcdef")
        token.chmod(0o600)
        await self.network(f"--page-token={token}")
        response, text = await self.get(self.base(self.server) + "/")
        self.assertEqual(response.code, 401)
        self.assertEqual(response.headers.getRawHeaders("www-authenticate"), ['Basic realm="dmsg", charset="UTF-8"'])
        self.assertNotIn(self.server._key.public.hex(), text)
        for options in (
            {"auth": ("me", "0123456789abcdef")},
            {"headers": {"Authorization": "Bearer 0123456789abcdef"}},
        ):
            response, text = await self.get(self.base(self.server) + "/", **options)
            self.assertEqual(response.code, 200)

    @asynchronous
    async def test_parts_of_the_page_are_sent_when_they_change(self) -> None:
        """The browser gets parts of the page when they change. A browser that does not read is left out, and the number
        of browsers is limited.
        """
        await self.network()
        got = bytearray()
        response: Any = await treq.get(self.base(self.server) + "/live", persistent=False)
        self.assertEqual(response.headers.getRawHeaders("content-type"), ["text/event-stream"])
        response.collecting = treq.collect(response, got.extend)
        response.collecting.addErrback(lambda _: None)
        await self.until(lambda: got.count(b"data: ") >= 1)
        first = json.loads(got.partition(b"data: ")[2].partition(b"\n")[0])
        self.assertEqual(sorted(first), ["charts", "events", "facts", "problems", "reasons", "tables"])
        await self.start_client(self.url)
        await self.until(lambda: b"1 of 10000" in got)
        second = json.loads(got.split(b"data: ")[2].partition(b"\n")[0])
        self.assertNotIn("problems", second)
        others = [await treq.get(self.base(self.server) + "/live", persistent=False) for _ in range(MAX_WATCHERS)]
        self.assertEqual([one.code for one in others].count(503), 1)
        await self.server.stop_for_test()
        await response.collecting
        for one in others:
            await one.content()

    @asynchronous
    async def test_problems_are_listed_first(self) -> None:
        self.url = await self.start_discovery(f"--metrics={LOOPBACK}")
        server = await self.start_server(
            f"--discovery={self.url}",
            f"--metrics={LOOPBACK}",
            "--max-connections=2",
            "--public-address=127.0.0.1:1",
        )
        for _ in range(2):
            await self.raw_client(server)
        await self.until(lambda: server.reachable is False)
        _, text = await self.get(self.base(server) + "/")
        self.assertIn("The server cannot connect to its own public address", text)
        self.assertIn("The server is full: 2 clients are connected", text)
        self.assertRegex(text, r'<dl><div><dt>[^<]*</dt><dd class="bad">')

    @asynchronous
    async def test_a_draining_server_says_so(self) -> None:
        await self.network()
        client = await self.raw_client(self.server)
        base = self.base(self.server)
        # The withdrawal waits for the answers: the drain could be over before both requests arrive.
        answered: Deferred[None] = Deferred()
        withdraw = self.server.registration.withdraw
        self.patch(
            self.server.registration, "withdraw", lambda: answered.addCallback(lambda _: ensureDeferred(withdraw()))
        )
        leaving = maybeDeferred(self.server.stopService)
        asking = [Deferred.fromCoroutine(self.get(base + path)) for path in ("/", "/health")]
        (_, page), (response, text) = await gatherResults(asking)
        answered.callback(None)
        self.assertIn("The server is shutting down: its clients move", page)
        self.assertEqual((response.code, json.loads(text)["status"]), (503, "draining"))
        client.transport.loseConnection()  # type: ignore[union-attr]
        await leaving
        self.assertIsNone(self.server.metrics_port)

    @asynchronous
    async def test_a_server_that_is_killed_is_missed(self) -> None:
        self.url = await self.start_discovery(f"--metrics={LOOPBACK}")
        server = await self.start_server(f"--discovery={self.url}")
        key = server._key.public
        page = self.base(self.discovery) + "/"

        async def shows(pattern: str) -> str:
            while True:
                _, text = await self.get(page)
                if re.search(pattern, text, re.DOTALL):
                    return text
                await deferLater(reactor, 0.2)

        await shows("listed</td>")
        server.registration.stop()  # The server sends nothing more, as if it were killed, until it is missed.
        api = self.discovery._running.api
        api._now = api.reports._now = lambda: time.time() + 600
        text = await shows(f"Server {key.short}… at 127.0.0.1:[0-9]+ last posted .* ago: check whether it runs")
        self.assertRegex(text, f'title="{key.text}, in logs and JSON: {key}".*missing</td>')
        await shows(r"Servers listed for clients: 0 \(was 1\)")
        # The server is found by the characters that the page shows, and by the first digits that a log shows.
        for beginning in (f"{key.short}…", key.text[:12].upper(), key.hex()[:8]):
            _, text = await self.get(page, params={"key": beginning})
            self.assertRegex(text, rf"Entry of {key.short}….*Server: address.*127\.0\.0\.1:\d+")

    def test_bad_options_are_one_line(self) -> None:
        from twisted.python.usage import UsageError

        from dmsg.tap import discovery, server

        path = Path(self.mktemp())
        path.write_text("short")
        path.chmod(0o600)
        for tap in (server, discovery):
            for options, problem in (
                ([f"--page-token={path}"], "needs --metrics"),
                ([f"--page-token={path}", "--metrics=tcp:0"], "16 to 512"),
                (["--page-token=/nowhere", "--metrics=tcp:0"], "No such file"),
            ):
                parsed: Any = tap.Options()
                with self.assertRaisesRegex(UsageError, problem):
                    parsed.parseOptions(options)


class HardTimesTests(PageCase):
    """Pages while another service fails."""

    @asynchronous
    async def test_a_flood_of_requests_does_not_block_the_metrics(self) -> None:
        """Behind a proxy all clients have one address; a stranger without the token sends the requests."""
        # A busy machine answers less than the 50 requests a second that are admitted.
        self.patch(site, "STATUS_RATE", 1.0)
        self.patch(site, "STATUS_BURST", 50.0)
        await self.network()
        base = self.base(self.server)
        refused = 0
        while refused < 20:
            answers = [
                Deferred.fromCoroutine(self.get(base + "/", headers={"Host": "evil.example"})) for _ in range(20)
            ]
            refused += [response.code for response, _ in await gatherResults(answers)].count(429)
        for path in ("/metrics", "/health"):
            response, _ = await self.get(base + path)
            self.assertEqual(response.code, 200)

    @asynchronous
    async def test_a_store_that_hangs(self) -> None:
        """The page of discovery still opens, and reports the hanging store."""
        await self.network()
        hanging: Any = Deferred()
        self.discovery._running.api._store._store.count = lambda: hanging
        text = ""
        while "has not answered for" not in text:
            response, text = await self.get(self.base(self.discovery) + "/")
            self.assertEqual(response.code, 200)
            await deferLater(reactor, 0.2)
        self.assertIn("Discovery is impaired: the store has not answered for", text)
        hanging.callback(7)
        while '<dd class="good">ok</dd>' not in text:
            _, text = await self.get(self.base(self.discovery) + "/")
            await deferLater(reactor, 0.2)
        self.assertRegex(text, r"State: the store has not answered for \d s \(was ok\)")
