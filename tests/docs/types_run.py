"""Type checks of the examples in the pages, which find calls of renamed methods.  ``make lint`` runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.docs.blocks import ROOT, all_pages

# Examples stay short: they have no annotations, and use the transport and the protocol that Twisted's interfaces
# declare as the concrete classes that they are.
CONFIGURATION = """
[mypy]
plugins = mypy_zope:plugin
check_untyped_defs = True
ignore_missing_imports = True
scripts_are_modules = True
disable_error_code = index, misc, override, union-attr, var-annotated
"""
ABSTRACT = ('"IProtocol" has no attribute', '"ClientMeta | None"', "tuple[str, ...] | Any | None")


class ExampleTypeTests(SynchronousTestCase):
    """Tests that examples only call existing functions."""

    def check(self, blocks: dict[str, str]) -> list[str]:
        """Return mypy's errors in ``blocks`` (the text by a name), without those that an example may have."""
        root = Path(self.mktemp()).absolute()
        root.mkdir()
        (root / "mypy.ini").write_text(CONFIGURATION)
        for name, text in blocks.items():
            (root / f"{name}.py").write_text(text)
        command = [sys.executable, "-m", "mypy", "--config-file", str(root / "mypy.ini")]
        command += ["--cache-dir", str(ROOT / ".mypy_cache")]
        command += [str(root / f"{name}.py") for name in blocks]
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        self.assertIn(ran.returncode, (0, 1), ran.stdout + ran.stderr)
        errors = [line.rpartition("/")[2] for line in ran.stdout.splitlines() if ": error: " in line]
        return [line for line in errors if not any(text in line for text in ABSTRACT)]

    def test_examples_use_names_that_exist(self) -> None:
        blocks = {
            f"{page.name.removesuffix('.md').replace('/', '_').replace('-', '_')}_{block.line}": block.text
            for page in all_pages()
            for block in page.blocks
            if block.language == "python"
        }
        self.assertGreater(len(blocks), 20)
        self.assertEqual(self.check(blocks), [])

    def test_a_missing_method_is_found(self) -> None:
        text = "from dmsg import SecKey\n\n\ndef main():\n    key = SecKey.generate()\n    key.go_on()\n"
        self.assertEqual(
            self.check({"example": text}), ['example.py:6: error: "SecKey" has no attribute "go_on"  [attr-defined]']
        )
