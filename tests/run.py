"""trial, which writes down what it ran and what it left out: ``python -m tests.run ARGUMENTS OF TRIAL``.

``python -m tests.run --summary DIRECTORY...`` says it for the runs with these
temporary directories: every reason for a test that was left out with how many
and which; and of a run in one process the seconds of each package, and the
tests that took longest.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from twisted.scripts import trial

RESULTS = "results.json"
"""In the temporary directory of a run."""
NAMED = 3
"""Tests named for a reason."""
SHOWN = 0.1
"""Seconds of a test that counts when the time is said."""
SLOWEST = 10
"""Tests that are named as those that took longest."""


class Options(trial.Options):
    """Those of trial; the reporter writes at its end what it counted."""

    def postOptions(self) -> None:
        super().postOptions()
        target = Path(self["temp-directory"]).absolute() / RESULTS
        chosen: Any = self["reporter"]

        class Counting(chosen):  # type: ignore[misc]
            _began: dict[str, float] = {}
            _took: dict[str, float] = {}

            def startTest(self, test: Any) -> None:
                self._began[test.id()] = time.monotonic()
                super().startTest(test)

            def stopTest(self, test: Any) -> None:
                super().stopTest(test)
                self._took[test.id()] = time.monotonic() - self._began.get(test.id(), time.monotonic())

            def done(self) -> None:
                super().done()
                unexpected = len(self.unexpectedSuccesses)
                counts = {
                    "run": self.testsRun,
                    "failed": len(self.failures) + len(self.errors) + unexpected,
                    "skipped": [(test.id(), str(reason)) for test, reason in self.skips],
                    "seconds": self._took,
                }
                target.write_text(json.dumps(counts))

        self["reporter"] = Counting


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def _say_times(took: dict[str, float]) -> None:
    """Where the time went.  trial with -j hears of a test only when it has ended, and knows nothing of its time."""
    known = {test: seconds for test, seconds in took.items() if seconds >= SHOWN}
    if not known:
        return
    packages: dict[str, float] = defaultdict(float)
    for test, seconds in known.items():
        packages[".".join(test.split(".")[:2])] += seconds
    by_time = sorted(packages.items(), key=lambda item: -item[1])
    _say("seconds: " + ", ".join(f"{name} {seconds:.0f}" for name, seconds in by_time))
    for test, seconds in sorted(known.items(), key=lambda item: -item[1])[:SLOWEST]:
        _say(f"  {seconds:5.1f} {test}")


def summary(directories: list[str]) -> int:
    """Print what runs left out and why, and a last line with all counts; the exit status."""
    run = failed = 0
    reasons: dict[str, list[str]] = defaultdict(list)
    took: dict[str, float] = {}
    for directory in directories:
        try:
            counts = json.loads((Path(directory) / RESULTS).read_text())
        except FileNotFoundError:
            _say(f"{directory}: no run came to its end there")
            return 1
        run += counts["run"]
        failed += counts["failed"]
        took.update(counts["seconds"])
        for test, reason in counts["skipped"]:
            reasons[reason].append(test)
    _say_times(took)
    skipped = sum(map(len, reasons.values()))
    for reason, tests in sorted(reasons.items()):
        more = f" and {len(tests) - NAMED} more" if len(tests) > NAMED else ""
        _say(f"skipped {len(tests)}: {reason} ({', '.join(tests[:NAMED])}{more})")
    _say(f"{run - failed - skipped} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--summary"]:
        sys.exit(summary(sys.argv[2:]))
    trial.Options = Options  # type: ignore[misc]
    trial.run()
