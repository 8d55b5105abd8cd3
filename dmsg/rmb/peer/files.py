"""Transfer of files between peers. A local client requests it by ``file.upload``; peers exchange ``file.negotiate``,
``file.write`` and ``file.close``.

The receiver stores a file in its directory under the id of the upload. The id may have only letters, digits and
hyphens. The receiver never opens an existing file.

Each write has its offset in the tag ``offset=N``. So writes may be repeated and may arrive in any order. A write
without offset is appended. The upload is complete when every byte of the agreed size has arrived. If the sender has
named a command of the receiver's local services, this command is then called with the path of the file, and its answer
goes to the sender.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias
from uuid import uuid4

from twisted.internet.defer import Deferred, TimeoutError
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from dmsg.base.eviction import pick_loser, pick_replaced
from dmsg.base.units import human_size
from dmsg.directories import free_bytes, sync_directory
from dmsg.net.own_pauses import FairTimeout, add_fair_timeout, stop_timeout
from dmsg.renames import rename_to_new
from dmsg.rmb.envelope.wire import JSON
from dmsg.rmb.errors import RmbError
from dmsg.rmb.peer.local_json import MAX_COMMAND, LocalRequest, incoming_request, incoming_response, may_be_called
from dmsg.rmb.peer.store import REPLY, PeerStore
from dmsg.rmb.session.seal import ReceivedMessage

FILE = "file"
CHUNK = 512 * 1024
"""Number of bytes of the file in one write."""
MAX_SIZE = 4 * 1024 * 1024 * 1024
"""Maximum size of a file in bytes."""
MAX_UPLOADS = 16
"""Maximum number of files that this peer receives at the same time. Each twin may send a quarter of this number. At the
limit, the twin that sends most files loses its newest one to a twin that sends fewer."""
IDLE_TIMEOUT = 60.0
"""Seconds without a write after which an upload is cancelled and its file removed."""
NEGOTIATE_TIMEOUT = 30
"""Seconds that the receiver may take to accept or refuse a file."""
SEEN_WRITES = 64
"""Number of recent writes of an upload that are remembered to recognise repetitions. Only writes without an offset need
this, because repeating a write with an offset does no harm."""
MAX_SPANS = 1000
"""Maximum number of separate received parts of a file, with missing bytes between them."""
MAX_OUTCOMES = 1000
"""Maximum number of finished uploads whose outcome is remembered. A repeated ``file.close`` then gets the same
answer. Above it, the twin with most outcomes loses its oldest one to another twin."""
PART_SUFFIX = ".part"
IN_FLIGHT = 8
"""Maximum number of writes of one upload that no relay has confirmed yet."""
ERROR = 0

_NAME = re.compile(r"[A-Za-z0-9-]{1,64}")
_OFFSET = re.compile(r"(?:^|[,\s])offset=(\d{1,12})(?:$|[,\s])")
_log = Logger()

NEGOTIATED = "file.negotiate"
Answer = Callable[..., None]
"""Function that sends the answer to a request, with data or an error, and with tags."""


class _Incoming:
    """File that is being received. Its name is ``<id>.part`` until it is complete."""

    __slots__ = ("close", "command", "file", "part", "path", "seen", "size", "spans", "timeout", "written")

    def __init__(self, path: Path, size: int, command: str | None) -> None:
        if path.exists() or path.is_symlink():
            raise FileExistsError(17, "File exists")
        self.path = path
        self.part = path.with_name(f"{path.name}{PART_SUFFIX}")
        self.size = size
        self.command = command
        self.file = os.open(self.part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        # Half-open ranges of the received bytes, in order. Adjacent ranges are merged.
        self.spans: list[tuple[int, int]] = []
        self.written = 0
        self.seen: deque[bytes] = deque(maxlen=SEEN_WRITES)
        self.close: tuple[ReceivedMessage, Answer] | None = None
        self.timeout: FairTimeout | None = None

    def write(self, offset: int | None, data: bytes, signature: bytes) -> None:
        """Write data at ``offset``; with None, append them to the earlier writes without offset.

        :param signature: signature of the message, by which repetitions are recognised.
        :raises ValueError: the write is empty, exceeds the agreed size, or would make too many separate parts.
        """
        if signature in self.seen:
            return  # The sender has repeated this write.
        self.seen.append(signature)
        at = self.written if offset is None else offset
        end = at + len(data)
        if not data:
            raise ValueError("the write request contains no data")
        if end > self.size:
            raise ValueError(f"the write goes beyond the file's agreed size of {self.size} bytes")
        os.pwrite(self.file, data, at)
        self.written = max(self.written, end) if offset is None else self.written
        before = [span for span in self.spans if span[1] < at]
        behind = [span for span in self.spans if span[0] > end]
        touched = self.spans[len(before) : len(self.spans) - len(behind)]
        whole = (min([at, *(span[0] for span in touched)]), max([end, *(span[1] for span in touched)]))
        self.spans = [*before, whole, *behind]
        if len(self.spans) > MAX_SPANS:
            raise ValueError("the file has too many gaps: send its pieces in order")

    @property
    def received(self) -> int:
        """Number of bytes that have arrived."""
        return sum(end - start for start, end in self.spans)

    @property
    def complete(self) -> bool:
        """Whether every byte of the file has arrived."""
        return self.spans == ([(0, self.size)] if self.size else [])


def _has_bytes(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return bool(file.read(1))
    except OSError:
        return False  # The error is ignored here, because the peer reports it when it opens the file to send it.


Ask: TypeAlias = Callable[[str, LocalRequest, int, int, str], Coroutine[Deferred[object], object, None]]
"""Function that sends a request. Its arguments are the uid, the request, the timestamp, the lifetime in seconds, and
the name of the part of the peer that handles the answers."""


class FileUploads:
    """Both sides of uploads: sends files to other peers, and receives files from them.

    :param directory: directory for received files; None refuses uploads.
    :param ask: function that sends a request, see :data:`Ask`. Its last argument names the part of this peer that gets
        the answers.
    """

    def __init__(
        self, reactor: IReactorTime, directory: Path | None, ask: Ask, store: PeerStore, now: Callable[[], float]
    ) -> None:
        self._reactor = reactor
        self._directory = directory
        self._ask = ask
        self._store = store
        self._now = now
        self._incoming: dict[tuple[int, str], _Incoming] = {}
        self._waiting: dict[str, tuple[str, Deferred[tuple[bytes, tuple[int, str] | None]]]] = {}
        self._outcomes: OrderedDict[tuple[int, str], bytes | None] = OrderedDict()
        if directory is not None:
            # These are incomplete files of a peer process that was killed. No process will complete them.
            for left in directory.glob(f"*{PART_SUFFIX}"):
                left.unlink(missing_ok=True)

    def stop(self) -> None:
        """Cancel all uploads that are being received."""
        for key in list(self._incoming):
            self._give_up(key)

    # --- sending ---

    async def upload(self, uid: str, request: LocalRequest, left: int) -> None:
        """Run the command ``file.upload`` of a local client.

        Two messages go to the client's reply list: the id of the upload when it begins, and the outcome at the end.
        """
        error: str | None = None
        try:
            path, command, size = self._check_request(request)
        except ValueError as wrong:
            error = str(wrong)
        else:
            try:
                await self._send(str(uuid4()), request, path, command, size, left)
            except (OSError, ValueError, RmbError) as wrong:
                error = getattr(wrong, "strerror", None) or str(wrong)
        if error is not None:
            message = incoming_response(request.reference, b"", "", None, 0, (ERROR, error))
            await self._store.hand_over(request.reply_to, message, once=(uid, "file"))

    def _check_request(self, request: LocalRequest) -> tuple[Path, str | None, int]:
        if request.schema != JSON:
            raise ValueError("expected content schema to be application/json")
        if len(request.destinations) != 1:
            raise ValueError("can only upload to one destination")
        try:
            body = json.loads(request.data)
            path, command = body["path"], body.get("cmd")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError('data is not {"path": ..., "cmd": ...}') from None
        if not isinstance(path, str) or not (command is None or isinstance(command, str)):
            raise ValueError("path and cmd must be texts")
        try:
            status = os.stat(path)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path}: not a regular file")
        if status.st_size > MAX_SIZE:
            raise ValueError(f"{path}: this file has more than {MAX_SIZE} bytes")
        if not status.st_size and _has_bytes(path):
            # Files in /proc report size 0, so they would arrive empty.
            raise ValueError(f"{path}: the system does not report its size; send a copy of the file")
        return Path(path), command, status.st_size

    async def _send(
        self, upload: str, request: LocalRequest, path: Path, command: str | None, size: int, left: int
    ) -> None:
        negotiate = json.dumps({"size": size, "cmd": command}).encode()
        _, error = await self._exchange(upload, request, "negotiate", negotiate, NEGOTIATE_TIMEOUT)
        if error is not None:
            raise RmbError(error[1])
        started = incoming_response(
            request.reference, json.dumps(upload).encode(), str(request.destinations[0]), JSON, int(self._now())
        )
        await self._store.hand_over(request.reply_to, started, once=(upload, "started"))
        with path.open("rb") as file:
            under_way: list[Deferred[None]] = []
            for offset in range(0, size, CHUNK):
                data = file.read(min(CHUNK, size - offset))
                if len(data) < min(CHUNK, size - offset):
                    raise ValueError(f"{path}: the file became shorter while it was sent")
                write = replace(request, command="file.write", data=data, tags=f"offset={offset}", schema=None)
                now = int(self._now())
                under_way.append(Deferred.fromCoroutine(self._ask(upload, write, now, max(60, left), FILE)))
                if len(under_way) >= IN_FLIGHT:
                    await under_way.pop(0)
            for one in under_way:
                await one
        data, error = await self._exchange(upload, request, "close", b"", max(60, left))
        if error is not None:
            raise RmbError(error[1])
        ended = incoming_response(request.reference, data, str(request.destinations[0]), JSON, int(self._now()))
        await self._store.hand_over(request.reply_to, ended, once=(upload, "ended"))

    async def _exchange(
        self, upload: str, request: LocalRequest, command: str, data: bytes, timeout: int
    ) -> tuple[bytes, tuple[int, str] | None]:
        waiting: Deferred[tuple[bytes, tuple[int, str] | None]] = Deferred()
        self._waiting[upload] = (command, waiting)
        message = replace(request, command=f"file.{command}", data=data, tags=None, schema=JSON)
        asking = Deferred.fromCoroutine(self._ask(upload, message, int(self._now()), timeout, FILE))
        asking.addErrback(lambda failure: _log.failure("unhandled error while a file was uploaded", failure))
        try:
            return await add_fair_timeout(waiting, timeout, self._reactor)
        except TimeoutError:
            raise RmbError(f"the receiver did not answer file.{command} within {timeout} s") from None
        finally:
            self._waiting.pop(upload, None)

    def answered(self, uid: str, data: bytes, error: tuple[int, str] | None, tags: str) -> None:
        """Process an answer of the receiver of an upload that this peer sends.

        :param tags: tags of the answer. A receiver of this package marks its answer to ``file.negotiate`` with tags, so
            that a repetition of this answer is not mistaken for the answer to ``file.close``.
        """
        step, waiting = self._waiting.get(uid, ("", None))
        if waiting is None or waiting.called:
            return  # Errors of single writes are ignored here, because the answer to ``file.close`` repeats them.
        if step == "close" and tags == NEGOTIATED:
            return
        waiting.callback((data, error))

    # --- receiving ---

    async def requested(self, received: ReceivedMessage, command: str, answer: Answer) -> None:
        """Process a ``file.negotiate``, ``file.write`` or ``file.close`` request of another peer."""
        key = (received.source.twin, received.envelope.uid)
        try:
            if command == "negotiate":
                self._negotiate(key, received.payload, answer)
            elif command == "write":
                self._write(key, received)
            elif command == "close":
                await self._close(key, received, answer)
            else:
                answer(b"", (ERROR, f"unknown command 'file.{command[:80]}'"))
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            self._give_up(key, why)
            answer(b"", (ERROR, why))

    def _negotiate(self, key: tuple[int, str], body: bytes, answer: Answer) -> None:
        if self._directory is None:
            answer(b"", (ERROR, "upload is not enabled"))
            return
        if key in self._incoming:
            answer(b"", None, tags=NEGOTIATED)  # The request was repeated, so it gets the same answer again.
            return
        if not _NAME.fullmatch(key[1]):
            answer(b"", (ERROR, "the id of an upload has letters, digits and hyphens only"))
            return
        counts = Counter(twin for twin, _ in self._incoming)
        loser = pick_loser(counts, key[0])
        is_full = len(self._incoming) >= MAX_UPLOADS
        if counts[key[0]] >= MAX_UPLOADS // 4 or (is_full and loser is None):
            answer(b"", (ERROR, "too many uploads at once"))
            return
        try:
            content = json.loads(body)
            size, command = content["size"], content.get("cmd")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError('data is not {"size": ..., "cmd": ...}') from None
        if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= MAX_SIZE:
            raise ValueError(f"size must be a number from 0 to {MAX_SIZE}")
        if command is not None and not (isinstance(command, str) and may_be_called(command)):
            raise ValueError(f"cmd must have 1 to {MAX_COMMAND} characters and no reserved prefix")
        free = free_bytes(self._directory)
        if free is not None:
            # Space that the present uploads still need does not count as free.
            free = max(0, free - sum(one.size - one.received for one in self._incoming.values()))
            if size > free // 2:
                raise ValueError(
                    f"not enough space: the file has {human_size(size)}, and a file may use at most half of the free "
                    f"{human_size(free)}"
                )
        incoming = _Incoming(self._directory / key[1], size, command)
        if is_full:
            newest = next(one for one in reversed(self._incoming) if one[0] == loser)
            self._give_up(newest, "too many uploads at once, and another twin has fewer")
        self._incoming[key] = incoming
        self._touch(key)
        answer(b"", None, tags=NEGOTIATED)

    def _touch(self, key: tuple[int, str]) -> None:
        incoming = self._incoming[key]
        if incoming.timeout is not None and incoming.timeout.active():
            incoming.timeout.restart()
        else:
            incoming.timeout = FairTimeout(self._reactor, IDLE_TIMEOUT, partial(self._give_up, key))

    def _give_up(self, key: tuple[int, str], reason: str = "bytes of the file are missing") -> None:
        incoming = self._incoming.pop(key, None)
        if incoming is None:
            return
        self._release(incoming)
        with contextlib.suppress(OSError):
            incoming.part.unlink(missing_ok=True)
        close, incoming.close = incoming.close, None
        if close is not None:
            close[1](b"", (ERROR, reason))

    def _release(self, incoming: _Incoming) -> None:
        stop_timeout(incoming.timeout)
        # The error is ignored, because fsync has already reported any error of the writes.
        with contextlib.suppress(OSError):
            os.close(incoming.file)

    def _write(self, key: tuple[int, str], received: ReceivedMessage) -> None:
        incoming = self._incoming.get(key)
        if incoming is None:
            return  # The error is reported by the answer to ``file.close``.
        self._touch(key)
        match = _OFFSET.search(received.envelope.tags)
        incoming.write(int(match[1]) if match else None, received.payload, received.envelope.signature)
        if incoming.close is not None and incoming.complete:
            self._finish(key, incoming, incoming.close)

    async def _close(self, key: tuple[int, str], received: ReceivedMessage, answer: Answer) -> None:
        incoming = self._incoming.get(key)
        if incoming is None:
            if key not in self._outcomes:
                answer(b"", (ERROR, "there is no such upload"))
            elif (outcome := self._outcomes[key]) is not None:
                # The sender has repeated ``file.close``.  If the upload is answered by a service, its outcome is None.
                answer(outcome, None)
            return
        if incoming.complete:
            self._finish(key, incoming, (received, answer))
        else:
            # The answer has to wait, because missing writes may still arrive over another relay.
            incoming.close = (received, answer)
            self._touch(key)

    def _finish(self, key: tuple[int, str], incoming: _Incoming, close: tuple[ReceivedMessage, Answer]) -> None:
        received, answer = close
        # An exception of these calls cancels the upload, as any other error does.
        os.fsync(incoming.file)
        rename_to_new(incoming.part, incoming.path)
        try:
            # The directory is synced before the sender gets its answer. Otherwise a power failure could undo the rename
            # of a file that the sender considers stored.
            sync_directory(incoming.path.parent)
        except OSError:
            incoming.path.unlink(missing_ok=True)
            raise
        del self._incoming[key]
        self._release(incoming)
        outcome = None if incoming.command is not None else json.dumps(str(incoming.path)).encode()
        if len(self._outcomes) >= MAX_OUTCOMES and key not in self._outcomes:
            # Otherwise a twin with many small uploads would make the peer forget those of all others.
            loser = pick_replaced(Counter(twin for twin, _ in self._outcomes), key[0])
            del self._outcomes[next(one for one in self._outcomes if loser in (None, one[0]))]
        self._outcomes[key] = outcome
        if outcome is not None:
            answer(outcome, None)
            return
        assert incoming.command is not None
        envelope = received.envelope
        message = incoming_request(
            envelope.uid,
            received.source,
            incoming.command,
            envelope.expiration,
            json.dumps({"path": str(incoming.path)}).encode(),
            None,
            REPLY,
            JSON,
            envelope.timestamp,
        )
        calling = Deferred.fromCoroutine(
            self._store.hand_over(f"msgbus.{incoming.command}", message, once=(envelope.uid, str(key[0]), "file"))
        )
        calling.addErrback(lambda failure: answer(b"", (ERROR, "the command cannot be called")))
