"""Text of ``--help`` of the plugins of twistd: what an entity does, an example, and its options by group."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from dmsg.base.options import GROUPS, Choice, Flag, Number, Option

HELP_COLUMN = 28
"""Column at which the help texts of options begin."""
EXAMPLE = "Example: "
"""Text that separates a plugin's description from its example."""


def usage_of(description: str, rows: Iterable[Option], width: int) -> str:
    """Return the text of ``--help``.

    :param description: what the entity does, followed by ``EXAMPLE`` and the example.
    :param rows: declarations of the options.
    :param width: columns of the terminal.
    """
    what, mark, example = description.partition(EXAMPLE)
    lines = ["", *textwrap.wrap(what, width)]
    if mark:
        lines += [
            "",
            "Example:",
            *textwrap.wrap(example, width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False),
        ]
    rows = sorted(rows, key=lambda row: row.name)
    for group in GROUPS:
        members = [row for row in rows if row.group == group]
        if members:
            lines += ["", f"{group}:", *(line for row in members for line in _lines(row, width))]
    return "\n".join(lines) + "\n"


def _lines(row: Option, width: int) -> Iterator[str]:
    """Return the help lines of one option: name, help text, accepted values, and default."""
    letter = f"-{row.short}," if row.short else ""
    name = f"  {letter:<4}--{row.name}{'' if isinstance(row.kind, Flag) else '='}"
    notes = [row.kind.accepted_text.replace("`", "")] if isinstance(row.kind, (Number, Choice)) else []
    if row.default_in_words:
        notes.append(f"default: {row.default_in_words}")
    text = f"{row.help}." + (f" [{'; '.join(notes)}]" if notes else "")
    wrapped = textwrap.wrap(text, max(width - HELP_COLUMN, 20), break_on_hyphens=False)
    if len(name) < HELP_COLUMN:
        yield name.ljust(HELP_COLUMN) + wrapped.pop(0)
    else:
        yield name
    for line in wrapped:
        yield " " * HELP_COLUMN + line
