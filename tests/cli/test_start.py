"""Time until a command starts: the modules that its help imports."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from twisted.trial.unittest import SynchronousTestCase

from dmsg.cli.main import COMMANDS

KEYS_OF_TWINS = ("twin", "rmb")
"""Commands whose options name kinds of keys, which other libraries define."""
SHOW = """
import os, sys
import dmsg.cli.main
for name in sys.argv[1:]:
    child = os.fork()
    if not child:
        break
    os.waitpid(child, 0)
else:
    sys.exit()
sys.argv = ["dmsg", name, "--help"]
print("===", name)
from dmsg.cli.entry import entry
try:
    entry()
finally:
    for name in ("twisted", "cryptography", "noise", "asyncio", "importlib.metadata", "rich", "pyspark"):
        if name in sys.modules:
            print("IMPORTED", name)
"""
"""Shows the help of each command in a child process, as all commands begin with the same imports."""


class StartTests(SynchronousTestCase):
    def test_help_needs_no_network(self) -> None:
        """Twisted alone takes longer than a person should wait for a page of text."""
        environment = {**os.environ, "COVERAGE_PROCESS_START": ""}
        command = [sys.executable, "-c", SHOW, *COMMANDS]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        self.assertEqual(done.stderr, "")
        shown = dict(said.split("\n", 1) for said in done.stdout.split("=== ")[1:])
        self.assertEqual(set(shown), set(COMMANDS))
        for name, out in shown.items():
            self.assertIn("Usage: dmsg", out, name)
            imported = set(re.findall("IMPORTED (.*)", out))
            self.assertEqual(imported - {"cryptography"} if name in KEYS_OF_TWINS else imported, set(), name)
