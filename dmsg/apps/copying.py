"""Copying of files that goes on where it was cut, as a protocol over any stream.

Messages are ``length(4) || JSON``, big endian.  The one who connects asks::

    {"op": "put", "path": P, "size": N, "mode": M, "mtime": T}    wants to send a file
    {"op": "get", "path": P, "offset": O, "sha256": H}            wants one, and has O bytes of it

The answer to ``put`` is ``{"offset": O, "sha256": H}``: O bytes are there, H is
their SHA-256; with ``"whole": true`` the file itself is there, to which the
sender says ``{"same": true}`` or ``false``.  Else the sender says ``{"offset": O}`` when its own first O bytes
are the same and else ``{"offset": 0}``, then sends the rest, then the SHA-256 of
the whole file (32 bytes).  To ``get`` the answer is
``{"size": N, "offset": O, "mode": M, "mtime": T}``, and the bytes and the hash follow.  The receiver closes with
``{"ok": true}``; either side may say ``{"error": TEXT}`` instead of anything.

M are the permissions of the file, T the nanoseconds since 1970 at which it was changed; older programs say
neither.  A new file has both, without what the umask takes; one that takes the place of another keeps that one's mode.

What has arrived lies in ``.NAME.dmsg-part`` beside the file until it is whole.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionAborted, ConnectionDone, ConnectionLost
from twisted.internet.interfaces import IReactorTime
from twisted.internet.protocol import Protocol
from twisted.internet.task import cooperate
from twisted.protocols.basic import FileSender
from twisted.python.failure import Failure

from dmsg.apps.parts import IS_BUSY, PART_SUFFIX, HeldPart, hold, part_of
from dmsg.apps.paths import regular_size, there_is, umask
from dmsg.apps.transfer import DIGEST_SIZE, Refused, TransferError, Transferred, _message, _take_message, lost_text
from dmsg.errors import CutShort, DmsgError

CHUNK = 256 * 1024


class CopyCut(TransferError, CutShort):
    """The connection was lost: the copy can go on where it was cut.  No other error is tried again."""


class CopyBusy(CopyCut):
    """The other side receives this from another connection, perhaps of a killed program that is soon given up."""


class _Hashed(FileSender):
    CHUNK_SIZE = CHUNK


class Copier(Protocol):
    """What both sides of both directions share; ``done`` fires with a :class:`Transferred`."""

    def __init__(
        self, reactor: IReactorTime, started: Callable[[str, int, int], Callable[[int], None]] | None = None
    ) -> None:
        """:param started: told name, size and offset; gives what is told of progress."""
        self._reactor = reactor
        self._started = started or (lambda name, size, offset: lambda done: None)
        self._progress: Callable[[int], None] = lambda done: None
        self._buffer = bytearray()
        self._hash = hashlib.sha256()
        self._file: IO[bytes] | None = None
        self._held: HeldPart | None = None
        self._path = Path()
        self._size = self._done_bytes = self._offset = 0
        self._receiving = False
        self._mode: int | None = None
        self._mtime: int | None = None
        self._at = time.monotonic()
        self._next: Callable[[dict[str, Any]], None] = self._unexpected
        self.done: Deferred[Transferred] = Deferred()

    @property
    def what(self) -> str:
        """The file, as an error begins with it; empty when it has no name yet."""
        name = self._path.name.removesuffix(PART_SUFFIX)
        return f"{name}: " if name else ""

    # --- messages ---

    def dataReceived(self, data: bytes) -> None:
        if self.done.called:
            return
        try:
            if self._receiving:
                self._take(data)
                return
            self._buffer += data
            while not self._receiving and not self.done.called:
                message = _take_message(self._buffer)
                if message is None:
                    return
                if "error" in message:
                    text = f"refused by the other side: {str(message['error'])[:200]}"
                    raise CopyBusy(text) if IS_BUSY in text else Refused(text)
                self._next(message)
            if self._receiving and self._buffer and not self.done.called:
                rest, self._buffer = bytes(self._buffer), bytearray()
                self._take(rest)
        except TransferError as error:
            self._refuse(error)
        except OSError as error:
            self._refuse(self._named(error))

    def _named(self, error: OSError) -> TransferError:
        """The error of a file, by the name that a person knows."""
        name = self._path.name or (Path(error.filename).name if isinstance(error.filename, str) else "")
        name = name.removesuffix(PART_SUFFIX)
        return TransferError(f"{name}: {error.strerror}" if name else str(error.strerror))

    def _begin(self, work: Callable[[], None]) -> None:
        """Do the first step; what is wrong with this side's file ends the copy."""
        try:
            work()
        except TransferError as error:
            self._refuse(error)
        except OSError as error:
            self._refuse(self._named(error))

    def _unexpected(self, message: dict[str, Any]) -> None:
        raise TransferError("the other side does not speak dmsg's file copying")

    def _say(self, **message: Any) -> None:
        assert self.transport is not None
        self.transport.write(_message(message))

    @staticmethod
    def _number(message: dict[str, Any], name: str, most: int = 2**63) -> int:
        value = message.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
            raise TransferError(f"{name} is malformed")
        return value

    def _remember(self, message: dict[str, Any]) -> None:
        """Mode and time of the file that is to come, where the other side says them."""
        if "mode" in message:
            self._mode = self._number(message, "mode", 0o777)
        if "mtime" in message:
            self._mtime = self._number(message, "mtime", 2**62)

    # --- what is there already ---

    def _hash_prefix(self, path: Path, size: int, then: Callable[[Any], None]) -> None:
        """SHA-256 of the first ``size`` bytes, a piece per reactor turn."""
        digest = hashlib.sha256()

        def pieces() -> Any:
            left = size
            with path.open("rb") as file:
                while left:
                    data = file.read(min(CHUNK, left))
                    if not data:
                        raise TransferError(f"{path.name} is shorter than it was")
                    left -= len(data)
                    digest.update(data)
                    yield None

        def failed(failure: Failure) -> None:
            error = failure.value
            self._refuse(error if isinstance(error, TransferError) else TransferError(f"{path.name}: {error}"))

        def hashed(_: Any) -> None:
            if not self.done.called:
                then(digest)

        if size:
            cooperate(pieces()).whenDone().addCallback(hashed).addErrback(failed)
        else:
            hashed(None)

    # --- sending ---

    def _send_from(self, path: Path, offset: int, digest: Any) -> None:
        self._path, self._offset, self._done_bytes, self._hash = path, offset, offset, digest
        self._file = path.open("rb")
        self._file.seek(offset)
        self._progress = self._started(path.name, self._size, offset)
        self._next = self._answered
        _Hashed().beginFileTransfer(self, self.transport, self._count).addCallbacks(self._sent, self._not_sent)  # type: ignore[no-untyped-call]

    def read(self, count: int) -> bytes:
        """What FileSender sends: no more than was announced."""
        assert self._file is not None
        return self._file.read(min(count, self._size - self._done_bytes))

    def _count(self, data: bytes) -> bytes:
        self._hash.update(data)
        self._done_bytes += len(data)
        self._progress(self._done_bytes)
        return data

    def _sent(self, last: bytes) -> None:
        assert self.transport is not None and self._file is not None
        if self._done_bytes != self._size or self._file.read(1):
            self._refuse(TransferError(f"{self._path.name} changed while it was sent"))
        else:
            self.transport.write(self._hash.digest())

    def _not_sent(self, failure: Failure) -> None:
        if isinstance(failure.value, OSError):
            self._refuse(self._named(failure.value))
        # else the transport is gone, and connectionLost says why

    def _answered(self, message: dict[str, Any]) -> None:
        if message.get("ok") is not True or self._done_bytes != self._size:
            self._unexpected(message)
        self._finished()

    # --- receiving ---

    def _receive_from(self, path: Path, offset: int, digest: Any) -> None:
        self._path, self._offset, self._done_bytes, self._hash = path, offset, offset, digest
        there_is(path)
        part = part_of(path)
        # until it is whole it is this user's alone: who may read it is said at the end
        descriptor = os.open(part, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._file = os.fdopen(descriptor, "r+b")
        self._file.truncate(offset)
        self._file.seek(offset)
        self._progress = self._started(path.name, self._size, offset)
        self._receiving = True
        self._take(b"")

    def _take(self, data: bytes) -> None:
        assert self._file is not None
        body = data[: self._size - self._done_bytes]
        if body:
            self._file.write(body)
            self._hash.update(body)
            self._done_bytes += len(body)
            self._progress(self._done_bytes)
        if self._done_bytes == self._size:
            self._buffer += data[len(body) :]
            if len(self._buffer) >= DIGEST_SIZE:
                self._complete(bytes(self._buffer[:DIGEST_SIZE]))

    def _complete(self, digest: bytes) -> None:
        assert self._file is not None
        part = part_of(self._path)
        if digest != self._hash.digest():
            part.unlink(missing_ok=True)  # nothing to go on with
            raise TransferError("SHA-256 is not that of the sender")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        before = there_is(self._path)
        if before is not None:  # who could not read it shall not from now on
            os.chmod(part, stat.S_IMODE(before.st_mode))
        else:
            os.chmod(part, (0o666 if self._mode is None else self._mode) & ~umask())
        if self._mtime is not None:
            os.utime(part, ns=(self._mtime, self._mtime))
        os.replace(part, self._path)
        self._say(ok=True)
        self._finished(close=False)

    # --- the end ---

    def _finished(self, *, close: bool = True) -> None:
        self._close_file()
        self._receiving = False
        self._buffer.clear()
        moved = self._size - self._offset
        seconds = time.monotonic() - self._at
        if not self.done.called:
            self.done.callback(Transferred(self._path.name, moved, seconds, self._hash.hexdigest()))
        if close:
            self.transport.loseConnection()  # type: ignore[union-attr]

    def _refuse(self, error: TransferError) -> None:
        sending = self._file is not None and not self._receiving
        self._close_file()
        if self.transport is not None:
            if sending:  # a message would be taken for bytes of the file
                self.transport.abortConnection()  # type: ignore[attr-defined]
            else:
                self._say(error=str(error))
                self.transport.loseConnection()
        if not self.done.called:
            self.done.errback(Failure(error))

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
        held, self._held = self._held, None
        if held is not None:
            held.release()

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        self._close_file()
        if not self.done.called:
            if reason.check(ConnectionDone, ConnectionLost, ConnectionAborted, DmsgError):
                self.done.errback(Failure(CopyCut(lost_text(reason))))
            else:  # our own: the same would happen again
                self.done.errback(Failure(TransferError(f"{type(reason.value).__name__}: {reason.value}")))


def mode_and_time(path: Path) -> dict[str, int]:
    status = path.stat()
    return {"mode": stat.S_IMODE(status.st_mode) & 0o777, "mtime": max(0, status.st_mtime_ns)}


class Put(Copier):
    """Sends a file; it must be a regular one."""

    def __init__(self, reactor: IReactorTime, source: Path, target: str, **options: Any) -> None:
        super().__init__(reactor, **options)
        self._size = regular_size(source)
        self._source = source
        self._target = target

    def connectionMade(self) -> None:
        self._at = time.monotonic()
        self._begin(self._offer)

    def _offer(self) -> None:
        self._say(op="put", path=self._target, size=self._size, **mode_and_time(self._source))
        self._next = self._offered

    def _offered(self, message: dict[str, Any]) -> None:
        offset = self._number(message, "offset", self._size)
        self._next = self._unexpected

        def hashed(digest: Any) -> None:
            same = digest.hexdigest() == message.get("sha256")
            if message.get("whole") is True:
                self._say(same=same)
                self._offset = self._done_bytes = self._size
                self._path, self._hash, self._next = self._source, digest, self._answered
                return
            self._say(offset=offset if same else 0)
            self._send_from(self._source, offset if same else 0, digest if same else hashlib.sha256())

        self._hash_prefix(self._source, offset, hashed)


class Get(Copier):
    """Fetches a file to ``target``."""

    def __init__(self, reactor: IReactorTime, source: str, target: Path, **options: Any) -> None:
        super().__init__(reactor, **options)
        self._source = source
        self._target = target

    def connectionMade(self) -> None:
        self._at = time.monotonic()
        self._path = self._target
        self._begin(self._ask)

    def _ask(self) -> None:
        self._held = hold(self._target)
        part, here = self._held.path, self._held.size

        def hashed(digest: Any) -> None:
            self._prefix, self._here = digest, here
            self._say(op="get", path=self._source, offset=here, sha256=digest.hexdigest())
            self._next = self._granted

        self._hash_prefix(part, here, hashed)

    def _granted(self, message: dict[str, Any]) -> None:
        self._size = self._number(message, "size")
        self._remember(message)
        offset = self._number(message, "offset", min(self._size, self._here))
        if offset not in (0, self._here):
            raise TransferError("offset is malformed")
        self._receive_from(self._target, offset, self._prefix if offset else hashlib.sha256())
