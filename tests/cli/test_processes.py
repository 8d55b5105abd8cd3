"""Child processes of commands: how each is started, in the whole package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

import dmsg

PACKAGE = Path(dmsg.__file__).parent


def commands_of_python() -> Iterator[tuple[str, list[object]]]:
    """Iterate over the lists that begin with ``sys.executable``: where each is, and its constants behind that."""
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text()
        if "sys.executable" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.List | ast.Tuple) and node.elts and ast.unparse(node.elts[0]) == "sys.executable":
                constants: list[object] = [
                    one.value if isinstance(one, ast.Constant) else None for one in node.elts[1:]
                ]
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", constants


class SafePathTests(SynchronousTestCase):
    """Python puts the working directory first on its path for ``-m`` and ``-c``, and peers may write there."""

    def test_no_child_imports_modules_of_its_working_directory(self) -> None:
        found = [(where, words) for where, words in commands_of_python() if {"-m", "-c"} & set(words)]
        self.assertGreater(len(found), 3)
        self.assertEqual([where for where, words in found if words[0] != "-P"], [])
