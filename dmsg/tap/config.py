"""Settings of an entity in one TOML file, under the names of its options.

What stands on the command line goes before what stands in the file.
"""

from __future__ import annotations

import re
import signal
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from twisted.internet.interfaces import IReactorFromThreads
from twisted.logger import Logger
from twisted.python.usage import UsageError

from dmsg.net.reactor import Reactor
from dmsg.tap.log_files import reopen_log_files

_log = Logger()


def given(arguments: Sequence[str]) -> frozenset[str]:
    """Names of the options on a command line."""
    return frozenset(word[2:].partition("=")[0] for word in arguments if word.startswith("--"))


def read(path: str, known: Sequence[str], lists: Sequence[str], flags: Sequence[str] = ()) -> dict[str, Any]:
    """The settings in the file, as the command line would have them.

    :param known: names of all options; ``lists`` of those that may be repeated.
    :raises UsageError: unreadable, malformed, or with a name or value that is none.
    """
    try:
        content = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}") from None
    settings: dict[str, Any] = {}
    for given_name, value in content.items():
        name = given_name.replace("_", "-")
        if name not in known or name == "config":
            raise UsageError(f"{where(path, given_name)}: there is no setting {given_name!r}")
        if name in lists:
            values = value if isinstance(value, list) else [value]
            if not all(isinstance(one, str) for one in values):
                raise UsageError(f"{where(path, given_name)}: {given_name} is a text or a list of texts")
            settings[name] = values
        elif name in flags:
            if not isinstance(value, bool):
                raise UsageError(f"{where(path, given_name)}: {given_name} is true or false")
            settings[name] = int(value)
        elif isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise UsageError(f"{where(path, given_name)}: {given_name} is a text or a number")
        else:
            settings[name] = str(value)
    return settings


def where(path: str, name: str) -> str:
    """The file, and the line on which it sets ``name``, if that is seen."""
    pattern = re.compile(rf"^\s*[\"']?{name.replace('-', '[-_]')}[\"']?\s*=")
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return path
    line = next((number for number, line in enumerate(lines, 1) if pattern.match(line)), 0)
    return f"{path}, line {line}" if line else path


def on_hangup(reactor: Reactor, reload: Callable[[], None]) -> None:
    """Call ``reload`` at SIGHUP, and open log files anew: who rotates them sends it, too."""

    def hung_up(number: int, frame: Any) -> None:
        threads = cast(IReactorFromThreads, reactor)
        threads.callFromThread(reopen_log_files)
        threads.callFromThread(reload)

    try:
        signal.signal(signal.SIGHUP, hung_up)
    except ValueError:  # not in the main thread: a program of its own uses this, and has its own way
        _log.debug("SIGHUP is not listened to")
