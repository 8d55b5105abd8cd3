"""What the options of several entities share."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any, TextIO, cast

from twisted.internet.endpoints import serverFromString
from twisted.logger import (
    FileLogObserver,
    FilteringLogObserver,
    ILogObserver,
    LogEvent,
    LogLevel,
    LogLevelFilterPredicate,
    eventAsText,
    globalLogBeginner,
)
from twisted.python.usage import Options as UsageOptions, UsageError

from dmsg.base.printable import printable, without_userinfo
from dmsg.base.urls import check_url
from dmsg.directories import config_directory
from dmsg.errors import DmsgError
from dmsg.pages.access import read_token
from dmsg.tap.log_files import log_file_of, reopen_at_signals

DESCRIPTOR_RESERVE = 64
"""Descriptors that are not for clients: log, listening ports, discovery."""


class EntityOptions(UsageOptions):
    """Options of an entity: what is wrong with them is one line, behind which twistd prints no page of usage."""

    def parseOptions(self, options: Sequence[str] | None = None) -> None:
        """:raises UsageError: one of them cannot be; twistd's caller gets a line instead, and its status 1."""
        try:
            super().parseOptions(options)  # type: ignore[no-untyped-call]
        except UsageError as error:
            twistd: Any = getattr(self, "parent", None)
            if twistd is None:
                raise
            sys.stderr.write(f"twistd {twistd.subCommand}: {error}\n")
            raise SystemExit(1) from None

    def opt_version(self) -> None:
        """Show the version of dmsg and exit"""
        sys.stdout.write(f"dmsg {version('dmsg')}\n")
        raise SystemExit(0)

    opt_V = opt_version

    def opt_h(self) -> None:
        """The same as --help"""
        self.opt_help()  # type: ignore[no-untyped-call]


def endpoint(value: str) -> str:
    """Check a Twisted endpoint string without listening."""
    from twisted.internet import reactor

    try:
        port = getattr(serverFromString(reactor, value), "_port", 0)
        if isinstance(port, int) and not 0 <= port < 65536:
            raise ValueError(f"{port} is no port")
    except Exception as error:
        raise UsageError(f"{value!r} is not an endpoint string, as tcp:8080 is: {error}") from None
    return value


def url(value: str) -> str:
    """Check an HTTP URL."""
    try:
        return check_url(value)
    except ValueError as error:
        raise UsageError(str(error)) from None


def number(value: str, low: int, high: int) -> int:
    """A whole number within bounds."""
    try:
        result = int(value)
    except ValueError:
        raise UsageError(f"{value!r} is not a number") from None
    if not low <= result <= high:
        raise UsageError(f"{value} is not between {low} and {high}")
    return result


def seconds(value: str) -> float:
    """Seconds, 0 to 3600."""
    try:
        result = float(value)
    except ValueError:
        raise UsageError(f"{value!r} is not a number of seconds") from None
    if not 0 <= result <= 3600:
        raise UsageError(f"{value} is not between 0 and 3600 seconds")
    return result


def descriptors() -> int:
    """How many connections this process may have, after raising the soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = resource.RLIM_INFINITY  # which is a negative number
    if soft != endless and (soft < hard or hard == endless):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (ValueError, OSError):
            pass
    return 2**31 if soft == endless else max(1, soft - DESCRIPTOR_RESERVE)


def _as_json(event: LogEvent) -> str:
    line: dict[str, Any] = {
        "time": event["log_time"],
        "level": event["log_level"].name if "log_level" in event else "info",
        "system": event.get("log_namespace", ""),
        "text": eventAsText(event, includeTimestamp=False, includeSystem=False),
    }
    for name in ("reason", "peer", "address"):
        if name in event:
            line[name] = str(event[name])
    return json.dumps(line) + "\n"


def json_log(stream: TextIO) -> ILogObserver:
    """Writes one JSON object a line."""
    observer: ILogObserver = FileLogObserver(stream, _as_json)
    return observer


def set_log_format(value: str, *, debug: bool = False) -> None:
    """``text`` is twistd's log; ``json`` takes its place, in its file or on standard output.  No control characters.

    :param debug: also what is said for debugging.

    A plugin's makeService is called just before twistd begins to log, and has
    no other way to choose an observer: its application does not know it yet.
    """
    begin = globalLogBeginner.beginLoggingTo

    def begin_otherwise(given: Iterable[ILogObserver], **options: Any) -> None:
        observers = list(given)
        del globalLogBeginner.beginLoggingTo
        files = [file for one in observers if (file := log_file_of(one)) is not None]
        for file in files:
            reopen_at_signals(file)
        if value == "json":
            outputs: list[Any] = [*files] or [sys.stdout]
            observers = [json_log(output) for output in outputs]
        if not debug:
            level = LogLevelFilterPredicate(LogLevel.info)
            # that a connection to Redis will be tried again is no news; that Redis is away has a line of its own
            level.setLogLevelForNamespace("twisted.application._client_service", LogLevel.warn)
            observers = [FilteringLogObserver(one, [level]) for one in observers]
        begin([printable_log(one) for one in observers], **options)

    globalLogBeginner.beginLoggingTo = begin_otherwise  # type: ignore[method-assign,assignment]


def _shown(text: str) -> str:
    return without_userinfo(printable(text))


def printable_log(observer: ILogObserver) -> ILogObserver:
    """What strangers have said does nothing to the terminal on which a log is read, and makes no line of its own."""

    def observe(event: LogEvent) -> None:
        observer(
            {
                name: _shown(value) if isinstance(value, str) and not name.startswith("log_") else value
                for name, value in event.items()
            }
        )

    return cast(ILogObserver, observe)


def own_pid_file(options: Any, name: str) -> None:
    """Two entities run from one directory, as the README has it: twistd's one file would keep the second out.

    In the foreground nobody needs the file; else it gets the entity's name.
    One that was asked for stays.
    """
    twistd = getattr(options, "parent", None)
    if twistd is not None and twistd.get("pidfile") == "twistd.pid":
        twistd["pidfile"] = "" if twistd.get("nodaemon") else f"{name}.pid"


def default_key_file(name: str) -> str:
    """Where the key of an entity lies when nobody says."""
    return str(config_directory() / f"{name}.key")


METRICS_OPTION = [
    "metrics",
    None,
    None,
    "endpoint string for its page, /metrics and /health, as in tcp:9100:interface=127.0.0.1",
    str,
]
PAGE_TOKEN_OPTION = [
    "page-token",
    None,
    None,
    "file (mode 0600) with a token that opens the page from anywhere; without it the page is for this machine alone",
    str,
]


def page_token(options: Any) -> bytes | None:
    """What is in the file of ``--page-token``.

    :raises UsageError: it cannot be used, or there is no page.
    """
    path = options["page-token"]
    if path is None:
        return None
    if options["metrics"] is None:
        raise UsageError("--page-token: there is no page without --metrics")
    try:
        return read_token(path)
    except DmsgError as error:
        raise UsageError(str(error)) from None
