"""Tests over real TCP in a process that is stalled again and again: ``python -m tests.stalls --seconds 600``.

On a busy machine, a process can pause for tenths of a second at any time. Meanwhile timers expire, and events arrive
together that usually arrive one after another. A fault that only such an order of events shows fails one run in many.
This program makes such pauses at random: a turn of the reactor begins or ends with a pause.

The modules run one after another in random order, until the time is over. The chance and the length of the pauses
differ between the modules. For each module that failed, the program prints a command that makes the same sequence of
pauses again: ``python -m tests.run --stalls CHANCE:SECONDS:SEED MODULE``. The turns of the reactor differ between runs,
so the command may have to be repeated until the module fails again.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

TESTS = Path(__file__).parent
PACKAGES = ("agent", "aio", "apps", "clients", "collector", "messaging", "net", "pages", "rmb", "streams", "v2019")
"""Packages whose tests run entities in the process of trial. The tests of commands start processes, which this module
does not stall.
"""
REAL_TCP = re.compile(
    r"^\s*from (twisted\.internet import .*\breactor\b|tests\.net\.support |tests\.rmb\.network import .*RmbCase)",
    re.MULTILINE,
)
"""Import by which a module is recognised whose tests use the reactor and not a clock in memory."""
PROCESSES = re.compile(r"^from dmsg\.cli\.processes import .*\bEntities\b", re.MULTILINE)
"""Import by which a module is recognised whose entities run in processes of their own, which are not stalled."""
STALLS = ((0.3, 0.1), (0.2, 0.2), (0.05, 0.5), (0.02, 1.0))
"""Chances of a pause in a turn of the reactor, each with the longest pause in seconds. Both are so small that the
pauses alone do not use up the time that a test waits for an event (``tests.net.support.TIMEOUT``).
"""
MODULE_TIMEOUT = 900.0
"""Seconds after which the run of a module is ended and counts as failed."""


@dataclass(frozen=True)
class Stalls:
    """Pauses of the reactor.

    :ivar chance: chance that a turn of the reactor has a pause.
    :ivar longest: longest pause in seconds.
    :ivar seed: seed of the pauses; those of a test also depend on its name.
    """

    chance: float
    longest: float
    seed: int

    @classmethod
    def parse(cls, text: str) -> Stalls:
        """Return the pauses that ``CHANCE:SECONDS:SEED`` describes.

        :raises ValueError: the text is malformed.
        """
        chance, longest, seed = text.split(":")
        found = cls(float(chance), float(longest), int(seed))
        if not (0 <= found.chance <= 1 and found.longest >= 0):
            raise ValueError("the chance must be from 0 to 1, and the seconds at least 0")
        return found

    def __str__(self) -> str:
        return f"{self.chance:g}:{self.longest:g}:{self.seed}"


class Stalling:
    """Pauses before and after the polls of a reactor, while a test runs.

    :param sleep: function that makes a pause.
    """

    def __init__(self, stalls: Stalls, reactor: Any, sleep: Callable[[float], object] = time.sleep) -> None:
        self._stalls = stalls
        self._sleep = sleep
        self._random: Random | None = None
        self._iterate = reactor.doIteration
        reactor.doIteration = self._with_pauses

    def begin(self, test: str) -> None:
        """Begin the pauses of a test."""
        self._random = Random(zlib.crc32(test.encode()) ^ self._stalls.seed)

    def end(self) -> None:
        """End the pauses of the test."""
        self._random = None

    def _pause(self) -> None:
        # Half of the pauses come before the poll: data that arrived meanwhile are read before due timers are called.
        # After the other half, the timers come first.
        random = self._random
        if random is not None and random.random() < self._stalls.chance / 2:
            self._sleep(random.random() * self._stalls.longest)

    def _with_pauses(self, delay: float | None) -> None:
        self._pause()
        self._iterate(delay)
        self._pause()


def stall(reporter: Any, stalls: Stalls) -> None:
    """Make a reporter class of trial stall the reactor while a test runs."""
    from twisted.internet import reactor

    stalling = Stalling(stalls, reactor)
    start, stop = reporter.startTest, reporter.stopTest

    def start_stalled(self: Any, test: Any) -> None:
        stalling.begin(test.id())
        start(self, test)

    def stop_stalled(self: Any, test: Any) -> None:
        stop(self, test)
        stalling.end()

    reporter.startTest, reporter.stopTest = start_stalled, stop_stalled


def modules() -> list[str]:
    """Return the names of the test modules that use real TCP in the process of trial."""
    paths = sorted(path for package in PACKAGES for path in TESTS.joinpath(package).rglob("test_*.py"))
    return [
        ".".join(path.relative_to(TESTS.parent).with_suffix("").parts)
        for path in paths
        if REAL_TCP.search(text := path.read_text()) and not PROCESSES.search(text)
    ]


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run_module(module: str, stalls: Stalls, timeout: float) -> str | None:
    """Run a test module with pauses; return None if it succeeded, else its output."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "tests.run", "--stalls", str(stalls), "--temp-directory", f"{directory}/run"]
        try:
            done = subprocess.run(
                [*command, module], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired as error:
            return (error.stdout or b"").decode(errors="replace") + f"\nnot ended within {timeout:g} s"
    if done.returncode == 0:
        return None
    # A process that a signal has ended prints no summary.
    return f"{done.stdout.decode(errors='replace')}\nended with status {done.returncode}"


def main(arguments: list[str]) -> int:
    """Run modules until the time is over, and return 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.stalls", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="seconds after which no further module begins")
    parser.add_argument("--seed", type=int, default=None, help="seed of the order and of the pauses")
    parser.add_argument("modules", nargs="*", help="test modules; by default all that use real TCP")
    options = parser.parse_args(arguments)
    seed = int(time.time()) if options.seed is None else options.seed
    _say(f"seed {seed}")
    random = Random(seed)
    until = time.monotonic() + options.seconds
    failed: list[str] = []
    count = 0
    while time.monotonic() < until:
        order = options.modules or modules()
        for module in random.sample(order, len(order)):
            stalls = Stalls(*random.choice(STALLS), random.randrange(2**32))
            if time.monotonic() >= until:
                break
            count += 1
            began = time.monotonic()
            output = run_module(module, stalls, MODULE_TIMEOUT)
            _say(f"{time.monotonic() - began:5.0f} s, pauses {stalls}: {module}")
            if output is not None:
                failed.append(f"python -m tests.run --stalls {stalls} {module}")
                _say(f"{output}\nfailed: {failed[-1]}")
    _say(f"{count} runs of modules, {len(failed)} failed")
    for command in failed:
        _say(f"  {command}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
