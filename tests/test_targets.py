"""Targets of make and steps of CI: each test is reached by one of them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from unittest import skipUnless

from twisted.trial.unittest import SynchronousTestCase

from tests.mutation.__main__ import FAMILIES
from tests.mutation.equivalent import EQUIVALENT

ROOT = Path(__file__).parents[1]


class TargetTests(SynchronousTestCase):
    def test_equivalent_mutants_are_of_lines_that_are_there(self) -> None:
        for file, before, _ in EQUIVALENT:
            lines = {line.strip() for line in (ROOT / file).read_text().splitlines()}
            self.assertIn(before, lines, file)

    def test_mutants_are_made_of_modules_that_are_there(self) -> None:
        """A module that was renamed would silently have no mutants any more."""
        for patterns, _ in FAMILIES.values():
            for pattern in patterns:
                self.assertTrue(list(ROOT.joinpath("dmsg").glob(f"{pattern}.py")), pattern)

    @skipUnless(shutil.which("make"), "there is no make here")
    def test_every_long_test_is_reached(self) -> None:
        """Modules that ``make test`` does not find are named in a part of ``make long``, or in ``make lint``."""
        command = ["make", "--dry-run", "--no-print-directory", "long", "WHICH=all", "lint"]
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        modules = {
            ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for pattern in ("long_*.py", "*_run.py", "*_runs.py", "suite.py")
            for path in ROOT.joinpath("tests").rglob(pattern)
            if not path.name.startswith("test_")
        }
        self.assertGreater(len(modules), 10)
        self.assertEqual({module for module in modules if not re.search(rf"\b{re.escape(module)}\b", said)}, set())

    @skipUnless(shutil.which("make"), "there is no make here")
    def test_an_unknown_part_is_refused(self) -> None:
        done = subprocess.run(["make", "long", "WHICH=siege nothing"], cwd=ROOT, capture_output=True, text=True)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("no long tests are called nothing", done.stderr)

    def test_the_workflow_names_steps(self) -> None:
        workflow = (ROOT / ".github/workflows/ci.yml").read_text()
        steps = set(re.findall(r"(?m)^if wanted (\w+)", (ROOT / ".ci/run").read_text()))
        matrix = [step for line in re.findall(r'steps: \["(.*)"\]', workflow) for step in re.findall(r"\w+", line)]
        named = [*matrix, *re.findall(r"\.ci/run (\w+)", workflow)]
        self.assertEqual(set(named) - steps, set())
        self.assertEqual(steps - set(named) - {"others"}, set(), "steps that public CI leaves out")
        described = re.findall(r"(?m)^#   (\w+) ", (ROOT / ".ci/run").read_text())
        self.assertEqual(set(described), steps)
