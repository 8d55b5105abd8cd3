"""Listening side of copies.  The docstring of :mod:`dmsg.apps.copies` describes the protocol."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionAborted, ConnectionDone
from twisted.internet.interfaces import IReactorTime
from twisted.internet.protocol import Protocol
from twisted.internet.threads import deferToThread
from twisted.python.failure import Failure

from dmsg.apps.copies import GET, PUT, copy_error, cut_error, transfer_result
from dmsg.apps.descriptors import open_within
from dmsg.apps.intake import Intake, Reservation
from dmsg.apps.parcels.destination import Destination
from dmsg.apps.parcels.offers import Offer
from dmsg.apps.parcels.receiver import ParcelReceiver, ReceivedParcel
from dmsg.apps.parcels.sender import FilesSender, ParcelSender, SentParcel
from dmsg.apps.parcels.walk import WalkResult, walk
from dmsg.apps.parcels.wire import MESSAGE_LIMIT, Messages, encode
from dmsg.apps.partial_files import IS_BUSY
from dmsg.apps.paths import path_inside
from dmsg.apps.transfer import TransferError, TransferResult
from dmsg.keys import PubKey

LEFT_AFTER = 5.0
"""Seconds without a transport after which a sender's file may be received over another connection.  The sender was then
probably killed and started again with a new key.
"""
OLD_PROGRAM = "this dmsg does not know the copies of dmsg 0.1: update the program that asks"


class CopyPeer(Protocol):
    """Connection from a peer that fetches or sends a file or directory.

    :param root: directory whose files peers may fetch.
    :param writable: whether peers may also send files.
    :param hidden: whether names that begin with a dot are allowed.
    :param busy: table of the connections that write files now, by path; all connections of the listener share it.
    :param intake: limit on all that peers leave in the directory; None for no limit.
    :ivar done: Deferred that fires with a :class:`~dmsg.apps.transfer.TransferResult`.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        root: Path,
        *,
        writable: bool = False,
        overwrite: bool = False,
        hidden: bool = False,
        max_size: int | None = None,
        busy: dict[Path, CopyPeer] | None = None,
        intake: Intake | None = None,
    ) -> None:
        self._reactor = reactor
        self._root = root
        self._writable = writable
        self._overwrite = overwrite
        self._hidden = hidden
        self._max_size = max_size
        self._busy = busy if busy is not None else {}
        self._intake = intake
        self._reservation: Reservation | None = None
        self._messages = Messages()
        self._inner: ParcelSender | ParcelReceiver | None = None
        self._path = Path()
        self._is_asked = False
        self._own_path: Path | None = None
        self._loss: Failure | None = None
        self.done: Deferred[TransferResult] = Deferred()

    def dataReceived(self, data: bytes) -> None:
        if self._inner is not None:
            self._inner.dataReceived(data)
            return
        if self.done.called:
            return
        self._messages.feed(data)
        if self._is_asked:
            if self._messages.held > MESSAGE_LIMIT:
                self._refuse(TransferError("the other side sends data that was not requested"))
            return
        try:
            message = self._messages.take()
            if message is not None:
                self._is_asked = True
                self._answer(message)
        except OSError as error:
            self._refuse(TransferError(f"{self._path.name}: {error.strerror}" if self._path.name else error.strerror))
        except TransferError as error:
            self._refuse(error)

    def _answer(self, message: dict[str, object]) -> None:
        op, path = message.get("op"), message.get("path")
        if op == PUT and self._writable:
            base = self._root.resolve()
            self._path = base if path == "" else path_inside(self._root, path, hidden=self._hidden)
            place = Destination(self._path, overwrite=self._overwrite, hidden=self._hidden, base=base, copies=True)
            self._switch_protocol(ParcelReceiver(place, self._on_offer))
        elif op in (PUT, "put") and not self._writable:
            raise TransferError("this peer accepts no files")
        elif op == GET:
            self._path = path_inside(self._root, path, hidden=self._hidden)
            self._give(self._path, directories=message.get("directories") is not False)
        else:
            raise TransferError(OLD_PROGRAM)

    # --- files that the peer fetches ---

    def _give(self, path: Path, *, directories: bool) -> None:
        base = self._root.resolve()
        try:
            at = open_within(base, path.parent)
        except OSError:
            raise TransferError(f"there is no file {path.name}") from None
        try:
            mode = os.stat(path.name, dir_fd=at, follow_symlinks=False).st_mode
        except FileNotFoundError:
            raise TransferError(f"there is no file {path.name}") from None
        finally:
            os.close(at)
        if stat.S_ISDIR(mode) and not directories:
            raise TransferError(f"{path.name}: is a directory")
        if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
            raise TransferError(f"{path.name}: not a regular file")
        self.transport.pauseProducing()  # type: ignore[union-attr]
        walking = deferToThread(walk, [path], hidden=self._hidden, base=base)
        walking.addCallbacks(self._walked, self._walk_failed)

    def _walked(self, walked: WalkResult) -> None:
        if not self.done.called:
            self.transport.resumeProducing()  # type: ignore[union-attr]
            self._switch_protocol(FilesSender(walked))

    def _walk_failed(self, failure: Failure) -> None:
        if not self.done.called:
            self.transport.resumeProducing()  # type: ignore[union-attr]
            # Peers must not learn the location of the directory on this machine.
            self._refuse(TransferError(str(failure.value).replace(f"{self._path.parent}/", "")))

    # --- files that the peer sends ---

    def _on_offer(self, offer: Offer) -> None:
        """Check an offer; see :data:`~dmsg.apps.parcels.receiver.Asked`.

        :raises TransferError: the offer is refused.
        """
        if offer.kind != "files" or len(offer.things) != 1:
            raise TransferError("send one file or directory at a time")
        if self._max_size is not None and offer.size > self._max_size:
            raise TransferError(f"the offer has {offer.size} bytes, and the limit is {self._max_size}")
        parent = self._path
        self._path /= offer.things[0][0]
        if self._intake is not None:
            # The claim may end another connection to the file, so a refusal has to come first.
            self._intake.check_sender(parent, offer.things, self._peer_key())
        self._claim(self._path)
        if self._intake is not None:
            self._reservation = self._intake.reserve(parent, offer.things, self._peer_key())

    def _claim(self, path: Path) -> None:
        """Reserve a target for this connection until the connection ends.

        :raises TransferError: another connection that is still alive writes to the target.
        """
        other = self._busy.get(path)
        if other is not None:
            if not other.is_left_by(self):
                raise TransferError(f"{path.name} {IS_BUSY}")
            other.give_way()
        self._busy[path] = self
        self._own_path = path

    def is_left_by(self, other: CopyPeer) -> bool:
        """Whether a newer connection may receive the file instead, because this connection's sender was probably
        killed.

        The sender was probably killed if the stream has no transport, and either the newer connection is from the same
        peer, or the stream has had no transport for ``LEFT_AFTER`` seconds.

        :param other: the newer connection.
        """
        since = getattr(self.transport, "away_since", None)
        if since is None:
            return False
        same = self._peer_key() is not None and self._peer_key() == other._peer_key()
        return same or self._reactor.seconds() - since > LEFT_AFTER

    def give_way(self) -> None:
        """End this connection, so that a newer connection can continue its partial file."""
        self.transport.abortConnection()  # type: ignore[union-attr]
        # The partial file must be unlocked now, because the newer connection opens it in this turn.
        self.connectionLost(Failure(ConnectionAborted()))

    def _peer_key(self) -> PubKey | None:
        key = None if self.transport is None else getattr(self.transport.getPeer(), "public_key", None)
        return key if isinstance(key, PubKey) else None

    # --- both directions ---

    def _switch_protocol(self, inner: ParcelSender | ParcelReceiver) -> None:
        self._inner = inner
        inner.done.addCallbacks(self._parcel_done, self._failed)
        inner.makeConnection(self.transport)  # type: ignore[no-untyped-call]
        if rest := self._messages.take_some(self._messages.held):
            inner.dataReceived(rest)

    def _settle(self, transferred: int | None) -> None:
        reservation, self._reservation = self._reservation, None
        if self._intake is not None and reservation is not None:
            self._intake.settle(reservation, transferred)

    def _parcel_done(self, result: SentParcel | ReceivedParcel) -> None:
        self._settle(result.size)
        if not self.done.called:
            self.done.callback(transfer_result(self._path.name, result))

    def _failed(self, failure: Failure) -> None:
        self._settle(None)
        if not self.done.called:
            self.done.errback(Failure(copy_error(failure, self._loss)))

    def _refuse(self, error: TransferError) -> None:
        self.transport.write(encode(error=str(error)))  # type: ignore[union-attr]
        self.transport.loseConnection()  # type: ignore[union-attr]
        self._failed(Failure(error))

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        if self._own_path is not None and self._busy.get(self._own_path) is self:
            del self._busy[self._own_path]
        self._loss = reason
        if self._inner is not None:
            self._inner.connectionLost(reason)
        self._failed(Failure(cut_error(reason)))
