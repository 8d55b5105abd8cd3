"""The rules for alerts, as promtool reads them; that each fires is seen in ``long_alerts``."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from twisted.trial.unittest import SkipTest, SynchronousTestCase

ROOT = Path(__file__).parents[2]
RULES = ROOT / "contrib" / "prometheus" / "alerts.yml"
ALERTS = re.findall(r"alert: (\w+)", RULES.read_text())


def program(name: str) -> str:
    """Return the path of a program.  :raises SkipTest: the program is not installed."""
    found = shutil.which(name)
    if found is None:
        raise SkipTest(f"there is no {name} here")
    return found


class RulesTests(SynchronousTestCase):
    """Checks of the files by promtool."""

    def test_promtool_accepts_the_rules(self) -> None:
        tool = program("promtool")
        for arguments in (["check", "rules", str(RULES)], ["check", "config", str(RULES.parent / "prometheus.yml")]):
            done = subprocess.run([tool, *arguments], capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_each_alert_says_what_to_do(self) -> None:
        text = RULES.read_text()
        for part in text.split("- alert: ")[1:]:
            name = part.split()[0]
            for needed in ("severity: ", "summary: ", "description: "):
                self.assertIn(needed, part, name)
        self.assertEqual(len(set(ALERTS)), len(ALERTS))
