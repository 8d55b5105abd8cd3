"""Sending side of a parcel: offers the parcel, and sends it if the other side accepts."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict, Unpack

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IPushProducer
from twisted.internet.task import TaskFinished
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.apps.chunks import CHUNK_LIMIT, END, encode_chunk, encode_end
from dmsg.apps.parcels.manifest import FILE
from dmsg.apps.parcels.walk import OfferedFiles, WalkResult
from dmsg.apps.parcels.wire import (
    CHANGED_LIMIT,
    GAVE_UP,
    MESSAGE_FULL,
    ParcelEnd,
    lost_error,
    parse_numbers,
    text_offer,
)
from dmsg.apps.sources import SourceChanged, resized_error
from dmsg.apps.transfer import Measured, TransferError, TransferRefused
from dmsg.base.printable import MAX_PEER_TEXT, shorten
from dmsg.net.background import work as do_work
from dmsg.net.streams.transports import transport_of

if TYPE_CHECKING:
    from _hashlib import HASH


CHUNK = 256 * 1024


@dataclass(frozen=True)
class SentParcel(Measured):
    """Result of a sent parcel.

    :ivar size: number of bytes transferred, without those that the other side had already.
    :ivar seconds: duration from acceptance to the final answer.
    :ivar changed: names of files that somebody changed at the sender while they were sent; at most ``CHANGED_LIMIT``.
    :ivar sha256: hash in hexadecimal if the parcel is one file, else empty.
    """

    size: int
    files: int
    seconds: float
    changed: tuple[str, ...] = ()
    sha256: str = ""


@implementer(IPushProducer)
class _FlowControl:
    """Producer that pauses a task of this program while the stream's send buffer is full."""

    def __init__(self, work: Iterator[object]) -> None:
        self.task = do_work(work)
        self._paused = False

    def pauseProducing(self) -> None:
        if not self._paused:
            self._paused = True
            self.task.pause()

    def resumeProducing(self) -> None:
        if self._paused:
            self._paused = False
            self.task.resume()

    def stopProducing(self) -> None:
        if not self._paused:
            self._paused = True
            self.task.pause()


class SenderOptions(TypedDict, total=False):
    """Optional arguments of :class:`ParcelSender` and of its subclasses."""

    on_accepted: Callable[[], object]
    progress: Callable[[int], object]
    refusal: str


