"""What may be shown of texts."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.base.printable import without_userinfo
from dmsg.cli.output import describe
from dmsg.discovery.lookup import Lookup
from dmsg.discovery.url import check_url
from dmsg.errors import DmsgError
from dmsg.net.redis import without_password


class UserinfoTests(SynchronousTestCase):
    """User and password of a URL are never shown."""

    def test_texts(self) -> None:
        for text, shown in (
            ("http://me:secret@host:1/path", "http://***@host:1/path"),
            ("at http://me:s@cret@host/ and wss://you@host", "at http://***@host/ and wss://***@host"),
            ("http://host/path@x?a=b@c", "http://host/path@x?a=b@c"),
            ("me@example.org", "me@example.org"),
            ("no URL", "no URL"),
        ):
            self.assertEqual(without_userinfo(text), shown)
        self.assertEqual(without_password("redis://:secret@host/1"), "redis://***@host/1")

    def test_where_they_are_shown(self) -> None:
        lookup = Lookup(Clock(), "http://me:secret@127.0.0.1:9")
        self.assertEqual((lookup.url, lookup.shown_url), ("http://me:secret@127.0.0.1:9", "http://***@127.0.0.1:9"))
        self.successResultOf(lookup.close())
        self.assertEqual(describe(DmsgError("http://me:secret@host: no")), "http://***@host: no")
        error = self.assertRaises(ValueError, check_url, "ftp://me:secret@host")
        self.assertIn("ftp://***@host", str(error))
