"""Texts of strangers on a terminal and in a log, and files that are hidden in a served directory."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

from twisted.logger import textFileLogObserver
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.static import MultipleRangeStaticProducer, NoRangeStaticProducer
from twisted.web.test.requesthelper import DummyRequest

from dmsg.apps.http_directory import MAX_RANGES, Listing, ListingThreads, file_site, servable
from dmsg.apps.partial_files import PART_SUFFIX
from dmsg.base.printable import UNPRINTABLE, printable
from dmsg.cli import output
from dmsg.tap.options import printable_log

EVIL = "\x1b]0;title\x07\x1b[2Jred\u202etxt.exe\nstranger 203.0.113.9: flood"


class PrintableTests(SynchronousTestCase):
    """No character of the text controls the terminal."""

    def test_control_characters_in_text_are_escaped(self) -> None:
        self.assertEqual(printable("Größe 日本 ok"), "Größe 日本 ok")
        clean = printable(EVIL)
        self.assertTrue(clean.isprintable())
        self.assertEqual(len(clean), len(EVIL))
        self.assertEqual(printable("a\tb\n\x1b", "\n\t"), f"a\tb\n{UNPRINTABLE}")

    def test_control_characters_in_messages_are_escaped(self) -> None:
        out = io.StringIO()
        self.patch(sys, "stdout", out)
        output.say(EVIL)
        self.assertNotIn("\x1b", out.getvalue())
        self.assertNotIn("\u202e", out.getvalue())

    def test_log_lines_contain_no_line_breaks_of_peers(self) -> None:
        """A peer's text cannot start a line of its own. Otherwise filters such as fail2ban would ban an address that a
        stranger names.
        """
        out = io.StringIO()
        observer: Any = printable_log(textFileLogObserver(out))
        observer({"log_format": "{who} said {what}", "who": "somebody", "what": EVIL, "log_time": 0.0})
        text = out.getvalue()
        self.assertEqual(text.count("\n"), 1)
        self.assertTrue(text.rstrip("\n").isprintable())
        self.assertIn("somebody said", text)


class ServedTests(SynchronousTestCase):
    """Names that begin with a dot, and parts of copies."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()
        for path in ("plain", ".secret", f"film{PART_SUFFIX}", ".git/config", "below/plain", "below/.env"):
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            (self.root / path).write_text(path)
        os.symlink(".secret", self.root / "innocent")
        os.symlink("plain", self.root / "link")
        os.mkfifo(self.root / "pipe")

    def there(self, *, hidden: bool) -> set[str]:
        names = [str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.name != "pipe"]
        root = os.path.realpath(self.root)
        found = {name for name in names if servable(str(self.root / name), root, hidden=hidden)}
        listing: Any = Listing(str(self.root), root, "x", hidden=hidden, threads=ListingThreads(None))
        self.assertEqual({row.name for row in listing._rows()}, {name for name in found if os.sep not in name})
        return found

    def test_without_the_option(self) -> None:
        self.assertEqual(self.there(hidden=False), {"plain", "below", "below/plain", "link"})

    def test_served_names_with_control_characters(self) -> None:
        everything = {"plain", ".secret", f"film{PART_SUFFIX}", ".git", ".git/config", "below", "below/plain"}
        self.assertEqual(self.there(hidden=True), everything | {"below/.env", "innocent", "link"})

    def test_a_root_below_a_hidden_directory(self) -> None:
        root = self.root / ".git"
        self.assertTrue(servable(str(root / "config"), os.path.realpath(root), hidden=False))

    def test_very_many_ranges(self) -> None:
        """Each range would repeat the same bytes in the answer."""
        site: Any = file_site(self.root, hidden=False)
        for count, expected in ((MAX_RANGES, MultipleRangeStaticProducer), (MAX_RANGES + 1, NoRangeStaticProducer)):
            request: Any = DummyRequest([b"plain"])
            request.requestHeaders.addRawHeader(b"range", b"bytes=" + b",".join([b"0-0"] * count))
            child = site.getChild(b"plain", request)
            child.type, child.encoding = "text/plain", None
            file = child.openForReading()
            self.addCleanup(file.close)
            self.assertIsInstance(child.makeProducer(request, file), expected)

    def test_requested_names_with_control_characters(self) -> None:
        for hidden in (False, True):
            site: Any = file_site(self.root, hidden=hidden)
            for path in ([b".secret"], [b".git"], [b"innocent"], [f"film{PART_SUFFIX}".encode()]):
                request: Any = DummyRequest(path)
                child = site.getChild(path[0], request)
                self.assertEqual(child is site.childNotFound, not hidden, path)
