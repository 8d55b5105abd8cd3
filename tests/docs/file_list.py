"""List of files in docs/architecture.md, made from the docstrings of modules; ``python -m tests.docs.file_list``.

The description of a file or package is the first sentence of its docstring.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
GENERATED = "envelope_pb2.py"
"""Name of the module that protoc generates, and that is not listed."""
COLUMN = 28
"""Column at which descriptions begin."""
WIDTH = 116
"""Maximum length of a line of the list."""
_BLOCK = re.compile(r"(## Every file\n.*?```text\n).*?(```\n)", re.DOTALL)


def is_listed(path: Path) -> bool:
    """Whether a module has a line of its own; ``__init__.py`` and ``__main__.py`` have none."""
    return path.suffix == ".py" and not path.name.startswith("__") and path.name != GENERATED


def description(path: Path) -> str:
    """Return the first sentence of a module's docstring, without markup and full stop."""
    source = path.read_text()
    # Parse only up to the end of the docstring; a module that does not begin with one has none.
    begin = source.find('"""')
    head = source[: source.find('"""', begin + 3) + 3] if begin in (0, 1) else ""
    text = " ".join((ast.get_docstring(ast.parse(head)) or "").partition("\n\n")[0].split())
    sentence = re.split(r"\.(?=\s|$)", text, maxsplit=1)[0]
    return re.sub(r":\w+:`~?([^`]+)`", r"\1", sentence).replace("``", "").replace("**", "")


def lines(directory: Path, depth: int) -> Iterator[str]:
    """Return the lines of a package: its modules, then its packages."""
    for path in sorted(directory.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        if is_listed(path):
            name, source = path.name, path
        elif (path / "__init__.py").exists():
            name, source = f"{path.name}/", path / "__init__.py"
        else:
            continue
        indented = "  " * depth + name
        yield from textwrap.wrap(
            description(source),
            WIDTH,
            initial_indent=f"{indented:<{COLUMN - 1}} ",
            subsequent_indent=" " * COLUMN,
            break_on_hyphens=False,
        )
        if path.is_dir():
            yield from lines(path, depth + 1)


def with_list(text: str) -> str:
    """Return the page with its list replaced by the one that the docstrings give."""
    made = "\n".join(["dmsg/", *lines(ROOT / "dmsg", 1)]) + "\n"
    return _BLOCK.sub(lambda match: match[1] + made + match[2], text)


if __name__ == "__main__":
    PAGE.write_text(with_list(PAGE.read_text()))
