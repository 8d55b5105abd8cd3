"""Parts that the commands of ``dmsg analytics`` share: Spark's session, options, and errors printed as one line."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from dmsg.base.printable import shorten
from dmsg.cli.options import WRITTEN_DIRECTORY
from dmsg.cli.output import EXIT_INTERRUPTED, fail, state
from dmsg.directories import cache_directory
from dmsg.directory_checks import check_not_planted
from dmsg.errors import DmsgError, ExtraNotInstalled, WrongUse, needs_extra

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dmsg.analytics.session import Load, SparkOnDemand


ARCHIVES = "spark"
"""Directory for archives of Java classes, inside the user's cache directory."""
LOCAL_DIR_SETTING = "spark.local.dir="
"""Prefix of the value of ``--conf`` that sets the directories of Spark's temporary files."""
_Command = TypeVar("_Command", bound=Callable[..., object])


def errors_in_one_line(command: Callable[..., object]) -> Callable[..., object]:
    """Decorate a command so that errors that a user can fix are printed as one line, with exit status 1."""

    @functools.wraps(command)
    def wrapped(*args: object, **options: object) -> object:
        try:
            return command(*args, **options)
        except (DmsgError, OSError) as error:
            _fail_if_disk_is_full(error, options)
            fail(error)

    return wrapped


def _fail_if_disk_is_full(error: Exception, options: dict[str, object]) -> None:
    """If a full disk has caused an error, print an explanation and end the command.

    :param options: options of the command, which name the directories that it writes.
    """
    from dmsg.analytics.full_disk import explain_full_disk, is_of_full_disk, temporary_directories

    if not is_of_full_disk(error) or click.get_current_context().find_root().params.get("verbose"):
        return
    named = [str(options[name]) for name in ("out", "html", "ranking", "directory") if options.get(name)]
    written = [directory for one in named if (directory := local_directory(one)) is not None]
    settings = options.get("conf")
    chosen = [one for one in settings if one.startswith(LOCAL_DIR_SETTING)] if isinstance(settings, tuple) else []
    temporary = [Path(one) for text in chosen for one in text.removeprefix(LOCAL_DIR_SETTING).split(",")]
    fail(DmsgError(explain_full_disk(written, temporary or temporary_directories())))


def needs_tables(command: Callable[..., object]) -> Callable[..., object]:
    """Decorate a command that reads tables.  Errors are printed as one line, and a missing package is explained."""

    @functools.wraps(command)
    @errors_in_one_line
    def wrapped(*args: object, **options: object) -> object:
        if any(importlib.util.find_spec(name) is None for name in ("pyspark", "deltalake", "pyarrow")):
            raise ExtraNotInstalled(f"Spark is not installed: {needs_extra('spark')}; it also needs Java 17")
        from deltalake.exceptions import DeltaError

        from dmsg.analytics.lake_error import LakeError

        try:
            return command(*args, **options)
        except LakeError as error:
            _fail_if_disk_is_full(error, options)
            fail(error)
        except DeltaError as error:
            _fail_if_disk_is_full(error, options)
            fail(DmsgError(f"the tables' logs cannot be written or read: {shorten(str(error).splitlines()[0])}"))
        raise SystemExit(1)

    return wrapped


def needs_spark(command: Callable[..., object]) -> Callable[..., object]:
    """Decorate a command that uses Spark.  Errors of Spark and of tables are printed as one line."""

    @functools.wraps(command)
    @needs_tables
    def wrapped(*args: object, **options: object) -> object:
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException

        from dmsg.analytics.main import Errors

        try:
            return command(*args, **options)
        except Errors as error:
            _fail_if_disk_is_full(error, options)
            fail(error)
        except ConnectionError:
            fail(DmsgError("Spark's Java has ended, perhaps for lack of memory: --memory gives it more"))
        except (PySparkException, Py4JError) as error:
            _fail_if_disk_is_full(error, options)
            if click.get_current_context().find_root().params.get("verbose"):
                raise
            lines = [line for line in str(error).splitlines() if not line.startswith("An error occurred while")]
            first = "".join(lines[:1]).lstrip(": ")[:400]
            click.echo(f"dmsg: Spark failed: {first} (for the whole error: dmsg --verbose analytics ...)", err=True)
        raise SystemExit(1)

    return wrapped


