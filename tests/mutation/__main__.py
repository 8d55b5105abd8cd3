"""Mutation testing: seeded mutants of the cores of each family, each run against the tests that reach it.

``make long WHICH=mutate FAMILIES="v2019 rmb" SAMPLE=40``
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from functools import partial

from tests.mutation.mutants import ROOT, Mutant, difference, sample
from tests.mutation.running import SURVIVED, Runner, fork, wait

_RMB_RELAY = [
    *("backlog", "deliveries", "delivery", "limiter", "mail", "presence", "rules", "switch"),
    *("federation/batch", "federation/offers", "federation/slots", "federation/unverified"),
    *("queue/interface", "queue/removals", "queue/reserve", "queue/sqlite"),
]
_DISCOVERY_TESTS = ["entries", "lookup", "service.test_api", "service.test_nameplates", "store.test_sqlite"]
FAMILIES: dict[str, tuple[list[str], list[str]]] = {
    "v2019": (["v2019/core/*"], ["tests.v2019", "tests.streams"]),
    "streams": (["streams/core/*"], ["tests.streams", "tests.v2019"]),
    "messaging": (["messaging/core/*"], ["tests.messaging"]),
    "rmb": (
        [
            "rmb/envelope/[!e]*",
            "rmb/twins/*",
            "rmb/socket/fragments",
            "net/websocket/frames",
            *(f"rmb/relay/{name}" for name in _RMB_RELAY),
        ],
        ["tests.rmb", "tests.test_keys", "tests.test_signed"],
    ),
    "noise": (["noise/*"], ["tests.noise", "tests.messaging.core.test_secure", "tests.v2019.test_vectors"]),
    "discovery": (
        ["discovery/entries/*"],
        [*(f"tests.discovery.{name}" for name in _DISCOVERY_TESTS), "tests.test_signed"],
    ),
    "codes": (["apps/codes/pake", "apps/codes/words"], ["tests.apps.test_codes", "tests.apps.codes.test_stream"]),
}
"""Patterns of the modules of dmsg, and the names of the tests, by family."""
LEAST = 85.0
"""Percentage of mutants that have to be noticed. The aim is 90; a sample of 200 differs by up to 4 from all mutants."""


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def statuses(runner: Runner, mutants: list[Mutant], jobs: int) -> Iterator[tuple[Mutant, int]]:
    """Run the tests of each mutant in a fork; yield the status of the fork, negative if a signal ended it."""
    running: dict[int, Mutant] = {}
    for mutant in mutants:
        if len(running) >= jobs:
            pid, status = wait()
            yield running.pop(pid), status
        numbers = runner.tests_for(mutant)
        running[fork(partial(runner.run, mutant, mutant.file, numbers), runner.seconds(numbers))] = mutant
    while running:
        pid, status = wait()
        yield running.pop(pid), status


def score(family: str, number: int, seed: int, jobs: int) -> float:
    """Print the mutants that survive, and return the percentage of the noticed ones.

    :raises RuntimeError: tests fail without a mutant.
    """
    patterns, names = FAMILIES[family]
    paths = sorted(path for pattern in patterns for path in ROOT.joinpath("dmsg").glob(f"{pattern}.py"))
    files = [str(path.relative_to(ROOT)) for path in paths if path.name != "__init__.py"]
    began = time.monotonic()
    runner = Runner(names, files)
    runner.check()
    mutants = sample(files, number, seed)
    noticed = stopped = 0
    for mutant, status in statuses(runner, mutants, jobs):
        if status == SURVIVED:
            before, after = difference(mutant)
            reaching = len(runner.tests_for(mutant))
            _say(f"{mutant.file}:{mutant.place[0]} {mutant.operator.removeprefix('core/')}, {reaching} tests")
            _say(f"  - {before}\n  + {after}")
        else:
            noticed += 1
            stopped += status < 0
    percent = 100.0 * noticed / max(1, len(mutants))
    took = time.monotonic() - began
    _say(
        f"{family}: {noticed} of {len(mutants)} mutants noticed, {percent:.1f} %, seed {seed}"
        f" ({stopped} never ended; {len(runner.tests)} tests, {took:.0f} s)"
    )
    return percent


def main() -> int:
    """Run the command; return 1 if less than ``--least`` percent of a family's mutants are noticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"one or more of {', '.join(FAMILIES)}")
    parser.add_argument("--sample", type=int, default=200, help="number of mutants of each family")
    parser.add_argument("--seed", type=int, default=1, help="seed of the choice of mutants")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="number of forks at a time")
    parser.add_argument(
        "--least", type=float, default=LEAST, help=f"percentage that has to be noticed (default {LEAST:.0f})"
    )
    arguments = parser.parse_args()
    families: list[str] = arguments.families or list(FAMILIES)
    for family in families:
        if family not in FAMILIES:
            parser.error(f"there is no family {family}; there are {', '.join(FAMILIES)}")
    if len(families) == 1:
        return int(score(families[0], arguments.sample, arguments.seed, arguments.jobs) < arguments.least)
    # Each family runs in a process of its own, which has imported only the family's tests.
    failed = 0
    for family in families:
        given = {name: value for name, value in vars(arguments).items() if name != "families"}
        words = (f"--{name}={value}" for name, value in given.items())
        failed |= os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-m", "tests.mutation", family, *words])
    return int(failed != 0)


if __name__ == "__main__":
    sys.exit(main())
