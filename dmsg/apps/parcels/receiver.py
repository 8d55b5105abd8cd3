"""The side that is offered a parcel, may take it, and puts it in its place."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import Protocol
from twisted.internet.task import CooperativeTask, cooperate
from twisted.python.failure import Failure

from dmsg.apps.parcels.manifest import DIRECTORY, FILE, Checked, Item, decode_item
from dmsg.apps.parcels.place import Place
from dmsg.apps.parcels.wire import (
    DIGEST_SIZE,
    TEXT_LIMIT,
    THINGS_LIMIT,
    Messages,
    encode,
    numbers,
)
from dmsg.apps.transfer import TransferError, lost_text


@dataclass(frozen=True)
class Offer:
    """What somebody offers; nothing of it has been looked at by anybody.

    :ivar kind: ``files``, ``text`` or ``pipe``.
    :ivar things: of files: names and kinds, bytes and number of files of each.
    :ivar size: bytes in all; of a pipe nobody knows.
    :ivar files: how many.
    :ivar text: the text; the name of a pipe.
    """

    kind: str
    things: list[tuple[str, str, int, int]] = field(default_factory=list)
    size: int = 0
    files: int = 0
    text: str = ""


@dataclass(frozen=True)
class Taken:
    """What has come.

    :ivar size: bytes that came, which is less than there are where some were here already.
    :ivar paths: of files: what is there now.
    :ivar seconds: from when it was taken.
    """

    offer: Offer
    size: int
    paths: list[Path]
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.size / self.seconds if self.seconds else 0.0


Asked = Callable[[Offer], "Deferred[str | None] | str | None"]
"""Told of an offer: None, it is taken; else why it is not."""


class ParcelReceiver(Protocol):
    """``done`` fires with :class:`Taken` or fails with :class:`~dmsg.apps.transfer.TransferError`; ``closed`` fires
    when the connection is gone: what was said last has left then.

    :param asked: see :data:`Asked`.
    :param progress: told how many bytes of all are here.
    :param pipe: where the bytes of a pipe go.
    """

    def __init__(
        self,
        place: Place,
        asked: Asked,
        *,
        progress: Callable[[int], object] = lambda done: None,
        pipe: Callable[[bytes], object] | None = None,
    ) -> None:
        self._place = place
        self._asked = asked
        self._progress = progress
        self._pipe = pipe
        self._messages = Messages()
        self._step: Callable[[], bool] = self._take_offer
        self._waits = self._given_up = False
        self._offer = Offer("text")
        self._began = time.monotonic()
        self._size = self._there = 0
        self._hash: Any = hashlib.sha256()
        self._checked = Checked()
        self._have: dict[int, tuple[int, Any]] = {}
        self._from: dict[int, int] = {}
        self._files: Iterator[tuple[int, Item]] = iter(())
        self._entry = Item("", FILE)
        self._file: IO[bytes] | None = None
        self._left = 0
        self._task: CooperativeTask[Iterator[None]] | None = None
        self.done: Deferred[Taken] = Deferred(lambda _: self._give_up())
        self.closed: Deferred[None] = Deferred()

    def dataReceived(self, data: bytes) -> None:
        if self.done.called:
            return
        self._messages.feed(data)
        self._go_on()

    def _go_on(self) -> None:
        try:
            while not self._waits and not self.done.called and self._step():
                pass
        except TransferError as error:
            self._fail(error)
        except OSError as error:
            self._fail(_named(error))

    def _wait(self, waiting: Deferred[Any], then: Callable[[Any], None]) -> None:
        """Read no more until something is known here."""
        transport: Any = self.transport
        self._waits = True
        transport.pauseProducing()

        def known(result: Any) -> None:
            self._waits = False
            if self.done.called:
                return
            if isinstance(result, Failure):
                error = result.value
                if isinstance(error, OSError):
                    error = _named(error)
                self._fail(error if isinstance(error, TransferError) else TransferError(str(error)))
                return
            try:
                then(result)
            except OSError as error:
                self._fail(_named(error))
                return
            except TransferError as error:
                self._fail(error)
                return
            if not self.done.called:
                transport.resumeProducing()
                self._go_on()

        waiting.addBoth(known)

    # --- what is offered ---

    def _take_offer(self) -> bool:
        message = self._messages.take()
        if message is None:
            return False
        self._offer = _offer_of(message)
        if self._offer.kind == "files":
            self._place.check([(name, kind) for name, kind, _, _ in self._offer.things])

        def answered(why: str | None) -> None:
            if why is not None:
                self._say(take=False, why=why)
                self._end(TransferError(why))
                return
            self._began = time.monotonic()
            if self._offer.kind == "text":
                self._say(ok=True)
                self._finished([])
                return
            free = self._place.free() if self._offer.kind == "files" else self._offer.size
            if self._offer.size > free:
                raise TransferError("there is not enough room on the disk")
            self._say(take=True)
            self._step = self._take_piece if self._offer.kind == "pipe" else self._take_entries

        self._wait(maybeDeferred(self._asked, self._offer), answered)
        return True

    # --- a pipe ---

    def _take_piece(self) -> bool:
        data = self._messages.piece()
        if data is None:
            return False
        if not data:
            self._step = self._take_end
            return True
        self._hash.update(data)
        self._size += len(data)
        assert self._pipe is not None
        self._pipe(data)
        self._progress(self._size)
        return True

    def _take_end(self) -> bool:
        digest = self._messages.exactly(DIGEST_SIZE)
        if digest is None:
            return False
        if digest != self._hash.digest():
            raise TransferError("SHA-256 is not that of the sender")
        self._say(ok=True)
        self._finished([])
        return False

    # --- files ---

    def _take_entries(self) -> bool:
        message = self._messages.take()
        if message is None:
            return False
        if message.get("whole") is True:
            self._look_at_place()
            return True
        entries = message.get("entries")
        if not isinstance(entries, list):
            raise TransferError("the other side does not speak dmsg's parcels")
        for one in entries:
            self._checked.add(decode_item(one))
        return True

    def _look_at_place(self) -> None:
        """What a person has taken is what comes; and how much of it is here."""
        promised = {name: (kind, size, files) for name, kind, size, files in self._offer.things}
        found: dict[str, tuple[str, int, int]] = {}
        for entry in self._checked.entries:
            name = entry.path.partition("/")[0]
            kind, size, files = found.get(name, (entry.kind, 0, 0))
            found[name] = kind, size + entry.size, files + (entry.kind != DIRECTORY)
        if found != promised:
            raise TransferError("what comes is not what was offered")
        task = self._task = cooperate(self._look())
        self._wait(task.whenDone(), lambda _: self._say_what_is_here())

    def _look(self) -> Iterator[None]:
        for index, entry in enumerate(self._checked.entries):
            size = self._place.clear(entry)
            if size:
                digest = hashlib.sha256()
                for data in self._place.read(entry, size):
                    digest.update(data)
                    yield None
                self._have[index] = size, digest
            elif not index % 100:
                yield None

    def _say_what_is_here(self) -> None:
        some: list[list[Any]] = []
        for index, (size, digest) in self._have.items():
            some.append([index, size, digest.hexdigest()])
            if len(some) >= 1000:
                self._say(have=some)
                some = []
        if some:
            self._say(have=some)
        self._say(whole=True)
        self._step = self._take_offsets

    def _take_offsets(self) -> bool:
        message = self._messages.take()
        if message is None:
            return False
        if message.get("whole") is True:
            self._there = sum(self._from.values())
            self._files = iter([one for one in enumerate(self._checked.entries) if one[1].kind == FILE])
            self._step = self._next_file
            return True
        for index, offset in numbers(message, "from", 2):
            if index not in self._have or offset != self._have[index][0]:
                raise TransferError("the other side does not speak dmsg's parcels")
            self._from[index] = offset
        return True

    def _next_file(self) -> bool:
        following = next(self._files, None)
        if following is None:
            paths = self._place.finish(self._checked.entries)
            self._say(ok=True)
            self._finished(paths)
            return False
        index, self._entry = following
        offset = self._from.get(index, 0)
        self._hash = self._have[index][1] if offset else hashlib.sha256()
        self._file = self._place.write_from(self._entry, offset)
        self._left = self._entry.size - offset
        self._step = self._take_bytes
        return True

    def _take_bytes(self) -> bool:
        assert self._file is not None
        if self._left:
            data = self._messages.some(self._left)
            if not data:
                return False
            # without a buffer a full disk may take a part of it
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]
            self._hash.update(data)
            self._left -= len(data)
            self._size += len(data)
            self._progress(self._there + self._size)
            return True
        digest = self._messages.exactly(DIGEST_SIZE)
        if digest is None:
            return False
        if digest != self._hash.digest():
            # nothing to go on with
            self._file.truncate(0)
            raise TransferError(f"SHA-256 of {self._entry.path} is not that of the sender")
        file, self._file = self._file, None
        self._place.finish_file(self._entry, file)
        self._step = self._next_file
        return True

    # --- the end ---

    def _say(self, **message: Any) -> None:
        self.transport.write(encode(**message))  # type: ignore[union-attr]

    def _finished(self, paths: list[Path]) -> None:
        seconds = time.monotonic() - self._began
        if not self.done.called:
            self.done.callback(Taken(self._offer, self._size, paths, seconds))

    def _fail(self, error: TransferError) -> None:
        self._say(error=str(error))
        self._end(error)

    def _end(self, error: TransferError) -> None:
        self._stop()
        transport: Any = self.transport
        transport.resumeProducing()  # and throw away: who writes and is not read may not read either
        transport.loseConnection()
        if not self.done.called:
            self.done.errback(Failure(error))

    def _give_up(self) -> None:
        self._given_up = True
        self._stop()
        if self.transport is not None:
            self.transport.abortConnection()  # type: ignore[attr-defined]

    def _stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.whenDone().addErrback(lambda _: None)
            try:
                task.stop()
            except Exception:  # noqa: S110  # it is done already
                pass
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        self._stop()
        if not self.done.called and not self._given_up:
            self.done.errback(Failure(TransferError(lost_text(reason))))
        if not self.closed.called:
            self.closed.callback(None)


def _offer_of(message: dict[str, Any]) -> Offer:
    """:raises TransferError: it is none."""
    kind = message.get("offer")
    if kind == "text" and isinstance(text := message.get("text"), str) and len(text) <= TEXT_LIMIT:
        return Offer("text", text=text, size=len(text.encode("utf-8", "replace")))
    if kind == "pipe" and isinstance(name := message.get("name"), str) and 0 < len(name) <= 255:
        return Offer("pipe", text=name)
    things, size, files = message.get("things"), message.get("size"), message.get("files")
    if kind == "files" and isinstance(things, list) and 0 < len(things) <= THINGS_LIMIT:
        found = [_thing(one) for one in things]
        if len({name for name, *_ in found}) == len(found):
            total, number = sum(one[2] for one in found), sum(one[3] for one in found)
            if (size, files) == (total, number):
                return Offer("files", found, total, number)
    raise TransferError("what is offered is malformed")


def _thing(value: Any) -> tuple[str, str, int, int]:
    thing = value if isinstance(value, dict) else {}
    name, kind, size, files = (thing.get(one) for one in ("name", "kind", "size", "files"))
    if not isinstance(name, str) or kind not in (FILE, DIRECTORY) or type(size) is not int or type(files) is not int:
        raise TransferError("what is offered is malformed")
    if not 0 <= size < 2**62 or not 0 <= files < 2**31:
        raise TransferError("what is offered is malformed")
    return name, str(kind), size, files


def _named(error: OSError) -> TransferError:
    name = Path(error.filename).name if isinstance(error.filename, str) else ""
    return TransferError(f"{name}: {error.strerror}" if name else str(error.strerror))