def spark_options(command: Callable[..., object]) -> Callable[..., object]:
    for option in (
        click.option("--conf", multiple=True, metavar="KEY=VALUE", help="Set a Spark property; repeatable."),
        click.option("--memory", default="1g", show_default=True, help="Memory of the Spark driver."),
        click.option(
            "--master",
            envvar="DMSG_SPARK_MASTER",
            metavar="MASTER",
            help=(
                "Spark master: local[N], spark://HOST:PORT or sc://HOST:PORT (Spark Connect).  "
                "Default: the cores of this machine.  Environment: DMSG_SPARK_MASTER."
            ),
        ),
    ):
        command = option(command)
    return command


spark_when_option = click.option(
    "--spark",
    "when",
    type=click.Choice(["always", "if-needed"]),
    default="always",
    show_default=True,
    help="With if-needed, a run on this machine computes few events without Spark, which is faster.",
)


def not_empty(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Check that a value is not empty.

    An empty value, as from a shell variable that is not set, would otherwise mean the working directory.
    """
    if value is not None and not value.strip():
        raise click.BadParameter("the value is empty")
    return value


def directory_option(name: str, text: str, *, required: bool = True) -> Callable[[_Command], _Command]:
    """Return the decorator of an option whose value is a directory or a URI.

    :param name: name of the option.
    :param text: help text of the option.
    """
    return click.option(name, required=required, metavar="DIR", help=text, callback=not_empty)


def local_directory_option(name: str, text: str, *, exists: bool = False) -> Callable[[_Command], _Command]:
    """Return the decorator of a required option whose value is a directory of this machine, as a Path.

    :param name: name of the option.
    :param text: help text of the option.
    :param exists: whether the directory must exist, because the command only reads from it.
    """
    kind = click.Path(exists=True, file_okay=False, path_type=Path) if exists else WRITTEN_DIRECTORY
    return click.option(name, required=True, type=kind, metavar="DIR", help=text)


def make_output_directory(directory: Path) -> None:
    """Create a directory for the files of a command, if it is absent.

    :raises UnsafeDirectory: another user has put the directory, or one above it, into a shared directory.
    :raises OSError: the directory cannot be created.
    """
    check_not_planted(directory)
    directory.mkdir(parents=True, exist_ok=True)


def as_of_option(command: Callable[..., object]) -> Callable[..., object]:
    return click.option(
        "--as-of",
        type=click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S"]),
        metavar="TIME",
        callback=_end_of_day,
        help=(
            "Show the tables as they were at this time (UTC), at most eight days ago, such as 2026-01-31 or "
            "2026-01-31T08:00."
        ),
    )(command)


def _end_of_day(ctx: click.Context, param: click.Parameter, value: datetime | None) -> datetime | None:
    """Return a time in UTC.  If the value is only a day, the time is the end of that day."""
    if value is None:
        return None
    if value.time() == datetime.min.time():
        value += timedelta(days=1) - timedelta(milliseconds=1)
    return value.replace(tzinfo=UTC)


def tables_option(text: str = "Directory or URI of the tables.") -> Callable[[_Command], _Command]:
    return directory_option("--out", text)


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str, int, int | None], None]]:
    """Context manager that shows a progress bar at a terminal, unless ``--quiet`` was given.

    It yields a function to call with the name of the present step, the amount done, and the total amount or None.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        # If standard error is no terminal, an enabled bar would print an empty line at its end.
        disable=state.quiet or not console.is_terminal or console.is_dumb_terminal,
    )
    with bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, of: bar.update(task, description=what, completed=done, total=of)


@contextlib.contextmanager
def session(master: str | None, memory: str, conf: tuple[str, ...], load: Load) -> Iterator[SparkSession]:
    with session_on_demand(master, memory, conf, load) as spark:
        yield spark.session


