"""Check of the output of commands with ``--json`` against the schema in the documentation, wherever a test runs such a
command.
"""

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
"""Commands without JSON objects: their output is empty, another program's, or a picture for people."""


def leaves(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the names of all commands below this one."""
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
    """Return the schema."""
    found: dict[str, Any] = json.loads(SCHEMA.read_text())
    return found


@cache
def _validator(command: str) -> Any:
    definitions = document()["$defs"]
    one = {"anyOf": [definitions["commands"][command], {"$ref": "#/$defs/error"}]}
    return jsonschema_rs.validator_for({"$schema": document()["$schema"], "$defs": definitions, **one})


def check(arguments: Sequence[str], out: str) -> int:
    """Check the output of a command; return the number of its objects.

    :raises AssertionError: a line is not an object that the schema gives for this command.
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
    """Return the name of the command that these arguments run; None if the schema does not have the command."""
    words = [word for word in arguments if not word.startswith("-")]
    for number in (2, 1):
        if " ".join(words[:number]) in document()["$defs"]["commands"]:
            return " ".join(words[:number])
    return None
