"""Output of the commands: results on standard output, messages on standard error.  Both may be closed.

With ``--json``, every result is one JSON object per line.  ``--quiet`` leaves out progress and notices.  If the reader
of a pipe has ended (``dmsg iperf | head``), a command ends without a message, with the exit status that a shell reports
for SIGPIPE.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn, TextIO

import click

from dmsg.base.printable import printable, without_userinfo
from dmsg.directories import note_on_working_directory
from dmsg.errors import ConnectFailed, CutShort, DmsgError, EntryNotFound, NobodyThere, Unwanted, WrongUse

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOBODY = 3
"""Exit status: the peer does not exist or cannot be reached."""
EXIT_UNWANTED = 4
"""Exit status: the other side was reached, and refused the request."""
EXIT_CUT = 5
"""Exit status: a transfer was interrupted, and the same command can resume it."""
STATUSES = ((WrongUse, EXIT_USAGE), (CutShort, EXIT_CUT), (NobodyThere, EXIT_NOBODY), (Unwanted, EXIT_UNWANTED))
UNLIMITED_WIDTH = 10_000
"""Number of columns that is assumed if the output is not a terminal."""
EXIT_INTERRUPTED = 130
"""Exit status after SIGINT: 128 plus the number of the signal."""
EXIT_PIPE = 141
"""Exit status after SIGPIPE: 128 plus the number of the signal."""
INDENT = "  "
"""Start of further lines of a text of a peer."""
_COMMAND = re.compile(r"(?<=.{6}: )dmsg( [^ ;:]+){1,5}$")
"""Regular expression for a command at the end of a message, such as "start it with: dmsg up".  No line is broken within
the command.  Longer texts are taken for sentences."""
_NO_BREAK = "\u00a0"
"""Space at which lines are not broken."""


class _Output:
    """Options of this process's output, and whether the output has failed."""

    def __init__(self) -> None:
        self.json = False
        self.quiet = False
        self.status: int | None = None
        """Exit status of the command if its standard output cannot be written; None while it can."""
        self.interrupted = False
        """Whether the user has ended the command, as with Ctrl-C."""
        self.cancel: Callable[[], None] | None = None
        """Callback that cancels the running command; None if no command runs in a reactor."""
        self.writes_to: int | None = None
        """Descriptor to which :func:`say` is writing a line; None if it is not."""


state = _Output()


def say(text: str = "", *, err: bool = False, wraps: bool = False, as_it_is: bool = False) -> None:
    """Print a line.  Characters that a terminal would interpret are replaced.  If the output fails, no error is raised
    here.

    :param err: whether to print to standard error, wrapped to the width of the terminal if it is one.
    :param wraps: whether to wrap a line of standard output, too; false for lines that users copy as a whole.
    :param as_it_is: whether to print the text unchanged, because it goes to a file or a program.
    """
    if not as_it_is:
        text = printable(text, "\n\t")
        if err or wraps:
            text = wrap(text, columns_of_messages() if err else columns())
    try:
        try:
            state.writes_to = 2 if err else 1
            click.echo(text, err=err, color=as_it_is or None)
        finally:
            state.writes_to = None
    except _WriteInterrupted:
        state.writes_to = None
        to_null(*_stream_of(err=err))
    except (OSError, ValueError) as error:
        mark_output_failed(error, err=err)


class _WriteInterrupted(Exception):
    """Error: the user has ended the command while a write waited for the reader of a pipe."""


def interrupt_write() -> None:
    """End the write of :func:`say` that is under way, if it is blocked.  Only handlers of signals call this function.

    A write blocks while the reader of a pipe does not read.  Python would continue the write after the handler, and the
    command would not end.
    """
    import select

    if state.writes_to is not None and not select.select([], [state.writes_to], [], 0)[1]:
        raise _WriteInterrupted


def tell(text: str, /, **fields: object) -> None:
    """Print a result: the text, or with ``--json`` the fields as one JSON object."""
    say(json.dumps(fields) if state.json else text)


def columns() -> int:
    """Return the width of the terminal; ``UNLIMITED_WIDTH`` if standard output is not a terminal."""
    return _width(sys.stdout)


def columns_of_messages() -> int:
    """Return the width of the terminal; ``UNLIMITED_WIDTH`` if standard error is not a terminal."""
    return _width(sys.stderr)


def _width(stream: TextIO) -> int:
    try:
        return shutil.get_terminal_size().columns if stream.isatty() else UNLIMITED_WIDTH
    except (OSError, ValueError, AttributeError):
        return UNLIMITED_WIDTH


def shows_notices() -> bool:
    """Return whether notices are printed: neither was ``--quiet`` given, nor has standard output failed.

    The failure ends the command, so that a later notice, such as how to use a code, would be wrong.
    """
    return not state.quiet and state.status is None


def notice(text: str) -> None:
    """Print a message for the user to standard error, if notices are shown (:func:`shows_notices`)."""
    if shows_notices():
        say(f"dmsg: {text}", err=True)


def wrap(text: str, width: int, indent: str = "  ") -> str:
    """Return a text of which no line is longer than the terminal, if its words permit.

    Words such as URLs and keys, and a command at the end of a line, are not broken, so that the user can copy them.

    :param width: number of columns.
    :param indent: text before each further line, after the indentation of the first line.
    """
    return "\n".join(line if len(line) <= width else _wrap_line(line, width, indent) for line in text.split("\n"))


