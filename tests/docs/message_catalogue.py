"""Catalogue of the messages of the product, made from its code; ``python -m tests.docs.message_catalogue`` writes it.

The catalogue is for people who look up what a line means, and for reviewers who read all messages as a list.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from tests.docs.modules import ROOT, modules

PAGE = ROOT / "docs" / "reference" / "messages.md"
LOGGED = frozenset({"debug", "info", "warn", "error", "failure", "critical"})
"""Methods of a logger."""
SHOWN = frozenset({"say", "notice", "fail", "fail_with"})
"""Functions of the commands that write a line to the terminal."""
LEFT_OUT = "dmsg/testing/"
"""Directory whose messages only programmers see; the catalogue leaves them out."""
HEAD = """# Messages

Every error message and log line of the product, by package, except those that consist only of values. `{...}` stands
for a value. The second column is the exception that carries the message, the level of the log line, or `shown` for a
line that a command prints.
`python -m tests.docs.message_catalogue` writes this page from the code.
"""


@dataclass(frozen=True, order=True)
class Message:
    """Message of the product.

    :ivar package: directory below ``dmsg/``, or the module for modules at the top.
    :ivar text: with ``{...}`` where a value stands.
    :ivar kind: exception, level of the log, or ``shown``.
    """

    package: str
    text: str
    kind: str


def text_of(node: ast.expr) -> str | None:
    """Return the text of an expression, with ``{...}`` for values; None for an expression that is no text."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(part.value if isinstance(part, ast.Constant) else "{...}" for part in values)  # type: ignore[misc]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = text_of(left), text_of(right)
            return None if first is None or second is None else first + second
    return None


def _kind(node: ast.AST) -> tuple[str, ast.Call] | None:
    """Return the kind of message that a node makes, and the call that has its text."""
    if not isinstance(node, ast.Raise | ast.Call):
        return None
    match node:
        case ast.Raise(exc=ast.Call(func=func) as call):
            return ast.unparse(func).rpartition(".")[2], call
        case ast.Call(func=ast.Attribute(value=owner, attr=name)) if name in LOGGED and "log" in ast.unparse(owner):
            return name, node
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in SHOWN:
            return "shown", node
    return None


@cache
def messages() -> frozenset[Message]:
    """Return the messages of all modules."""
    return frozenset(_messages())


def _messages() -> Iterator[Message]:
    for place, tree in modules():
        if place.startswith(LEFT_OUT):
            continue
        package = place.split("/")[1].removesuffix(".py")
        for node in ast.walk(tree):
            found = _kind(node)
            if found is None:
                continue
            kind, call = found
            for argument in call.args[:2]:
                text = text_of(argument)
                if text is None:
                    continue
                words = text.replace("{...}", "")
                if " " in words and any(character.isalpha() for character in words):
                    yield Message(package, " ".join(text.split()), kind)
                    break


def _as_code(value: re.Match[str]) -> str:
    return f"`{value[0].replace(chr(92), '')}`"


def page() -> str:
    """Return the page."""
    lines = [HEAD]
    package = ""
    for message in sorted(messages()):
        if message.package != package:
            package = message.package
            lines.append(f"\n## {package}\n\n| message | kind |\n|---|---|")
        text = message.text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
        lines.append(f"| {re.sub(r'{[^}]*}', _as_code, text)} | {message.kind} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
