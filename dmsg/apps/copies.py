"""Copies to and from the directory of a listener: one request message, and then a parcel over the same stream.

Messages are ``length(4) || JSON``, big endian.  The side that connects sends the request::

    {"op": "put-tree", "path": P}                          this side offers a parcel of one file or directory, for the
                                                           directory P
    {"op": "get-tree", "path": P, "directories": BOOL}     the listener offers a parcel of P, which may be a directory
                                                           only if BOOL is true

P is relative to the listener's directory; an empty P is that directory itself.  Either side may send ``{"error":
TEXT}`` instead of a message.  A program of dmsg 0.1 requests with ``put`` and ``get``; the listener answers that the
program must be updated.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionAborted, ConnectionDone, ConnectionLost
from twisted.internet.protocol import Protocol
from twisted.internet.threads import deferToThread
from twisted.python.failure import Failure

from dmsg.apps.parcels.destination import Destination
from dmsg.apps.parcels.manifest import DIRECTORY
from dmsg.apps.parcels.offers import Offer
from dmsg.apps.parcels.receiver import ParcelReceiver, ReceivedParcel
from dmsg.apps.parcels.sender import FilesSender, ParcelSender, SentParcel
from dmsg.apps.parcels.walk import WalkResult, walk
from dmsg.apps.parcels.wire import ParcelCut, encode
from dmsg.apps.partial_files import IS_BUSY
from dmsg.apps.transfer import TransferError, TransferRefused, TransferResult, lost_text
from dmsg.errors import CutShort, DmsgError

PUT, GET = "put-tree", "get-tree"
REFUSED = "refused by the other side"
"""Text before the reason with which the other side refused a copy."""
OLD_LISTENERS = ("files are not fetched here", "there is no directory")
"""Reasons that identify a listener of dmsg 0.1, which does not know this protocol."""

Started = Callable[[str, int, int], Callable[[int], None]]
"""Callback invoked with name, size and resume offset in bytes, when content begins to flow.  It returns a callback,
which is invoked with the number of bytes transferred so far.
"""


class CopyCut(TransferError, CutShort):
    """Error: the connection was lost.  A new attempt can resume the copy.  Only this error and :class:`CopyBusy` lead
    to a new attempt.
    """


class CopyBusy(CopyCut):
    """Error: the other side is receiving this file over another connection.  That connection may belong to a program
    that was killed, and then ends soon, so a new attempt is made.
    """


def transfer_result(name: str, result: SentParcel | ReceivedParcel, size: int | None = None) -> TransferResult:
    """Return the result of a copy from the result of its parcel.

    :param size: bytes of all files of the parcel; None if they are not known.
    """
    resumed = 0 if size is None else max(0, size - result.size)
    return TransferResult(name, result.size, result.seconds, result.sha256, bool(result.changed), resumed)


class Copy(Protocol):
    """Side of a copy that connects and sends the request.

    :param name: name of the file or directory in results and errors.
    :ivar done: Deferred that fires with a :class:`~dmsg.apps.transfer.TransferResult`.
    :ivar label: start of an error message about this copy: the name and a colon.
    :ivar closed: Deferred that fires when the connection has ended.  A program that fetched a file must not stop its
        client before that.  Otherwise the listener might not learn that the file has arrived.
    """

    def __init__(self, name: str, on_started: Started) -> None:
        self._name = name
        self.label = f"{name}: "
        self._on_started = on_started
        self._progress: Callable[[int], None] | None = None
        self._size = 0
        self._inner: ParcelSender | ParcelReceiver | None = None
        self._loss: Failure | None = None
        self.done: Deferred[TransferResult] = Deferred(lambda _: self._inner.done.cancel() if self._inner else None)
        self.closed: Deferred[None] = Deferred()

    def _on_progress(self, done: int) -> None:
        if self._progress is None:
            self._progress = self._on_started(self._name, self._size, done)
        self._progress(done)

    def _switch_protocol(self, inner: ParcelSender | ParcelReceiver, **message: object) -> None:
        """Send the request, and then let ``inner`` use the stream as one side of a parcel."""
        self.transport.write(encode(**message))  # type: ignore[union-attr]
        self._inner = inner
        inner.done.addCallbacks(self._parcel_done, self._failed)
        inner.makeConnection(self.transport)  # type: ignore[no-untyped-call]

    def _parcel_done(self, result: SentParcel | ReceivedParcel) -> None:
        if not self.done.called:
            self.done.callback(transfer_result(self._name, result, self._size))

    def _failed(self, failure: Failure) -> None:
        if self.done.called:
            return
        error, text = copy_error(failure, self._loss), str(failure.value)
        if text.startswith(REFUSED) and IS_BUSY in text:
            # Only a refusal by the other side leads to a new attempt. If this side is busy, a new attempt would fail,
            # too.
            error = CopyBusy(text)
        elif text.startswith(tuple(f"{REFUSED}: {old}" for old in OLD_LISTENERS)):
            error = TransferRefused(
                f"{REFUSED}: the dmsg there is older, and copies files in another way: update it there"
            )
        self.done.errback(Failure(error))

    def dataReceived(self, data: bytes) -> None:
        if self._inner is not None:  # Data before the request is ignored.
            self._inner.dataReceived(data)

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        self._loss = reason
        if self._inner is not None:
            self._inner.connectionLost(reason)
        elif not self.done.called:
            self.done.errback(Failure(cut_error(reason)))
        if not self.closed.called:
            self.closed.callback(None)


def cut_error(reason: Failure) -> TransferError:
    """Return the error of a copy whose connection was lost: CopyCut if a new attempt may succeed."""
    if reason.check(ConnectionDone, ConnectionLost, ConnectionAborted, DmsgError):
        return CopyCut(lost_text(reason))
    # An unexpected error of this program would occur again in a new attempt.
    return TransferError(f"{type(reason.value).__name__}: {reason.value}")


def copy_error(failure: Failure, loss: Failure | None) -> BaseException:
    """Return the error of a copy whose parcel has failed.

    :param failure: failure of the parcel.
    :param loss: reason why the connection was lost, or None.
    """
    if loss is not None and isinstance(failure.value, ParcelCut):
        return cut_error(loss)
    assert failure.value is not None
    return failure.value


class Put(Copy):
    """Copy of a local file or directory to the path ``target`` below the listener's directory."""

    def __init__(
        self,
        source: Path,
        target: str,
        *,
        on_started: Started = lambda name, size, offset: lambda done: None,
        hidden: bool = False,
        on_left_out: Callable[[WalkResult], object] = lambda walked: None,
    ) -> None:
        """:param on_left_out: callback invoked before content is sent, with the files found and those left out."""
        super().__init__(source.resolve().name if source.name in ("", "..") else source.name, on_started)
        self._hidden = hidden
        self._on_left_out = on_left_out
        self._source = source
        directory, _, self._called = target.rpartition("/")
        self._directory = directory.rstrip("/") or ("/" if target.startswith("/") else "")

    def connectionMade(self) -> None:
        walking = deferToThread(walk, [self._source], hidden=self._hidden, called=self._called)
        walking.addCallbacks(self._walked, self._walk_failed)

    def _walked(self, walked: WalkResult) -> None:
        if self.done.called or self._loss is not None:
            return
        self._on_left_out(walked)
        self._size = walked.checked.size
        sender = FilesSender(walked, progress=self._on_progress, refusal=REFUSED)
        self._switch_protocol(sender, op=PUT, path=self._directory)

    def _walk_failed(self, failure: Failure) -> None:
        if not self.done.called:
            self.done.errback(failure)
        if self._loss is None:
            self.transport.loseConnection()  # type: ignore[union-attr]


class Get(Copy):
    """Copy of the file or directory ``source`` below the listener's directory to the local path ``target``.

    :param directories: whether ``source`` may be a directory.
    """

    def __init__(
        self,
        source: str,
        target: Path,
        *,
        directories: bool = False,
        hidden: bool = False,
        on_started: Started = lambda name, size, offset: lambda done: None,
    ) -> None:
        super().__init__(target.name, on_started)
        self._source = source
        self._directories = directories
        self._place = Destination(target.parent, overwrite=True, hidden=hidden, copies=True)

    def connectionMade(self) -> None:
        receiver = ParcelReceiver(
            self._place, self._on_offer, progress=self._on_progress, name=self._name, refusal=REFUSED
        )
        self._switch_protocol(receiver, op=GET, path=self._source, directories=self._directories)

    def _on_offer(self, offer: Offer) -> str | None:
        self._size = offer.size
        if offer.kind != "files":
            return "a file or directory was requested"
        is_wanted = self._directories or offer.things[0][1] != DIRECTORY
        return None if is_wanted else f"{self._source}: is a directory"
