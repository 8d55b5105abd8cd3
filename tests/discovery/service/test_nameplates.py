"""Nameplates in discovery's API, and in programs that use it."""

from __future__ import annotations

import json
from typing import Any

from twisted.internet.defer import Deferred, fail, succeed

from dmsg.discovery.entries.nameplates import (
    FAILED_LOOKUP_COST,
    LARGEST_NAMEPLATE,
    LOOK_BURST,
    LOOK_RATE,
    MAX_PER_ADDRESS,
    NAMEPLATE_LIFETIME,
    Release,
)
from dmsg.discovery.lookup.lookup import Lookup
from dmsg.discovery.lookup.lookups import Lookups
from dmsg.discovery.lookup.nameplates import PATH, NoSuchNameplate, claim, find
from dmsg.discovery.lookup.requests import DiscoveryRequests
from dmsg.discovery.store.base import StoreContended
from dmsg.errors import DiscoveryError
from dmsg.keys import SecKey
from tests.discovery.service.test_api import APICase

KEY, OTHER, THIRD = (SecKey.from_seed(b"nameplate %d" % number) for number in range(3))
ONE, TWO, THREE = (key.public.hex() for key in (KEY, OTHER, THIRD))


class AnswerTests(APICase):
    """Answers of discovery, and their effect in a client program."""

    def setUp(self) -> None:
        super().setUp()
        self.lookups = Lookups([Lookup(self.clock, "http://discovery", http=self.http)])

    def run_(self, asking: Any) -> Any:
        return self.successResultOf(Deferred.fromCoroutine(asking))

    def refused(self, asking: Any, kind: type[Exception] = DiscoveryError) -> str:
        return str(self.failureResultOf(Deferred.fromCoroutine(asking), kind).value)

    def test_a_nameplate_is_claimed_renewed_found_and_released(self) -> None:
        nameplate = self.run_(claim(self.lookups, KEY))
        self.assertEqual(len(str(nameplate.number)), 4)
        self.assertEqual(self.run_(find(self.lookups, nameplate.number)), KEY.public)
        self.now = NAMEPLATE_LIFETIME - 1
        self.assertTrue(self.run_(nameplate.renew()))
        self.now = NAMEPLATE_LIFETIME + 1
        self.assertEqual(self.run_(find(self.lookups, nameplate.number)), KEY.public)
        self.run_(nameplate.release())
        self.assertIn("nobody waits", self.refused(find(self.lookups, nameplate.number), NoSuchNameplate))
        self.run_(nameplate.release())

    def test_a_nameplate_lost_to_another_key_is_reported(self) -> None:
        """The discovery was absent for longer than the nameplate's lifetime, and another key has the number now."""
        nameplate = self.run_(claim(self.lookups, KEY))
        self.now = 2 * NAMEPLATE_LIFETIME
        self.run_(self.as_coroutine(self.store.nameplates.claim(TWO, (nameplate.number,), "", 9, self.now, 1e9)))
        self.assertFalse(self.run_(nameplate.renew()))

    async def as_coroutine(self, asked: Deferred[Any]) -> Any:
        return await asked

    def test_an_address_with_too_many_nameplates_is_refused(self) -> None:
        self.api.client_of = lambda request: "192.0.2.77"  # The address is not public.
        for number in range(MAX_PER_ADDRESS + 9):
            self.assertEqual(self.request("POST", PATH, self.body(b"a%d" % number))[0], 200)
        self.api.client_of = lambda request: "8.8.8.8"
        for number in range(MAX_PER_ADDRESS):
            self.assertEqual(self.request("POST", PATH, self.body(b"b%d" % number))[0], 200)
        self.assertEqual(
            self.message("POST", PATH, self.body(b"one more")), (429, "8.8.8.8 has 32 nameplates, which is the limit")
        )
        self.assertEqual(self.request("POST", PATH, self.body(b"b1"))[0], 200)
        self.assertIn("nameplates", self.metrics.render().decode())

    def test_a_site_has_no_more_nameplates_than_an_address(self) -> None:
        """Whoever has a /48 of IPv6 has 65536 blocks of addresses."""
        blocks = iter(range(0, 65536, 16))
        self.api.client_of = lambda request: f"2600:1f:7:{next(blocks):x}::1"
        for number in range(8 * MAX_PER_ADDRESS):
            self.assertEqual(self.request("POST", PATH, self.body(b"c%d" % number))[0], 200)
        refused = self.message("POST", PATH, self.body(b"one more"))
        self.assertEqual(refused, (429, "2600:1f:7::/48 has 256 nameplates, which is the limit"))
        self.api.client_of = lambda request: "2600:1f:8::1"
        self.assertEqual(self.request("POST", PATH, self.body(b"another site"))[0], 200)
        self.clock.advance(NAMEPLATE_LIFETIME)
        self.api.client_of = lambda request: "2600:1f:7:ffff::1"
        self.assertEqual(self.request("POST", PATH, self.body(b"later"))[0], 200)

    def test_guesses_of_numbers_are_rate_limited(self) -> None:
        """Without the limit, one address could find every code within a second.  Successful and failed look-ups count
        alike.
        """
        codes = {self.run_(claim(self.lookups, SecKey.from_seed(b"code %d" % number))).number for number in range(13)}
        self.api.client_of = lambda request: "8.8.8.8"
        said = [self.request("GET", f"{PATH}/{number}")[0] for number in range(1000, 1100)]
        self.assertEqual(len(said) - said.count(429), LOOK_BURST)
        self.assertEqual({self.request("GET", f"{PATH}/{number}")[0] for number in codes}, {429})
        self.clock.advance(1 / LOOK_RATE)
        self.assertEqual(self.request("GET", f"{PATH}/{min(codes)}")[0], 200)
        self.assertEqual(self.message("GET", f"{PATH}/{min(codes)}")[0], 429)
        # Another client does not have to wait.
        self.api.client_of = lambda request: "9.9.9.9"
        self.assertEqual(self.request("GET", f"{PATH}/{min(codes)}")[0], 200)
        # A client with a whole site (/48) has eight times as many look-ups, however many blocks it uses.
        self.api.client_of = lambda request: f"2600:1f:7:{next(blocks) << 4:x}::1"
        blocks = iter(range(4096))
        said = [self.request("GET", f"{PATH}/{number}")[0] for number in range(2000, 2300)]
        self.assertEqual(len(said) - said.count(429), 8 * LOOK_BURST)

    def test_under_attack_numbers_are_longer(self) -> None:
        def digits(seed: bytes) -> int:
            return len(str(json.loads(self.request("POST", PATH, self.body(seed))[1])["nameplate"]))

        self.assertEqual(digits(b"before"), 4)
        hosts = iter(range(100))
        self.api.client_of = lambda request: f"8.8.{next(hosts)}.8"
        for number in range(99):
            self.request("GET", f"{PATH}/{99_000_000 + number}")
        self.api.client_of = lambda request: "9.9.9.9"
        self.assertEqual(digits(b"under attack"), 6)
        self.assertEqual(digits(b"before"), 4)  # A nameplate that is kept has the same length as before.
        self.clock.advance(NAMEPLATE_LIFETIME)
        self.assertEqual(digits(b"after it"), 4)

    def body(self, seed: bytes) -> bytes:
        return json.dumps({"static": SecKey.from_seed(seed).public.hex()}).encode()

    def test_a_claim_that_loses_every_race_is_retried_and_counted(self) -> None:
        """The client may retry the claim, and the failure is counted."""
        self.store.nameplates.claim = lambda *asked: fail(StoreContended("other processes changed it"))
        self.assertEqual(self.message("POST", PATH, self.body(b"one")), (503, "other processes changed it"))
        self.assertIn('dmsg_discovery_refused_total{reason="contended"} 1.0', self.metrics.render().decode())

    def test_failed_lookups_count_against_the_rate(self) -> None:
        charged: list[float] = []
        self.api.charge = lambda request, requests: charged.append(requests)
        self.assertEqual(self.message("GET", f"{PATH}/77"), (404, "there is no such nameplate"))
        self.assertEqual(charged, [FAILED_LOOKUP_COST])

    def test_malformed_requests_are_refused(self) -> None:
        for path in ("/0x7", "/123456789", "/-1", "/%C2%B2", "/a"):
            self.assertEqual(self.message("GET", PATH + path)[0], 422, path)
        release = Release(7, ONE).sign(KEY).to_json()
        self.assertEqual(self.message("DELETE", f"{PATH}/8", release)[0], 422)
        self.assertEqual(self.message("DELETE", f"{PATH}/7", release)[0], 404)
        self.assertEqual(self.message("DELETE", f"{PATH}/7", Release(7, ONE).sign(OTHER).to_json())[0], 401)
        self.assertEqual(self.message("POST", PATH, b"{}")[0], 400)
        self.assertEqual(self.message("GET", PATH)[0], 405)

    def test_a_wrong_answer_of_discovery_is_one_line(self) -> None:
        """The error text is one line about the answer."""
        for answer in (b"[]", b"7", b"{}", b'{"static":"00"}', b"\xff", b"[" * 100_000):
            self.patch(
                DiscoveryRequests, "request", lambda *_, answer=answer: self.as_coroutine(succeed((200, answer)))
            )
            for asking in (claim(self.lookups, KEY), find(self.lookups, 7)):
                self.assertLess(len(self.refused(asking)), 200)
        for number, lasts in (
            (0, 600),
            (LARGEST_NAMEPLATE + 1, 600),
            (True, 600),
            (7, 0),
            (7, 10**9),
            ("7", 600),
            (7, 1e308),
        ):
            answer = json.dumps({"nameplate": number, "lasts": lasts}).encode()
            self.patch(
                DiscoveryRequests, "request", lambda *_, answer=answer: self.as_coroutine(succeed((200, answer)))
            )
            self.assertIn("malformed", self.refused(claim(self.lookups, KEY)))

    def test_a_nameplate_with_an_invalid_key_is_an_error(self) -> None:
        """The client that looks up the nameplate reports the error."""
        status, body = self.request("POST", PATH, json.dumps({"static": "02" + "ff" * 32}).encode())
        self.assertEqual(status, 200)
        self.assertIn("not a point", self.refused(find(self.lookups, json.loads(body)["nameplate"])))

    def test_a_discovery_without_nameplates_is_named(self) -> None:
        self.patch(DiscoveryRequests, "request", lambda *_: self.as_coroutine(succeed((404, b"{}"))))
        self.assertIn("runs an older version", self.refused(claim(self.lookups, KEY)))
        self.assertIn("nobody waits", self.refused(find(self.lookups, 7)))
