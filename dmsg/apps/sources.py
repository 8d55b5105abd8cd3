"""Files that are to be sent: opened, measured, and whether they are still what was offered.

What the system says of a size is a hint.  Files of ``/proc`` have none, those of ``/sys`` have less than they say, and
others grow or shrink while they are read.
"""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path
from typing import IO

from dmsg.apps.exposure import OwnFiles, check_source
from dmsg.apps.transfer import TransferError

UNMEASURED_LIMIT = 1024 * 1024
"""Bytes of a file whose size the system does not say, which is read before it is offered."""
_SMALL = 64 * 1024
"""Bytes that an attribute of ``/sys``, which has no blocks, says at most of its size."""


class SourceChanged(TransferError):
    """A file is not any more what it was when it was offered; the text names it, for both sides."""


def changed_text(name: str) -> str:
    """Return the text about a file that arrived but was modified during the transfer."""
    return f"{name} was written to while it was sent: what has arrived is what was read"


def resized_error(name: str, now: int, then: int) -> SourceChanged:
    """The error of a file that became shorter, or is another one."""
    return SourceChanged(f"{name} changed after it was offered: it has {now:,} bytes now, and had {then:,}")


def gone_error(name: str, error: OSError) -> SourceChanged:
    """The error of a file that cannot be read any more."""
    return SourceChanged(f"{name} changed after it was offered: {error.strerror}")


def is_pipe(path: str) -> bool:
    """Whether a name is that of a pipe: of the shell, as ``<(command)``, a named one, or standard input by a name.

    An open file that has no name any more is as good as one: it can only be read.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    if stat.S_ISFIFO(mode) or stat.S_ISDIR(mode) or _descriptor(path) is None:
        return stat.S_ISFIFO(mode)
    return not stat.S_ISREG(mode) or not os.path.exists(os.path.realpath(path))


def open_pipe(path: str) -> tuple[int, str]:
    """A descriptor of a pipe, and what a person calls it.

    :raises OSError: it cannot be opened.
    """
    number = _descriptor(path)
    if number is None:
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), os.path.basename(path)
    return number, "standard input" if number == 0 else "a pipe"


def named_path(path: Path) -> Path:
    """Return the path behind a link of ``/proc``, such as ``/dev/stdin``, if the file has a path."""
    if _descriptor(os.fspath(path)) is None:
        return path
    real = Path(os.path.realpath(path))
    return real if real.exists() else path


def _descriptor(path: str) -> int | None:
    """The number of an open file of this process that a path is another name of."""
    for _ in range(8):  # /dev/stdin -> /proc/self/fd/0; more links than that are something else
        above, name = os.path.split(path)
        if (
            os.path.realpath(above or ".") in (f"/proc/{os.getpid()}/fd", "/dev/fd")
            and name.isascii()
            and name.isdigit()
        ):
            return int(name)
        if not os.path.islink(path):
            return None
        path = os.path.join(above, os.readlink(path))
    return None


def open_regular(
    path: str | Path, name: str, at: int | None = None, *, follow: bool = False, own: OwnFiles | None = None
) -> io.FileIO:
    """Open a regular file to read it; a pipe would wait for somebody to write, a device has no end.

    :param name: its name, as an error has it.
    :param at: descriptor of the directory that the path begins in.
    :param follow: if it is a link, what it leads to.
    :param own: see :func:`~dmsg.apps.exposure.check_source`.
    :raises TransferError: it is none.
    :raises OwnFile: it is dmsg's own.
    :raises OSError: it cannot be opened.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags, dir_fd=at)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise TransferError(f"{name}: is {'a directory' if stat.S_ISDIR(mode) else 'not a regular file'}")
    try:
        check_source(descriptor, name, path=path if at is None else None, own=own)
    except BaseException:
        os.close(descriptor)
        raise
    return io.FileIO(descriptor, "rb")


def content_of_unmeasured(file: IO[bytes], status: os.stat_result, name: str) -> bytes | None:
    """Read an open file whose size is unknown; return None if its size is known.

    :raises TransferError: that is more than can be read in advance.
    """
    if status.st_size and (status.st_blocks or status.st_size > _SMALL):
        return None
    found = bytearray()
    while len(found) <= UNMEASURED_LIMIT and (data := file.read(UNMEASURED_LIMIT + 1 - len(found))):
        found += data
    file.seek(0)
    if len(found) == status.st_size:
        return None
    if len(found) > UNMEASURED_LIMIT:
        raise TransferError(f"{name}: its size is unknown; send it through a pipe: dmsg send - < FILE")
    return bytes(found)


class Source:
    """File to send, kept open from the offer until it has been sent.

    :ivar size: bytes that are offered, and sent.
    """

    def __init__(self, file: IO[bytes], name: str) -> None:
        """:raises TransferError: see :func:`content_of_unmeasured`."""
        self._name = name
        self._status = os.fstat(file.fileno())
        try:
            content = content_of_unmeasured(file, self._status, name)
        except BaseException:
            file.close()
            raise
        self._measured = content is None
        if content is not None:
            file.close()
            file = io.BytesIO(content)
        self._file = file
        self.size = self._status.st_size if content is None else len(content)
        self._left = self.size

    def go_to(self, offset: int) -> None:
        """Read on from there."""
        self._file.seek(offset)
        self._left = self.size - offset

    seek = go_to
    """Name of :meth:`go_to` in the interface of files."""

    def read(self, count: int) -> bytes:
        """The next bytes, no more than were offered; none at the end.

        :raises SourceChanged: there are less.
        """
        data = self._file.read(min(count, self._left))
        if count and self._left and not data:
            raise resized_error(self._name, self.size - self._left, self.size)
        self._left -= len(data)
        return data

    def was_written_to(self) -> bool:
        """Whether somebody has written to it since it was opened."""
        if not self._measured:
            return False
        now = os.fstat(self._file.fileno())
        return (now.st_size, now.st_mtime_ns) != (self._status.st_size, self._status.st_mtime_ns)

    def close(self) -> None:
        """May be repeated."""
        self._file.close()
