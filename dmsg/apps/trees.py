"""Directories over the connection of a copy: after one message of :mod:`dmsg.apps.copying` it is a parcel's.

``{"op": "put-tree", "path": P}`` and then a parcel, which comes to be in the directory P of the side that is asked;
``{"op": "get-tree", "path": P}``, to which that side answers with a parcel of P.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import Protocol
from twisted.internet.threads import deferToThread
from twisted.python.failure import Failure

from dmsg.apps.copy_listener import Peer
from dmsg.apps.copying import CopyBusy, CopyCut
from dmsg.apps.descriptors import open_within
from dmsg.apps.parcels.offers import Offer
from dmsg.apps.parcels.place import Place
from dmsg.apps.parcels.receiver import ParcelReceiver, Taken
from dmsg.apps.parcels.sender import FilesSender, Sent
from dmsg.apps.parcels.walk import Walked, walk
from dmsg.apps.parcels.wire import ParcelCut, encode
from dmsg.apps.parts import IS_BUSY
from dmsg.apps.paths import inside
from dmsg.apps.transfer import TransferError, Transferred, lost_text

PUT_TREE, GET_TREE = "put-tree", "get-tree"

Started = Callable[[str, int, int], Callable[[int], None]]
"""Told name, size and offset; gives what is told of progress."""


NO_DIRECTORY = "there is no directory"
"""By this the one that fetches knows it."""


class NoDirectory(TransferError):
    """What was to be fetched is no directory; it may be a file."""


class _Tree(Protocol):
    """One side of the copy of a directory; ``done`` fires with a :class:`~dmsg.apps.transfer.Transferred`.

    :ivar what: it, as an error begins with it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.what = f"{name}: "
        self._inner: Any = None
        self._gone = False
        self.done: Deferred[Transferred] = Deferred(lambda _: self._inner.done.cancel() if self._inner else None)

    def _become(self, inner: Any) -> None:
        self._inner = inner
        inner.done.addCallbacks(self._carried, self._failed)
        inner.makeConnection(self.transport)

    def _carried(self, result: Sent | Taken) -> None:
        if not self.done.called:
            self.done.callback(Transferred(self._name, result.size, result.seconds, "", bool(result.changed)))

    def _failed(self, failure: Failure) -> None:
        if self.done.called:
            return
        if failure.check(ParcelCut):
            failure = Failure(CopyCut(str(failure.value)))
        elif IS_BUSY in str(failure.value):
            failure = Failure(CopyBusy(str(failure.value)))
        elif NO_DIRECTORY in str(failure.value):
            failure = Failure(NoDirectory(str(failure.value)))
        self.done.errback(failure)

    def dataReceived(self, data: bytes) -> None:
        if self._inner is not None:  # else it speaks before it is asked
            self._inner.dataReceived(data)

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        self._gone = True
        if self._inner is not None:
            self._inner.connectionLost(reason)
        elif not self.done.called:
            self.done.errback(Failure(CopyCut(lost_text(reason))))


class PutTree(_Tree):
    """Sends a directory into the directory ``target`` of the peer.

    :raises TransferError: it cannot be sent.
    """

    def __init__(
        self,
        source: Path,
        target: str,
        *,
        started: Started,
        hidden: bool = False,
        left_out: Callable[[Walked], object] = lambda walked: None,
    ) -> None:
        """:param left_out: told what there is and what of it is not sent, before anything is."""
        super().__init__(source.resolve().name if source.name in ("", "..") else source.name)
        self._hidden = hidden
        self._left_out = left_out
        self._source = source
        self._target = target
        self._started = started

    def connectionMade(self) -> None:
        walking = deferToThread(walk, [self._source], hidden=self._hidden)
        walking.addCallbacks(self._walked, self._not_walked)

    def _walked(self, walked: Walked) -> None:
        progress: list[Callable[[int], None]] = []

        def moved(done: int) -> None:
            if not progress:
                progress.append(self._started(self._name, walked.checked.size, done))
            progress[0](done)

        if self.done.called or self._gone:
            return
        self._left_out(walked)
        self.transport.write(encode(op=PUT_TREE, path=self._target))  # type: ignore[union-attr]
        self._become(FilesSender(walked, progress=moved))

    def _not_walked(self, failure: Failure) -> None:
        if not self.done.called:
            self.done.errback(failure)
        if not self._gone:
            self.transport.loseConnection()  # type: ignore[union-attr]


