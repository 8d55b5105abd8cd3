"""Configuration file of an entity: a TOML file whose settings have the names of the command-line options.

Options on the command line override the file.
"""

from __future__ import annotations

import re
import signal
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
    """Text of an option's value.

    :ivar where: the file and the line that contain the value, and a colon; empty if it came from the command line.
    """

    where = ""


def read(path: str, rows: Sequence[Option]) -> dict[str, object]:
    """Return the settings in the file, in the form that values from the command line have.

    :param path: path of the file.
    :param rows: declarations of all options.
    :raises UsageError: the file is unreadable or malformed, or has an invalid name or value.
    """
    # The import is here, because most entities run without a configuration file.
    import tomllib

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
    """Return the path and, if found, the number of the line that sets ``name``, as a text for messages."""
    pattern = re.compile(rf"^\s*[\"']?{name.replace('-', '[-_]')}[\"']?\s*=")
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return path
    line = next((number for number, line in enumerate(lines, 1) if pattern.match(line)), 0)
    return f"{path}, line {line}" if line else path


def on_hangup(reactor: Reactor, reload: Callable[[], None]) -> None:
    """Install a handler for SIGHUP that calls ``reload`` and reopens the log files.

    Programs that rotate logs also send this signal.
    """

    def hung_up(number: int, frame: object) -> None:
        threads = cast(IReactorFromThreads, reactor)
        threads.callFromThread(reopen_log_files)
        threads.callFromThread(reload)

    try:
        signal.signal(signal.SIGHUP, hung_up)
    except ValueError:
        # Python allows signal handlers only in the main thread. If the entity runs in another thread, the program that
        # started it there handles signals.
        _log.debug("SIGHUP is not handled outside the main thread: settings cannot be reloaded")
