"""Manual pages, generated from the docstrings and options that ``--help`` shows, too."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import click

from dmsg.cli.output import name_file_in_errors
from dmsg.directory_checks import check_not_planted

STATUSES = (
    ("0", "Success."),
    ("1", "The command failed."),
    ("2", "The command line is invalid."),
    ("3", "The peer does not exist or cannot be reached."),
    ("4", "The other side was reached, and refused the request."),
    ("5", "The transfer was interrupted; the same command resumes it."),
    ("130, 143", "The command was ended by Ctrl-C (130) or by SIGTERM (143)."),
)
FILES = (
    ("~/.config/dmsg/config.toml", "default values of options; see dmsg-config(1)"),
    ("~/.config/dmsg/names", "the address book; see dmsg-name(1)"),
    ("~/.config/dmsg/key", "the default key of the agent; see dmsg-up(1)"),
)
ENVIRONMENT = (
    ("DMSG_DISCOVERY", "URLs of discoveries, separated by blanks"),
    ("DMSG_KEY_FILE", "path of the key file"),
    ("DMSG_CONFIG, DMSG_NAMES", "paths of the configuration file and of the address book, in place of those below"),
    ("DMSG_AGENT", "path of the agent's socket; off to work without an agent"),
    ("NO_COLOR", "print no colours if this is set to any value"),
)


def pages(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield file name and text of the manual pages of a command and of all its subcommands.

    :param path: names of the groups that contain the command, and its own name.
    """
    yield f"{'-'.join(path)}.1", page(command, path)
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            if found is not None and not found.hidden:
                yield from pages(found, (*path, name))


def page(command: click.Command, path: tuple[str, ...]) -> str:
    """Return the manual page of a command for section 1, in the macros of man(7)."""
    context = click.Context(command, info_name=" ".join(path))
    title = "-".join(path)
    day = time.strftime("%Y-%m-%d")
    parts = [
        f'.TH "{_escape(title.upper())}" "1" "{day}" "dmsg {version("dmsg")}" "dmsg"',
        ".SH NAME",
        _escape(f"{title} - {command.get_short_help_str(200).rstrip('.')}"),
        ".SH SYNOPSIS",
        f".B {_escape(' '.join(path))}",
        _escape(" ".join(command.collect_usage_pieces(context))),
        ".SH DESCRIPTION",
        *_paragraphs(command.help or ""),
    ]
    if isinstance(command, click.Group):
        parts.append(".SH COMMANDS")
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            if found is not None and not found.hidden:
                parts += [".TP", f".B {_escape('-'.join((*path, name)))}(1)", _escape(found.get_short_help_str(200))]
    records = [
        record
        for param in command.get_params(context)
        if isinstance(param, click.Option) and (record := param.get_help_record(context)) is not None
    ]
    if records:
        parts.append(".SH OPTIONS")
        for name, text in records:
            parts += [".TP", f".B {_escape(name)}", _escape(" ".join(text.split()))]
    for heading, rows in (("EXIT STATUS", STATUSES), ("ENVIRONMENT", ENVIRONMENT), ("FILES", FILES)):
        parts.append(f".SH {heading}")
        for name, text in rows:
            parts += [".TP", f".B {_escape(name)}", _escape(text)]
    if len(path) > 1:
        parts += [".SH SEE ALSO", f".BR {_escape('-'.join(path[:-1]))} (1)"]
    return "\n".join(parts) + "\n"


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the lines of a description in the macros of man(7).  The lines of examples are not wrapped."""
    for number, paragraph in enumerate(re.split(r"\n\s*\n", text.strip())):
        lines = paragraph.splitlines()
        as_it_is = lines[0].strip() == "\b"
        if as_it_is:
            lines = lines[1:]
        if lines and lines[0].strip() in ("Examples:", "Example:"):
            yield ".SH EXAMPLES"
            lines = lines[1:]
        elif number:
            yield ".PP"
        if as_it_is:
            yield ".nf"
            yield from (_escape(line.removeprefix("  ")) for line in lines)
            yield ".fi"
        else:
            yield from (_escape(line.strip()) for line in lines)


def _escape(text: str) -> str:
    """Escape text for roff, so that roff takes no line for a request, and prints no dash as a hyphen."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\(ga").replace("\b", "")
    return "\\&" + text if text.startswith((".", "\\(aq")) else text


def write(command: click.Command, directory: Path) -> int:
    """Write the pages of a command and of all its subcommands into a directory, and return their number.

    :raises OSError: a page cannot be written, or another user has put it into a shared directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    number = 0
    for name, text in pages(command, ("dmsg",)):
        check_not_planted(directory / name)
        with name_file_in_errors(directory / name):
            (directory / name).write_text(text)
        number += 1
    return number
