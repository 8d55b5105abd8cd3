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

from dmsg.apps.parcels.manifest import DIRECTORY, ENTRIES_LIMIT, FILE, Checked, Item, decode_item, tops
from dmsg.apps.parcels.place import Place
from dmsg.apps.parcels.wire import (
    DIGEST_SIZE,
    TEXT_LIMIT,
    THINGS_LIMIT,
    Messages,
    encode,
    lost,
    numbers,
)
from dmsg.apps.parts import PART_SUFFIX
from dmsg.apps.transfer import TransferError

HELD_LIMIT = 1024 * 1024
"""Bytes that are kept of what comes while this side is busy with something else, and reads no more."""


@dataclass(frozen=True)
class Offer:
    """What somebody offers; nothing of it has been looked at by anybody.

    :ivar kind: ``files``, ``text`` or ``pipe``.
    :ivar things: of files: names and kinds, bytes, files and directories of each.
    :ivar size: bytes in all; of a pipe nobody knows.
    :ivar files: how many.
    :ivar text: the text; the name of a pipe.
    """

    kind: str
    things: list[tuple[str, str, int, int, int]] = field(default_factory=list)
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
    :param most: bytes that are taken of a pipe; of files who is asked knows how many they are.
    """

    def __init__(
        self,
        place: Place,
        asked: Asked,
        *,
        progress: Callable[[int], object] = lambda done: None,
        pipe: Callable[[bytes], object] | None = None,
        most: int | None = None,
    ) -> None:
        self._place = place
        self._asked = asked
        self._progress = progress
        self._pipe = pipe
        self._most = most
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
        self._item = Item("", FILE)
        self._file: IO[bytes] | None = None
        self._left = 0
        self._task: CooperativeTask[Iterator[None]] | None = None
        self.done: Deferred[Taken] = Deferred(lambda _: self._give_up())
        self.closed: Deferred[None] = Deferred()

    def dataReceived(self, data: bytes) -> None:
        if self.done.called:
            return
        self._messages.feed(data)
        if self._waits and self._messages.held > HELD_LIMIT:
            self._fail(TransferError("the other side sends what was not asked for"))
            return
        self._go_on()

    def _go_on(self) -> None:
        try:
            while not self._waits and not self.done.called and self._step():
                pass
        except TransferError as error:
            self._fail(error)
        except OSError as error:
            self._fail(self._named(error))

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
                    error = self._named(error)
                self._fail(error if isinstance(error, TransferError) else TransferError(str(error)))
                return
            try:
                then(result)
            except OSError as error:
                self._fail(self._named(error))
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
            self._place.check([(name, kind) for name, kind, *_ in self._offer.things])

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
            if self._offer.kind == "files":
                # of what has begun to come it is not known yet how much is missing
                if not self._place.has_begun([name for name, *_ in self._offer.things]):
                    self._check_room(0)
                self._place.hold([(name, kind) for name, kind, *_ in self._offer.things])
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
        if self._most is not None and self._size > self._most:
            raise TransferError(f"more than {self._most} bytes, which is the limit")
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
        if not isinstance(entries, list) or not entries:
            raise TransferError("the other side does not speak dmsg's parcels")
        for one in entries:
            self._checked.add(decode_item(one))
        return True

    def _look_at_place(self) -> None:
        """What a person has taken is what comes; and how much of it is here."""
        if [_thing(top) for top in tops(self._checked.entries)] != self._offer.things:
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

    def _check_room(self, here: int) -> None:
        """:raises TransferError: what is missing has no room.  :param here: bytes of all that need no more."""
        if self._offer.size - here > self._place.free():
            raise TransferError("there is not enough room on the disk")

    def _say_what_is_here(self) -> None:
        self._check_room(sum(size for size, _ in self._have.values()))
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
            task = self._task = cooperate(self._place.finish(self._checked.entries))

            def in_place(_: Any) -> None:
                self._say(ok=True)
                self._finished([self._place.path_of(name) for name, *_ in self._offer.things])

            self._wait(task.whenDone(), in_place)
            return True
        index, self._item = following
        offset = self._from.get(index, 0)
        self._hash = self._have[index][1] if offset else hashlib.sha256()
        self._file = self._place.write_from(self._item, offset)
        self._left = self._item.size - offset
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
            raise TransferError(f"SHA-256 of {self._item.path} is not that of the sender")
        file, self._file = self._file, None
        self._place.finish_file(self._item, file)
        self._step = self._next_file
        return True

    # --- the end ---

    def _named(self, error: OSError) -> TransferError:
        """The error of a file, by the name that a person knows."""
        name = Path(error.filename).name if isinstance(error.filename, str) else ""
        if not name or name.endswith(PART_SUFFIX):
            name = self._item.path or self._offer.things[0][0] if self._offer.things else ""
        return TransferError(f"{name}: {error.strerror}" if name else str(error.strerror))

    def _say(self, **message: Any) -> None:
        self.transport.write(encode(**message))  # type: ignore[union-attr]

    def _finished(self, paths: list[Path]) -> None:
        seconds = time.monotonic() - self._began
        self._place.release()
        if not self.done.called:
            self.done.callback(Taken(self._offer, self._size, paths, seconds))

    def refuse(self, why: str) -> None:
        """Something here keeps it from arriving: the other side is told, and ``done`` is the caller's to end."""
        self._given_up = True
        self._say(error=why)
        self._stop()
        transport: Any = self.transport
        transport.loseConnection()

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
        self._place.release()

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        self._stop()
        if not self.done.called and not self._given_up:
            self.done.errback(Failure(lost(reason, self._size if self._offer.kind == "files" else 0)))
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
        entries = sum(files + directories for _, _, _, files, directories in found)
        if len({name for name, *_ in found}) == len(found) and entries <= ENTRIES_LIMIT:
            total, number = sum(one[2] for one in found), sum(one[3] for one in found)
            if (size, files) == (total, number):
                return Offer("files", found, total, number)
    raise TransferError("what is offered is malformed")


def _thing(value: Any) -> tuple[str, str, int, int, int]:
    thing = value if isinstance(value, dict) else {}
    name, kind = thing.get("name"), thing.get("kind")
    numbers_of = [thing.get(one) for one in ("size", "files", "directories")]
    if not isinstance(name, str) or kind not in (FILE, DIRECTORY):
        raise TransferError("what is offered is malformed")
    if any(type(number) is not int or not 0 <= number < 2**62 for number in numbers_of):
        raise TransferError("what is offered is malformed")
    size, files, directories = numbers_of
    assert size is not None and files is not None and directories is not None
    return name, str(kind), size, files, directories
