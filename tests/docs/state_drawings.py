"""Drawings of the states of transports and channels, made from their tables of transitions.

``python -m tests.docs.state_drawings`` writes them into the modules that have the tables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from dmsg.messaging.core import state as messaging
from dmsg.v2019.core import state as v2019

MODULES: tuple[Any, ...] = (v2019, messaging)
"""Modules with a table ``TRANSITIONS`` and a drawing of it in their docstring."""
NOTHING = "(nothing)"
"""What stands in a drawing for an id that has no state."""
_DRAWING = re.compile(r"(?<=::\n\n).*?(?=\n\n(?! )|\n\"\"\")", re.DOTALL)


def _said(what: Enum) -> str:
    """Return an input in words, as in ``receive CLOSE``."""
    verb, _, frame = what.name.partition("_")
    return f"{ {'SEND': 'send', 'RECV': 'receive'}[verb] } {frame.replace('_', ' ')}"


def drawing(table: Mapping[Any, Enum]) -> str:
    """Return the drawing of a table: for each state, in the order of the table, what leads from it and where to.

    :param table: state, or None, and input -> next state.
    """
    by_state: dict[str, list[tuple[str, str]]] = {}
    for (before, what), after in table.items():
        by_state.setdefault(NOTHING if before is None else before.name, []).append((_said(what), after.name))
    width = max(map(len, by_state))
    length = max(len(said) for rows in by_state.values() for said, _ in rows)
    lines = []
    for begun, rows in by_state.items():
        for number, (said, next_state) in enumerate(rows):
            shown = "" if number else begun
            lines.append(f"    {shown:<{width}} -- {said} {'-' * (length - len(said))}--> {next_state}")
    return "\n".join(lines)


def with_drawing(text: str, module: Any) -> str:
    """Return the text of a module with its drawing as the table has it."""
    return _DRAWING.sub(lambda _: drawing(module.TRANSITIONS), text, count=1)


if __name__ == "__main__":
    for one in MODULES:
        path = Path(one.__file__)
        path.write_text(with_drawing(path.read_text(), one))
