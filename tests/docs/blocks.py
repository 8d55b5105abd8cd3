"""Parser of the code blocks in Markdown pages, and of the comments that say how to run them.

A page is read from top to bottom.  A console block is a list of commands, each followed by its expected output.  A
line that begins with ``$``, or with a name and ``$`` (``bob$``), is a command; a command that ends with a backslash
continues on the next line; all other lines are output.  A Python block whose first line is ``# NAME.py`` is a file for
later commands; any other Python block is run to its end.

Two kinds of comments state the needs of a page, or of the block below the comment::

    <!-- page: network -->
    <!-- needs: java -->
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^```(\w+)\s*$")
_MARK = re.compile(r"^<!-- (needs|page): (.*) -->$")
_PROMPT = re.compile(r"^(\w*)\$ (.*)$")
_FILE = re.compile(r"^# (\w+\.\w+)$")
LANGUAGES = ("console", "python", "toml")


@dataclass
class Command:
    """Command line that a person types; ``output`` is the output that the page shows for it."""

    terminal: str
    text: str
    output: list[str] = field(default_factory=list)


@dataclass
class Block:
    """Fenced block, which begins at ``line`` of its page."""

    language: str
    line: int
    needs: tuple[str, ...]
    text: str

    @property
    def commands(self) -> list[Command]:
        """Return the commands of a console block, each with its output."""
        commands: list[Command] = []
        going_on = False
        for line in self.text.splitlines():
            match = None if going_on else _PROMPT.match(line)
            if match:
                commands.append(Command(match[1], match[2]))
            elif going_on:
                commands[-1].text += "\n" + line
            elif line.strip():
                commands[-1].output.append(line)
            going_on = (match is not None or going_on) and line.endswith("\\")
        return commands

    @property
    def file_name(self) -> str | None:
        """File name of a Python or TOML block that is a file; None for other blocks."""
        match = _FILE.match(self.text.partition("\n")[0])
        return match[1] if match else None


@dataclass
class Page:
    """Markdown file with its blocks."""

    path: Path
    fixtures: tuple[str, ...]
    blocks: list[Block]

    @property
    def name(self) -> str:
        """Path of the page below the root of the project."""
        return str(self.path.relative_to(ROOT))


def read_page(path: Path) -> Page:
    """Parse a page.

    :raises ValueError: a block does not end.
    """
    fixtures: tuple[str, ...] = ()
    blocks: list[Block] = []
    needs: tuple[str, ...] = ()
    language, start = "", 0
    lines: list[str] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if language:
            if line == "```":
                if language in LANGUAGES:
                    blocks.append(Block(language, start, needs, "\n".join(lines) + "\n"))
                language, needs = "", ()
            else:
                lines.append(line)
            continue
        if fence := _FENCE.match(line):
            language, start, lines = fence[1], number, []
        elif mark := _MARK.match(line):
            words = tuple(mark[2].split())
            if mark[1] == "page":
                fixtures = words
            else:
                needs = words
    if language:
        raise ValueError(f"{path}:{start}: the block has no end")
    return Page(path, fixtures, blocks)


def all_pages() -> list[Page]:
    """Return README and all pages in docs that have blocks."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    pages = [read_page(path) for path in paths if "_build" not in path.parts and "_generated" not in path.parts]
    return [page for page in pages if page.blocks]
