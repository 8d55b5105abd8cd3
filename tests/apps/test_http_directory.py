"""Files over HTTP, as a browser gets them: listings in threads, sizes that are true."""

from __future__ import annotations

import html
import os
import re
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from twisted.internet import reactor
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.trial.unittest import TestCase
from twisted.web.client import Agent, readBody
from twisted.web.http_headers import Headers
from twisted.web.server import Site

from dmsg.apps import http_directory
from dmsg.apps.http_directory import LISTINGS_AT_ONCE, Listing, ListingThreads, file_site
from tests.support import asynchronous


class SiteCase(TestCase):
    """A directory that is served."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()
        self.root.mkdir()
        (self.root / "film").write_bytes(b"0123456789")

    async def serve(self, root: Path | None = None) -> None:
        site: Any = file_site(root or self.root, "bob", reactor=reactor)
        self.port = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(Site(site))
        self.addCleanup(self.port.stopListening)

    async def get(self, path: str, method: bytes = b"GET", **headers: str) -> tuple[Any, bytes]:
        url = f"http://127.0.0.1:{self.port.getHost().port}/{path}".encode()
        fields = Headers({name: [value] for name, value in headers.items()})
        response: Any = await Agent(reactor).request(method, url, fields)
        return response, await readBody(response)


class NameTests(SiteCase):
    """Names that other programs have given to files: any bytes but NUL and a slash."""

    @asynchronous
    async def test_each_name_can_be_fetched_and_shows_no_control_characters(self) -> None:
        names = (b"a\nb", b"x\x1b]0;evil\x07", "txt\u202egpj".encode(), b"bad\xffname", "\u00fc".encode(), b'"<&%41')
        below = b"dir\xff\x1b"
        for directory in (os.fsencode(self.root), os.path.join(os.fsencode(self.root), below)):
            os.makedirs(directory, exist_ok=True)
            for name in names:
                with open(os.path.join(directory, name), "wb") as file:
                    file.write(name)
        await self.serve()
        for path in ("", quote(below) + "/"):
            _, listing = await self.get(path)
            text = listing.decode()
            self.assertTrue(text.replace("\n", "").isprintable())
            links = [html.unescape(one) for one in re.findall(r'<tr><td><a href="\./([^"]*)"', text)]
            self.assertLessEqual({quote(name) for name in names}, set(links))
            for link in links:
                response, content = await self.get(path + link)
                self.assertEqual(response.code, 200, link)
                if unquote_to_bytes(link) in names:
                    self.assertEqual(content, unquote_to_bytes(link))
        for path in ("bad%FE", "film%00", "..%2Ffilm"):
            self.assertEqual((await self.get(path))[0].code, 404, path)


class ListingTests(SiteCase):
    """Listings of directories with many files."""

    @asynchronous
    async def test_listings_are_made_in_threads(self) -> None:
        threads = set()
        made = Listing._make_listing

        def in_which(listing: Listing, *arguments: Any) -> bytes:
            threads.add(threading.get_ident())
            return made(listing, *arguments)

        self.patch(Listing, "_make_listing", in_which)
        await self.serve()
        _, body = await self.get("")
        self.assertIn(b'href="./film"', body)
        self.assertNotIn(threading.get_ident(), threads)

    @asynchronous
    async def test_a_long_listing_is_cut_and_says_so(self) -> None:
        self.patch(http_directory, "ROWS_LIMIT", 2)
        for name in "abc":
            (self.root / name).write_bytes(b"")
        await self.serve()
        _, body = await self.get("")
        self.assertEqual((body.count(b'href="./'), b"and 2 more" in body), (2, True))

    @asynchronous
    async def test_a_removed_directory_is_404(self) -> None:
        (self.root / "below").mkdir()
        await self.serve()
        rows = Listing._rows

        def gone(listing: Listing) -> Any:
            (self.root / "below").rmdir()
            return rows(listing)

        self.patch(Listing, "_rows", gone)
        response, body = await self.get("below/")
        self.assertEqual((response.code, body), (403, b"this directory cannot be read\n"))

    @asynchronous
    async def test_listings_are_limited_and_queued(self) -> None:
        """A request whose client leaves while it waits takes no thread; when too many wait, the next one is refused."""
        go = threading.Event()
        self.addCleanup(go.set)
        running: list[None] = []

        def slow() -> bytes:
            running.append(None)
            go.wait(20)
            return b"page"

        threads = ListingThreads(reactor)
        made = [threads.run(number, slow, Deferred()) for number in range(LISTINGS_AT_ONCE)]
        gone: Deferred[Any] = Deferred()
        waiting = threads.run("gone", slow, gone)
        gone.errback(OSError())
        self.failureResultOf(waiting)
        self.patch(http_directory, "LISTINGS_WAITING", 1)
        self.assertFalse(threads.is_full)
        left: Deferred[Any] = Deferred()
        made.append(threads.run("left", slow, left))
        self.assertTrue(threads.is_full)
        go.set()
        await gatherResults(made)
        self.assertEqual(len(running), LISTINGS_AT_ONCE + 1)

    @asynchronous
    async def test_concurrent_requests_share_one_listing(self) -> None:
        """Requests for a listing that is being made wait for the next one, which is newer."""
        go = threading.Event()
        self.addCleanup(go.set)
        pages: list[None] = []

        def slow() -> bytes:
            pages.append(None)
            go.wait(20)
            return b"page %d" % len(pages)

        threads = ListingThreads(reactor)
        asked = [threads.run("name", slow, Deferred()) for _ in range(4)]
        go.set()
        self.assertEqual(await gatherResults(asked), [b"page 1", *[b"page 2"] * 3])
        self.assertEqual(await threads.run("name", slow, Deferred()), b"page 3")

    @asynchronous
    async def test_too_many_requests_for_listings_are_refused(self) -> None:
        self.patch(http_directory, "LISTINGS_WAITING", 0)
        await self.serve()
        response, _ = await self.get("")
        self.assertEqual(response.code, 503)
        response, body = await self.get("film")
        self.assertEqual((response.code, body), (200, b"0123456789"))


class SizeTests(SiteCase):
    """The body has the length in the header, whatever happens to the file."""

    @asynchronous
    async def test_a_proc_file_announces_no_content(self) -> None:
        """Such a file has the size 0."""
        await self.serve(Path("/proc/sys/kernel"))
        expected = Path("/proc/sys/kernel/ostype").read_bytes()
        response, body = await self.get("ostype")
        self.assertEqual((response.length, body), (len(expected), expected))
        response, body = await self.get("ostype", b"HEAD")
        self.assertEqual(response.headers.getRawHeaders("content-length"), [str(len(expected))])
        response, body = await self.get("ostype", range="bytes=1-2")
        self.assertEqual((response.code, body), (206, expected[1:3]))
        response, body = await self.get("ostype", range="bytes=6-")
        self.assertEqual((response.code, body), (416, b""), "it is complete already")

    @asynchronous
    async def test_a_file_that_changes_while_it_is_sent_keeps_its_announced_length(self) -> None:
        """Added bytes are left out; if bytes are missing, the connection ends early."""
        await self.serve()
        film = self.root / "film"
        film.write_bytes(bytes(3_000_000))
        opened = http_directory.ContainedFile.openForReading
        for size, whole in ((3_000_100, True), (1000, False)):
            os.truncate(film, 3_000_000)

            def open_and_change(file: Any, size: int = size) -> Any:
                source = opened(file)
                os.truncate(film, size)
                return source

            self.patch(http_directory.ContainedFile, "openForReading", open_and_change)
            if whole:
                self.assertEqual((await self.get("film"))[1], bytes(3_000_000))
            else:
                try:
                    await self.get("film")
                except Exception as error:
                    self.assertNotIsInstance(error, AssertionError)
                else:
                    self.fail("it looks whole")

    @asynchronous
    async def test_a_link_that_comes_to_be(self) -> None:
        """The link replaces the file between its check and its opening."""
        outside = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, outside)
        (outside / "film").write_bytes(b"secret")
        await self.serve()
        looked = http_directory.servable

        def look_and_change(*arguments: Any, **options: Any) -> bool:
            found = looked(*arguments, **options)
            (self.root / "film").unlink(missing_ok=True)
            (self.root / "film").symlink_to(outside / "film")
            return found

        self.patch(http_directory, "servable", look_and_change)
        response, body = await self.get("film")
        self.assertEqual((response.code, b"secret" in body), (403, False))
