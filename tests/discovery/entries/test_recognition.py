"""Other networks: their discoveries, and their servers that post here."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, cast

from treq.testing import StubTreq
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.resource import Resource

from dmsg.discovery.entries.entry import ClientMeta
from dmsg.discovery.entries.recognition import GO_2019, NO_SERVERS, VERSION_1, VERSION_1_POSTED, is_version_1, recognise
from dmsg.discovery.lookup.lookup import Lookup
from dmsg.discovery.lookup.lookups import Lookups
from dmsg.errors import DiscoveryError, EntryNotFound, WrongDiscovery
from dmsg.keys import SecKey
from tests.discovery.service.test_api import APICase

KEY = SecKey.from_seed(b"recognition")
SERVER_OF_TODAY = (
    b'{"version":"0.0.1","sequence":2,"timestamp":1795303268439478589,"static":'
    b'"039ea4ea0dc38ac063f6a4d0862873381d814e1380cd04e3ca06c01cf5053b4429","server":{"address":"127.0.0.1:8081",'
    b'"availableSessions":10,"serverType":"community"},"signature":"57040a6d908285d7c5efd8da96fae47819fc392d2b3a5218a9'
    b"4d3581dcabacb559df10366cac73507617e626c8806d23c4a0e3b33b1ba4a11d38f0d6b19a1e1e00"
    b'"}'
)
"""Entry of a server as version 1.3.28 posts it; the last bytes of the signature are changed."""
SERVER_OF_2019 = (
    b'{"version":"0.0.1","sequence":0,"timestamp":1,"static":"","server":{"address":"h:1","port":"",'
    b'"available_connections":5},"signature":""}'
)
NOBODY = b'{"message":"%s","code":404}' % NO_SERVERS.encode()


class RuleTests(SynchronousTestCase):
    """Rules called directly."""

    def test_a_list_of_servers_tells_the_kind_of_discovery(self) -> None:
        for status, body, expected in (
            (404, NOBODY, VERSION_1),
            (200, b"[%s]" % SERVER_OF_TODAY, VERSION_1),
            (200, b"[%s,%s]" % (SERVER_OF_2019, SERVER_OF_TODAY), VERSION_1),
            (200, b"[]", GO_2019),
            (200, b"[%s]" % SERVER_OF_2019, GO_2019),
            (200, b"<html>", ""),
            (200, b"{}", ""),
            (404, b"404 page not found\n", ""),
            (404, b'{"message":"no","code":404}', ""),
            (500, b"[]", ""),
            (200, b"[" * 100_000, ""),
        ):
            self.assertEqual(recognise(status, body, path_is_unknown=True), expected, body[:40])
            known = expected if expected == VERSION_1 else ""
            self.assertEqual(recognise(status, body, path_is_unknown=False), known, body[:40])

    def test_an_entry_tells_the_kind_of_discovery(self) -> None:
        visor = b'{"client":{"delegated_servers":[]},"client_type":"visor"}'
        for body, expected in (
            (SERVER_OF_TODAY, True),
            (visor, True),
            (SERVER_OF_2019, False),
            (b"7", False),
            (b"", False),
            (b"[" * 100_000, False),
        ):
            self.assertIs(is_version_1(body), expected, body[:40])


class Elsewhere(Resource):
    """A service that answers some paths, and all others as Go's router does."""

    isLeaf = True

    def __init__(self, **paths: tuple[int, bytes]) -> None:
        super().__init__()
        self.paths = paths
        self.asked: list[str] = []

    def render(self, request: Any) -> bytes:
        path = request.path.decode()
        self.asked.append(path)
        status, body = self.paths.get(
            path.strip("/").replace("/", "_").replace("-", "_"), (404, b"404 page not found\n")
        )
        request.setResponseCode(status)
        return body