@contextlib.contextmanager
def session_on_demand(
    master: str | None, memory: str, conf: tuple[str, ...], load: Load, *, always: bool = True
) -> Iterator[SparkOnDemand]:
    """Context manager that yields a Spark session, which starts when it is first used.

    :param always: whether tasks of Spark on this machine read and compute however few events there are.  On a cluster,
        the amount of data decides what is done by tasks with Arrow, and what by Spark's own plans.
    """
    settings = {}
    for one in conf:
        key, equals, value = one.partition("=")
        if not equals:
            raise WrongUse(f"--conf is KEY=VALUE, not {one!r}")
        settings[key] = value
    from dmsg.analytics.session import SparkFailed, SparkOnDemand, find_java, is_local_master, make_session

    if re.fullmatch(r"\d+[kmgt]b?", memory.lower()) is None:
        raise WrongUse(f"--memory must be a number with k, m or g, like 2g, not {memory!r}")
    if master is not None and re.match(r"local(\[|$)|yarn$|k8s://|spark://|sc://", master) is None:
        raise WrongUse(f"--master is local[N], spark://HOST:PORT, sc://HOST:PORT, yarn or k8s://..., not {master!r}")
    if is_local_master(master):
        # A run without new events needs no Java. Even so, a missing Java is always an error, so that users learn of it
        # before there are many events.
        find_java()

    context = click.get_current_context()

    def start() -> SparkSession:
        try:
            # Tables are computed in several threads, so this function may run in any of them. Only the main thread has
            # the context of the command, so the function enters the context.
            with context.scope(cleanup=False), silence_java() as words:
                return make_session(
                    master, memory=memory, settings=settings, load=load, archives=cache_directory() / ARCHIVES
                )
        except SparkFailed as error:
            raise SparkFailed(f"{error}{words.why()}") from None

    def handle_interrupts() -> None:
        # At its start in the main thread, Spark installs a handler for Ctrl-C. That handler would send Java a request
        # in the middle of another request, so it is replaced.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, _interrupted)

    is_local = is_local_master(master)
    spark = SparkOnDemand(start, is_local=is_local, is_wanted=is_local and always)
    spark.at_start(handle_interrupts)
    handle_interrupts()
    try:
        yield spark
    finally:
        if spark.has_started:
            with silence_java():
                spark.session.stop()


def _interrupted(number: int, frame: object) -> None:
    """End the process at once, because of Ctrl-C.

    The tables survive this, as they survive kill -9.  Spark's Java process ends by itself.
    """
    os.write(2, (b"\x1b[?25h" if os.isatty(2) else b"") + b"dmsg: interrupted\n")
    os._exit(EXIT_INTERRUPTED)


@contextlib.contextmanager
def silence_java() -> Iterator[_ErrorOutput]:
    """Context manager within which the output of Java is hidden, unless --verbose was given.

    It yields the buffer of this output, which tells why Java has failed.
    """
    words = _ErrorOutput()
    if click.get_current_context().find_root().params.get("verbose"):
        yield words
        return
    sys.stderr.flush()
    kept = os.dup(2)
    reading, writing = os.pipe()
    os.dup2(writing, 2)
    os.close(writing)
    # Java keeps the writing end of the pipe open until its process ends, so a thread reads the pipe until then.
    threading.Thread(target=words.read, args=(reading,), daemon=True).start()
    try:
        yield words
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)


class _ErrorOutput:
    """Buffer of the first 64 KiB that Java has written to standard error."""

    LIMIT = 65536

    def __init__(self) -> None:
        self._output = b""
        self._at_end = threading.Event()

    def read(self, descriptor: int) -> None:
        """Read the output until all writers have closed the pipe.  Called in a thread of its own.

        :param descriptor: descriptor of the pipe's reading end.
        """
        with open(descriptor, "rb", buffering=0) as pipe:
            while piece := pipe.read(self.LIMIT):
                self._output += piece[: self.LIMIT - len(self._output)]
        self._at_end.set()

    def why(self) -> str:
        """Return a text that says why Java ended: the root cause of its first error, or else its last line."""
        if not self._at_end.wait(1) and not self._output:
            return ""
        lines = [line.strip() for line in self._output.decode(errors="replace").splitlines() if line.strip()]
        for telling in ("^Caused by: ", "Exception|OutOfMemory", "(?i)error|unrecognized|cannot|could not"):
            if found := [line for line in lines if re.search(telling, line)]:
                return f" Java said: {shorten(found[0].removeprefix('Caused by: '))}"
        return "".join(f" Java said: {shorten(line)}" for line in lines[-1:])


def local_directory(uri: str) -> Path | None:
    """Return the path of a directory of this machine; None if the URI is of another kind."""
    return Path(uri) if "://" not in uri else None
