"""Ctrl-C while a program imports its modules."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

import dmsg

PROGRAM = """
import os, signal, sys
name, is_ignored = sys.argv[1], sys.argv[2] == "ignored"
signal.signal(signal.SIGINT, signal.SIG_IGN if is_ignored else signal.default_int_handler)
def interrupt(event, details):
    if event == "import" and name == "all":
        os.write(2, details[0].encode() + bytes([10]))
    elif event == "import" and details[0] == name:
        os.kill(os.getpid(), signal.SIGINT)
sys.argv[:3] = ["program"]
sys.addaudithook(interrupt)
"""
"""Begin of a program to which Ctrl-C comes when it begins to import a module, or which names its imports."""
COMMAND = "from dmsg.cli.entry import entry; entry()", "config", "path"
ENTITY = "from twisted.scripts.twistd import run; run()", "-n", "--pidfile=", "dmsg-discovery", "--help"
UNGUARDED = ["dmsg", "dmsg.cli", "dmsg.cli.entry", "dmsg.cli.loading", "dmsg.lazily"]
"""Modules of dmsg that the program imports before it can handle Ctrl-C."""


def run(program: tuple[str, ...], name: str, signals: str = "handled") -> tuple[int, str, str]:
    """Run the program; status, output, errors."""
    code, *arguments = program
    command = [sys.executable, "-c", PROGRAM + code, name, signals, *arguments]
    environment = {**os.environ, "COVERAGE_PROCESS_START": "", "DMSG_CONFIG": "config.toml"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return done.returncode, done.stdout, done.stderr


class LoadingTests(SynchronousTestCase):
    def test_only_few_small_modules_are_imported_before_ctrl_c_is_handled(self) -> None:
        """Modules such as ``signal``, ``enum`` and ``importlib`` take most of the time until then."""
        code = "import sys, __future__; before = set(sys.modules); import dmsg.cli.entry; "
        code += "print(*sorted(set(sys.modules).difference(before)))"
        # Without ``site``, no other package imports these modules first.
        environment = {**os.environ, "PYTHONPATH": str(Path(dmsg.__file__).parent.parent)}
        command = [sys.executable, "-S", "-c", code]
        found = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        self.assertEqual(found.stdout.split(), UNGUARDED)

    def test_ctrl_c_prints_nothing(self) -> None:
        """Ctrl-C prints nothing during the import of any module that is not needed to handle the signal."""
        status, out, err = run(COMMAND, "all")
        self.assertEqual((status, out), (0, "config.toml\n"))
        imported = {name for name in err.split() if name.startswith("dmsg")}
        self.assertIn("dmsg.cli.main", imported)
        for name in sorted(imported.difference(UNGUARDED)):
            status, out, err = run(COMMAND, name)
            self.assertEqual((out, err.strip()), ("", ""), name)
            self.assertIn(status, (-signal.SIGINT, 130), name)

    def test_ctrl_c_prints_nothing_at_the_end(self) -> None:
        """The command has printed its result, and waits for threads or collects garbage."""
        at_end = "import atexit; atexit.register(os.kill, os.getpid(), signal.SIGINT); "
        code, *arguments = COMMAND
        result = run((at_end + code, *arguments), "none")
        self.assertEqual(result, (-signal.SIGINT, "config.toml\n", ""))

    def test_ctrl_c_ends_an_entity(self) -> None:
        """Ctrl-C also works while an imported module ignores errors."""
        for name in ("dmsg.tap.discovery", "dmsg.tap.running", "dmsg.discovery.service.settings", "klein"):
            self.assertEqual(run(ENTITY, name), (-signal.SIGINT, "", ""), name)

    def test_a_signal_that_is_ignored_stays_ignored(self) -> None:
        """A shell lets programs in the background ignore SIGINT, so that Ctrl-C ends only the one in the foreground."""
        for name in ("dmsg.cli.main", "click"):
            self.assertEqual(run(COMMAND, name, "ignored"), (0, "config.toml\n", ""), name)
