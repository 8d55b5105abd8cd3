"""How soon a command is there: what its help imports."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from twisted.trial.unittest import SynchronousTestCase

from dmsg.cli.main import COMMANDS

KEYS_OF_TWINS = ("twin", "rmb")
"""Their options name kinds of keys, which other libraries know."""
SHOW = """
import sys
sys.argv = ["dmsg", sys.argv[1], "--help"]
from dmsg.cli.entry import entry
try:
    entry()
finally:
    for name in ("twisted", "cryptography", "noise", "asyncio", "importlib.metadata", "rich", "pyspark"):
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
            for name in COMMANDS
        }
        for name, process in running.items():
            out, _ = process.communicate()
            self.assertIn("Usage: dmsg", out, name)
            imported = set(re.findall("IMPORTED (.*)", out))
            self.assertEqual(imported - {"cryptography"} if name in KEYS_OF_TWINS else imported, set(), name)
