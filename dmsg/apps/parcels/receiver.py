"""Receiving side of a parcel: accepts or refuses the offer, and writes the files."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

from twisted.internet.defer import Deferred, maybeDeferred, succeed
from twisted.internet.error import ConnectionDone
from twisted.internet.task import CooperativeTask
from twisted.python.failure import Failure

from dmsg.apps.parcels.contents import FileContents
from dmsg.apps.parcels.destination import Destination
from dmsg.apps.parcels.manifest import FILE, CheckedItems, Item, decode_item
from dmsg.apps.parcels.offers import Offer, offer_of, parse_item
from dmsg.apps.parcels.wire import (
    DIGEST_SIZE,
    GAVE_UP,
    ParcelEnd,
    lost_error,
    parse_numbers,
)
from dmsg.apps.partial_files import PART_SUFFIX
from dmsg.apps.transfer import Measured, TransferError
from dmsg.base.units import human_size
from dmsg.net.background import work, work_for_strangers
from dmsg.net.streams.transports import transport_of

_T = TypeVar("_T")

HELD_LIMIT = 1024 * 1024
"""Maximum bytes to buffer while this side has paused reading."""
TURN_SLICE = 0.01
"""Seconds of a reactor turn that one parcel may use.  Many small files that arrive together would otherwise delay other
connections.
"""
ENTRIES_SLICE = 50
"""Maximum number of entries that are checked in one step.  A longer list is checked in several steps."""


@dataclass(frozen=True)
class ReceivedParcel(Measured):
    """Result of a received parcel.

    :ivar offer: offer that was accepted.
    :ivar size: number of bytes transferred, without those that existed already.
    :ivar paths: paths of the top-level files and directories.
    :ivar seconds: duration from acceptance to the end.
    :ivar changed: names of files that somebody changed at the sender while they were sent; at most ``CHANGED_LIMIT``.
    :ivar sha256: hash in hexadecimal if the parcel is one file, else empty.
    """

    offer: Offer
    size: int
    paths: list[Path]
    seconds: float
    changed: tuple[str, ...] = ()
    sha256: str = ""


Asked = Callable[[Offer], "Deferred[str | None] | str | None"]
"""Callback that decides about an offer.  It returns None to accept the offer, or the reason for refusing it."""


class ParcelReceiver(ParcelEnd):
    """Protocol of the receiving side of a parcel.

    :param place: directory that files are written to.
    :param decide_offer: see :data:`Asked`.
    :param progress: callback invoked with the number of bytes present so far, with those of earlier transfers.
    :param pipe: callback invoked with the bytes of a pipe.
    :param end_pipe: callback invoked after the last byte; the pipe has arrived when its Deferred fires.
    :param limit: maximum bytes of a pipe.  For files, ``decide_offer`` checks the size.
    :param name: name that the only item of the parcel gets instead of the offered name; None for the offered names.
    :param refusal: text to put before the reason that the other side gives when it ends the transfer.
    :ivar done: Deferred that fires with :class:`ReceivedParcel`, or fails with
        :class:`~dmsg.apps.transfer.TransferError`.
    :ivar closed: Deferred that fires when the connection is closed and the last message has been sent.
    """

    def __init__(
        self,
        place: Destination,
        decide_offer: Asked,
        *,
        progress: Callable[[int], object] = lambda done: None,
        pipe: Callable[[bytes], object] | None = None,
        end_pipe: Callable[[], Deferred[None]] = lambda: succeed(None),
        limit: int | None = None,
        name: str | None = None,
        refusal: str = GAVE_UP,
    ) -> None:
        super().__init__(refusal)
        self._place = place
        self._decide_offer = decide_offer
        self._progress = progress
        self._pipe = pipe
        self._end_pipe = end_pipe
        self._most = limit
        self._name = name
        self._step: Callable[[], bool] = self._take_offer
        self._waits = False
        self._offer = Offer("text")
        self._began = time.monotonic()
        self._size = 0
        """Number of bytes of a pipe that have arrived."""
        self._hash = hashlib.sha256()
        self._checked = CheckedItems(hidden=place.hidden)
        self._contents = FileContents(place, self._messages, progress)
        self._pausing = False
        """Whether reading is paused only so that other connections can be served."""
        self._task: CooperativeTask[Iterator[object]] | None = None
        self.done: Deferred[ReceivedParcel] = Deferred(lambda _: self._give_up())
        self.closed: Deferred[None] = Deferred()

    def dataReceived(self, data: bytes) -> None:
        if self.done.called:
            return
        self._messages.feed(data)
        if self._waits and self._messages.held > HELD_LIMIT:
            self._fail(TransferError("the other side sends data that was not requested"))
            return
        self._proceed()

    def _proceed(self, slice_of_turn: float = TURN_SLICE) -> None:
        until = time.monotonic() + slice_of_turn
        try:
            while not self._waits and not self.done.called and self._step():
                if time.monotonic() > until and not self._waits and not self.done.called:
                    self._pausing = True
                    self._wait(work(iter((None,))).whenDone(), lambda _: None)
        except TransferError as error:
            self._fail(error)
        except OSError as error:
            self._fail(self._with_shown_name(error))

    def _wait(self, waiting: Deferred[_T], then: Callable[[_T], None]) -> None:
        """Pause reading until ``waiting`` fires, and then call ``then`` with its result.  A failure ends the
        transfer.
        """
        transport = transport_of(self)
        self._waits = True
        transport.pauseProducing()

        def known(result: _T | Failure) -> None:
            self._waits = self._pausing = False
            if self.done.called:
                return
            if isinstance(result, Failure):
                error = result.value
                if isinstance(error, OSError):
                    error = self._with_shown_name(error)
                self._fail(error if isinstance(error, TransferError) else TransferError(str(error)))
                return
            try:
                then(result)
            except OSError as error:
                self._fail(self._with_shown_name(error))
                return
            except TransferError as error:
                self._fail(error)
                return
            # If this side did not read, it would not notice the end of the connection.
            transport.resumeProducing()
            if not self.done.called:
                self._proceed()

        waiting.addBoth(known)

    # --- accepting the offer ---

    def _take_offer(self) -> bool:
        message = self._messages.take()
        if message is None:
            return False
        self._offer = offer_of(message)
        if self._name is not None:
            self._offer = self._offer.with_name(self._name)
        if self._offer.kind == "files":
            self._place.check([(name, kind) for name, kind, *_ in self._offer.things])

        def answered(reason: str | None) -> None:
            if reason is not None and self._offer.of_0_1:
                raise TransferError(reason)
            if reason is not None:
                self._say(take=False, why=reason)
                self._end(TransferError(reason))
                return
            self._began = time.monotonic()
            if self._offer.kind == "text":
                self._say(ok=True)
                self._finished([])
                return
            if self._offer.kind == "files":
                # If a part of a file exists, the number of missing bytes is not known yet, and the free space is
                # checked later.
                if not self._place.has_begun([name for name, *_ in self._offer.things]):
                    self._check_room(0)
                self._place.hold([(name, kind) for name, kind, *_ in self._offer.things])
            if self._offer.of_0_1:
                self._step = self._take_one_file
                return
            self._say(take=True, **({"pieces": True} if self._offer.kind == "files" else {}))
            self._step = self._take_piece if self._offer.kind == "pipe" else self._take_entries

        self._wait(cast("Deferred[str | None]", maybeDeferred(self._decide_offer, self._offer)), answered)
        return True

    def _take_one_file(self) -> bool:
        """Begin to receive a file from a program of dmsg 0.1, which sends the content without waiting for an answer."""
        ((name, _, size, *_),) = self._offer.things
        file = Item(name, FILE, size, 0o666, time.time_ns())
        self._checked.add(file)
        self._work(self._place.clear(file), self._begin_files)
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
            raise TransferError(f"the files have more than {self._most} bytes, the limit")
        assert self._pipe is not None
        self._pipe(data)
        self._progress(self._size)
        return True

    def _take_end(self) -> bool:
        digest = self._messages.exactly(DIGEST_SIZE)
        if digest is None:
            return False
        if digest != self._hash.digest():
            raise TransferError("the SHA-256 differs from the sender's")
        self._wait(self._end_pipe(), self._pipe_written)
        return False

    def _pipe_written(self, _: None) -> None:
        self._say(ok=True)
        self._finished([])

    # --- files ---

    def _take_entries(self) -> bool:
        message = self._messages.take()
        if message is None:
            return False
        if message.get("whole") is True:
            self._check_destination()
            return True
        entries = message.get("entries")
        if not isinstance(entries, list) or not entries:
            raise TransferError("the other side does not use dmsg's protocol for sending files")
        if len(entries) <= ENTRIES_SLICE:
            for one in entries:
                self._checked.add(self._decode_item(one))
            return True
        self._work(self._add(entries), lambda: None)
        return True

    def _add(self, entries: list[object]) -> Iterator[None]:
        for one in entries:
            self._checked.add(self._decode_item(one))
            yield None

    def _decode_item(self, value: object) -> Item:
        item = decode_item(value)
        return item if self._name is None else item.below(self._name)

    def _work(self, steps: Iterator[object], then: Callable[[], None]) -> None:
        """Run a long task in steps, and then call ``then``.

        Steps are necessary, because a sender could easily describe directories that take this side long to create.
        """
        task = self._task = work_for_strangers(steps)
        self._wait(task.whenDone(), lambda _: then())

    def _check_destination(self) -> None:
        """Check that the manifest matches the accepted offer, and find out which parts of the files exist already."""
        if [parse_item(top) for top in self._checked.tops] != self._offer.things:
            raise TransferError("the data differs from the offer")
        self._work(self._check_target(), self._on_destination_checked)

    def _check_target(self) -> Iterator[object]:
        self._check_room((yield from self._contents.find_existing(self._checked.entries)))
        some: list[list[object]] = []
        for index, size, digest in self._contents.existing():
            some.append([index, size, digest])
            if len(some) >= 1000:
                self._say(have=some)
                some = []
            yield None
        if some:
            self._say(have=some)

    def _on_destination_checked(self) -> None:
        self._say(whole=True)
        self._step = self._take_offsets

    def _check_room(self, existing: int) -> None:
        """Check that the disk has room for the missing bytes of the parcel.

        :param existing: number of bytes that exist already.
        :raises TransferError: the disk has too little room.
        """
        free = self._place.free()
        needed = self._offer.size - existing
        if free is not None and needed > free:
            first, *others = (name for name, *_ in self._offer.things)
            raise TransferError(
                f"{first}{f' and {len(others)} more' if others else ''}: there is not enough room on the disk: "
                f"{human_size(needed)} are needed, {human_size(free)} are free, {human_size(needed - free)} are missing"
            )

    def _take_offsets(self) -> bool:
        message = self._messages.take()
        if message is None:
            return False
        if message.get("whole") is True:
            self._contents.in_chunks = message.get("pieces") is True
            self._progress(self._contents.resumed)
            self._begin_files()
            return True
        for index, offset in parse_numbers(message, "from", 2):
            if not self._contents.resume(index, offset):
                raise TransferError("the other side does not use dmsg's protocol for sending files")
        return True

    def _begin_files(self) -> None:
        self._contents.begin(self._checked.entries)
        self._step = self._next_file

    def _next_file(self) -> bool:
        if not self._contents.open_next():

            def in_place() -> None:
                self._say(ok=True)
                self._finished([self._place.path_of(name) for name, *_ in self._offer.things])

            self._work(self._place.finish(self._checked.entries), in_place)
            return True
        self._step = self._take_content
        return True

    def _take_content(self) -> bool:
        has_taken = self._contents.take()
        if self._contents.is_complete:
            self._step = self._next_file
        return has_taken

    # --- end of the transfer ---

    def _with_shown_name(self, error: OSError) -> TransferError:
        """Return the error of a file.  It contains the name that the user knows, not that of the partial file."""
        name = Path(error.filename).name if isinstance(error.filename, str) else ""
        item = self._contents.item.path
        if not name or name.endswith(PART_SUFFIX) or name == Path(item).name:
            name = item or self._offer.things[0][0] if self._offer.things else ""
        return TransferError(f"{name}: {error.strerror}" if name else str(error.strerror))

    def _finished(self, paths: list[Path]) -> None:
        seconds = time.monotonic() - self._began
        self._place.release()
        if not self.done.called:
            contents = self._contents
            size, changed = self._size + contents.size, tuple(contents.changed)
            self.done.callback(ReceivedParcel(self._offer, size, paths, seconds, changed, contents.sha256))

    def refuse(self, reason: str) -> None:
        """End the transfer because of a problem on this side, and send the reason to the other side.  The caller fires
        ``done``.
        """
        self._given_up = True
        self._say(error=reason)
        self._close()

    def _fail(self, error: TransferError) -> None:
        self._say(error=str(error))
        self._end(error)

    def _close(self) -> None:
        self._stop()
        transport = transport_of(self)
        # What the sender still sends is read and discarded. A sender that cannot write might not read the error either.
        transport.resumeProducing()
        transport.loseConnection()

    def _end(self, error: TransferError) -> None:
        self._close()
        if not self.done.called:
            self.done.errback(Failure(error))

    def _stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.whenDone().addErrback(lambda _: None)
            try:
                task.stop()
            except Exception:  # noqa: S110  # it is done already
                pass
        self._contents.close()
        self._place.release()

    def _take_last_words(self) -> None:
        """Process the data that arrived before the connection ended, while reading was paused."""
        if self._pausing:
            self._waits = self._pausing = False
            self._proceed(math.inf)
        elif self._waits and self._step == self._take_entries:
            try:
                while self._messages.take() is not None:
                    pass
            except TransferError as error:
                self._fail(error)

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        if not self.done.called and not self._given_up:
            self._take_last_words()
        self._stop()
        if not self.done.called and not self._given_up:
            self.done.errback(Failure(lost_error(reason, self._contents.size)))
        if not self.closed.called:
            self.closed.callback(None)
