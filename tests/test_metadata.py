"""Metadata of the package, as an index shows them."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from configparser import ConfigParser
from importlib.metadata import version
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

ROOT = Path(__file__).parents[1]


def long_description() -> Callable[[str], str]:
    """Return the function of setup.py. The file itself cannot be imported, because it would build."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    tree.body = [
        node
        for node in tree.body
        if isinstance(node, ast.Import) or (isinstance(node, ast.FunctionDef) and node.name == "long_description")
    ]
    names: dict[str, Callable[[str], str]] = {}
    exec(compile(tree, "setup.py", "exec"), names)  # noqa: S102
    return names["long_description"]


class MetadataTests(SynchronousTestCase):
    def test_links_lead_somewhere(self) -> None:
        """An index has no files beside it; a link is absolute, or none."""
        text = long_description()((ROOT / "README.md").read_text())
        self.assertEqual([link for link in re.findall(r"\]\(([^)]*)\)", text) if "://" not in link], [])
        self.assertNotIn("<!--", text)
        self.assertNotIn("![", text)
        self.assertIn("One command runs a discovery and a server", text)
        make = long_description()
        self.assertEqual(make("[a](b.md), [c](https://d/e), ![p](q.svg)"), "a, [c](https://d/e), !p")
        self.assertEqual(make("![picture](docs/x.svg)\n\nText\n<!-- needs: clone -->\nmore"), "Text\nmore")

    def test_the_version_is_defined_once(self) -> None:
        config = ConfigParser()
        config.read(ROOT / "setup.cfg")
        self.assertEqual(version("dmsg"), config["metadata"]["version"])
        for name in ("author", "keywords", "license"):
            self.assertTrue(config["metadata"][name], name)
        said = [
            path.name
            for path in (*ROOT.glob("dmsg/**/*.py"), *ROOT.glob("docs/*.py"))
            if re.search(r"^(__version__|release|version) = [\"']", path.read_text(), re.MULTILINE)
        ]
        self.assertEqual(said, [], "the version stands in setup.cfg alone")
