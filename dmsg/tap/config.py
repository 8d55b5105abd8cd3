"""Settings of an entity in one TOML file, under the names of its options.

The command line overrides the file.
"""

from __future__ import annotations

import re
import signal
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from twisted.internet.interfaces import IReactorFromThreads
from twisted.logger import Logger
from twisted.python.usage import UsageError

from dmsg.base.options import Flag, Option
from dmsg.net.reactor import Reactor
from dmsg.tap.log_files import reopen_log_files

_log = Logger()


class GivenText(str):
    """Text that was given for an option.

    :ivar where: the file and the line, with a colon; empty for the command line.
    """

    where = ""


def read(path: str, rows: Sequence[Option]) -> dict[str, object]:
    """Return the settings in the file, as the command line would give them.

    :param rows: all options.
    :raises UsageError: the file is unreadable or malformed, or has an invalid name or value.
    """
    try:
        content = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}") from None
    known = {row.name: row for row in rows if row.in_file}
    settings: dict[str, object] = {}
    for given_name, value in content.items():
        name, place = given_name.replace("_", "-"), f"{find_line(path, given_name)}: "
        if name not in known:
            raise UsageError(f"{place}there is no setting {given_name!r}")
        if known[name].repeated:
            values = value if isinstance(value, list) else [value]
            if not all(isinstance(one, str) for one in values):
                raise UsageError(f"{place}{given_name} must be a text or a list of texts")
            texts = [GivenText(one) for one in values]
            for text in texts:
                text.where = place
            settings[name] = texts
        elif isinstance(known[name].kind, Flag):
            if not isinstance(value, bool):
                raise UsageError(f"{place}{given_name} must be true or false")
            settings[name] = value
        elif isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise UsageError(f"{place}{given_name} must be a text or a number")
        else:
            text = GivenText(value)
            text.where = place
            settings[name] = text
    return settings


def find_line(path: str, name: str) -> str:
    """Return the file and, if found, the line on which it sets ``name``."""
    pattern = re.compile(rf"^\s*[\"']?{name.replace('-', '[-_]')}[\"']?\s*=")
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return path
    line = next((number for number, line in enumerate(lines, 1) if pattern.match(line)), 0)
    return f"{path}, line {line}" if line else path


def on_hangup(reactor: Reactor, reload: Callable[[], None]) -> None:
    """At SIGHUP, call ``reload`` and reopen the log files; programs that rotate logs send this signal, too."""

    def hung_up(number: int, frame: object) -> None:
        threads = cast(IReactorFromThreads, reactor)
        threads.callFromThread(reopen_log_files)
        threads.callFromThread(reload)

    try:
        signal.signal(signal.SIGHUP, hung_up)
    except ValueError:
        # Outside the main thread no handler is installed: another program runs the entity there, and handles signals
        # itself.
        _log.debug("this system has no SIGHUP: settings cannot be reloaded")
