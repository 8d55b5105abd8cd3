"""URLs of HTTP services: which are refused, and in which words."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from dmsg.base.urls import check_url


class CheckTests(SynchronousTestCase):
    """URLs that a person or a stranger wrote."""

    def test_a_url_with_blanks_or_control_characters_is_refused(self) -> None:
        for url in ("http://a.example/\x1b[2J", "http://a.example/a b", "http://a.example:1\n", "http://a\u202eb:1"):
            with self.subTest(url=url):
                error = self.assertRaises(ValueError, check_url, url)
                self.assertTrue(str(error).isprintable())

    def test_a_url_of_a_service_is_returned_unchanged(self) -> None:
        for url in ("http://127.0.0.1:9090", "https://relay.example.org/dmsg", "http://[::1]:1", "http://ä.example/"):
            self.assertEqual(check_url(url), url)
