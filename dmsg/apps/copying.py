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
``{"ok": true}``; either side may say ``{"error": TEXT}`` instead of a message.  Where the answer to ``put`` and
what the sender says to it, or ``get`` and its answer, both have ``"pieces": true``, bytes and hash travel as
:mod:`dmsg.apps.pieces` says.

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

from dmsg.apps.descriptors import open_within
from dmsg.apps.parts import IS_BUSY, PART_SUFFIX, HeldPart, hold
from dmsg.apps.paths import there_is, umask
from dmsg.apps.pieces import END, PieceReader, digest_of, end, error_of, piece
from dmsg.apps.sources import Source, SourceChanged, open_regular
from dmsg.apps.transfer import DIGEST_SIZE, TransferError, Transferred, _message, _take_message, lost_text
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
        self._source: Source | None = None
        self._file: IO[bytes] | None = None
        self._at: int | None = None
        """The directory of what is received."""
        self._held: HeldPart | None = None
        self._path = Path()
        self._size = self._done_bytes = self._offset = 0
        self._receiving = self._sending = self._changed = False
        self._pieces: PieceReader | None = None
        """None: the other side does not know pieces."""
        self._pieces_over = False
        self._error: TransferError | None = None
        self._mode: int | None = None
        self._mtime: int | None = None
        self._began = time.monotonic()
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
                    error = error_of(message, "refused by the other side")
                    raise CopyBusy(str(error)) if IS_BUSY in str(error) else error
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

    def _hash_prefix(self, read: Callable[[int], bytes], size: int, then: Callable[[Any], None]) -> None:
        """SHA-256 of the first ``size`` bytes, a piece per reactor turn."""
        digest = hashlib.sha256()

        def pieces() -> Any:
            left = size
            while left:
                data = read(min(CHUNK, left))
                if not data:
                    raise TransferError(f"{self.what}became shorter while it was read")
                left -= len(data)
                digest.update(data)
                yield None

        def hashed(_: Any) -> None:
            if not self.done.called:
                self._begin(lambda: then(digest))

        def failed(failure: Failure) -> None:
            error = failure.value
            if isinstance(error, OSError):
                error = self._named(error)
            self._refuse(error if isinstance(error, TransferError) else TransferError(str(error)))

        if size:
            cooperate(pieces()).whenDone().addCallback(hashed).addErrback(failed)
        else:
            hashed(None)

    # --- sending ---

    def _open_source(self, path: Path, at: int | None = None, *, follow: bool = False) -> Source:
        """From now on it is this file, whatever has its name.

        :raises TransferError: it is no regular file.
        :raises OSError: it cannot be opened.
        """
        self._path = path
        self._source = Source(open_regular(path if at is None else path.name, path.name, at, follow=follow), path.name)
        self._size = self._source.size
        return self._source

    def _send_from(self, offset: int, digest: Any) -> None:
        assert self._source is not None
        self._offset, self._done_bytes, self._hash = offset, offset, digest
        self._source.go_to(offset)
        self._sending = True
        self._progress = self._started(self._path.name, self._size, offset)
        self._next = self._answered
        _Hashed().beginFileTransfer(self, self.transport, self._count).addCallbacks(self._sent, self._not_sent)  # type: ignore[no-untyped-call]

    def read(self, count: int) -> bytes:
        """What FileSender sends; it takes an exception for its own."""
        if self._source is None:
            return b""
        try:
            return self._source.read(count)
        except TransferError as error:
            self._error = error
        except OSError as error:
            self._error = self._named(error)
        return b""

    def _count(self, data: bytes) -> bytes:
        self._hash.update(data)
        self._done_bytes += len(data)
        self._progress(self._done_bytes)
        return data if self._pieces is None else piece(data)

    def _sent(self, last: bytes) -> None:
        if self._error is not None:
            self._refuse(self._error)
            return
        if self._source is None or self.done.called:
            return
        assert self.transport is not None
        self._changed = self._source.was_written_to()
        digest = self._hash.digest()
        self.transport.write(digest if self._pieces is None else end(digest, changed=self._changed))
        self._sending = False

    def _not_sent(self, failure: Failure) -> None:
        """The transport is gone, and connectionLost says why."""

    def _answered(self, message: dict[str, Any]) -> None:
        if message.get("ok") is not True or self._done_bytes != self._size:
            self._unexpected(message)
        self._finished()

    # --- receiving ---

    def _hold(self, path: Path, base: Path | None = None) -> HeldPart:
        """Have the part of a file, in the directory that is there now.

        :param base: a directory above it; no link is followed between the two, and directories between are made.
        """
        self._path = path  # as an error names it
        self._at = open_within(base or path.parent, path.parent, make=base is not None)
        self._held = hold(path.name, self._at)
        return self._held

    def _hash_part(self, size: int, then: Callable[[Any], None]) -> None:
        assert self._held is not None
        file = self._file = self._held.file()
        self._hash_prefix(file.read, size, then)

    def _receive_from(self, offset: int, digest: Any) -> None:
        self._offset, self._done_bytes, self._hash = offset, offset, digest
        assert self._file is not None and self._at is not None
        there_is(self._path.name, self._at)
        self._file.truncate(offset)
        self._file.seek(offset)
        self._progress = self._started(self._path.name, self._size, offset)
        self._receiving = True
        self._take(b"")

    def _take(self, data: bytes) -> None:
        if self._pieces is not None:
            self._take_pieces(self._pieces, data)
            return
        body = data[: self._size - self._done_bytes]
        if body:
            self._store(body)
        if self._done_bytes == self._size:
            self._buffer += data[len(body) :]
            if len(self._buffer) >= DIGEST_SIZE:
                self._complete(bytes(self._buffer[:DIGEST_SIZE]))

    def _take_pieces(self, reader: PieceReader, data: bytes) -> None:
        self._buffer += data
        while not self._pieces_over:
            body = reader.take(self._buffer, self._size - self._done_bytes)
            if body is None:
                self._pieces_over = True
            elif not body:
                return
            else:
                self._store(body)
        message = _take_message(self._buffer)
        if message is None:
            return
        if "error" in message:
            raise error_of(message, "the other side gave up")
        self._changed = message.get("changed") is True
        self._complete(digest_of(message, self._size - self._done_bytes))

    def _store(self, body: bytes) -> None:
        assert self._file is not None
        self._file.write(body)
        self._hash.update(body)
        self._done_bytes += len(body)
        self._progress(self._done_bytes)

    def _complete(self, digest: bytes) -> None:
        assert self._file is not None and self._held is not None and self._at is not None
        if digest != self._hash.digest():
            self._held.take_away()  # nothing to go on with
            raise TransferError("SHA-256 is not that of the sender")
        self._file.flush()
        os.fsync(self._file.fileno())
        before = there_is(self._path.name, self._at)
        if before is not None:  # who could not read it shall not from now on
            mode = stat.S_IMODE(before.st_mode)
        else:
            mode = (0o666 if self._mode is None else self._mode) & ~umask()
        os.fchmod(self._file.fileno(), mode)
        if self._mtime is not None:
            os.utime(self._file.fileno(), ns=(self._mtime, self._mtime))
        self._file.close()
        self._file = None
        self._held.become(self._path.name)
        self._say(ok=True)
        self._finished(close=False)

    # --- the end ---

    def _finished(self, *, close: bool = True) -> None:
        self._close_file()
        self._receiving = self._sending = False
        self._buffer.clear()
        moved = self._size - self._offset
        seconds = time.monotonic() - self._began
        if not self.done.called:
            self.done.callback(Transferred(self._path.name, moved, seconds, self._hash.hexdigest(), self._changed))
        if close:
            self.transport.loseConnection()  # type: ignore[union-attr]

    def _refuse(self, error: TransferError) -> None:
        self._error = error  # also for connectionLost, which an abort calls at once
        self._close_file()
        transport: Any = self.transport
        if transport is not None:
            if self._sending and self._pieces is None:  # a message would be taken for bytes of the file
                transport.abortConnection()
            else:
                if self._sending:
                    transport.write(END)
                changed = {"changed": True} if isinstance(error, SourceChanged) else {}
                self._say(error=str(error), **changed)
                transport.loseConnection()
        if not self.done.called:
            self.done.errback(Failure(error))

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
        source, self._source = self._source, None
        if source is not None:
            source.close()
        held, self._held = self._held, None
        if held is not None:
            held.release()
        at, self._at = self._at, None
        if at is not None:
            os.close(at)

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        self._close_file()
        if not self.done.called:
            if self._error is not None:
                self.done.errback(Failure(self._error))
            elif reason.check(ConnectionDone, ConnectionLost, ConnectionAborted, DmsgError):
                self.done.errback(Failure(CopyCut(lost_text(reason))))
            else:  # our own: the same would happen again
                self.done.errback(Failure(TransferError(f"{type(reason.value).__name__}: {reason.value}")))


