"""Two runs of tests at the same time: ``python -m tests.alongside ARGUMENTS -- ARGUMENTS``, each for one ``python``.

The second run prints as usual. The output of the first run is kept in a file, and printed after that of the second. The
exit status is 0 if both runs succeed. Ctrl-C and SIGTERM end both runs.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from types import FrameType
from typing import BinaryIO

GRACE = 20.0
"""Seconds within which an interrupted run must end; after that it is killed."""

NICE = 5
"""Niceness of the second run, which has the lower priority."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _end(runs: list[subprocess.Popen[bytes]]) -> None:
    """End the runs, and wait until all of them have ended."""
    for run in runs:
        # At a terminal, Ctrl-C has reached the runs as well. A second signal would break off their clean-up.
        try:
            run.wait(1)
        except subprocess.TimeoutExpired:
            run.send_signal(signal.SIGINT)
    for run in runs:
        try:
            run.wait(GRACE)
        except subprocess.TimeoutExpired:
            run.kill()
            run.wait()


def _both(first: list[str], second: list[str], kept: BinaryIO) -> bool:
    """Run both and return whether both succeeded; the output of the first goes into a file."""
    runs: list[subprocess.Popen[bytes]] = []
    try:
        runs.append(subprocess.Popen([sys.executable, *first], stdout=kept, stderr=subprocess.STDOUT))
        # The first run takes longer. With equal priority it would run on alone at the end.
        runs.append(subprocess.Popen(["nice", "-n", str(NICE), sys.executable, *second]))
        runs[1].wait()
        if runs[0].poll() is None:
            sys.stdout.write("waiting for the run whose output follows\n")
            sys.stdout.flush()
        runs[0].wait()
    finally:
        _end(runs)
    return not any(run.returncode for run in runs)


def main(arguments: list[str]) -> int:
    """Run both, and return 0 if both succeed."""
    middle = arguments.index("--")
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)
    with tempfile.TemporaryFile() as kept:
        try:
            succeeded = _both(arguments[:middle], arguments[middle + 1 :], kept)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        finally:
            kept.seek(0)
            sys.stdout.flush()
            shutil.copyfileobj(kept, sys.stdout.buffer)
            sys.stdout.flush()
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
