"""Discovery and key that a script names by texts."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from dmsg.clients.identity import Identity


class DiscoveryTests(SynchronousTestCase):
    """Choice of the discovery that a client asks."""

    def test_malformed_urls_are_refused_before_any_request(self) -> None:
        for named in ("home", ["http://a.example:1", "home"], "ftp://a.example"):
            with self.subTest(named=named):
                error = self.assertRaises(ValueError, Identity, named, None)
                self.assertIn("is not a URL such as http://127.0.0.1:9090", str(error))

    def test_several_urls_are_separated_by_blanks(self) -> None:
        urls = ["http://a.example:1", "http://b.example:1"]
        self.assertEqual(Identity(" ".join(urls), None).urls, urls)
