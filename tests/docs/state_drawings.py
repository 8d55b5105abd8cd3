"""Drawings of states and messages in the docstrings of modules, made from the tables that the modules run on.

``python -m tests.docs.state_drawings`` writes the drawings into the modules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

from dmsg.base.cipher_names import TAG_SIZE
from dmsg.clients import lifecycle
from dmsg.keys import PUBKEY_SIZE
from dmsg.messaging.core import state as messaging
from dmsg.noise import handshake
from dmsg.v2019.core import state as v2019

NOTHING = "(nothing)"
"""Name in a drawing of an id that has no state."""
_DRAWING = re.compile(r"(?<=::\n\n).*?(?=\n\n(?! )|\n\"\"\")", re.DOTALL)


def _words_of(what: Enum) -> str:
    """Return an input in words, as in ``receive CLOSE``."""
    verb, _, frame = what.name.partition("_")
    return f"{ {'SEND': 'send', 'RECV': 'receive'}[verb] } {frame.replace('_', ' ')}"


def _lines(arrows: Iterable[tuple[str, str, str]]) -> str:
    """Return the drawing of arrows: for each state, in the order given, what leads from it and where to.

    :param arrows: state, input in words, next state.
    """
    by_state: dict[str, list[tuple[str, str]]] = {}
    for before, what, after in arrows:
        by_state.setdefault(before, []).append((what, after))
    width = max(map(len, by_state))
    length = max(len(what) for rows in by_state.values() for what, _ in rows)
    return "\n".join(
        f"    {'' if number else before:<{width}} -- {what} {'-' * (length - len(what))}--> {after}"
        for before, rows in by_state.items()
        for number, (what, after) in enumerate(rows)
    )


def drawing(table: Mapping[Any, Enum]) -> str:
    """Return the drawing of a table of transitions.

    :param table: state, or None, and input -> next state.
    """
    return _lines(
        (NOTHING if before is None else before.name, _words_of(what), after.name)
        for (before, what), after in table.items()
    )


def lifecycle_drawing() -> str:
    """Return the drawing of a client's lifecycle, without the transitions that change nothing."""
    automaton = lifecycle.make_lifecycle.__automat_automaton__
    found: dict[str, dict[str, str]] = {}
    for before, what, after, _ in automaton.allTransitions():
        if before is not after:
            found.setdefault(before.name, {})[what] = after.name
    inputs = [name for name in vars(lifecycle.Lifecycle) if any(name in rows for rows in found.values())]
    states = [automaton.initialState.name]
    for state in states:  # Grows while it is read, so that states come in the order in which they are reached.
        states += [found[state][what] for what in inputs if found[state].get(what, state) not in states]
    return _lines((state, what, found[state][what]) for state in states for what in inputs if what in found[state])


def patterns_drawing() -> str:
    """Return the messages of each Noise pattern, with their tokens and their size without a payload."""
    rows: list[tuple[str, str, str]] = []
    for pattern, template in handshake.TEMPLATES.items():
        name = pattern.name
        for side, known in zip(("->", "<-"), template.pattern.pre_messages, strict=True):
            if known:
                rows.append((name, f"{side} {', '.join(known)}", "known before"))
                name = ""
        for number, tokens in enumerate(template.pattern.tokens):
            # Keys follow an agreement in both patterns, so a static key and the payload have a tag each.
            size = TAG_SIZE + sum({"e": PUBKEY_SIZE, "s": PUBKEY_SIZE + TAG_SIZE}.get(token, 0) for token in tokens)
            rows.append((name, f"{'<-' if number % 2 else '->'} {', '.join(tokens)}", f"{size} bytes"))
            name = ""
    width = max(len(message) for _, message, _ in rows)
    return "\n".join(f"    {name:<2}  {message:<{width}}  {note}" for name, message, note in rows)


DRAWINGS: dict[ModuleType, Callable[[], str]] = {
    v2019: lambda: drawing(v2019.TRANSITIONS),
    messaging: lambda: drawing(messaging.TRANSITIONS),
    lifecycle: lifecycle_drawing,
    handshake: patterns_drawing,
}
"""Drawing of each module that has one; it is the first literal block of the module's docstring."""


def path_of(module: ModuleType) -> Path:
    """Return the path of a module's source."""
    assert module.__file__ is not None
    return Path(module.__file__)


def with_drawing(text: str, current: str) -> str:
    """Return the text of a module with its drawing replaced by the current one."""
    return _DRAWING.sub(lambda _: current, text, count=1)


if __name__ == "__main__":
    for module, make in DRAWINGS.items():
        path_of(module).write_text(with_drawing(path_of(module).read_text(), make()))