class Put(Copier):
    """Sends a file; it must be a regular one."""

    def __init__(self, reactor: IReactorTime, source: Path, target: str, **options: Any) -> None:
        super().__init__(reactor, **options)
        self._local = source
        self._target = target

    def connectionMade(self) -> None:
        self._began = time.monotonic()
        self._begin(self._offer)

    def _offer(self) -> None:
        source = self._open_source(self._local, follow=True)
        self._say(op="put", path=self._target, size=source.size, **source.mode_and_time)
        self._next = self._offered

    def _offered(self, message: dict[str, Any]) -> None:
        assert self._source is not None
        offset = self._number(message, "offset", self._size)
        self._next = self._unexpected

        def hashed(digest: Any) -> None:
            same = digest.hexdigest() == message.get("sha256")
            if message.get("whole") is True:
                self._say(same=same)
                self._offset = self._done_bytes = self._size
                self._hash, self._next = digest, self._answered
                return
            goes_on = {"offset": offset if same else 0}
            if message.get("pieces") is True:
                self._pieces = PieceReader()
                goes_on["pieces"] = True
            self._say(**goes_on)
            self._send_from(offset if same else 0, digest if same else hashlib.sha256())

        self._hash_prefix(self._source.read, offset, hashed)


class Get(Copier):
    """Fetches a file to ``target``."""

    def __init__(self, reactor: IReactorTime, source: str, target: Path, **options: Any) -> None:
        super().__init__(reactor, **options)
        self._named_there = source
        self._target = target

    def connectionMade(self) -> None:
        self._began = time.monotonic()
        self._begin(self._ask)

    def _ask(self) -> None:
        here = self._hold(self._target).size

        def hashed(digest: Any) -> None:
            self._prefix, self._here = digest, here
            self._say(op="get", path=self._named_there, offset=here, sha256=digest.hexdigest(), pieces=True)
            self._next = self._granted

        self._hash_part(here, hashed)

    def _granted(self, message: dict[str, Any]) -> None:
        self._size = self._number(message, "size")
        self._remember(message)
        offset = self._number(message, "offset", min(self._size, self._here))
        if offset not in (0, self._here):
            raise TransferError("offset is malformed")
        if message.get("pieces") is True:
            self._pieces = PieceReader()
        self._receive_from(offset, self._prefix if offset else hashlib.sha256())
