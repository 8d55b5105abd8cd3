"""The command line of the siege."""

from __future__ import annotations

import io
import sys

from twisted.trial.unittest import SynchronousTestCase

from benchmarks.siege.__main__ import main


class SecondsTests(SynchronousTestCase):
    def test_an_attack_that_is_too_short_is_refused_in_one_line(self) -> None:
        for seconds in ("1", "nan", "-3"):
            self.patch(sys, "argv", ["siege", f"--seconds={seconds}"])
            said = io.StringIO()
            self.patch(sys, "stderr", said)
            self.assertEqual(self.assertRaises(SystemExit, main).code, 2)
            self.assertEqual(said.getvalue(), f"python -m benchmarks.siege: --seconds is 2 or more, not {seconds}\n")
