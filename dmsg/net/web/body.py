"""Reading of response bodies from untrusted servers, up to a limit."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.internet.protocol import Protocol
from twisted.python.failure import Failure
from twisted.web.client import ResponseDone
from twisted.web.http import PotentialDataLoss
from twisted.web.iweb import IResponse

from dmsg.net.web.response import AnswerTooLong


class _Collector(Protocol):
    def __init__(self, limit: int, finished: Deferred[bytes]) -> None:
        self._most = limit
        self._finished = finished
        self._parts: list[bytes] = []
        self._size = 0

    def dataReceived(self, data: bytes) -> None:
        self._size += len(data)
        if self._size <= self._most:
            self._parts.append(data)
            return
        self._parts.clear()
        drop(self.transport)
        if not self._finished.called:
            self._finished.errback(AnswerTooLong(f"an answer has more than {self._most} bytes"))

    def connectionLost(self, reason: Failure = Failure(ResponseDone())) -> None:
        if self._finished.called:
            return
        if reason.check(ResponseDone, PotentialDataLoss):
            self._finished.callback(b"".join(self._parts))
        else:
            self._finished.errback(reason)


def drop(transport: object) -> None:
    """Close the connection of a response by the first suitable method, because Twisted's transport wrappers differ in
    their methods."""
    for name in ("abortConnection", "loseConnection", "stopProducing"):
        end = getattr(transport, name, None)
        if end is not None:
            end()
            return


def read_body(response: IResponse, limit: int) -> Deferred[bytes]:
    """Return a Deferred for the body of a response of :class:`twisted.web.client.Agent`.

    The Deferred fails with :class:`AnswerTooLong` if the body exceeds ``limit`` bytes, or with the error that ended the
    connection.
    """

    def cancelled(_: Deferred[bytes]) -> None:
        drop(collector.transport)

    finished: Deferred[bytes] = Deferred(cancelled)
    collector = _Collector(limit, finished)
    response.deliverBody(collector)
    return finished
