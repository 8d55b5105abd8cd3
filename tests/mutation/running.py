"""Running tests against mutants, each in a fork of a process that has imported the tests.

The first fork measures which lines each test reaches and how long the test takes. A mutant is run by the tests that
reach its statement, the quickest first, until one fails. A change within a function is made by replacing the code of
the imported function; after any other change, the fork imports the modules of dmsg and the tests again.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import os
import pickle
import resource
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import SourceFileLoader
from typing import Any, cast
from unittest import TestCase, TestResult

from tests.mutation.mutants import ROOT, Mutant, mutated

SLOW = 1.0
"""Seconds of the processor above which a test runs only for mutants that no quicker test reaches."""
LONGEST_MEASURED = 300
"""Maximum seconds of the processor for measuring the tests."""
MORE_TIME = 10
"""Factor by which tests may take longer than without a mutant, before the mutant counts as one that never ends."""
LEAST_TIME = 10
"""Seconds of the processor that the tests of a mutant may always take."""
MORE_WALL = 10
"""Factor by which a fork may take longer by the wall clock, because the machine may be busy."""
MEMORY = 2 << 30
"""Maximum number of bytes of data of a fork; a mutant that collects without end is stopped by it."""
NOTICED, SURVIVED = 1, 0
KEPT = ("tests.mutation", "tests.forking", "tests.durations")
"""Modules that are not imported again."""


@dataclass(slots=True)
class Measured:
    """A test by its name: seconds of the processor, and the lines of each file that it reaches."""

    name: str
    seconds: float = 0.0
    failed: str = ""
    skipped: bool = False
    lines: dict[str, set[int]] = field(default_factory=dict)


def load(names: Iterable[str]) -> list[TestCase]:
    """Return the tests of modules or packages that need no reactor: others take real time."""
    from twisted.trial.runner import TestLoader
    from twisted.trial.unittest import TestCase as ReactorTestCase

    def tests_of(suite: Any) -> Iterator[TestCase]:
        try:
            inner = iter(suite)
        except TypeError:
            if not isinstance(suite, ReactorTestCase):
                yield suite
        else:
            for one in inner:
                yield from tests_of(one)

    loader = TestLoader()
    return [test for name in names for test in tests_of(loader.loadByName(name, recurse=True))]


def prepare() -> None:
    """Make property tests draw the same examples in each fork, and keep failures as they were found."""
    from hypothesis import Phase, settings

    phases = (Phase.explicit, Phase.generate)
    settings.register_profile(
        "mutation", parent=settings.get_profile("dmsg"), derandomize=True, database=None, phases=phases
    )
    settings.load_profile("mutation")


def _use_own_reactor() -> None:
    """Give the reactor descriptors of its own, because all forks share the inherited ones."""
    reactor = sys.modules.get("twisted.internet.reactor")
    if reactor is not None:
        cast(Any, reactor).__init__()


def fork(work: Callable[[], int], seconds: float) -> int:
    """Run ``work`` in a fork and return the process id of the fork; the result of ``work`` is its exit status.

    :param seconds: of the processor that it may use.
    """
    pid = os.fork()
    if pid:
        return pid
    status = 2
    try:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 1))
        signal.alarm(MORE_WALL * int(seconds + 1))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        _use_own_reactor()
        with tempfile.TemporaryDirectory(prefix="dmsg-mutants-") as directory:
            os.chdir(directory)
            status = work()
            os.chdir("/")
    finally:
        os._exit(status)


def wait() -> tuple[int, int]:
    """Wait for a fork; return its id and its status, negative if a signal ended it."""
    pid, status = os.wait()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    return pid, os.waitstatus_to_exitcode(status)


def measure(tests: list[TestCase], files: list[str]) -> list[Measured]:
    """Return what each test reaches.

    :raises RuntimeError: measuring did not come to its end.
    """
    import coverage

    read, write = os.pipe()

    def work() -> int:
        measuring = coverage.Coverage(data_file=None, config_file=False, include=[str(ROOT / file) for file in files])
        found = []
        measuring.start()
        for number, test in enumerate(tests):
            measuring.switch_context(str(number))
            result, began = TestResult(), time.process_time()
            test.run(result)
            said = "".join(text for _, text in [*result.failures, *result.errors])
            found.append(Measured(test.id(), time.process_time() - began, said, bool(result.skipped)))
        measuring.stop()
        data = measuring.get_data()
        for file in files:
            for line, contexts in data.contexts_by_lineno(str(ROOT / file)).items():
                for context in filter(None, contexts):
                    found[int(context)].lines.setdefault(file, set()).add(line)
        with open(write, "wb", closefd=False) as stream:
            pickle.dump(found, stream)
        return 0

    fork(work, LONGEST_MEASURED)
    os.close(write)
    with open(read, "rb") as stream:
        said = stream.read()
    _, status = wait()
    if status or not said:
        raise RuntimeError(f"measuring the tests ended with status {status}")
    return cast(list[Measured], pickle.loads(said))


def _statement(tree: ast.Module, line: int) -> tuple[range, bool]:
    """Return the lines of the innermost statement at a line, without its block, and whether it stands in a function."""
    around = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and line in _lines(node)]
    innermost = min(around, key=lambda node: len(_lines(node)), default=None)
    lines = range(line, line + 1)
    if innermost is not None:
        block = getattr(innermost, "body", None)
        head = range(innermost.lineno, block[0].lineno) if block else _lines(innermost)
        lines = head if line in head else lines
    functions = [node for node in around if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return lines, any(line >= node.body[0].lineno for node in functions)


def _lines(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield inner
            yield from _codes(inner)


class Runner:
    """The tests of a family, imported, and what each of them reaches."""

    def __init__(self, names: list[str], files: list[str]) -> None:
        prepare()
        self.names = names
        self.tests = load(names)
        self.files = files
        self._trees = {file: ast.parse((ROOT / file).read_text()) for file in files}
        self._functions: dict[str, list[types.FunctionType]] = {str(ROOT / file): [] for file in files}
        for thing in gc.get_objects():
            if isinstance(thing, types.FunctionType):
                functions = self._functions.get(thing.__code__.co_filename)
                if functions is not None:
                    functions.append(thing)
        gc.collect()
        gc.freeze()
        self.measured = measure(self.tests, files)
        ended = sorted((one.seconds, number) for number, one in enumerate(self.measured) if not one.skipped)
        self.by_time = [number for _, number in ended]

    def check(self) -> None:
        """Run the tests as for a mutant, but without a mutant.

        :raises RuntimeError: a test fails.
        """
        for one in self.measured:
            if one.failed:
                raise RuntimeError(f"{one.name} fails without a mutant:\n{one.failed}")
        numbers = [number for number in self.by_time if self._is_quick(number)]
        read, write = os.pipe()
        fork(partial(self.run, None, self.files[0], numbers, write), self.seconds(numbers))
        os.close(write)
        with open(read, "rb") as stream:
            said = stream.read().decode()
        _, status = wait()
        if status != SURVIVED:
            raise RuntimeError(f"tests fail without a mutant when the quickest come first: {said or status}")

    def seconds(self, numbers: list[int]) -> float:
        """Return how many seconds tests may take with a mutant."""
        return LEAST_TIME + MORE_TIME * sum(self.measured[number].seconds for number in numbers)

    def tests_for(self, mutant: Mutant) -> list[int]:
        """Return the numbers of the tests that reach the statement of a mutant, the quickest first.

        A statement that runs when its module is imported counts as reached by all tests, those of the module first.
        """
        lines, within = _statement(self._trees[mutant.file], mutant.place[0])
        reaching = [number for number in self.by_time if mutant.file in self.measured[number].lines]
        if within:
            reaching = [number for number in reaching if not self.measured[number].lines[mutant.file].isdisjoint(lines)]
        else:
            # Coverage does not tell which tests use a default of a class.
            reaching += [number for number in self.by_time if mutant.file not in self.measured[number].lines]
        quick = [number for number in reaching if self._is_quick(number)]
        return quick or reaching

    def _is_quick(self, number: int) -> bool:
        return self.measured[number].seconds <= SLOW

    def run(self, mutant: Mutant | None, file: str, numbers: list[int], report: int = 1) -> int:
        """Run tests in this fork, with a mutant or for comparison without one; return ``NOTICED`` or ``SURVIVED``.

        :param report: descriptor to which the name of the first test that fails is written, and why.
        """
        path = str(ROOT / file)
        source = mutated(mutant) if mutant else (ROOT / file).read_text()
        try:
            whole = compile(source, path, "exec", dont_inherit=True)
        except SyntaxError:
            return NOTICED
        tests = [self.tests[number] for number in numbers]
        in_function = mutant is None or _statement(self._trees[file], mutant.place[0])[1]
        if not in_function or not self._replace(path, whole):
            try:
                tests = self._import_again(path, whole, [test.id() for test in tests])
            except BaseException:  # A module that cannot be imported is noticed, whatever it raises.
                return NOTICED
        for test in tests:
            result = TestResult()
            test.run(result)
            if not result.wasSuccessful():
                why = "".join(text for _, text in [*result.failures, *result.errors])
                os.write(report, f"{test.id()}\n{why}"[:4000].encode())
                return NOTICED
        return SURVIVED

    def _replace(self, path: str, whole: types.CodeType) -> bool:
        """Give the imported functions of a file their new code; False: they have to be imported again."""
        functions: dict[tuple[str, int], list[types.FunctionType]] = {}
        for function in self._functions[path]:
            functions.setdefault(_key(function.__code__), []).append(function)
        codes: dict[tuple[str, int], list[types.CodeType]] = {}
        for code in _codes(whole):
            codes.setdefault(_key(code), []).append(code)
        changed = []
        for key, same in functions.items():
            for function in same:
                if function.__code__ not in codes.get(key, ()):
                    new = codes.get(key, ())
                    if len(new) != 1 or new[0].co_freevars != function.__code__.co_freevars:
                        return False
                    changed.append((function, new[0]))
        for function, code in changed:
            function.__code__ = code
        return True

    def _import_again(self, path: str, whole: types.CodeType, names: list[str]) -> list[TestCase]:
        """Import the modules of the tests with another code of one file; return the tests of these names."""
        loaders = cast(Any, SourceFileLoader)
        usual = loaders.get_code

        def get_code(loader: SourceFileLoader, fullname: str) -> Any:
            return whole if loader.path == path else usual(loader, fullname)

        loaders.get_code = get_code
        for name in list(sys.modules):
            of_us = name.startswith(("dmsg.", "tests.")) and not name.startswith(KEPT)
            if of_us and not name.endswith("_pb2"):  # Messages are registered once in a process.
                del sys.modules[name]
        by_name = {test.id(): test for test in load(self.names)}
        return [by_name[name] for name in names]


def _key(code: types.CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno
