"""References in the documentation lead to modules that have a page.

Sphinx checks every reference, but it takes more than a minute. The test of this module takes a second and finds the
most common mistake: a page or a docstring refers to a module that the pages do not include yet.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.docs.modules import ROOT, modules

_KINDS = "(?:mod|class|func|meth|data|attr|exc)"
ROLE = re.compile(rf"(?::{_KINDS}:|{{{_KINDS}}})`(?:[^`<]*<)?~?(dmsg[\w.]*)>?`")
"""A reference to a name of the product, in reST or MyST, with or without a title of its own."""
DIRECTIVE = re.compile(r"(auto|py:|\.\. )(module|class|function|data|exception|attribute|method):: (dmsg[\w.]*)")
"""A directive that documents a module or a single name."""


def _pages() -> str:
    pages = (ROOT / "docs").rglob("*.*")
    texts = (page.read_text() for page in pages if page.suffix in {".rst", ".md"} and "_build" not in page.parts)
    return "\n".join(texts)


def _module_of(place: str) -> str:
    return ".".join(Path(place).with_suffix("").parts).removesuffix(".__init__")


class ReferenceTests(SynchronousTestCase):
    """Tests of the references on pages, and in the docstrings of modules that have a page."""

    def test_references_lead_to_what_is_on_a_page(self) -> None:
        pages = _pages()
        directives = DIRECTIVE.findall(pages)
        with_page = {name for _, kind, name in directives if kind == "module"}
        with_docstring = {name for prefix, kind, name in directives if (prefix, kind) == ("auto", "module")}
        names = {name for _, kind, name in directives if kind != "module"}
        every = {_module_of(place) for place, _ in modules()}
        references = [("docs", target) for target in ROLE.findall(pages)]
        for place, tree in modules():
            if _module_of(place) not in with_docstring:
                continue
            texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
            references += [(place, one) for text in texts if isinstance(text, str) for one in ROLE.findall(text)]
        lost = []
        for place, target in references:
            module = target
            while module not in every and "." in module:
                module = module.rpartition(".")[0]
            if module not in with_page and not {target, target.rpartition(".")[0]} & names:
                lost.append(f"{place}: {target}")
        self.assertGreater(len(with_page), 100)
        self.assertEqual(lost, [], "add the modules to docs/internals.rst")
