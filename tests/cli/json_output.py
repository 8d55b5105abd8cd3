"""What commands may say with ``--json``: the schema of the documents, looked at wherever a test runs a command so."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import click
import jsonschema_rs

SCHEMA = Path(__file__).parents[2] / "docs" / "reference" / "json-output.json"
AS_IT_IS = frozenset(
    {
        "connect",
        "listen",
        "nc",
        "messaging connect",
        "messaging listen",
        "curl",
        "completion",
        "demo",
        "analytics demo",
        "rmb demo",
        "name add",
        "name remove",
        "name group add",
        "name group remove",
        "config set",
        "config unset",
    }
)
"""Commands that say nothing, or whose output is another program's, or a picture for people: no objects."""


def leaves(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[str]:
    """All commands, by their names."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from leaves(found, (*path, name))
    else:
        yield " ".join(path)


@cache
def document() -> dict[str, Any]:
    """The schema."""
    found: dict[str, Any] = json.loads(SCHEMA.read_text())
    return found


@cache
def _validator(command: str) -> Any:
    definitions = document()["$defs"]
    one = {"anyOf": [definitions["commands"][command], {"$ref": "#/$defs/error"}]}
    return jsonschema_rs.validator_for({"$schema": document()["$schema"], "$defs": definitions, **one})


def check(arguments: Sequence[str], out: str) -> int:
    """Look at what a command said; how many objects there were.

    :raises AssertionError: a line is none of the command's objects.
    """
    command = command_of(arguments)
    if command is None or command in AS_IT_IS:
        return 0
    lines = [line for line in out.splitlines() if line]
    for line in lines:
        try:
            _validator(command).validate(json.loads(line))
        except (ValueError, jsonschema_rs.ValidationError) as error:
            raise AssertionError(f"dmsg {' '.join(arguments)}: {line}\n{error}") from None
    return len(lines)


def command_of(arguments: Sequence[str]) -> str | None:
    """Which one it is; None: none that the schema knows."""
    words = [word for word in arguments if not word.startswith("-")]
    for number in (2, 1):
        if " ".join(words[:number]) in document()["$defs"]["commands"]:
            return " ".join(words[:number])
    return None