class ParcelSender(ParcelEnd):
    """Base class of all senders of parcels.

    :param on_accepted: callback invoked when the other side has accepted.
    :param progress: callback invoked with the number of bytes sent so far, plus those that the other side had already.
    :param refusal: text to put before the reason that the other side gives when it ends the transfer.
    :ivar done: Deferred that fires with :class:`SentParcel`.
    """

    _resumes = False
    """Whether the receiver stores what it received before an interruption, so that a repeated transfer resumes
    there.
    """

    def __init__(
        self,
        *,
        on_accepted: Callable[[], object] = lambda: None,
        progress: Callable[[int], object] = lambda done: None,
        refusal: str = GAVE_UP,
    ) -> None:
        super().__init__(refusal)
        self._on_accepted = on_accepted
        self._progress = progress
        self._next: Callable[[dict[str, object]], None] = self._on_answer
        self._flow: _FlowControl | None = None
        self._began = time.monotonic()
        self._size = self._files = 0
        self._said_all = self._in_bytes = self._pieces = False
        self._changed: list[str] = []
        self._sha256 = ""
        self._error: TransferError | None = None
        self.done: Deferred[SentParcel] = Deferred(lambda _: self._give_up())

    def connectionMade(self) -> None:
        self._say(**self._offer())

    def _offer(self) -> dict[str, object]:
        raise NotImplementedError

    def _begin(self) -> None:
        """Start sending the content, because the receiver has accepted."""
        raise NotImplementedError

    def dataReceived(self, data: bytes) -> None:
        if self.done.called:
            return
        self._messages.feed(data)
        try:
            while not self.done.called and (message := self._messages.take()) is not None:
                self._next(message)
        except TransferError as error:
            self._fail(error)

    def _on_answer(self, message: dict[str, object]) -> None:
        if message.get("take") is not True:
            raise TransferRefused(
                f"the other side refused: {shorten(str(message.get('why', 'no reason')), MAX_PEER_TEXT)}"
            )
        self._began = time.monotonic()
        self._pieces = message.get("pieces") is True
        self._next = self._report_unexpected
        self._on_accepted()
        self._begin()

    def _report_unexpected(self, message: dict[str, object]) -> None:
        raise TransferError("the other side does not use dmsg's protocol for sending files")

    def _on_arrival(self, message: dict[str, object]) -> None:
        if message.get("ok") is not True or not self._said_all:
            self._report_unexpected(message)
        self.transport.loseConnection()  # type: ignore[union-attr]
        if not self.done.called:
            seconds = time.monotonic() - self._began
            self.done.callback(SentParcel(self._size, self._files, seconds, tuple(self._changed), self._sha256))

    def _send_all(self, work: Iterator[object]) -> None:
        """Run, in steps, an iterator that writes to the stream.  Pause it while the stream's send buffer is full."""
        flow = self._flow = _FlowControl(work)
        transport = transport_of(self)
        transport.registerProducer(flow, True)

        def over(result: object) -> None:
            stopped = self._flow is not flow
            if not stopped:
                self._flow = None
                transport.unregisterProducer()
            if isinstance(result, Failure) and not stopped:
                self._sending_failed(result)

        flow.task.whenDone().addBoth(over)

    def _sending_failed(self, failure: Failure) -> None:
        error = failure.value
        if isinstance(error, OSError):
            error = TransferError(f"{error.filename or 'the parcel'}: {error.strerror}")
        if isinstance(error, TransferError):
            self._fail(error)
        elif not self.done.called:
            self.done.errback(failure)
            self.transport.abortConnection()  # type: ignore[union-attr]

    def _fail(self, error: TransferError) -> None:
        # The error is stored first, because ``abortConnection`` calls ``connectionLost``, which reads it.
        self._error = error
        self._stop()
        transport = transport_of(self)
        # Without chunks, the other side would take an error message for content of the file.
        if self._in_bytes and not self._pieces:
            transport.abortConnection()
        else:
            if self._in_bytes:
                transport.write(END)
            changed = {"changed": True} if isinstance(error, SourceChanged) else {}
            self._say(error=str(error), **changed)
            transport.loseConnection()
        if not self.done.called:
            self.done.errback(Failure(error))

    def _stop(self) -> None:
        flow, self._flow = self._flow, None
        if flow is not None:
            self.transport.unregisterProducer()  # type: ignore[union-attr]
            with suppress(TaskFinished):
                flow.task.stop()  # Stopping the task also closes its file.

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        self._stop()
        if not self.done.called and not self._given_up:
            error = self._error or lost_error(reason, self._size if self._resumes else 0)
            self.done.errback(Failure(error))


class TextSender(ParcelSender):
    """Sender of a parcel that is a text.

    :raises TransferError: the text is too long.
    """

    def __init__(self, text: str, **options: Unpack[SenderOptions]) -> None:
        self._text_offer = text_offer(text)
        super().__init__(**options)
        self._size = len(text.encode("utf-8", "replace"))

    def _offer(self) -> dict[str, object]:
        self._next = self._on_arrival
        self._said_all = True
        return self._text_offer

    def _on_arrival(self, message: dict[str, object]) -> None:
        if message.get("take") is False:
            self._on_answer(message)
        super()._on_arrival(message)


class PipeSender(ParcelSender):
    """Sender of a pipe, whose size is unknown.

    :param source: function that starts reading the pipe.  It gets this sender, and calls its methods
        ``registerProducer``, ``write`` and ``end``.
    """

    def __init__(self, name: str, source: Callable[[PipeSender], object], **options: Unpack[SenderOptions]) -> None:
        super().__init__(**options)
        self._name = name
        self._source = source
        self._hash = hashlib.sha256()

    def _offer(self) -> dict[str, object]:
        return {"offer": "pipe", "name": self._name}

    def _begin(self) -> None:
        self._next = self._on_arrival
        self._files = 1
        self._in_bytes = True
        self._source(self)

    def write(self, data: bytes) -> None:
        """Send bytes that were read from the pipe."""
        for at in range(0, len(data), CHUNK_LIMIT):
            some = data[at : at + CHUNK_LIMIT]
            self._hash.update(some)
            self._size += len(some)
            self.transport.write(encode_chunk(some))  # type: ignore[union-attr]
        self._progress(self._size)

    def end(self) -> None:
        """Send the end of the pipe and its hash."""
        if not self.done.called:
            self._said_all = True
            self.transport.write(END + self._hash.digest())  # type: ignore[union-attr]


