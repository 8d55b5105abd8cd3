"""Places of tests: beside the module under test, or in the list of scenarios."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
OUTSIDE = ("benchmarks", "contrib", "docs", "fuzz")
"""Directories whose tests are about files outside the package."""
SCENARIOS = {
    ".": (
        "atomic_write delivery_before_errors dependencies durations forking metadata public rooms signed stalls targets"
    ),
    "agent": "socket",
    "aio": "server",
    "analytics": "arrow spark spark_runs",
    "blocking": "waiting_streams",
    "cli": "commands interrupted json offered process_behaviour start tools untrusted_names",
    "cli/files": "full_disk planted stranger_lines",
    "clients": "addresses expect pauses stopped",
    "collector": "exchange processes",
    "discovery/entries": "deletions",
    "messaging": "channels discovery endless_channels old_clients pauses recorded_sessions",
    "net": (
        "entities faults lost_receipts memory messaging old_programs openapi operate provoked resume sites telemetry"
    ),
    "net/carriers": "tls_attacks",
    "net/links": "carrier_attacks release_ciphers",
    "noise": "oracle",
    "pages": "pages parts phone",
    "rmb": "enemies failures full_disk pauses random_input",
    "rmb/twins": "values",
    "streams": "family",
    "streams/core": "ciphers",
    "tap": "daemons",
    "testing": "power_cuts traced_files",
    "v2019": (
        "ciphers closed_window footprint half_close provoked reentrancy relay_corners remembered_features secure"
        " streams table_vectors telemetry unread_requests upgrade vectors wrongly_plain"
    ),
}
"""Tests of several modules at once: processes, attacks, recordings, whole networks; by directory."""


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def lineage(path: Path, name: str) -> list[str]:
    """Return the names of the class's members and bases, those of its ancestors included."""
    for node in tree(path).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            own = [one.name for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
            bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
            return sum((lineage(path, base) for base in bases), own + bases)
        if isinstance(node, ast.ImportFrom) and (source := source_of(node)) is not None:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return lineage(source, alias.name)
    return []


def is_run(path: Path, name: str) -> bool:
    """Whether trial finds tests in this class."""
    names = lineage(path, name)
    return any(one.startswith("test") for one in names) and any(one.endswith("TestCase") for one in names)


def source_of(node: ast.ImportFrom) -> Path | None:
    """Return the module of the tests from which something is imported; None for other modules."""
    path = ROOT / f"{(node.module or '').replace('.', '/')}.py"
    return path if path.is_relative_to(TESTS) and path.is_file() else None


class RoomTests(SynchronousTestCase):
    """Tests of the rules in CONTRIBUTING.md for the place of tests."""

    def test_tests_stand_beside_their_modules(self) -> None:
        """``tests/x/test_y.py`` is about ``dmsg/x/y.py``, or the package ``dmsg/x/y``."""
        elsewhere = set()
        for path in TESTS.rglob("test_*.py"):
            room = path.parent.relative_to(TESTS)
            module = ROOT / "dmsg" / room / path.stem.removeprefix("test_")
            if not (module.with_suffix(".py").is_file() or module.is_dir() or str(room) in OUTSIDE):
                elsewhere.add(str(path.relative_to(TESTS)))
        listed = {str(Path(room) / f"test_{name}.py") for room, names in SCENARIOS.items() for name in names.split()}
        self.assertEqual(elsewhere, listed)

    def test_no_test_is_loaded_twice(self) -> None:
        """A class with tests runs again in each module that imports it by name; import its module instead."""
        twice = [
            f"{path.relative_to(ROOT)}: {alias.name}"
            for path in TESTS.rglob("test_*.py")
            for node in tree(path).body
            if isinstance(node, ast.ImportFrom) and (source := source_of(node)) is not None
            for alias in node.names
            if is_run(source, alias.name)
        ]
        self.assertEqual(twice, [])

    def test_documents_name_tests_that_are_there(self) -> None:
        pages = [ROOT / "CONTRIBUTING.md", *ROOT.joinpath("docs").rglob("*.md")]
        named = {found for page in pages for found in re.findall(r"\btests/[\w/]+\.py\b", page.read_text())}
        self.assertGreater(len(named), 10)
        self.assertEqual({name for name in named if not (ROOT / name).is_file()}, set())
