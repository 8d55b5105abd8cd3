"""Spool: directory of event files, which are appended to, sealed, and recovered after a crash.

The open file is plain text, has the name ``.<kind>-<boot>-<number>.open``, and is locked by its process. Each write
ends with a complete line, so a killed process loses only events that it had not written. Sealing compresses the file to
``<kind>-<boot>-<number>.jsonl.gz``. The sealed file is complete on the disk before it gets this name, so a program that
collects files by their names never reads a part of a file. When a process starts, the files of killed processes are
truncated after their last complete line and sealed.

All functions block, and are called from one thread. The total size of the sealed files is limited: the oldest ones are
removed to make room.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO

from dmsg.directories import sync_directory
from dmsg.telemetry.schema import SCHEMA_VERSION, SEGMENT_SUFFIX

ROTATE_BYTES = 16 * 1024 * 1024
"""Size of the text in bytes at which a file is sealed."""
ROTATE_SECONDS = 300.0
"""Default age in seconds at which an open file is sealed."""
SPOOL_LIMIT = 1024 * 1024 * 1024
"""Default limit of all sealed files of a directory, in bytes."""
COMPRESSION = 3
"""Compression level of gzip. It takes half of the CPU time of the usual level 6, for files that are 4 % larger."""
UNSEALED_LIMIT = 8
"""Maximum number of unsealed files that wait for disk space. If there are more, the oldest are removed."""
OPEN_SUFFIX = ".open"


def end_line(envelope: Mapping[str, object], lines: int, digest: str, *, recovered: bool) -> bytes:
    """Return the last line of a file, with the number of its lines and their digest."""
    row = {**envelope, "type": "segment_end", "lines": lines, "sha256": digest, "recovered": recovered}
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"


class Spool:
    """Files of one process in a directory.

    :param stem: beginning of the files' names.
    :param ending: function that returns the last line of a file. Its arguments are the number of the file's lines and
        the SHA-256 of these lines in hex.
    :param family: beginning of the names of files that may be removed to make room.
    :ivar removed: number of sealed files removed to make room.
    """

    def __init__(
        self,
        directory: Path,
        stem: str,
        ending: Callable[[int, str], bytes],
        *,
        rotate_bytes: int = ROTATE_BYTES,
        rotate_seconds: float = ROTATE_SECONDS,
        limit: int = SPOOL_LIMIT,
        family: str = "",
    ) -> None:
        self._directory = directory
        self._stem = stem
        self._ending = ending
        self._rotate_bytes, self._rotate_seconds, self._limit = rotate_bytes, rotate_seconds, limit
        self._family = family
        self._number = 0
        self._file: IO[bytes] | None = None
        self._opened = 0.0
        self._size = 0
        self._lines = 0
        self._hash = hashlib.sha256()
        self._unsealed: list[Path] = []
        self.removed = 0

    def write(self, lines: bytes, count: int, now: float) -> None:
        """Append complete lines.

        :param count: number of the lines.
        :param now: time of a monotonic clock, in seconds.
        :raises OSError: the lines cannot be written. None of them is in the file then.
        """
        file = self._file
        if file is None:
            file = self._open(now)
        try:
            if file.write(lines) != len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(self._size)
            file.seek(self._size)
            raise
        self._size += len(lines)
        self._lines += count
        self._hash.update(lines)

    def seal_if_due(self, now: float) -> None:
        """Seal the open file if it is large or old enough."""
        if self._file is not None and (
            self._size >= self._rotate_bytes or (self._lines and now - self._opened >= self._rotate_seconds)
        ):
            self.seal()

    def _open(self, now: float) -> IO[bytes]:
        self._number += 1
        path = self._directory / f".{self._stem}-{self._number:06d}{OPEN_SUFFIX}"
        file = open(path, "xb", buffering=0)  # The file object is kept open, because the lock ends when it is closed.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._file, self._opened = file, now
        self._size = self._lines = 0
        self._hash = hashlib.sha256()
        return file

    def seal(self) -> None:
        """Seal the open file, if there is one.

        :raises OSError: there is no disk space. The next call tries again.
        """
        file = self._file
        if file is not None:
            ending = self._ending(self._lines, self._hash.hexdigest())
            try:
                whole = file.write(ending) == len(ending)
            except OSError:
                whole = False
            if not whole:
                # The file is sealed without its last line, so that readers see that it is incomplete.
                file.truncate(self._size)
            self._file = None
            file.close()
            self._unsealed.append(Path(file.name))
            for path in self._unsealed[:-UNSEALED_LIMIT]:
                path.unlink(missing_ok=True)
                self.removed += 1
            del self._unsealed[:-UNSEALED_LIMIT]
        while self._unsealed:
            compress(self._unsealed[0])
            del self._unsealed[0]
        self._make_room()

    def _make_room(self) -> None:
        paths = self._directory.glob(f"{self._family}*{SEGMENT_SUFFIX}")
        sealed = sorted((stat.st_mtime_ns, stat.st_size, path) for path, stat in _stats(paths))
        total = sum(size for _, size, _ in sealed)
        for _, size, path in sealed:
            if total <= self._limit:
                break
            path.unlink(missing_ok=True)
            self.removed += 1
            total -= size


def _stats(paths: Iterable[Path]) -> Iterable[tuple[Path, os.stat_result]]:
    for path in paths:
        try:
            yield path, path.stat()
        except FileNotFoundError:
            continue  # The file may be gone, because the sender has delivered it to a collector.


def compress(path: Path) -> Path:
    """Compress an open file to its sealed file, and remove the open file.

    :raises OSError: there is no disk space. The open file still exists.
    """
    sealed = path.with_name(path.name.removeprefix(".").removesuffix(OPEN_SUFFIX) + SEGMENT_SUFFIX)
    fresh = path.with_name(f".{sealed.name}.part")
    try:
        with open(path, "rb") as source, open(fresh, "wb") as raw:
            with gzip.GzipFile("", "wb", COMPRESSION, raw, mtime=0) as target:
                shutil.copyfileobj(source, target, 256 * 1024)
            # The file is synced before it is renamed. Otherwise it could be empty under its final name after a power
            # failure.
            raw.flush()
            os.fsync(raw.fileno())
        fresh.replace(sealed)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
    path.unlink()
    return sealed


def recover(directory: Path) -> int:
    """Seal the open files of processes that no longer run.

    :returns: number of files sealed.
    """
    found = 0
    for path in sorted(directory.glob(f".*{OPEN_SUFFIX}")):
        try:
            with open(path, "r+b") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue  # The file is skipped, because its process is still running.
                if not _mend(file):
                    path.unlink()
                    continue
                compress(path)
                found += 1
        except FileNotFoundError:
            continue  # The file is gone, because another process has recovered it.
    # Incompletely compressed files of killed processes are removed. A process that still has an open file may be
    # compressing now, so its files are not removed.
    for path in directory.glob(f".*{SEGMENT_SUFFIX}.part"):
        boot = path.name.removeprefix(".").rpartition("-")[0]
        if not any(directory.glob(f".{boot}-*{OPEN_SUFFIX}")):
            path.unlink(missing_ok=True)
    return found


def _mend(file: IO[bytes]) -> bool:
    """Truncate a file after its last complete line, and append a ``segment_end`` event. Return False if no line is
    left."""
    digest = hashlib.sha256()
    lines = size = 0
    last = b""
    for line in file:
        if not line.endswith(b"\n"):
            break
        digest.update(line)
        lines += 1
        size += len(line)
        last = line
    file.truncate(size)
    if not lines:
        return False
    try:
        row = json.loads(last)
        if row["type"] == "segment_end":
            return True
        envelope = {name: row[name] for name in ("producer", "role", "boot", "ts", "mono")}
        envelope = {"v": SCHEMA_VERSION, **envelope, "seq": row["seq"] + 1}
    except (ValueError, KeyError, TypeError):
        return True  # The line stays, although it is not an event; the pipeline puts it into quarantine.
    file.seek(size)
    file.write(end_line(envelope, lines, digest.hexdigest(), recovered=True))
    file.flush()
    return True
