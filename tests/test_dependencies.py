"""Comparison of the imports with the requirements in setup.cfg.

A package that is installed only as another package's requirement may be missing on another machine.

A package that came along with somebody else's tools is missed on a fresh machine.
"""

import ast
import re
import sys
from collections.abc import Iterator
from configparser import ConfigParser
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

ROOT = Path(__file__).parents[1]
OURS = {"dmsg", "tests", "benchmarks"}
STUBS = {"_typeshed"}
"""Modules that only type checkers have."""


IMPORT = re.compile(r"^.*?\b(?:from[ \t]+([\w.]+)[ \t]+import\b|import[ \t]+(.*))", re.MULTILINE)
"""Text that may be an import; it may also be in a string."""


def possible(source: str) -> set[str]:
    """Return the first words of all modules that a source may import, and more."""
    found: set[str] = set()
    for module, modules in IMPORT.findall(source):
        found.update(name.strip().partition(" ")[0].partition(".")[0] for name in (module or modules).split(","))
    return found


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements of a module. No import is in an expression, and most nodes are."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        for node in getattr(tree, name, ()):
            yield node
            yield from statements(node)


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield the top-level modules that a module imports."""
    for node in statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


@cache
def imported(folder: str) -> dict[str, str]:
    """Return each top-level module that is imported below a folder, with a file that imports it."""
    found: dict[str, str] = {}
    known = sys.stdlib_module_names | OURS | STUBS
    for path in sorted((ROOT / folder).rglob("*.py")):
        source = path.read_text()
        # Most files import nothing that is not known by now, and need not be parsed.
        if possible(source) - known - set(found):
            for name in imports(ast.parse(source)):
                if name not in known:
                    found.setdefault(name, str(path.relative_to(ROOT)))
    return found


@cache
def owners() -> dict[str, set[str]]:
    """The distributions that each top-level module belongs to."""
    return {name: {plain(one) for one in found} for name, found in packages_distributions().items()}


def plain(name: str) -> str:
    return name.lower().replace("_", "-")


def asked() -> dict[str, set[str]]:
    """The names of the distributions that setup.cfg asks for, by extra; of the package itself under an empty name."""
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    lists = {"": config["options"]["install_requires"], **config["options.extras_require"]}
    return {
        extra: {plain(found[0]) for line in text.splitlines() if (found := re.match(r"[A-Za-z][\w.-]*", line.strip()))}
        for extra, text in lists.items()
    }


class DependencyTests(SynchronousTestCase):
    def missing(self, folder: str, *extras: str) -> dict[str, str]:
        """Return the modules imported below a folder that belong to no required distribution."""
        lists = asked()
        wanted = set[str]().union(lists[""], *(lists[extra] for extra in extras))
        return {name: path for name, path in imported(folder).items() if not owners().get(name, {plain(name)}) & wanted}

    def test_imports_of_the_package_are_declared(self) -> None:
        every = [
            name
            for name in asked()
            if name not in ("", "lint", "docs", "dev", "dist", "fuzz", "mutation", "test", "test-s3", "test-spark")
        ]
        self.assertEqual(self.missing("dmsg", *every), {})

    def test_imports_of_the_tests_are_declared(self) -> None:
        """The distributions are those of `make test`; only the tests of Spark may need distributions that `make
        test-core` does not install.
        """
        self.assertEqual(
            self.missing("tests", "fuzz", "mutation", "redis", "rmb", "spark", "test", "test-s3", "test-spark"), {}
        )
        needed = self.missing("tests", "redis", "rmb", "test")
        self.assertEqual(
            {
                name
                for name, path in needed.items()
                if not path.startswith(("tests/analytics/", "tests/mutation", "tests/fuzz/__main__"))
            },
            set(),
        )

    def test_imports_of_the_benchmarks_are_declared(self) -> None:
        self.assertEqual(self.missing("benchmarks", "redis", "rmb", "spark", "test", "test-spark"), {})
