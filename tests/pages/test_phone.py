"""Live pages on a phone, in headless Chromium."""

from __future__ import annotations

from twisted.internet.threads import deferToThread
from twisted.trial.unittest import SkipTest

from tests.net.support import LOOPBACK
from tests.pages.browser import Browser, chromium
from tests.pages.test_pages import PageCase
from tests.support import asynchronous


class PhoneTests(PageCase):
    """Live pages in the window of a phone."""

    @asynchronous
    async def test_a_phone_shows_live_pages_without_moving_them(self) -> None:
        if chromium() is None:
            raise SkipTest("there is no Chromium here")
        self.url = await self.start_discovery(f"--metrics={LOOPBACK}")
        # A full server has a problem to show.
        server = await self.start_server(f"--discovery={self.url}", f"--metrics={LOOPBACK}", "--max-connections=2")
        for _ in range(2):
            await self.start_client(self.url)
        collector = await self.start_collector()
        browser = await deferToThread(Browser)
        self.addCleanup(browser.close)
        for entity, problem in ((server, "The server is full"), (self.discovery, ""), (collector, "")):

            def check(base: str = self.base(entity), problem: str = problem) -> None:
                browser.look_by_phone()
                browser.go(base + "/")
                self.assertEqual(browser.too_wide(), [], base)
                self.assertIn(problem, " ".join(browser.texts("#problems li")))
                self.assertNotEqual(browser.texts("#facts dd"), [])
                # The first column of each table can be read before a table is moved in its box.
                heads = browser.value("document.querySelectorAll('tr > :first-child').length")
                self.assertEqual(len(browser.texts("tr > :first-child")), heads)

            await deferToThread(check)
