"""One file over one transport.

The sender writes ``length(4) || header``, big endian, the header JSON with
``name`` and ``size``; then the bytes; then their SHA-256 (32 bytes).  The
receiver answers ``length(4) || {"ok": true}`` when the file is whole and in
its place, or ``{"error": text}`` at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionAborted, ConnectionDone
from twisted.internet.protocol import Protocol
from twisted.protocols.basic import FileSender
from twisted.python.failure import Failure

from dmsg.base.printable import MAX_WORDS_OF_STRANGERS, shortened
from dmsg.errors import DmsgError, Unwanted
from dmsg.filelock import is_at

HEADER_LIMIT = 4096
"""Bytes of a header or an answer."""
CHUNK = 128 * 1024
DIGEST_SIZE = 32


class TransferError(DmsgError):
    """The file did not arrive."""


class Refused(TransferError, Unwanted):
    """The other side does not take it, or does not give it."""


def lost_text(reason: Failure) -> str:
    """A connection that ended too soon, in words."""
    if reason.check(ConnectionDone):
        return "the other side ended the connection"
    if reason.check(ConnectionAborted):
        return "the connection was given up on this side"
    return f"the connection was lost: {reason.value}"


@dataclass(frozen=True)
class Transferred:
    """What has arrived.

    :ivar seconds: from the first byte to the answer.
    :ivar changed: the source was written to while it was sent.
    """

    name: str
    size: int
    seconds: float
    sha256: str
    changed: bool = False

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.size / self.seconds if self.seconds else 0.0


def _message(value: dict[str, Any]) -> bytes:
    body = json.dumps(value).encode()
    return len(body).to_bytes(4, "big") + body


def take_framed(buffer: bytearray, limit: int, what: str) -> bytes | None:
    """What stands behind its length at the start of the buffer, taken out; None while it is not whole.

    :param what: is spoken, as an error says it.
    :raises TransferError: it is longer than ``limit``.
    """
    if len(buffer) < 4:
        return None
    size = int.from_bytes(buffer[:4], "big")
    if size > limit:
        raise TransferError(f"the other side does not speak dmsg's {what}")
    if len(buffer) < 4 + size:
        return None
    body = bytes(buffer[4 : 4 + size])
    del buffer[: 4 + size]
    return body


def _take_message(buffer: bytearray, limit: int = HEADER_LIMIT, what: str = "file transfer") -> dict[str, Any] | None:
    """The JSON object at the start of the buffer, taken out; None while it is not whole.

    :raises TransferError: it is none.
    """
    body = take_framed(buffer, limit, what)
    if body is None:
        return None
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise TransferError(f"the other side does not speak dmsg's {what}")
    return value


class _Sender(FileSender):
    CHUNK_SIZE = CHUNK


class SendFile(Protocol):
    """Sends one file; ``done`` fires with a :class:`Transferred`."""

    def __init__(self, path: Path, progress: Callable[[int], None] = lambda done: None) -> None:
        """:raises TransferError: not a regular file: a pipe would block, a device has no size."""
        # those modules need the errors of this one
        from dmsg.apps.sources import Source, open_regular

        self._path = path
        self._file = Source(open_regular(path, os.fspath(path), follow=True), path.name)
        self._progress = progress
        self._buffer = bytearray()
        self._sent = 0
        self._hash = hashlib.sha256()
        self._started = time.monotonic()
        self._error: TransferError | None = None
        self.size = self._file.size
        self.done: Deferred[Transferred] = Deferred()

    def connectionMade(self) -> None:
        assert self.transport is not None
        self._started = time.monotonic()
        self.transport.write(_message({"name": self._path.name, "size": self.size}))
        _Sender().beginFileTransfer(self, self.transport, self._count).addCallbacks(  # type: ignore[no-untyped-call]
            self._all_sent, self._not_sent
        )

    def read(self, count: int) -> bytes:
        """What FileSender sends; it takes an exception for its own."""
        try:
            return self._file.read(count)
        except TransferError as error:
            self._error = error
        except (OSError, ValueError) as error:  # it cannot be read, or is closed with the connection
            self._error = TransferError(f"{self._path.name}: {error}")
        return b""

    def _count(self, data: bytes) -> bytes:
        self._sent += len(data)
        self._hash.update(data)
        self._progress(self._sent)
        return data

    def _all_sent(self, last: bytes) -> None:
        assert self.transport is not None
        if self._error is None and self._file.was_written_to():  # which the receiver could not be told
            self._error = TransferError(f"{self._path.name} was written to while it was sent")
        if self._error is not None:
            self._fail(Failure(self._error))
            return
        self.transport.write(self._hash.digest())

    def _not_sent(self, failure: Failure) -> None:
        """The transport is gone, and connectionLost says why."""

    def dataReceived(self, data: bytes) -> None:
        self._buffer += data
        try:
            answer = _take_message(self._buffer)
            if answer is None:
                return
            if answer.get("ok") is not True:
                why = shortened(str(answer.get("error", "no reason")), MAX_WORDS_OF_STRANGERS)
                raise Refused(f"refused by the receiver: {why}")
        except TransferError:
            self._fail(Failure())
            return
        assert self.transport is not None
        seconds = time.monotonic() - self._started
        if not self.done.called:
            self.done.callback(Transferred(self._path.name, self.size, seconds, self._hash.hexdigest()))
        self.transport.loseConnection()

    def _fail(self, failure: Failure) -> None:
        if not self.done.called:
            self.done.errback(failure)
        if self.transport is not None:
            self.transport.abortConnection()  # type: ignore[attr-defined]

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        self._file.close()
        if not self.done.called:
            self.done.errback(Failure(TransferError(lost_text(reason))))


def safe_name(name: Any) -> str:
    """A file name that stays in its directory.

    :raises TransferError: it would not.
    """
    if not isinstance(name, str) or not name or name in (".", "..") or len(name.encode("utf-8", "replace")) > 255:
        raise TransferError("file name is malformed")
    if "/" in name or "\\" in name or any(ord(char) < 32 or ord(char) == 127 for char in name):
        raise TransferError("file name is malformed")
    return name


class ReceiveFile(Protocol):
    """Receives one file into a directory; ``done`` fires with a :class:`Transferred`.

    The bytes go to a temporary file, which takes its name when the SHA-256
    is right; nothing is left of a transfer that fails.
    """

    def __init__(
        self,
        directory: Path,
        *,
        overwrite: bool = False,
        hidden: bool = False,
        max_size: int | None = None,
        started: Callable[[str, int], Callable[[int], None]] = lambda name, size: lambda done: None,
    ) -> None:
        self._directory = directory
        self._overwrite = overwrite
        self._hidden = hidden
        self._max_size = max_size
        self._on_start = started
        self._progress: Callable[[int], None] = lambda done: None
        self._buffer = bytearray()
        self._name = ""
        self._size = 0
        self._received = 0
        self._hash = hashlib.sha256()
        self._file: IO[bytes] | None = None
        self._at: int | None = None
        """The directory, from when something comes."""
        self._part = ""
        self._started = time.monotonic()
        self.done: Deferred[Transferred] = Deferred()

    def dataReceived(self, data: bytes) -> None:
        if self.done.called:
            return
        try:
            self._take(data)
        except TransferError as error:
            self._refuse(error)
        except OSError as error:
            self._refuse(TransferError(f"{self._directory}: {error.strerror}"))

    def _take(self, data: bytes) -> None:
        if self._file is None:
            self._buffer += data
            header = _take_message(self._buffer)
            if header is None:
                return
            self._begin(header)
            data = bytes(self._buffer)
            self._buffer.clear()
        assert self._file is not None
        body = data[: self._size - self._received]
        if body:
            self._file.write(body)
            self._hash.update(body)
            self._received += len(body)
            self._progress(self._received)
        if self._received == self._size:
            self._buffer += data[len(body) :]
            if len(self._buffer) >= DIGEST_SIZE:
                self._finish(bytes(self._buffer))

    def _begin(self, header: dict[str, Any]) -> None:
        name = safe_name(header.get("name"))
        size = header.get("size")
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise TransferError("file size is malformed")
        if self._max_size is not None and size > self._max_size:
            raise TransferError(f"file of {size} bytes is too large, the limit is {self._max_size}")
        from dmsg.apps.descriptors import new_file, new_name, open_within
        from dmsg.apps.exposure import check_names, check_target

        check_names(name, hidden=self._hidden)
        if (self._directory / name).exists() and not self._overwrite:
            raise TransferError(f"{name} exists already")
        self._name, self._size = name, size
        self._started = time.monotonic()
        self._at, self._part = open_within(self._directory, self._directory), new_name()
        check_target(name, self._at)
        self._file = os.fdopen(new_file(self._at, self._part), "wb")
        self._progress = self._on_start(name, size)

    def _finish(self, digest: bytes) -> None:
        assert self._file is not None and self.transport is not None
        if digest != self._hash.digest():
            raise TransferError("SHA-256 is not that of the sender")
        self._file.flush()
        descriptor, at = self._file.fileno(), self._at
        os.fsync(descriptor)
        umask = os.umask(0)
        os.umask(umask)
        os.fchmod(descriptor, 0o666 & ~umask)
        if not is_at(descriptor, self._part, at):
            raise TransferError(f"{self._name}: somebody has put something else in its place while it came")
        if self._overwrite:
            os.replace(self._part, self._name, src_dir_fd=at, dst_dir_fd=at)
        else:
            try:
                os.link(self._part, self._name, src_dir_fd=at, dst_dir_fd=at, follow_symlinks=False)
            except FileExistsError:
                raise TransferError(f"{self._name} exists already") from None
            os.unlink(self._part, dir_fd=at)
        self._discard()
        self.transport.write(_message({"ok": True}))
        seconds = time.monotonic() - self._started
        self.done.callback(Transferred(self._name, self._size, seconds, self._hash.hexdigest()))

    def _refuse(self, error: TransferError) -> None:
        assert self.transport is not None
        self.transport.write(_message({"error": str(error)}))
        self.transport.loseConnection()
        self._discard()
        if not self.done.called:
            self.done.errback(Failure(error))

    def _discard(self) -> None:
        file, self._file = self._file, None
        at, self._at = self._at, None
        if file is not None:
            with suppress(OSError):
                file.close()  # a full disk
            with suppress(FileNotFoundError):  # it has its name
                os.unlink(self._part, dir_fd=at)
        if at is not None:
            os.close(at)

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        self._discard()
        if not self.done.called:
            of = f"{self._name}: " if self._name else ""
            self.done.errback(Failure(TransferError(f"{of}{lost_text(reason)}")))
