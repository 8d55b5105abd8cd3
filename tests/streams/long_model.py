"""The model of streams in ``docs/proofs``, checked by Spin: ``make long WHICH=proofs``."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from twisted.trial.unittest import SkipTest, TestCase

PROOFS = Path(__file__).parents[2] / "docs" / "proofs"
MODEL = PROOFS / "stream.pml"
SEARCH = ("-m500000", "-w24")
"""Options of the search: maximum depth, and 2**24 entries in the table of states."""
TIMEOUT = 900
"""Seconds that one search may take; on an idle machine, it takes ten."""
REMOVED = {
    "NO_CONFIRMATION": ("THIEF", "assertion violated"),
    "NO_GENERATIONS": ("", "assertion violated"),
    "SENDS_UNPROVEN": ("", "assertion violated"),
    "DELIVERS_AGAIN": ("", "assertion violated (r_delivered==r_given)"),
    "NO_PROBE": ("", "invalid end state"),
    "NO_PROBE_AT_CLOSED_WINDOW": ("", "invalid end state"),
    "CLOSES_SUSPENDED": ("", "invalid end state"),
    "FORGETS_CLOSED": ("", "assertion violated"),
}
"""For each rule of the model: the attacker without whom its removal does no harm, and the error that Spin reports."""


class StreamModelTests(TestCase):
    """Spin visits all states of ``docs/proofs/stream.pml``."""

    timeout = TIMEOUT

    def setUp(self) -> None:
        missing = [name for name in ("spin", "gcc") if shutil.which(name) is None]
        if missing:
            raise SkipTest(f"there is no {' and no '.join(missing)} here")

    def check(self, *names: str) -> str:
        """Return the report of a search in which these names are defined."""
        directory = Path(self.mktemp())
        directory.mkdir()
        commands = (
            ["spin", *(f"-D{name}" for name in names if name), "-a", str(MODEL)],
            ["gcc", "-O2", "-DCOLLAPSE", "-DSAFETY", "-DVECTORSZ=2048", "-o", "search", "pan.c"],
            ["./search", *SEARCH],
        )
        report = ""
        for command in commands:
            done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=TIMEOUT, check=False)
            report = done.stdout + done.stderr
            self.assertEqual(done.returncode, 0, report)
        if "errors: 0" in report:
            # Without these words Spin has visited every state.
            self.assertNotRegex(report, "(?i)search not completed|max search depth too small|out of memory")
        return report

    def test_every_promise_is_kept(self) -> None:
        self.assertIn("errors: 0", self.check())

    def test_a_thief_of_the_responders_key_changes_nothing(self) -> None:
        self.assertIn("errors: 0", self.check("THIEF"))

    def test_each_rule_is_needed(self) -> None:
        for rule, (attacker, error) in REMOVED.items():
            report = self.check(rule, attacker)
            self.assertIn("errors: 1", report, rule)
            self.assertIn(error, report, rule)

    def test_every_rule_of_the_model_is_removed_once(self) -> None:
        switches = set(re.findall(r"^#(?:ifdef |elif defined\()(\w+)", MODEL.read_text(), re.MULTILINE))
        self.assertEqual(switches - {"THIEF"}, set(REMOVED))
        listed = re.findall(r"^\| `(\w+)`:", (PROOFS / "index.md").read_text(), re.MULTILINE)
        self.assertEqual(set(listed), set(REMOVED))
