"""Entries in a discovery's list of servers that are refused, and the description of the reasons."""

from __future__ import annotations

import json

from twisted.trial.unittest import SynchronousTestCase

from dmsg.discovery.entries.entry import VERSION, ClientMeta, Entry, ServerMeta
from dmsg.discovery.lookup.server_list import MAX_LISTED, MAX_REASONS, parse_server_list
from dmsg.keys import SecKey
from tests.discovery.entries.test_recognition import SERVER_OF_TODAY

KEY = SecKey.from_seed(b"server list")
GOOD = Entry(VERSION, 0, 1, KEY.public.hex(), server=ServerMeta("h:1", 5)).sign(KEY)


class RefusalTests(SynchronousTestCase):
    """Lists as a discovery may send them."""

    def check(self, listed: list[object], entries: list[Entry], why: str) -> None:
        servers = parse_server_list(listed, "discovery x")
        self.assertEqual((servers, servers.refusal), (entries, why))

    def test_each_reason_is_named(self) -> None:
        good = json.loads(GOOD.to_json())
        changed = {**good, "timestamp": 2}
        of_client = json.loads(Entry(VERSION, 0, 1, KEY.public.hex(), ClientMeta(())).sign(KEY).to_json())
        self.check([], [], "")
        self.check([good], [GOOD], "")
        self.check([good, changed], [GOOD], "discovery x: 1 of 2 server entries are refused: invalid signature")
        self.check([changed] * 2, [], "discovery x: 2 of 2 server entries are refused: invalid signature")
        self.check([of_client], [], "discovery x: 1 of 1 server entries are refused: it is no server's")
        why = "it is of today's dmsg (version 1), whose network this program cannot join"
        self.check(
            [json.loads(SERVER_OF_TODAY), changed, changed],
            [],
            f"discovery x: 3 of 3 server entries are refused: invalid signature (2), {why} (1)",
        )
        self.check([7], [], "discovery x: 1 of 1 server entries are refused: entry is not an object")

    def test_a_description_has_a_limit(self) -> None:
        """The discovery chooses the names of unknown members, which are in the reasons."""
        listed: list[object] = [{f"{number}" * 1000: 1, "version": f"{number}"} for number in range(1000)]
        servers = parse_server_list(listed, "discovery x")
        self.assertEqual(servers, [])
        self.assertTrue(servers.refusal.startswith(f"discovery x: {MAX_LISTED} of {MAX_LISTED} server"))
        self.assertLess(len(servers.refusal), 1000 * MAX_REASONS)
        reasons: list[object] = [7, {}, {"version": 7}, {"version": "1", "sequence": "x"}, {"static": 7}]
        said = parse_server_list(reasons, "discovery x").refusal
        self.assertIn("5 of 5", said)
        self.assertTrue(said.endswith(", and other reasons (2)"), said)
