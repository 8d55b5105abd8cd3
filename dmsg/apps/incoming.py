"""What a peer sends to a key: one file as :mod:`dmsg.apps.transfer` has it, or a parcel.

The first message tells them apart: that of a parcel has an ``offer``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import Protocol
from twisted.python.failure import Failure

from dmsg.apps.parcels.receiver import ParcelReceiver, Taken
from dmsg.apps.parcels.wire import MESSAGE_LIMIT
from dmsg.apps.transfer import ReceiveFile, TransferError, Transferred, _take_message, lost_text


class Incoming(Protocol):
    """The side that is sent something; ``done`` fires with what has come, or fails with a ``TransferError``.

    :param file: makes the receiver of one file.
    :param parcel: makes the receiver of a parcel.
    """

    def __init__(self, file: Callable[[], ReceiveFile], parcel: Callable[[], ParcelReceiver]) -> None:
        self._file = file
        self._parcel = parcel
        self._first = bytearray()
        self._inner: Any = None
        self.done: Deferred[Transferred | Taken] = Deferred()

    def dataReceived(self, data: bytes) -> None:
        if self._inner is not None:
            self._inner.dataReceived(data)
            return
        self._first += data
        make: Callable[[], Any] | None
        try:
            message = _take_message(bytearray(self._first), MESSAGE_LIMIT)
            make = None if message is None else self._parcel if "offer" in message else self._file
        except TransferError:
            make = self._file  # which says so to the other side
        if make is None:
            return
        inner: Any = make()
        self._inner = inner
        inner.done.addBoth(self.done.callback)
        inner.makeConnection(self.transport)
        first, self._first = bytes(self._first), bytearray()
        inner.dataReceived(first)

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        if self._inner is not None:
            self._inner.connectionLost(reason)
        elif not self.done.called:
            self.done.errback(Failure(TransferError(lost_text(reason))))
