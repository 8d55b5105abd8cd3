"""Options of the plugins of twistd, generated from declarations, and the options that several plugins share."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Self, TextIO, TypeVar, cast

from twisted.application.app import ServerOptions
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

from dmsg.base.options import FLAG, KEY, LOGS, NETWORK, Choice, Flag, Kind, Option, Text, rows_of
from dmsg.base.printable import printable, without_userinfo
from dmsg.base.version import program_version
from dmsg.directories import config_directory, note_on_working_directory
from dmsg.errors import DmsgError
from dmsg.keylock import KeyLock, hold_key
from dmsg.keys import default_key, load_or_create_key
from dmsg.net.descriptors import raise_descriptor_limit
from dmsg.net.listening import ENDPOINT
from dmsg.net.reactor import Reactor, the_reactor
from dmsg.tap import config
from dmsg.tap.config import GivenText
from dmsg.tap.log_files import check_can_write, create_log_file, log_file_of, remove_empty_pid_file, reopen_at_signals
from dmsg.tap.usage import usage_of

UNSET_VALUES: tuple[object, ...] = (None, [], 0)
"""Values that an option has after parsing if it was not given on the command line."""
_T = TypeVar("_T")

LISTEN = Option(
    name="listen", help="Endpoint string to listen on; repeatable", kind=ENDPOINT, repeated=True, group=NETWORK
)
LOG_FORMAT = Option(
    name="log-format",
    help="Format of the log",
    kind=Choice({"text": "text", "json": "json"}),
    default="text",
    group=LOGS,
)
DEBUG = Option(name="debug", short="d", help="Write debug messages to the log", kind=FLAG, group=LOGS)


def listen_row(default: str, help: str = LISTEN.help, kind: Kind = ENDPOINT, short: str | None = None) -> Option:
    """Return the declaration of ``--listen``.

    :param default: endpoint string to listen on if the option is not given.
    :param help: help text.
    :param kind: kind of the accepted values.
    :param short: short name of the option, one letter.
    """
    return replace(LISTEN, default=(default,), help=help, kind=kind, short=short)


class EntityOptions(UsageOptions):
    """Options of an entity, generated from declarations; see :mod:`dmsg.base.options`.

    An error is printed as one line, without twistd's usage.  After parsing, each option has its value, in the unit of
    the settings class.

    :cvar plugin: name of the plugin of twistd.
    :cvar rows: declarations of all options of the plugin; :func:`~dmsg.base.options.rows_of` returns those of a
        settings class.
    :ivar from_file: settings in the configuration file.
    """

    plugin: ClassVar[str] = ""
    rows: ClassVar[tuple[Option, ...]] = ()
    optFlags: ClassVar[list[list[object]]]
    optParameters: ClassVar[list[list[object]]]
    longdesc: ClassVar[str] = ""
    synopsis = "[options]"

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        known = {row.name for base in cls.__mro__[1:] for row in getattr(base, "rows", ())}
        own = [row for row in cls.rows if row.name not in known]
        cls.optFlags = [[row.name, row.short, row.help] for row in own if isinstance(row.kind, Flag)]
        cls.optParameters = []
        for row in own:
            if row.repeated:
                # The long and the short name share one method, so that twistd shows them on one line.
                method = _appending(row)
                for name in filter(None, (row.name.replace("-", "_"), row.short)):
                    setattr(cls, f"opt_{name}", method)
            elif not isinstance(row.kind, Flag):
                cls.optParameters.append([row.name, row.short, None, _usage(row), GivenText])

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.from_file: dict[str, object] = {}
        self.update({row.name: [] for row in self.rows if row.repeated})

    def parseOptions(self, options: Sequence[str] | None = None) -> None:
        """Parse the options.

        :raises UsageError: an option is invalid.  As a plugin of twistd, the method instead prints one line and raises
            SystemExit with status 1.
        """
        try:
            super().parseOptions(options)  # type: ignore[no-untyped-call]
        except UsageError as error:
            twistd: ServerOptions | None = getattr(self, "parent", None)
            if twistd is None:
                raise
            sys.stderr.write(f"twistd {twistd.subCommand}: {error}\n")
            raise SystemExit(1) from None

    def postOptions(self) -> None:
        own_pid_file(self, self.plugin)
        self._given_options = {name: [*value] if isinstance(value, list) else value for name, value in self.items()}
        try:
            check_twistd_files(self)
            self.take_values()
            self.finish()
        except (DmsgError, OSError) as error:
            raise UsageError(str(error)) from None

    def take_values(self) -> None:
        """Read the configuration file, and convert the value of each option.

        :raises UsageError: a value is invalid; the message contains the value and, if it comes from the file, the line.
        """
        if self.get("config") is not None:
            self.from_file = config.read(self["config"], self.rows)
            for name, value in self.from_file.items():
                if self[name] in UNSET_VALUES:
                    self[name] = value
        if self.get("page-token") is not None and self["metrics"] is None:
            raise UsageError("--page-token needs --metrics, which opens the page")
        for row in self.rows:
            self[row.name] = self._value(row)

    def _value(self, row: Option) -> object:
        said = self[row.name]
        if row.repeated:
            return [_read(row, one) for one in said] or list(row.default or ())
        if isinstance(row.kind, Flag):
            return bool(said)
        return _read(row, said) if isinstance(said, GivenText) else row.default

    def finish(self) -> None:
        """Check combinations of options, and load what the service needs, such as the key.

        :raises UsageError: a combination is invalid.
        :raises DmsgError: a file cannot be used.
        :raises OSError: a file cannot be read.
        """

    def begin(self, reactor: Reactor | None) -> Reactor:
        """Set the format of the log, raise the limit of open files, and choose the reactor.

        :returns: ``reactor``, or the global reactor if ``reactor`` is None.
        """
        reactor = the_reactor(reactor)
        # Most systems set the soft limit to 1024, which is less than the number of connections that an entity accepts.
        raise_descriptor_limit()
        if log := _log_path(getattr(self, "parent", None) or {"nodaemon": True}):
            create_log_file(log)
        set_log_format(self["log-format"], debug=bool(self.get("debug")))
        return reactor

    def make(self, settings: Callable[..., _T], **others: object) -> _T:
        """Create an instance of a settings class from the values of the options.

        :param settings: settings class.
        :param others: further arguments of the class, which override the options.
        """
        values = {}
        for row in rows_of(settings):
            said = self[row.name]
            values[row.field] = row.default != said if isinstance(row.kind, Flag) else said
        return settings(**{**values, **others})

    def read_again(self) -> tuple[Self, list[str]]:
        """Read the configuration file again.

        :returns: options with the new values, and the names of the changed options that take effect only after a
            restart.
        :raises UsageError: the file is invalid.
        """
        fresh = type(self)()
        fresh.update(
            {name: [*value] if isinstance(value, list) else value for name, value in self._given_options.items()}
        )
        fresh.take_values()
        before, now = self.from_file, fresh.from_file
        changed = {name for name in {*before, *now} if before.get(name) != now.get(name)}
        reloaded = {row.name for row in self.rows if row.reloads}
        return fresh, sorted(name for name in changed - reloaded if self._given_options[name] in UNSET_VALUES)

    def getUsage(self, width: int | None = None) -> str:
        """Return the text of ``--help``: what the program does, an example, and the options by group."""
        own = [
            Option(name=name, short=self._letter(name), help=" ".join(text.split()).rstrip("."), kind=FLAG)
            for name, text in self.docs.items()
            if len(name) > 1 and name not in {row.name for row in self.rows}
        ]
        return usage_of(self.longdesc, (*self.rows, *own), width or int(os.environ.get("COLUMNS", "80")))

    def _letter(self, name: str) -> str | None:
        return next((short for short, long in self.synonyms.items() if long == name and len(short) == 1), None)

    def opt_help(self) -> None:
        """Display this help and exit."""
        _print_and_exit(str(self))

    def opt_version(self) -> None:
        """Show the version of dmsg and exit"""
        _print_and_exit(f"dmsg {program_version()}")

    opt_V = opt_version

    def opt_h(self) -> None:
        """The same as --help"""
        self.opt_help()


def _print_and_exit(text: str) -> NoReturn:
    """Print a text to standard output and end the process; with status 141 if the reader of a pipe has ended, such as
    ``head``.
    """
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # The flush at exit would fail, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(128 + signal.SIGPIPE) from None
    raise SystemExit(0)


def _appending(row: Option) -> Callable[[EntityOptions, str], None]:
    """Return the method that twistd calls for each value of a repeatable option."""

    def append(self: EntityOptions, value: str) -> None:
        self[row.name].append(GivenText(value))

    append.__doc__ = _usage(row)
    return append


def _usage(row: Option) -> str:
    return f"{row.help} [default: {row.default_in_words}]" if row.default_in_words else row.help


def _read(row: Option, given: GivenText) -> object:
    assert not isinstance(row.kind, Flag)
    try:
        return row.kind.read(str(given))
    except (DmsgError, ValueError, OSError) as error:
        raise UsageError(f"{given.where}{row.name}: {error}") from None


def _as_json(event: LogEvent) -> str:
    line: dict[str, object] = {
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
    """Return a log observer that writes one JSON object per line."""
    observer: ILogObserver = FileLogObserver(stream, _as_json)
    return observer


def set_log_format(value: str, *, debug: bool = False) -> None:
    """Set the format of the log that twistd is about to begin.

    twistd creates its log observer after the plugin's makeService has returned, and offers no way to replace it.  So
    this function replaces ``beginLoggingTo``, through which twistd passes its observer.  In both formats, control
    characters in messages are replaced.

    :param value: ``text`` for twistd's own format, or ``json`` for one JSON object per line.  The log goes to the same
        file, or to standard output.
    :param debug: whether to log debug messages, too.
    """
    begin = globalLogBeginner.beginLoggingTo

    def begin_otherwise(observer_list: Iterable[ILogObserver], **options: bool) -> None:
        observers = list(observer_list)
        del globalLogBeginner.beginLoggingTo
        files = [file for one in observers if (file := log_file_of(one)) is not None]
        for file in files:
            reopen_at_signals(file)
        if value == "json":
            outputs = cast(list[TextIO], files) or [sys.stdout]
            observers = [json_log(output) for output in outputs]
        if not debug:
            level = LogLevelFilterPredicate(LogLevel.info)
            # Twisted's client service logs each planned connection to Redis with level info. Only its warnings are
            # shown, which say that Redis does not answer.
            level.setLogLevelForNamespace("twisted.application._client_service", LogLevel.warn)
            observers = [FilteringLogObserver(one, [level]) for one in observers]
        begin([printable_log(one) for one in observers], **options)

    globalLogBeginner.beginLoggingTo = begin_otherwise  # type: ignore[method-assign,assignment]


def _default_text(text: str) -> str:
    return without_userinfo(printable(text))


def printable_log(observer: ILogObserver) -> ILogObserver:
    """Return an observer that replaces control characters in messages before it passes them to ``observer``.

    Text from strangers could otherwise control the terminal, or look like a log line of its own.
    """

    def observe(event: LogEvent) -> None:
        observer(
            {
                name: _default_text(value) if isinstance(value, str) and not name.startswith("log_") else value
                for name, value in event.items()
            }
        )

    return cast(ILogObserver, observe)


def own_pid_file(options: object, name: str) -> None:
    """Set the path of the pid file to ``NAME.pid``, or to none in the foreground, unless the command line sets a path.

    With twistd's default path, two entities could not run in the same directory, as they do in the README's example.

    :param options: options of the entity, whose ``parent`` has the options of twistd.
    """
    twistd = getattr(options, "parent", None)
    if twistd is not None and twistd.get("pidfile") == "twistd.pid":
        twistd["pidfile"] = "" if twistd.get("nodaemon") else f"{name}.pid"


def check_twistd_files(options: object) -> None:
    """Check that twistd can open its log file and its pid file, and enter its working directory.

    twistd itself opens them without handling errors, so that a mistyped name prints a traceback.  With ``--chroot``,
    only the log file is checked, because the other names are looked up in the new root.  An empty pid file is removed.

    :param options: options of the entity, whose ``parent`` has the options of twistd.
    :raises UsageError: a file cannot be opened, or the directory does not exist; the message names the option.
    """
    twistd = getattr(options, "parent", None)
    if twistd is None:
        return
    log = _log_path(twistd)
    in_root = twistd.get("chroot") is None
    for name, path in (("logfile", log), ("pidfile", twistd.get("pidfile") if in_root else "")):
        try:
            if path:
                check_can_write(Path(path))
                if name == "pidfile":
                    remove_empty_pid_file(Path(path))
        except OSError as error:
            raise UsageError(f"--{name}: {path}: {error.strerror}{note_on_working_directory(error)}") from None
    directory = twistd.get("rundir") or "."
    if in_root and directory != "." and not os.path.isdir(directory):
        raise UsageError(f"--rundir: {directory}: no such directory")


def _log_path(twistd: Mapping[str, Any]) -> str:
    """Return the path of the file that twistd logs to; empty if it logs elsewhere."""
    # A daemon without --logfile logs to this file.
    log: str = twistd.get("logfile") or ("" if twistd.get("nodaemon") or twistd.get("debug") else "twistd.log")
    return "" if log == "-" or twistd.get("syslog") or twistd.get("logger") else log


def default_key_file(name: str) -> str:
    """Return the default path of an entity's key file.

    :param name: name of the file without its suffix.
    """
    return str(config_directory() / f"{name}.key")


class KeyOptions(EntityOptions):
    """Options of an entity that has a secret key.

    :cvar key_name: name of the default key file, without its suffix.
    """

    key_name: ClassVar[str] = ""

    def take_key(self) -> None:
        """Load the key from its file.  The default file is created if it does not exist; another file only with
        ``--create``.

        :raises DmsgError: the file cannot be used, or another program uses the key.
        """
        if self["key-file"]:
            self["key"] = load_or_create_key(self["key-file"], create=bool(self["create"]))
        else:
            self["key-file"] = default_key_file(self.key_name)
            self["key"] = default_key(self["key-file"])
        # The key is locked only to check that it is free. The service locks it again after twistd has become a daemon.
        self.hold_key().release()

    def hold_key(self) -> KeyLock:
        """Lock the key file.

        :raises KeyInUse: another program uses the key.
        """
        return hold_key(self["key-file"], self.plugin, share=bool(self["share"]))


def key_rows(help: str, default: str) -> tuple[Option, ...]:
    """Return the declarations of the options of :class:`KeyOptions`.

    :param help: help text of ``--key-file``.
    :param default: default of ``--key-file``, as a text for the help.
    """
    return (
        Option(name="key-file", help=help, kind=Text("file"), default_text=default, secret=True, group=KEY),
        Option(name="create", help="Create the key file if it does not exist", kind=FLAG, in_file=False, group=KEY),
        Option(
            name="share",
            help=(
                "Use the key even if another program on this machine uses it; peers then reach only the program that "
                "started last"
            ),
            kind=FLAG,
            in_file=False,
            group=KEY,
        ),
    )
