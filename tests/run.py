"""trial, with a summary: ``python -m tests.run ARGUMENTS OF TRIAL``.

``--stalls CHANCE:SECONDS:SEED`` makes random pauses in the reactor (:mod:`tests.stalls`). It excludes ``-j``.

Each run ends with the packages that used the processor and the slowest tests. ``python -m tests.run --summary
DIRECTORY...`` says for the runs with these temporary directories why tests were skipped; its last line has all counts.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from twisted.python import usage
from twisted.scripts import trial

from tests import durations
from tests.stalls import Stalls, stall

RESULTS = "results.json"
"""Name of the file with the counts, in the temporary directory of a run."""
NAMED = 3
"""Number of tests that are named for each reason."""
SLOWEST = 20
"""Number of tests that are named as the slowest."""


class Options(trial.Options):
    """Options of trial; the reporter writes its counts into the temporary directory."""

    optParameters = [["stalls", None, None, "Pauses of the reactor, as CHANCE:SECONDS:SEED"]]

    def postOptions(self) -> None:
        super().postOptions()
        directory = Path(self["temp-directory"]).absolute()
        chosen: Any = self["reporter"]

        class Counting(chosen):  # type: ignore[misc]
            def done(self) -> None:
                super().done()
                unexpected = len(self.unexpectedSuccesses)
                counts = {
                    "run": self.testsRun,
                    "failed": len(self.failures) + len(self.errors) + unexpected,
                    "skipped": [(test.id(), str(reason)) for test, reason in self.skips],
                }
                (directory / RESULTS).write_text(json.dumps(counts))
                _say_times(directory)

        if not self["jobs"]:
            durations.measure(Counting, directory / durations.FILE)
        if self["stalls"]:
            if self["jobs"]:
                raise usage.UsageError("--stalls needs a run without --jobs")
            try:
                stall(Counting, Stalls.parse(self["stalls"]))
            except ValueError as error:
                raise usage.UsageError(f"--stalls {self['stalls']}: {error}") from None
        self["reporter"] = Counting


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def _say_times(directory: Path) -> None:
    """Say which packages used the processor, and which tests took longest."""
    measured = list(durations.read(directory))
    packages: dict[str, float] = defaultdict(float)
    for test, _, processor in measured:
        packages[".".join(test.split(".")[:2])] += processor
    by_time = sorted(packages.items(), key=lambda item: -item[1])
    _say("seconds of the processor: " + ", ".join(f"{name} {seconds:.0f}" for name, seconds in by_time if seconds > 1))
    _say(f"slowest {SLOWEST}, in seconds and seconds of the processor:")
    for test, wall, processor in sorted(measured, key=lambda row: -row[1])[:SLOWEST]:
        _say(f"  {wall:5.1f} {processor:5.1f} {test}")


def summary(directories: list[str]) -> int:
    """Print what runs left out and why, and a last line with all counts; the exit status."""
    run = failed = 0
    reasons: dict[str, list[str]] = defaultdict(list)
    for directory in directories:
        try:
            counts = json.loads((Path(directory) / RESULTS).read_text())
        except FileNotFoundError:
            _say(f"{directory}: no run came to its end there")
            return 1
        run += counts["run"]
        failed += counts["failed"]
        for test, reason in counts["skipped"]:
            reasons[reason].append(test)
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