class LookupTests(SynchronousTestCase):
    """Each case has a single look-up, and one line that names the kind of discovery."""

    def lookup(self, there: Resource) -> Lookup:
        return Lookup(Clock(), "http://there", http=cast(Any, StubTreq(there)))

    def test_a_discovery_of_today(self) -> None:
        for answer in ((404, NOBODY), (200, b"[%s]" % SERVER_OF_TODAY)):
            there = Elsewhere(dmsg_discovery_available_servers=answer)
            lookup = self.lookup(there)
            for asking in (
                lookup.available_servers(),
                lookup.entry(KEY.public),
                lookup.update(KEY, lambda blank: replace(blank, client=ClientMeta(()))),
                lookup.delete(KEY),
                lookup.ask("POST", "/discovery/nameplates", b"{}"),
            ):
                said = str(self.failureResultOf(asking, WrongDiscovery).value)
                self.assertEqual(said, f"discovery http://there: {VERSION_1}")
            self.assertEqual(len(there.asked), 10)

    def test_a_discovery_of_2019(self) -> None:
        """That discovery does not know the paths, and its answer about a single entry does not show its kind."""
        there = Elsewhere(dmsg_discovery_available_servers=(200, b"[]"))
        lookup = self.lookup(there)
        self.failureResultOf(lookup.entry(KEY.public), EntryNotFound)
        self.assertIn(GO_2019, str(self.failureResultOf(lookup.available_servers(), WrongDiscovery).value))

    def test_a_discovery_with_other_error_texts_is_recognised(self) -> None:
        """The discovery has the paths of the seed documents, but its 404 is no JSON. It is examined once."""
        there = Elsewhere(discovery_available_servers=(200, b"[]"))
        lookup = self.lookup(there)
        for _ in range(3):
            self.failureResultOf(lookup.entry(KEY.public), EntryNotFound)
        self.assertEqual(self.successResultOf(lookup.available_servers()), [])
        self.assertEqual(there.asked.count("/dmsg-discovery/available_servers"), 1)

    def test_a_url_of_another_service_is_no_discovery(self) -> None:
        there = Elsewhere()
        lookup = self.lookup(there)
        for _ in range(3):
            failure = self.failureResultOf(lookup.available_servers(), DiscoveryError)
            self.assertNotIsInstance(failure.value, WrongDiscovery)
            self.assertIn("is not a discovery", str(failure.value))
        self.assertEqual(there.asked.count("/dmsg-discovery/available_servers"), 1)

    def test_a_proxy_whose_discovery_is_away_is_not_called_another_program(self) -> None:
        """nginx answers with a page of its own while the discovery restarts, and when its limit is exceeded."""
        for status, text in (
            (429, "refuses further requests"),
            (502, "cannot reach"),
            (503, "cannot reach"),
            (504, "cannot reach"),
        ):
            there = Elsewhere(discovery_available_servers=(status, b"<html>nginx</html>"))
            said = str(self.failureResultOf(self.lookup(there).available_servers(), DiscoveryError).value)
            self.assertIn(text, said)
            self.assertIn(f"try again later ({status})", said)
        there = Elsewhere(discovery_available_servers=(500, b"<html></html>"))
        said = str(self.failureResultOf(self.lookup(there).available_servers(), DiscoveryError).value)
        self.assertEqual(said, "discovery http://there: the program at this URL is not a discovery (500)")

    def test_a_foreign_discovery_is_no_final_error_while_another_is_away(self) -> None:
        """The other discovery may return, so the client waits for it."""
        wrong = self.lookup(Elsewhere(dmsg_discovery_available_servers=(404, NOBODY)))
        away = self.lookup(Elsewhere())
        for ask in (
            lambda lookups: lookups.available_servers(),
            lambda lookups: lookups.update(KEY, lambda blank: replace(blank, client=ClientMeta(()))),
        ):
            failure = self.failureResultOf(ask(Lookups([wrong, away])), DiscoveryError)
            self.assertNotIsInstance(failure.value, WrongDiscovery)
            self.failureResultOf(ask(Lookups([wrong, wrong])), WrongDiscovery)


class PostedTests(APICase):
    """Here."""

    def test_current_servers_are_recognised(self) -> None:
        status, message = self.message("POST", "/dmsg-discovery/entry/", SERVER_OF_TODAY)
        self.assertEqual((status, message), (401, f"invalid signature: {VERSION_1_POSTED}"))

    def test_other_invalid_posts_are_answered_as_before(self) -> None:
        forged = json.loads(self.old_server_entry(b"x").to_json())
        forged["sequence"] = 1
        answer = self.message("POST", "/dmsg-discovery/entry/", json.dumps(forged).encode())
        self.assertEqual(answer, (401, "invalid signature"))
