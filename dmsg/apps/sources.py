"""Files to send: opens them, finds out their sizes, and checks that they are still the files that were offered.

The size that the system reports is only a hint.  Files of ``/proc`` have a reported size of 0, files of ``/sys`` a
reported size above their real one, and other files may grow or shrink while they are read.
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
"""Maximum bytes of a file whose real size the system does not report.  Such a file is read before it is offered."""
_SMALL = 64 * 1024
"""Maximum reported size in bytes of a file without disk blocks that counts as a file of ``/sys``.  The reported size of
such a file may be wrong.
"""


class SourceChanged(TransferError):
    """Error: a file has changed since it was offered.  Both sides show the text, which names the file."""


def changed_text(name: str) -> str:
    """Return the warning about a source file that somebody changed while it was sent."""
    return f"{name} was written to while it was sent, so the copy may mix old and new content"


def resized_error(name: str, new_size: int, old_size: int) -> SourceChanged:
    """Return the error for a file whose size has changed since it was offered.

    :param new_size: size in bytes now.
    :param old_size: size in bytes when the file was offered.
    """
    return SourceChanged(f"{name} changed after it was offered: it has {new_size:,} bytes now, and had {old_size:,}")


def gone_error(name: str, error: OSError) -> SourceChanged:
    """Return the error for a file that can no longer be read."""
    return SourceChanged(f"{name} changed after it was offered: {error.strerror}")


def is_pipe(path: str) -> bool:
    """Whether a path is a pipe: a named pipe, a pipe of the shell as in ``<(command)``, or a pipe as standard input.

    A path to an open descriptor whose file has no name counts as a pipe, too, because it can only be read once.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    if stat.S_ISFIFO(mode) or stat.S_ISDIR(mode) or _descriptor(path) is None:
        return stat.S_ISFIFO(mode)
    return not stat.S_ISREG(mode) or not os.path.exists(os.path.realpath(path))


def open_pipe(path: str) -> tuple[int, str]:
    """Open a pipe.

    :returns: descriptor, and the name to show to people.
    :raises OSError: the pipe cannot be opened.
    """
    number = _descriptor(path)
    if number is None:
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), os.path.basename(path)
    return number, "standard input" if number == 0 else "a pipe"


def named_path(path: Path) -> Path:
    """Return the file's own path if ``path`` is another name of an open descriptor, such as ``/dev/stdin``; else
    ``path``.
    """
    if _descriptor(os.fspath(path)) is None:
        return path
    real = Path(os.path.realpath(path))
    return real if real.exists() else path


def _descriptor(path: str) -> int | None:
    """Return the descriptor of this process for which a path is another name, as ``/dev/stdin`` is for 0; else None."""
    for _ in range(8):
        # For example, /dev/stdin is a link to /proc/self/fd/0. A longer chain of links does not lead to a descriptor.
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
    """Open a regular file for reading.  Other files are refused, because a pipe may block and a device may have no end.

    :param name: name to use in errors.
    :param at: descriptor of the directory to which ``path`` is relative; None for the working directory.
    :param follow: whether to follow a link.
    :param own: see :func:`~dmsg.apps.exposure.check_source`.
    :raises TransferError: the file is not regular.
    :raises OwnFile: the file belongs to dmsg itself.
    :raises OSError: the file cannot be opened.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags, dir_fd=at)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        what = "is a directory" if stat.S_ISDIR(mode) else "not a regular file"
        raise TransferError(f"{name}: {what}")
    try:
        check_source(descriptor, name, path=path if at is None else None, own=own)
    except BaseException:
        os.close(descriptor)
        raise
    return io.FileIO(descriptor, "rb")


def content_of_unmeasured(file: IO[bytes], status: os.stat_result, name: str) -> bytes | None:
    """Return the content of an open file whose real size the system does not report; None if the reported size is
    right.

    :raises TransferError: the file has more than ``UNMEASURED_LIMIT`` bytes.
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
    """File to send, which stays open from the offer until it has been sent.

    :ivar size: number of bytes that are offered and sent.
    """

    def __init__(self, file: IO[bytes], name: str) -> None:
        """:raises TransferError: the file's real size is unknown, and it has more than ``UNMEASURED_LIMIT`` bytes."""
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

    def seek(self, offset: int) -> None:
        """Set the position of the next :meth:`read`, in bytes from the start."""
        self._file.seek(offset)
        self._left = self.size - offset

    def read(self, count: int) -> bytes:
        """Return at most ``count`` of the next bytes within the offered size; empty at the end.

        :raises SourceChanged: the file has fewer bytes than were offered.
        """
        data = self._file.read(min(count, self._left))
        if count and self._left and not data:
            raise resized_error(self._name, self.size - self._left, self.size)
        self._left -= len(data)
        return data

    def was_written_to(self) -> bool:
        """Whether somebody has written to the file since it was opened."""
        if not self._measured:
            return False
        now = os.fstat(self._file.fileno())
        return (now.st_size, now.st_mtime_ns) != (self._status.st_size, self._status.st_mtime_ns)

    def close(self) -> None:
        """Close the file.  Further calls do nothing."""
        self._file.close()
