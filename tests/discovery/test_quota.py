"""How many servers somebody may have listed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg.discovery import quota as quota_module
from dmsg.discovery.quota import FORGOTTEN_AFTER, OF_HOST, OF_POSTER, ServerQuota


class QuotaTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.quota = ServerQuota()

    def post(self, number: int, poster: str = "8.8.8.8", host: str = "", now: float = 0.0) -> str | None:
        return self.quota.refusal(f"{number:066x}", poster, host or f"relay{number}.example", now)

    def test_of_one_address(self) -> None:
        self.assertEqual([self.post(number) for number in range(OF_POSTER)], [None] * OF_POSTER)
        self.assertEqual(self.post(99), "too many servers from 8.8.8.8")
        self.assertIsNone(self.post(99, "9.9.9.9"))
        # those that are there are posted again and again
        self.assertIsNone(self.post(0))
        self.assertEqual(self.post(98), "too many servers from 8.8.8.8")

    def test_of_one_block(self) -> None:
        for number in range(OF_POSTER):
            self.assertIsNone(self.post(number, f"2a00:1450:4001:81b::{number:x}"))
        self.assertIsNotNone(self.post(99, "2a00:1450:4001:81b:ffff::1"))

    def test_at_one_host(self) -> None:
        """By however many who post: clients would all be sent to it."""
        for number in range(OF_HOST):
            self.assertIsNone(self.post(number, f"8.8.{number}.1", "Victim.example"))
        self.assertEqual(self.post(99, "8.9.9.9", "victim.EXAMPLE"), "too many servers at victim.example")

    def test_beside_discovery_there_is_no_limit(self) -> None:
        for number in range(200):
            for poster in ("127.0.0.1", "10.0.0.7", "fd00::1", ""):
                self.assertIsNone(self.post(number, poster, "127.0.0.1"))

    def test_those_that_are_gone_are_forgotten(self) -> None:
        for number in range(OF_POSTER):
            self.post(number)
        self.assertIsNotNone(self.post(99, now=FORGOTTEN_AFTER - 1))
        self.assertIsNone(self.post(99, now=FORGOTTEN_AFTER))

    @given(
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(0, 3), st.integers(0, 999)), max_size=60)
    )
    def test_the_counts_are_right(self, posts: list[tuple[int, int, int, int]]) -> None:
        self.setUp()
        self.patch(quota_module, "OF_POSTER", 2)
        self.patch(quota_module, "REMEMBERED", 5)
        now = 0.0
        for number, poster, host, passed in posts:
            now += passed
            self.post(number, f"8.8.8.{poster}", f"h{host}", now)
            servers = self.quota._servers
            self.assertLessEqual(len(servers), 6)
            self.assertEqual(sum(self.quota._counts.values()), 2 * len(servers))
            for name, count in self.quota._counts.items():
                self.assertEqual(count, sum(name in server[:2] for server in servers.values()))
