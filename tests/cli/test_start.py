"""Time until a program starts: the modules that it imports."""

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

BEGIN = (
    "import sys; sys.argv = ['dmsg']; from dmsg.base.postponed_imports import postpone_imports; postpone_imports(); "
    "from dmsg.cli import entry, main; from dmsg.cli.loading import load; "
)
OF_PING = "import dmsg.cli.peers.ping; from dmsg.agent.socket_path import lines; "
OF_CLIENT = (
    "load('dmsg.cli.client_run', 'dmsg.v2019.client', 'dmsg.apps.pings'); from twisted.internet import reactor; "
    "from dmsg.discovery.lookup.lookup import Lookup; Lookup(reactor, 'http://192.0.2.1:9090'); "
)
REPORT = """
def is_internal(name):
    package, *_ = name.split(".")
    return package in sys.stdlib_module_names and any(part.startswith("_") for part in name.split("."))
print(sum(not is_internal(name) for name in sys.modules), *set(sys.modules))
"""
"""Prints the number of imported modules and their names.

Internal modules of the standard library are not counted: each Python version has others.
"""
HTTP_OF_TWISTED = frozenset(("twisted.web.client", "twisted.web.http", "treq", "hyperlink", "multipart"))
UNUSED_AT_START = frozenset(
    ("importlib.metadata", "tomllib", "rich", "dmsg.telemetry.service", "dmsg.v2019.client", "dmsg.pages.site")
)
"""Modules that an entity imports only if an option needs them."""
BUDGETS: dict[str, tuple[str, int, frozenset[str]]] = {
    "a command that works through an agent": (
        BEGIN + OF_PING,
        166,
        frozenset(("twisted", "cryptography", "noise", "asyncio", "zope.interface", "attr")),
    ),
    "a command with a client": (
        BEGIN + OF_PING + OF_CLIENT,
        549,
        HTTP_OF_TWISTED
        | {"twisted.internet.endpoints", "klein", "prometheus_client", "rich", "sqlite3", "segno"}
        | {"service_identity", "cryptography.x509.base", "http.client", "email"},
    ),
    "dmsg-server": (
        "import sys, dmsg.tap.server; from twisted.internet import reactor; ",
        559,
        HTTP_OF_TWISTED
        | UNUSED_AT_START
        | {"klein", "werkzeug", "sqlite3", "decimal", "prometheus_client", "dmsg.telemetry.relays"},
    ),
    "dmsg-discovery": (
        "import sys, dmsg.tap.discovery; from twisted.internet import reactor; ",
        676,
        UNUSED_AT_START | {"treq", "multipart", "dmsg.net.redis", "dmsg.discovery.store.redis"},
    ),
}
"""By program: code that imports what the program imports, maximum number of modules, and modules that it does not need.

Twisted's reactor alone is some 400 modules.
"""


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

    def test_modules_that_a_program_imports(self) -> None:
        """On average, each module costs a third of a millisecond and 60 KiB."""
        for name, (code, most, unwanted) in BUDGETS.items():
            done = subprocess.run(
                [sys.executable, "-c", f"{code}\n{REPORT}"], capture_output=True, text=True, check=False
            )
            self.assertEqual(done.returncode, 0, done.stderr)
            number, *modules = done.stdout.split()
            self.assertEqual(unwanted & set(modules), set(), name)
            self.assertLessEqual(int(number), most, name)
