"""Pages in headless Chromium, with a thousand clients connected: ``make long WHICH=operate``."""

from __future__ import annotations

import re

from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import SkipTest

from dmsg.errors import DropReason
from dmsg.pages import sampler
from tests.pages.browser import Browser, chromium
from tests.pages.test_pages import PageCase
from tests.support import asynchronous, some

CLIENTS = 1000
"""Connected while a browser looks."""


class BrowserTests(PageCase):
    """Pages in headless Chromium, with a thousand connected clients."""

    @asynchronous
    async def test_the_page_updates_in_a_browser(self) -> None:
        if chromium() is None:
            raise SkipTest("there is no Chromium here")
        await self.network()
        for _ in range(CLIENTS // 20):
            await gatherResults([Deferred.fromCoroutine(self.raw_client(self.server)) for _ in range(20)])
        base = self.base(self.server)
        browser = await deferToThread(Browser)
        self.addCleanup(browser.close)

        def first() -> None:
            browser.look(1400, 1400)
            browser.go(base + "/")
            browser.until(
                "document.body.innerText.includes('1001 of 10000') || document.body.innerText.includes('1000 of 10000')"
            )
            self.assertEqual(browser.value("document.getElementById('lost').hidden"), True)

        await deferToThread(first)
        # Later changes arrive through the script.
        self.server.factory.relay.drops[DropReason.FLOOD] += 4711
        await deferToThread(browser.until, "document.getElementById('reasons').innerText.includes('4.7 k')")

        def pictures() -> None:
            for width, height, dark in ((1400, 1400, False), (1400, 1400, True), (380, 3000, False), (380, 3000, True)):
                browser.look(width, height, dark=dark)
                # No page is wider than the window, so nobody has to scroll sideways.
                self.assertLessEqual(browser.value("document.documentElement.scrollWidth"), width)
                ground = browser.value("getComputedStyle(document.body).backgroundColor")
                light = sum(int(part) for part in re.findall(r"\d+", ground)[:3]) > 380
                self.assertEqual(light, not dark, ground)
                self.assertGreater(len(browser.picture()), 20_000)

        await deferToThread(pictures)

        def without_scripts() -> None:
            browser.look(1400, 1400, scripts=False)
            browser.go(base + "/")
            self.assertIn("Clients that send most", browser.value("document.body.innerText"))
            self.assertGreater(browser.value("document.querySelectorAll('svg').length"), 7)

        await deferToThread(without_scripts)

        def lost() -> None:
            browser.look(1400, 1400)
            browser.go(base + "/")
            browser.until("document.getElementById('lost').hidden")

        await deferToThread(lost)
        await self.server.stop_for_test()
        await deferToThread(browser.until, "!document.getElementById('lost').hidden")
        await deferToThread(browser.until, "document.body.classList.contains('lost')")

    @asynchronous
    async def test_the_page_reconnects_after_an_interruption(self) -> None:
        """A proxy's answer that is no event stream is an interruption. The page also reports a hanging server."""
        if chromium() is None:
            raise SkipTest("there is no Chromium here")
        await self.network()
        browser = await deferToThread(Browser)
        self.addCleanup(browser.close)
        await deferToThread(browser.go, self.base(self.server) + "/")
        await deferToThread(browser.until, "document.getElementById('lost').hidden")
        watchers = some(self.server._status._sampling)._watchers
        await self.until(lambda: watchers)
        # The connection hangs: it stays open, without further updates. There is no place for another one.
        self.patch(sampler, "MAX_WATCHERS", 0)
        next(iter(watchers)).send_changes = lambda content: None
        await deferToThread(browser.until, "!document.getElementById('lost').hidden")
        await self.until(lambda: not watchers)  # The script has connected again.
        self.patch(sampler, "MAX_WATCHERS", 16)
        await deferToThread(browser.until, "document.getElementById('lost').hidden")
        self.assertFalse(await deferToThread(browser.value, "document.body.classList.contains('lost')"))
