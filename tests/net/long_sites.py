"""A site at a public key in headless Chromium, through ``dmsg socks``: ``make long WHICH=operate``."""

from __future__ import annotations

from typing import Any

from klein import Klein
from twisted.internet import reactor
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import SkipTest
from twisted.web.server import Site

from dmsg.cli.tunnels.socks_run import SocksFactory
from tests.net.support import EntityCase
from tests.pages.browser import Browser, chromium
from tests.support import asynchronous


class BrowserTests(EntityCase):
    """``http://KEY.dmsg/`` in a browser."""

    @asynchronous
    async def test_a_site_at_a_key(self) -> None:
        if chromium() is None:
            raise SkipTest("there is no Chromium here")
        url = await self.start_discovery()
        await self.start_server(f"--discovery={url}")
        bob = await self.start_client(url, min_servers=1)
        alice = await self.start_client(url, min_servers=1)
        app = Klein()

        @app.route("/")
        def page(request: Any) -> bytes:
            request.setHeader("content-type", "text/html")
            host = request.getRequestHostname().decode()
            return f'<p>asked for {host}</p><a id="next" href="/next">next</a>'.encode()

        @app.route("/next")
        def moved(request: Any) -> bytes:
            request.redirect(f"http://{request.getRequestHostname().decode()}/")
            return b""

        site = Site(app.resource())
        listening = bob.listen(site, 80)
        self.addCleanup(listening.stopListening)
        proxy = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(SocksFactory(reactor, alice, 10.0))
        self.addCleanup(proxy.stopListening)
        at = f"socks5://127.0.0.1:{proxy.getHost().port}"
        browser = await deferToThread(Browser, f"--proxy-server={at}")
        self.addCleanup(browser.close)
        host = f"{bob.public_key.text}.dmsg"

        def look() -> None:
            browser.go(f"http://{host}/")
            browser.until(f"document.body.innerText.includes('asked for {host}')")
            browser.go(f"http://{host}/next")
            browser.until(f"location.href == 'http://{host}/'")

        await deferToThread(look)