def _wrap_line(line: str, width: int, indent: str) -> str:
    line = _COMMAND.sub(lambda found: found[0].replace(" ", _NO_BREAK), line)
    further = line[: len(line) - len(line.lstrip(" "))] + indent
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False, subsequent_indent=further)
    return wrapper.fill(line).replace(_NO_BREAK, " ")


def indent_text(text: str, width: int) -> str:
    """Return a text of a peer with all lines but the first indented.

    Otherwise the peer could write lines that look like messages of the command, or like texts of other peers.

    :param width: number of columns; the terminal itself must break no line, because it would not indent the rest.
    """
    lines = printable(text, "\n\t").expandtabs().split("\n")
    if width < UNLIMITED_WIDTH:
        from rich.cells import chop_cells

        # Characters of other scripts have two columns, and a word may be longer than a line.
        lines = [one for line in lines for one in chop_cells(line, max(1, width - len(INDENT))) or [""]]
    return f"\n{INDENT}".join(lines)


def mark_output_failed(error: Exception, *, err: bool) -> None:
    """Redirect an output that has failed to the null device.  If it is standard output, end the command.

    :param err: whether standard error has failed, and not standard output.
    """
    is_pipe = isinstance(error, BrokenPipeError | ValueError)
    to_null(*_stream_of(err=err))
    if err:
        return  # Only standard error has failed, so the command continues, but prints no messages.
    state.status = EXIT_PIPE if is_pipe else 1
    if not is_pipe:
        say(f"dmsg: standard output: {getattr(error, 'strerror', None) or error}", err=True)
    if state.cancel is not None:
        state.cancel()


@contextmanager
def writing_output() -> Iterator[None]:
    """Context manager for code that writes to standard output directly.  A failed write ends the command."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        mark_output_failed(error, err=False)
        raise SystemExit(state.status) from None


@contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Context manager for code that writes a file.  The error of a failed write, such as a full disk, gets the name of
    the file, which the system does not report.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)
        raise


def cannot_write(error: OSError | None) -> Exception:
    """Return the error for a failed write to standard output.

    :param error: reason from the system; None if it is unknown, as when the reader of a pipe has ended.
    """
    if error is None or isinstance(error, BrokenPipeError | ConnectionResetError):
        return BrokenPipeError()
    return DmsgError(f"standard output: {error.strerror}")


def _stream_of(*, err: bool) -> tuple[TextIO, int]:
    """Return standard error or standard output, and its descriptor."""
    return (sys.stderr, 2) if err else (sys.stdout, 1)


def to_null(stream: TextIO, descriptor: int) -> None:
    """Redirect a descriptor to the null device.  Later writes, such as the flush at exit, then cannot fail."""
    with suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)
    with suppress(OSError, ValueError):
        stream.flush()


def open_missing() -> None:
    """Open the null device for those of the descriptors 0 to 2 that are closed.

    Otherwise, the next file or socket would get one of these numbers.  A closed standard output is opened for reading
    only, so that the first result fails, as on a full disk.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # ``open`` returns the lowest free descriptor, which is ``descriptor`` here.
            os.open(os.devnull, os.O_RDONLY if descriptor == 1 else os.O_RDWR)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)


def describe(error: BaseException | None) -> str:
    """Return an error as one line.  If the error concerns a file, the line begins with its name."""
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror + note_on_working_directory(error)
        if isinstance(error.filename, str | bytes | os.PathLike):
            return f"{os.fsdecode(error.filename)}: {text}"
        return text
    # Twisted's CannotListenError has its cause in this attribute.
    cause = getattr(error, "socketError", None)
    if isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE:
        return f"{getattr(error, 'interface', '') or '*'}:{getattr(error, 'port', '')}: address already in use"
    return _with_name(without_userinfo(" ".join(str(error).split())), error) or type(error).__name__


def fail(error: BaseException) -> NoReturn:
    """Print an error as one line, with ``--json`` also as an object, and exit with the status for errors of its
    class.
    """
    text = describe(error)
    status = next((status for kind, status in STATUSES if isinstance(error, kind)), EXIT_FAILED)
    fail_with(text, status, _public_name(type(error)))


def _public_name(kind: type[BaseException]) -> str:
    """Return the name by which programs recognise an error: that of its class, or of the nearest public base class."""
    return next(base.__name__ for base in kind.__mro__ if not base.__name__.startswith("_"))


def fail_with(text: str, status: int, kind: str) -> NoReturn:
    """Print an error line, with ``--json`` also an object, and exit with ``status``.

    :param kind: name of the error, by which programs recognise it.
    """
    if state.json:
        say(json.dumps({"error": kind, "text": text, "status": status}))
    say(f"dmsg: {text}", err=True)
    raise SystemExit(status) from None


def _with_name(text: str, error: BaseException | None) -> str:
    """Return the text of an error.  If the peer has a name in the address book, the name replaces the key."""
    if not isinstance(error, EntryNotFound | ConnectFailed) or not error.key:
        return text

    from dmsg.clients.address_book import AddressBook
    from dmsg.keys import PubKey

    with suppress(DmsgError):
        key = PubKey.from_hex(error.key)
        name = AddressBook().name_of(key)
        if name is not None:
            return text.replace(key.short, name)
    return text
