"""Limit of servers for each place."""

from __future__ import annotations

from hypothesis import given, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg.discovery.service import server_quota as quota_module
from dmsg.discovery.service.server_quota import FORGOTTEN_AFTER, MAX_PER_POSTER, ServerQuota, TooManyServers


class QuotaTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.quota = ServerQuota()

    def post(self, number: int, poster: str = "8.8.8.8", now: float = 0.0, taken: bool = True) -> str | None:
        """:param taken: by the store."""
        static = f"{number:066x}"
        try:
            place = self.quota.reserve(static, poster, now)
        except TooManyServers as refusal:
            return str(refusal)
        if taken:
            self.quota.accept(place, now)
        else:
            self.quota.release(place)
        return None

    def test_one_address_has_a_limited_number_of_servers(self) -> None:
        self.assertEqual([self.post(number) for number in range(MAX_PER_POSTER)], [None] * MAX_PER_POSTER)
        self.assertEqual(self.post(99), "too many servers from 8.8.8.8")
        self.assertIsNone(self.post(99, "9.9.9.9"))
        # Known servers can post repeatedly.
        self.assertIsNone(self.post(0))
        self.assertEqual(self.post(98), "too many servers from 8.8.8.8")

    def test_one_block_has_a_limited_number_of_servers(self) -> None:
        for number in range(MAX_PER_POSTER):
            self.assertIsNone(self.post(number, f"2a00:1450:4001:81b::{number:x}"))
        self.assertIsNotNone(self.post(99, "2a00:1450:4001:81b:ffff::1"))

    def test_wider_blocks_have_a_limited_number_of_servers(self) -> None:
        """A stranger with a /48 had 65536 times as many."""
        taken = [self.post(number, f"2a00:1450:4001:{number:x}::1") for number in range(1000)]
        self.assertEqual(taken.count(None), 8 * MAX_PER_POSTER)
        self.assertEqual(taken[-1], "too many servers from 2a00:1450:4001::/48")
        self.assertIsNone(self.post(2000, "2a00:1450:4002::1"))

    def test_posts_refused_by_the_store_do_not_count(self) -> None:
        """Otherwise a stranger could use up the quota by posting a server's public entry again."""
        for number in range(MAX_PER_POSTER):
            self.post(number)
        self.assertIsNone(self.post(0, "9.9.9.9", taken=False))
        self.assertIsNone(self.post(0))
        self.assertIsNotNone(self.post(99))
        # A server that moves counts at its new address.
        self.assertIsNone(self.post(0, "9.9.9.9"))
        self.assertIsNone(self.post(99))
        self.assertIsNotNone(self.post(0))

    def test_beside_discovery_there_is_no_limit(self) -> None:
        for number in range(200):
            for poster in ("127.0.0.1", "10.0.0.7", "fd00::1", ""):
                self.assertIsNone(self.post(number, poster))

    def test_removed_servers_no_longer_count(self) -> None:
        for number in range(MAX_PER_POSTER):
            self.post(number)
        self.assertIsNotNone(self.post(99, now=FORGOTTEN_AFTER - 1))
        self.assertIsNone(self.post(99, now=FORGOTTEN_AFTER))

    @given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(0, 999)), max_size=60))
    def test_counts_equal_those_of_a_recount(self, posts: list[tuple[int, int, int]]) -> None:
        self.setUp()
        self.patch(quota_module, "MAX_PER_POSTER", 2)
        self.patch(quota_module, "MAX_COUNTED_SERVERS", 5)
        now = 0.0
        for number, poster, passed in posts:
            now += passed
            self.post(number, f"8.8.8.{poster}", now)
            servers = self.quota._servers
            self.assertLessEqual(len(servers), 5)
            self.assertEqual(sum(count for _, count in self.quota._counts.narrow_blocks()), len(servers))
            for name, count in self.quota._counts.narrow_blocks():
                self.assertEqual(count, sum(name == block for block, _ in servers.values()))
                self.assertLessEqual(count, 2)
