"""Docstrings that do not say their subject: they begin with a preposition or a pronoun.

A docstring of a class or an attribute begins with a noun phrase, one of a function with a verb: a reader who comes from
a search has nothing that "it" or "those" could stand for.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from tests.docs.modules import modules

WORDS = """
    Of By For With Without At In On From To Over Under As Behind Before After Between Beside Into Through That What Who
    Whom Whose Which It They One There This These Those He She How Where When Such Some Somebody Nobody Anybody Others
    Its Their Theirs
""".split()
"""Words with which a docstring must not begin; "Whether" is fine for predicates."""
BEGINS = re.compile(rf"({'|'.join(WORDS)})\b")


@dataclass(frozen=True)
class Docstring:
    """Docstring of the product, and its place.

    :ivar place: path and line.
    :ivar text: the docstring without its indentation.
    """

    place: str
    text: str

    @property
    def says_its_subject(self) -> bool:
        """Whether the docstring begins with something else than a preposition or a pronoun."""
        return BEGINS.match(self.text) is None


def _texts(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of the docstrings of a node and of its attributes."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text:
            yield node.body[0].lineno, text
    body = getattr(node, "body", None)
    if isinstance(body, list):
        for first, second in zip(body, body[1:], strict=False):
            match first, second:
                case ast.Assign() | ast.AnnAssign(), ast.Expr(value=ast.Constant(value=str(text))):
                    yield second.lineno, text


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the module and all statements in it. Expressions, nine of ten nodes, have no docstrings."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            part = getattr(node, name, None)
            if isinstance(part, list):
                waiting += part


def docstrings() -> Iterator[Docstring]:
    """Yield all docstrings of the product."""
    for place, tree in modules():
        for node in _statements(tree):
            for line, text in _texts(node):
                yield Docstring(f"{place}:{line}", text)


if __name__ == "__main__":
    for one in docstrings():
        if not one.says_its_subject:
            sys.stdout.write(f"{one.place}: {one.text.splitlines()[0]}\n")
