"""Discovery as the Messaging System uses it: items D of the checklist."""

from __future__ import annotations

import json
from dataclasses import replace

from dmsg.discovery.entries.dialects import Dialect, decode_verified
from dmsg.discovery.entries.entry import ClientMeta, Entry, ServerMeta, features, with_feature
from dmsg.keys import PubKey, SecKey
from dmsg.messaging.core.wire import Profile
from tests.discovery.service.test_api import APICase
from tests.messaging.support import KEYS, vectors

FULL = "available servers: includes servers with 0 available_connections"
INVALID = "entry validation error: "
A, S = KEYS["A"], KEYS["S"]


class D_DiscoveryTests(APICase):
    """The three endpoints, and what was recorded of them."""

    def entry(self, sequence: int = 0, timestamp: int = 1) -> Entry:
        return Entry("0.0.1", sequence, timestamp, A.public.hex(), client=ClientMeta((S.public.hex(),))).sign(A)

    def post(self, entry: Entry) -> tuple[int, str]:
        return self.message("POST", "/messaging-discovery/entry/", entry.to_json())

    def test_D1_three_endpoints(self) -> None:
        self.assertEqual(self.post(self.entry()), (200, "wrote a new entry"))
        status, body = self.request("GET", f"/messaging-discovery/entry/{A.public.hex()}")
        self.assertEqual((status, json.loads(body)["client"]), (200, {"delegated_servers": [S.public.hex()]}))
        self.assertEqual(self.request("GET", "/messaging-discovery/available_servers"), (200, b"[]"))

    def test_D2_every_recorded_exchange(self) -> None:
        """The same status and body, but where this discovery has a reason to differ."""
        exchanges = vectors("discovery_memory")["exchanges"]
        differ = {}
        for case in exchanges:
            body = case.get("request_body")
            status, answer = self.request(case["method"], case["path"], body.encode() if body else None)
            expected = case["response_body"].encode()
            same = json.loads(answer) == json.loads(expected) if expected[:1] in b"[{" else answer == expected
            if status != case["status"] or not same:
                differ[case["name"]] = (status, answer)
        self.assertEqual(set(differ), set(self.reasons))
        for name, (status, word) in self.reasons.items():
            self.assertEqual(differ[name][0], status, name)
            self.assertIn(word, differ[name][1], name)
        # A key that posts a client entry is no longer a server, so it is not listed.
        self.assertEqual(
            len(json.loads(differ["available servers: includes servers with 0 available_connections"][1])), 1
        )
        self.assertGreater(len(exchanges), 30)

    reasons = {
        # The service for which dmsg's client of 2019 was written gives this answer to the same request.
        "get with empty key": (404, b"entry of public key is not found"),
        # The answer is a redirect without a page.
        "get without trailing slash": (301, b""),
        # Errors are in JSON.
        "unknown path": (404, b'{"message":"not found","code":404}'),
        # The paths of the seed documents are served.
        "path of the extended spec text": (200, b'"sequence":1'),
        # Full servers are not listed.
        FULL: (200, b'"available_connections":10'),
    }

    def test_D3_signed_fields_of_entries(self) -> None:
        recorded = vectors("discovery_memory")["entry_signature"]
        for kind in ("client", "server"):
            preimage = recorded[f"{kind}_entry_preimage"]
            key = SecKey.from_hex(recorded[f"{kind}_entry_sec"])
            signed = recorded[f"{kind}_entry_signed"]
            text = signed if isinstance(signed, str) else json.dumps(signed)
            entry = decode_verified(text.encode(), Dialect.GO2019)
            self.assertEqual(entry.signing_json().decode(), preimage)
            self.assertEqual(key.public, PubKey.from_hex(entry.static))
            self.assertEqual(json.loads(entry.sign(key).to_json()).keys(), json.loads(text).keys())

    def test_D4_sequence_and_timestamp(self) -> None:
        self.assertEqual(self.post(self.entry(1)), (422, f"{INVALID}new entry has non-zero sequence"))
        self.assertEqual(self.post(self.entry()), (200, "wrote a new entry"))
        late = "sequence field of new entry is not sequence of old entry + 1"
        self.assertEqual(self.post(self.entry(2, 9)), (422, INVALID + late))
        early = "previous entry timestamp is not set before current entry timestamp"
        self.assertEqual(self.post(self.entry(1, 1)), (422, INVALID + early))
        self.assertEqual(self.post(self.entry(1, 2)), (200, "wrote new entry iteration"))

    def test_D5_the_same_entry_twice(self) -> None:
        self.assertEqual(self.post(self.entry())[0], 200)
        self.assertEqual(self.post(self.entry())[0], 422)

    def test_D6_tampered_entries_are_refused(self) -> None:
        self.assertEqual(self.post(replace(self.entry(), timestamp=2)), (401, "invalid signature"))

    def test_D7_ten_servers_at_most(self) -> None:
        for number in range(12):
            key = SecKey.from_seed(b"server %d" % number)
            version = with_feature("0.0.1", Profile.SEED.feature)
            entry = Entry(version, 0, 1, key.public.hex(), server=ServerMeta("h:1", 1, "")).sign(key)
            self.assertEqual(self.post(entry)[0], 200)
        status, body = self.request("GET", "/messaging-discovery/available_servers")
        self.assertEqual((status, len(json.loads(body))), (200, 10))
        self.assertEqual(
            {features(entry["version"]) for entry in json.loads(body)}, {frozenset({Profile.SEED.feature})}
        )
