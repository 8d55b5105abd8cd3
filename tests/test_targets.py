"""Targets of make and steps of CI: each test is reached by one of them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
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


class AlongsideTests(SynchronousTestCase):
    """Runs at the same time, as ``make test`` starts them."""

    def start(self, *runs: str) -> subprocess.Popen[str]:
        arguments = [argument for run in runs for argument in ("--", "-c", run)]
        command = (sys.executable, "-m", "tests.alongside", *arguments[1:])
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.addCleanup(process.kill)
        return process

    def test_the_last_prints_before_the_others(self) -> None:
        """The other runs end only when the last one has printed all of its output, and were started before."""
        paths = [Path(f"{self.mktemp()}-{number}").absolute() for number in range(2)]
        others = [
            f"import os\nprint({number}, flush=True)\nos.mkfifo({str(path)!r})\nopen({str(path)!r}).read()"
            for number, path in enumerate(paths)
        ]
        last = (
            f"import os, time\npaths = {list(map(str, paths))}\n"
            "while not all(map(os.path.exists, paths)): time.sleep(0.01)\n"
            "print('last', flush=True)\nfor path in paths: open(path, 'w').close()"
        )
        process = self.start(*others, last)
        said = [line for line in process.communicate()[0].splitlines() if not line.startswith("waiting for")]
        self.assertEqual((said[-3:], process.returncode), (["last", "0", "1"], 0))

    def test_any_failure_is_a_failure(self) -> None:
        failing, passing = "import sys; sys.exit(3)", "print('passed')"
        for failed in range(3):
            process = self.start(*(failing if number == failed else passing for number in range(3)))
            said, _ = process.communicate()
            self.assertEqual((process.returncode, said.count("passed\n")), (1, 2))

    def test_an_interrupt_ends_all(self) -> None:
        """A signal to the command alone, without a terminal that tells the runs as well."""
        running = "import os, time; os.write(1, b'%d\\n' % os.getpid()); time.sleep(600)"
        for number in (signal.SIGINT, signal.SIGTERM):
            process = self.start(running, running, running)
            assert process.stdout is not None
            last = int(process.stdout.readline())
            process.send_signal(number)
            said, _ = process.communicate()
            numbers = [int(line) for line in said.splitlines() if line.isdigit()]
            self.assertEqual((process.returncode, said.count("KeyboardInterrupt")), (130, 3), said)
            for pid in (last, *numbers):
                self.assertRaises(ProcessLookupError, os.kill, pid, 0)
