"""Catalogue of the messages of the product, made from its code; ``python -m tests.docs.message_catalogue`` writes it.

The catalogue is for people who look up what a line means, and for reviewers who read all messages as a list.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
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
UNNAMED = frozenset(
    {
        "text",
        "short",
        "name",
        "value",
        "strerror",
        "hex",
        "display_url",
        "shown_url",
        "rstrip",
        "decode",
        "total_seconds",
    }
)
"""Attributes whose owner's name says more about the value than their own name."""
VALUE = re.compile(r"{[A-Za-z_.][^{}]*}")
"""Value in a message."""
WITHIN = {
    "_error": ("the proxy {proxy} ", " (asked for {host}:{port})", "ProxyError"),
    "wrong_profile": ("", ": the peer seems to use the other --profile", "RemoteProtocolError"),
    "wrong": ("", "", "LocalError"),
}
"""By function that makes an exception: the texts before and after the message, and the type of the exception."""
HEAD = """# Messages

Every error message and log line of the product, by package, except those that consist only of values. A name in
braces, such as `{error}`, stands for a value, and `{...}` for a value without a name. The second column is the
exception that carries the message, the level of the log line, or `shown` for a line that a command prints.
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


def _value_name(node: ast.expr) -> str:
    """Return a name for a value in a message, taken from the code of the value; ``...`` if the code has none."""
    match node:
        case ast.Name(id="self"):
            return "..."
        case ast.Name(id=name):
            return name.lower().strip("_")
        case ast.Attribute(value=owner, attr=name):
            short = name.strip("_").removeprefix("shown_").removeprefix("display_")
            of = _value_name(owner) if short in UNNAMED else "..."
            return short if of == "..." else of
        case (
            ast.Call(func=ast.Attribute(value=owner, attr=name), args=[])
            | ast.Call(func=ast.Attribute(value=owner, attr="decode" as name))
        ):
            return _value_name(owner) if name in UNNAMED else "..."
        case ast.Call(func=ast.Name(id="len")):
            return "count"
        case ast.Call(func=ast.Name(), args=[argument, *_]):
            return _value_name(argument)
        case ast.Call(func=ast.Attribute(), args=[argument]) | ast.BoolOp(values=[argument, *_]):
            return _value_name(argument)
        case ast.Subscript(slice=ast.Constant(value=str(name))):
            return name
        case ast.Subscript(value=owner, slice=ast.Slice()):
            return _value_name(owner)
        case ast.BinOp(left=ast.Constant(), right=operand) | ast.BinOp(left=operand):
            return _value_name(operand)
        case ast.IfExp(body=ast.Constant(value=str(first)), orelse=ast.Constant(value=str(second))):
            return " or ".join(filter(None, (first, second)))
        case ast.IfExp(body=body):
            return _value_name(body)
    return "..."


def text_of(node: ast.expr, constants: Mapping[str, str]) -> str | None:
    """Return the text of an expression; None for an expression that is no text.

    Each value in the text is shown as ``{name}``, or as ``{...}`` if it has no name.

    :param constants: texts of the constants of the module.
    """
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name):
            return constants.get(name)
        case ast.FormattedValue(value=ast.Name(id=name)) if name in constants:
            return constants[name]
        case ast.FormattedValue(value=value):
            return f"{{{_value_name(value)}}}"
        case ast.JoinedStr(values=values):
            return "".join(text_of(part, constants) or "" for part in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = text_of(left, constants), text_of(right, constants)
            return None if first is None or second is None else first + second
    return None


def _constants(tree: ast.Module) -> dict[str, str]:
    """Return the texts of the constants of a module."""
    found: dict[str, str] = {}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                text = text_of(value, found)
                if text is not None:
                    found[name] = text
    return found


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
        constants = _constants(tree)
        for node in ast.walk(tree):
            found = _kind(node)
            if found is None:
                continue
            kind, call = found
            for argument in call.args[:2]:
                text = text_of(argument, constants)
                if text is None:
                    continue
                words = VALUE.sub("", text.removeprefix("dmsg: "))
                if " " in text and any(character.isalpha() for character in words):
                    before, after, kind = WITHIN.get(kind, ("", "", kind))
                    yield Message(package, " ".join(f"{before}{text}{after}".split()), kind)
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
        lines.append(f"| {VALUE.sub(_as_code, text)} | {message.kind} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
