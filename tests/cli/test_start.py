"""How soon a command is there: what its help imports."""

from __future__ import annotations

import os
import subprocess
import sys

from twisted.trial.unittest import SynchronousTestCase

QUICK = ("ping", "trace", "forward", "expose", "key", "discovery", "name")
"""Commands whose help needs nothing of what they need to run."""
SHOW = """
import sys
sys.argv = ["dmsg", sys.argv[1], "--help"]
from dmsg.cli.entry import entry
try:
    entry()
finally:
    for name in ("twisted", "cryptography", "noise", "asyncio", "importlib.metadata"):
        if name in sys.modules:
            print("IMPORTED", name)
"""


class StartTests(SynchronousTestCase):
    def test_help_needs_no_network(self) -> None:
        """Twisted alone takes longer than a person should wait for a page of text."""
        running = {
            name: subprocess.Popen(
                [sys.executable, "-c", SHOW, name],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "COVERAGE_PROCESS_START": ""},
            )
            for name in QUICK
        }
        for name, process in running.items():
            out, _ = process.communicate()
            self.assertIn("Usage: dmsg", out, name)
            self.assertNotIn("IMPORTED", out, name)
