"""How many hand-made mutants (:mod:`tests.mutation.by_hand`) random walks find.

``make long WHICH=mutate-walks WALKS=100`` prints one line for each mutant. A mutant is found when a walk with its code
fails.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, ModuleType

from tests.mutation.by_hand import (
    FAMILIES,
    INVISIBLE,
    MUTANTS,
    OF_AGENTS,
    OF_CLIENTS,
    OF_CODES,
    OF_DISCOVERY,
    OF_MESSAGING,
    OF_THE_BUS,
)

FOUND = 10
"""Exit status of the process of a mutant that was found."""


class _Loader(importlib.abc.Loader):
    """Loader of one module with a changed source."""

    def __init__(self, code: CodeType) -> None:
        self._code = code

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(self._code, module.__dict__)


class _Finder(importlib.abc.MetaPathFinder):
    """Finder of the module that a mutant changes."""

    def __init__(self, name: str) -> None:
        self._module, self._changes = MUTANTS[name]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._module:
            return None
        found = PathFinder.find_spec(fullname, path)
        assert found is not None and found.origin is not None
        code = compile(changed(Path(found.origin).read_text(), self._changes), found.origin, "exec")
        return importlib.machinery.ModuleSpec(fullname, _Loader(code), origin=found.origin)


def changed(source: str, changes: Sequence[tuple[str, str]]) -> str:
    """Return a source with the changes of a mutant.

    :raises ValueError: an old text is not there exactly once.
    """
    for old, new in changes:
        if source.count(old) != 1:
            raise ValueError(f"this text occurs {source.count(old)} times: {old}")
        source = source.replace(old, new)
    return source


def _walk_with_lies(seed: int) -> None:
    from dmsg.testing.walk import walk

    walk(seed, lies=True)


def _walk_without_lies(seed: int) -> None:
    from dmsg.testing.walk import walk

    walk(seed)


def _walk_of_the_bus(seed: int) -> None:
    from dmsg.testing.bus_walk import FAULTS, STEPS, follow
    from dmsg.testing.plan import draw

    follow(draw(seed, STEPS, FAULTS))


def _walk_of_messaging(seed: int) -> None:
    from dmsg.testing.messaging_walk import FAULTS, STEPS, follow
    from dmsg.testing.plan import draw

    follow(draw(seed, STEPS, FAULTS))


def _walk_of_codes(seed: int) -> None:
    from dmsg.testing.code_kinds import STEPS, draw_plan
    from dmsg.testing.code_walk import follow

    follow(draw_plan(seed, STEPS))


def _walk_of_discovery(seed: int) -> None:
    from dmsg.testing.discovery_walk import STEPS, draw_plan, follow

    follow(draw_plan(seed, STEPS))


def _walk_of_agents(seed: int) -> None:
    from dmsg.testing.agent_walk import STEPS, draw_plan, follow

    follow(draw_plan(seed, STEPS))


def try_one(name: str, first: int, walks: int) -> int:
    """Walk with the code of a mutant; print and return the number of walks until one failed, or 0 if none did."""
    finder = _Finder(name)
    # A change whose old text is gone must not count as found.
    finder.find_spec(MUTANTS[name][0], importlib.import_module(MUTANTS[name][0].rpartition(".")[0]).__path__, None)
    sys.meta_path.insert(0, finder)
    walk = _walk_with_lies
    if name in OF_CLIENTS:
        walk = _walk_without_lies
    elif name in OF_THE_BUS:
        walk = _walk_of_the_bus
    elif name in OF_MESSAGING:
        walk = _walk_of_messaging
    elif name in OF_CODES:
        walk = _walk_of_codes
    elif name in OF_DISCOVERY:
        walk = _walk_of_discovery
    elif name in OF_AGENTS:
        walk = _walk_of_agents
    started = time.process_time()
    for number in range(walks):
        try:
            walk(first + number)
        except Exception as error:
            # Only an AssertionError is the finding of a check. Other errors may also be faults of the walk itself.
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            why = kind + str(error).split("; faults:")[0][:100]
            sys.stdout.write(f"found in {number + 1:3} walks, {time.process_time() - started:4.0f} s: {name}: {why}\n")
            return number + 1
    why = f" ({INVISIBLE[name]})" if name in INVISIBLE else ""
    sys.stdout.write(f"not found in {walks} walks, {time.process_time() - started:4.0f} s: {name}{why}\n")
    return 0


def main() -> None:
    """Try all mutants, each in a process of its own, and print how many were found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--walks", type=int, default=100, help="for each mutant")
    parser.add_argument("--first", type=int, default=0, help="seed of the first walk")
    parser.add_argument("--one", help="only this mutant")
    parser.add_argument("--of", choices=sorted(FAMILIES), help="only the mutants of this family")
    arguments = parser.parse_args()
    if arguments.one is not None:
        sys.exit(FOUND if try_one(arguments.one, arguments.first, arguments.walks) else 0)
    found = 0
    names = list(MUTANTS if arguments.of is None else FAMILIES[arguments.of])
    for name in names:
        command = [sys.executable, "-m", "tests.mutation.by_walks", "--one", name]
        command += ["--walks", str(arguments.walks), "--first", str(arguments.first)]
        status = subprocess.run(command, check=False).returncode
        if status not in (0, FOUND):
            sys.exit(f"the process of this mutant failed with status {status}: {name}")
        found += status == FOUND
    invisible = sum(name in INVISIBLE for name in names)
    sys.stdout.write(f"{found} of {len(names)} mutants were found; {invisible} change nothing visible\n")


if __name__ == "__main__":
    main()
