"""Output of the commands: results on standard output, messages on standard error; either may be closed.

With ``--json`` every result is one JSON object per line; ``--quiet`` leaves out progress and notices.  If the reader of
a pipe has ended (``dmsg iperf | head``), a command ends without a message, with the status that a shell shows for
SIGPIPE.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn, TextIO

import click

from dmsg.base.printable import printable, without_userinfo
from dmsg.errors import ConnectFailed, CutShort, DmsgError, EntryNotFound, NobodyThere, Unwanted, WrongUse

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOBODY = 3
"""Exit status: the peer does not exist or cannot be reached."""
EXIT_UNWANTED = 4
"""Exit status: the other side was reached, and refused the request."""
EXIT_CUT = 5
"""Exit status: the transfer was interrupted; the same command resumes it."""
STATUSES = ((WrongUse, EXIT_USAGE), (CutShort, EXIT_CUT), (NobodyThere, EXIT_NOBODY), (Unwanted, EXIT_UNWANTED))
UNBOUNDED = 10_000
"""Number of columns if the output is no terminal."""
EXIT_INTERRUPTED = 130
"""Exit status after SIGINT: 128 plus the signal."""
EXIT_PIPE = 141
"""Exit status after SIGPIPE: 128 plus the signal."""


class _Output:
    """Output state of this process."""

    def __init__(self) -> None:
        self.json = False
        self.quiet = False
        self.status: int | None = None
        """Exit status of a command whose output cannot be written."""
        self.ended: Callable[[], None] | None = None
        """Callback that ends the running command."""


state = _Output()


def say(text: str = "", *, err: bool = False, as_it_is: bool = False) -> None:
    """Print a line, without characters that a terminal would interpret.  An error is recorded and never raised.

    :param as_it_is: whether to leave the text unchanged, because it goes to a file or a program.
    """
    try:
        click.echo(text if as_it_is else printable(text, "\n\t"), err=err, color=as_it_is or None)
    except (OSError, ValueError) as error:
        mark_output_failed(error, err=err)


def tell(text: str, /, **fields: object) -> None:
    """Print a result: the text, or with ``--json`` the fields as one object."""
    say(json.dumps(fields) if state.json else text)


def columns() -> int:
    """Return the width of the terminal, or ``UNBOUNDED`` if standard output is none."""
    try:
        return shutil.get_terminal_size().columns if sys.stdout.isatty() else UNBOUNDED
    except (OSError, ValueError):
        return UNBOUNDED


def notice(text: str) -> None:
    """Print a message for people, unless ``--quiet`` is given; on a terminal, lines end between two words."""
    if not state.quiet:
        say(_wrap(f"dmsg: {text}"), err=True)


def _wrap(text: str) -> str:
    """Return a message in lines that fit into the terminal of standard error; other outputs get it in one line."""
    try:
        width = shutil.get_terminal_size().columns if sys.stderr.isatty() else UNBOUNDED
    except (OSError, ValueError, AttributeError):
        return text
    if max(map(len, text.splitlines()), default=0) <= width:
        return text
    # A word such as a URL or a key stays whole, so that it can be copied.
    wrap = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False, subsequent_indent="  ")
    return "\n".join(wrap.fill(line) for line in text.splitlines())


def mark_output_failed(error: Exception, *, err: bool) -> None:
    """Redirect a failed output to the null device, and end the command if it was standard output."""
    is_pipe = isinstance(error, BrokenPipeError | ValueError)
    to_null(sys.stderr if err else sys.stdout, 2 if err else 1)
    if err:
        return  # If standard error failed, the command continues; only its notices are lost.
    state.status = EXIT_PIPE if is_pipe else 1
    if not is_pipe:
        say(f"dmsg: standard output: {getattr(error, 'strerror', None) or error}", err=True)
    if state.ended is not None:
        state.ended()


@contextmanager
def writing_output() -> Iterator[None]:
    """Context manager for code that writes to standard output itself; a failed write ends the command."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        mark_output_failed(error, err=False)
        raise SystemExit(state.status) from None


def cannot_write() -> Exception:
    """Return the error for standard output: its reader has ended if it is a pipe, else the disk is probably full."""
    mode = os.fstat(1).st_mode
    is_pipe = not stat.S_ISREG(mode) and not stat.S_ISCHR(mode)
    return BrokenPipeError() if is_pipe else DmsgError("standard output: cannot be written")


def to_null(stream: TextIO, descriptor: int) -> None:
    """Redirect a descriptor to the null device, so that later writes, such as the flush at exit, cannot fail."""
    with suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)
    with suppress(OSError, ValueError):
        stream.flush()


def open_missing() -> None:
    """Open those of the descriptors 0 to 2 that are closed; otherwise the next file or socket would get their numbers.

    Standard output then fails at the first result, as on a full disk.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # The call returns the lowest free descriptor, which is this one.
            os.open(os.devnull, os.O_RDONLY if descriptor == 1 else os.O_RDWR)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)


def describe(error: BaseException | None) -> str:
    """Describe an error in one line; name the file if the error concerns a file."""
    if isinstance(error, OSError) and error.strerror:
        if isinstance(error.filename, str | bytes | os.PathLike):
            return f"{os.fsdecode(error.filename)}: {error.strerror}"
        return error.strerror
    # The attribute is that of Twisted's CannotListenError, whose cause is described.
    cause = getattr(error, "socketError", None)
    if isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE:
        return f"{getattr(error, 'interface', '') or '*'}:{getattr(error, 'port', '')}: address already in use"
    return _with_name(without_userinfo(" ".join(str(error).split())), error) or type(error).__name__


def fail(error: BaseException) -> NoReturn:
    """Print one line about an error, with ``--json`` also an object, and exit with the status for its kind."""
    text = describe(error)
    status = next((status for kind, status in STATUSES if isinstance(error, kind)), EXIT_FAILED)
    fail_with(text, status, type(error).__name__)


def fail_with(text: str, status: int, kind: str) -> NoReturn:
    """Print an error line, with ``--json`` also an object, and exit.

    :param kind: name by which programs distinguish errors.
    """
    if state.json:
        say(json.dumps({"error": kind, "text": text, "status": status}))
    say(f"dmsg: {text}", err=True)
    raise SystemExit(status) from None


def _with_name(text: str, error: BaseException | None) -> str:
    """Return the text of an error with the peer's name from the address book in place of its key."""
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