class FilesSender(ParcelSender):
    """Sender of files and directories."""

    _resumes = True

    def __init__(self, walked: WalkResult, **options: Unpack[SenderOptions]) -> None:
        super().__init__(**options)
        self._entries = walked.checked.entries
        self._tops = walked.checked.tops
        self._offered = OfferedFiles(walked)
        self._total = walked.checked.size
        self._files_offer = walked.offer
        self._files = walked.checked.files
        self._have: dict[int, tuple[int, str]] = {}

    def _offer(self) -> dict[str, object]:
        return self._files_offer

    def _begin(self) -> None:
        self._send_all(self._list())

    def _list(self) -> Iterator[None]:
        some: list[list[object]] = []
        size = 0
        for entry in self._entries:
            some.append(entry.to_list())
            # In JSON, each UTF-16 code unit of an escaped character takes 6 bytes; each has 2 bytes here.
            size += 3 * len((entry.path + entry.target).encode("utf-16-le", "surrogatepass")) + 80
            if size >= MESSAGE_FULL:
                self._say(entries=some)
                some, size = [], 0
                yield None
        if some:
            self._say(entries=some)
        # The other side needs the whole list in order to find out which parts of the files it has.
        self._next = self._on_offsets
        self._say(whole=True)

    def _on_offsets(self, message: dict[str, object]) -> None:
        if message.get("whole") is True:
            if self._flow is not None:
                self._report_unexpected(message)
            self._next = self._on_arrival
            self._send_all(self._send_rest())
            return
        for index, size, digest in parse_numbers(message, "have", 3):
            known = index < len(self._entries) and self._entries[index].kind == FILE
            if not known or size > self._entries[index].size or not _is_digest(digest):
                self._report_unexpected(message)
            self._have[index] = size, digest

    def _send_rest(self) -> Iterator[None]:
        """Compare the parts that the other side has, send the offsets at which files resume, and then the rest of each
        file.
        """
        digests: dict[int, HASH] = {}
        some: list[list[int]] = []
        for index, (size, digest) in sorted(self._have.items()):
            hashed = hashlib.sha256()
            with self._offered.open(index) as file:
                left = size
                while left and (data := file.read(min(CHUNK, left))):
                    left -= len(data)
                    hashed.update(data)
                    yield None
            if not left and hashed.hexdigest() == digest:
                digests[index] = hashed
                some.append([index, size])
            if len(some) >= 1000:
                self._say(**{"from": some})
                some = []
        if some:
            self._say(**{"from": some})
        self._say(whole=True, **({"pieces": True} if self._pieces else {}))
        self._in_bytes = True
        yield from self._all_contents(digests)

    def _all_contents(self, digests: dict[int, HASH]) -> Iterator[None]:
        """Send the content that the other side lacks.

        :param digests: hash of the part that the other side has, by index of the entry.
        """
        there = sum(self._have[index][0] for index in digests)
        self._progress(there)
        for index, entry in enumerate(self._entries):
            if entry.kind == FILE:
                offset = self._have[index][0] if index in digests else 0
                yield from self._contents(index, offset, digests.get(index), there)
        self._said_all = True

    def _contents(self, index: int, offset: int, digest: HASH | None, present: int) -> Iterator[None]:
        entry = self._entries[index]
        digest = digest or hashlib.sha256()
        left = entry.size - offset
        with self._offered.open(index) as file:
            file.seek(offset)
            while left:
                data = file.read(min(CHUNK, left))
                if not data:
                    raise resized_error(entry.path, entry.size - left, entry.size)
                left -= len(data)
                digest.update(data)
                self._size += len(data)
                self.transport.write(encode_chunk(data) if self._pieces else data)  # type: ignore[union-attr]
                self._progress(present + self._size)
                yield None
            changed = self._offered.has_changed(index, file)
        if changed and len(self._changed) < CHANGED_LIMIT:
            self._changed.append(entry.path)
        if len(self._entries) == 1:
            self._sha256 = digest.hexdigest()
        self.transport.write(encode_end(digest.digest(), changed=changed) if self._pieces else digest.digest())  # type: ignore[union-attr]
        yield None  # Even an empty file takes a step. Otherwise a parcel with many empty files would block the reactor.

    def _stop(self) -> None:
        super()._stop()
        self._offered.close()


class OldFileSender(FilesSender):
    """Sender of one file to a program of dmsg 0.1.  Name, size and content are sent without waiting for an answer."""

    _resumes = False

    def _offer(self) -> dict[str, object]:
        return {"name": self._tops[0]["name"], "size": self._total}

    def connectionMade(self) -> None:
        super().connectionMade()
        self._next = self._on_arrival
        self._in_bytes = True
        self._on_accepted()
        self._send_all(self._all_contents({}))


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and value.isascii()
