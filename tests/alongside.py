"""Runs of tests at the same time: ``python -m tests.alongside ARGUMENTS -- ARGUMENTS ...``, each for one ``python``.

The last run prints as usual. The output of each other run is kept in a file, and printed after that of the last. The
exit status is 0 if all runs succeed. Ctrl-C and SIGTERM end all of them.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from types import FrameType
from typing import BinaryIO

GRACE = 20.0
"""Seconds within which an interrupted run must end; after that it is killed."""

NICE = 5
"""Niceness of the last run, which has the lowest priority."""


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


def _run_all(commands: list[list[str]], kept: Sequence[BinaryIO]) -> bool:
    """Run all and return whether all succeeded.

    :param kept: files for the output of all but the last.
    """
    runs: list[subprocess.Popen[bytes]] = []
    try:
        for command, file in zip(commands, kept, strict=False):
            runs.append(subprocess.Popen([sys.executable, *command], stdout=file, stderr=subprocess.STDOUT))
        # The others do less at the same time. With equal priority, one of them would run on alone at the end.
        runs.append(subprocess.Popen(["nice", "-n", str(NICE), sys.executable, *commands[-1]]))
        runs[-1].wait()
        if any(run.poll() is None for run in runs):
            sys.stdout.write("waiting for runs whose output follows\n")
            sys.stdout.flush()
        for run in runs:
            run.wait()
    finally:
        _end(runs)
    return not any(run.returncode for run in runs)


def _split(arguments: list[str]) -> list[list[str]]:
    """Return the arguments of each run."""
    commands: list[list[str]] = [[]]
    for one in arguments:
        if one == "--":
            commands.append([])
        else:
            commands[-1].append(one)
    return commands


def main(arguments: list[str]) -> int:
    """Run all, and return 0 if all succeed."""
    commands = _split(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)
    with ExitStack() as opened:
        kept = [opened.enter_context(tempfile.TemporaryFile()) for _ in commands[1:]]
        try:
            succeeded = _run_all(commands, kept)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        finally:
            for file in kept:
                file.seek(0)
                sys.stdout.flush()
                shutil.copyfileobj(file, sys.stdout.buffer)
            sys.stdout.flush()
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