class GetTree(_Tree):
    """Fetches the directory ``source`` of the peer into the directory ``target``."""

    def __init__(
        self, source: str, target: Path, *, overwrite: bool = False, hidden: bool = False, started: Started
    ) -> None:
        super().__init__(source.rstrip("/").rpartition("/")[2])
        self._source = source
        self._place = Place(target, overwrite=overwrite, hidden=hidden)
        self._started = started

    def connectionMade(self) -> None:
        size = 0
        progress: list[Callable[[int], None]] = []

        def asked(offer: Offer) -> str | None:
            nonlocal size
            size = offer.size
            wanted = offer.kind == "files" and [thing[0] for thing in offer.things] == [self._name]
            return None if wanted else "that is not what was asked for"

        def moved(done: int) -> None:
            if not progress:
                progress.append(self._started(self._name, size, done))
            progress[0](done)

        self.transport.write(encode(op=GET_TREE, path=self._source))  # type: ignore[union-attr]
        self._become(ParcelReceiver(self._place, asked, progress=moved))


class TreePeer(Peer):
    """The side that is asked, for files and directories."""

    _inner: Any = None
    _early = b""
    _walking = False
    _into = Path()

    def dataReceived(self, data: bytes) -> None:
        if self._inner is not None:
            self._inner.dataReceived(data)
        elif self._walking:
            self._early += data
        else:
            super().dataReceived(data)

    def _asked(self, message: dict[str, Any]) -> None:
        self._next = self._unexpected
        op, path = message.get("op"), message.get("path")
        if op == PUT_TREE and self._writable:
            directory = self._root.resolve() if path == "" else inside(self._root, path, hidden=self._hidden)
            self._into = directory
            base = self._root.resolve()
            os.close(open_within(base, directory, make=True))
            place = Place(directory, overwrite=self._overwrite, hidden=self._hidden, base=base)
            self._become(ParcelReceiver(place, self._wanted))
        elif op == GET_TREE and self._readable:
            source = inside(self._root, path, hidden=self._hidden)
            if not source.is_dir():
                raise TransferError(f"{NO_DIRECTORY} {source.name}")
            self._walking = True
            walking = deferToThread(walk, [source], hidden=self._hidden)
            walking.addCallbacks(lambda walked: self._become(FilesSender(walked)), self._not_walked)
        else:
            super()._asked({**message, "op": "put" if op == PUT_TREE else op})

    def _not_walked(self, failure: Failure) -> None:
        error = failure.value
        self._refuse(error if isinstance(error, TransferError) else TransferError(str(error)))

    def _wanted(self, offer: Offer) -> str | None:
        if offer.kind != "files" or len(offer.things) != 1:
            return "one file or directory at a time is sent here"
        if self._max_size is not None and offer.size > self._max_size:
            return f"{offer.size} bytes are too much, the limit is {self._max_size}"
        self._path = self._into / offer.things[0][0]
        self._claim(self._path)
        return None

    def _become(self, inner: Any) -> None:
        if self.done.called or self.transport is None:
            return  # the connection is lost
        self._inner = inner

        def carried(result: Sent | Taken) -> None:
            name = self._path.name or "directory"
            if not self.done.called:
                self.done.callback(Transferred(name, result.size, result.seconds, "", bool(result.changed)))

        def failed(failure: Failure) -> None:
            if not self.done.called:
                self.done.errback(failure)

        inner.done.addCallbacks(carried, failed)
        inner.makeConnection(self.transport)
        rest, self._buffer = bytes(self._buffer) + self._early, bytearray()
        self._early = b""
        if rest:
            inner.dataReceived(rest)

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        if self._inner is not None:
            self._inner.connectionLost(reason)
        super().connectionLost(reason)
