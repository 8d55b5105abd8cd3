"""The processor seconds of a test include those of its programs, and of the programs that these have started."""

from __future__ import annotations

import subprocess
import sys

from twisted.trial.unittest import SynchronousTestCase

from tests import durations

BUSY = 0.3
"""Processor seconds that the program uses."""
PROGRAM = f"import sys, time\nwhile time.process_time() < {BUSY}: pass\nprint(flush=True)\nsys.stdin.read()"


class DescendantsTests(SynchronousTestCase):
    """A program that a shell has started, such as the Python workers of Spark's Java."""

    def test_a_running_grandchild_counts(self) -> None:
        before = durations._used()[1]
        shell = subprocess.Popen(
            ["sh", "-c", '"$0" -c "$1"; exit 0', sys.executable, PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert shell.stdin is not None and shell.stdout is not None
        shell.stdout.readline()
        spent = durations._used()[1] - before
        shell.communicate()
        # The kernel counts whole ticks of a hundredth of a second.
        self.assertGreater(spent, BUSY / 2)
        self.assertEqual(shell.returncode, 0)
