"""POST requests to other relays, each with one message, or with several if the other relay accepts batches."""

from __future__ import annotations

from collections import OrderedDict

from attrs import define, field
from twisted.internet.defer import CancelledError, Deferred, TimeoutError
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.protocol import Protocol, connectionDone
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.client import Agent
from twisted.web.http_headers import Headers
from twisted.web.iweb import IResponse

from dmsg.base.bounded_tables import remember
from dmsg.net.own_pauses import add_fair_timeout
from dmsg.net.pending import cancellable
from dmsg.net.web.body import drop, read_body
from dmsg.net.web.fetch import Body, make_pool
from dmsg.rmb.relay.federation import batch
from dmsg.rmb.relay.federation.slots import MAX_POSTS
from dmsg.rmb.twins.twin import relay_url

CONNECT_TIMEOUT = 2.0
"""Timeout of a connection attempt to another relay, in seconds."""
POST_TIMEOUT = 3.0
"""Timeout for the answer to one request, in seconds."""
MAX_ANSWER = 4096
"""Maximum size of another relay's answer in bytes."""
ONLY_CONNECTED = b"x-rmb-only-connected"
"""Header that asks a relay to refuse the message if the session is not connected. The reference implementation ignores
it."""
GATHER_THRESHOLD = 2
"""Number of unanswered requests to one relay. Once it is reached, further messages to the relay wait ``GATHER_TIME``
seconds, so that they are sent together."""
GATHER_TIME = 0.002
"""Seconds for which messages are collected for a batch. A full batch is sent at once."""
MAX_BATCHING_RELAYS = 1000
"""Maximum number of relays that are remembered because they accept batches."""

_log = Logger()


@define(eq=False)
class _Posted:
    """Message that is part of a batch, or waits for one.

    :ivar answer: Deferred that fires with the status of the message: 0 if there is no answer, None if the relay does
        not accept batches.
    """

    data: bytes
    only_connected: bool
    answer: Deferred[int | None]

    def fire_answer(self, status: int | None) -> None:
        """Fire ``answer``, unless it has fired or was cancelled."""
        if not self.answer.called:
            self.answer.callback(status)


@define(eq=False)
class _RelayQueue:
    """Queue of messages for one relay, and the number of requests to it.

    :ivar waiting: messages that were not sent yet.
    :ivar under_way: number of requests that have no complete answer yet.
    :ivar next_send: delayed call that will send the waiting messages.
    """

    waiting: list[_Posted] = field(factory=list)
    under_way: int = 0
    next_send: IDelayedCall | None = None


class _Statuses(Protocol):
    """Protocol that reads the answer to a batch, line by line."""

    def __init__(self, posted: list[_Posted]) -> None:
        self._posted = posted
        self._lines = batch.AnswerParser()
        self.finished: Deferred[None] = Deferred(lambda _: drop(self.transport))

    def dataReceived(self, data: bytes) -> None:
        try:
            for number, status in self._lines.feed(data):
                self._posted[number].fire_answer(status)
        except (ValueError, IndexError):
            drop(self.transport)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if not self.finished.called:
            self.finished.callback(None)


class Poster:
    """Sender of messages to other relays.

    :param plain: whether relays with ``http:`` URLs are allowed. Otherwise only ``https:`` is allowed, so that a twin
        cannot make a public relay send requests to other services in its network.
    """

    def __init__(self, reactor: IReactorTime, *, plain: bool) -> None:
        self._reactor = reactor
        self._plain = plain
        self._pool = make_pool(reactor, limit=MAX_POSTS)
        self._pool.cachedConnectionTimeout = 50
        self._agent = Agent(reactor, connectTimeout=CONNECT_TIMEOUT, pool=self._pool)
        self._take_batches: OrderedDict[str, None] = OrderedDict()
        self._lines: dict[str, _RelayQueue] = {}

    def takes_many(self, relay: str) -> bool:
        """Whether several messages for this relay are sent in one request."""
        return relay_url(relay) in self._take_batches

    async def post(self, relay: str, data: bytes, *, only_connected: bool) -> int:
        """Send a message to a relay and return the HTTP status of its answer; 0 if it did not answer."""
        url = relay_url(relay)
        if not (self._plain or url.startswith("https:")):
            return 0
        if url in self._take_batches and len(data) <= batch.MAX_BATCH_SIZE:
            status = await self._with_others(url, data, only_connected)
            if status is not None:
                return status
        return await self._post_single(url, data, only_connected)

    async def _post_single(self, url: str, data: bytes, only_connected: bool) -> int:
        headers = Headers({"content-type": ["application/octet-stream"]})
        if only_connected:
            headers.addRawHeader(ONLY_CONNECTED, b"1")
        response = await self._ask(url, headers, data)
        if response is None:
            return 0
        if response.headers.hasHeader(batch.OFFER):
            remember(self._take_batches, url, None, MAX_BATCHING_RELAYS)
        else:
            self._take_batches.pop(url, None)
        code: int = response.code
        await self._read(response, url)
        return code

    async def _ask(self, url: str, headers: Headers, data: bytes) -> IResponse | None:
        """Send a request and return its response, whose body is not read yet; None if there was no response."""
        try:
            request = self._agent.request(b"POST", url.encode("ascii"), headers, Body(data))
            return await cancellable(add_fair_timeout(request, POST_TIMEOUT, self._reactor))
        except CancelledError:
            raise
        except TimeoutError:
            return None
        # When a connection is lost, Twisted raises exceptions of many types. So all types are caught.
        except Exception as error:
            _log.debug("a request to the relay {relay} failed: {error!r}", relay=url, error=error)
            return None

    async def _read(self, response: IResponse, url: str) -> None:
        """Read and drop the body of a response, so that the connection can be reused."""
        try:
            await cancellable(add_fair_timeout(read_body(response, MAX_ANSWER), POST_TIMEOUT, self._reactor))
        except CancelledError:
            raise
        except Exception as error:  # The status is known already, so an error in the body does not matter.
            _log.debug("a request to the relay {relay} failed: {error!r}", relay=url, error=error)

    # --- batches ---

    def _with_others(self, url: str, data: bytes, only_connected: bool) -> Deferred[int | None]:
        """Send a message in a batch at the end of this reactor turn.

        While ``GATHER_THRESHOLD`` requests to the relay are unanswered, the batch waits ``GATHER_TIME`` seconds for
        further messages.
        """
        line = self._lines.get(url)
        if line is None:
            line = self._lines[url] = _RelayQueue()
        posted = _Posted(data, only_connected, Deferred())
        line.waiting.append(posted)
        if line.next_send is None:
            wait = GATHER_TIME if line.under_way >= GATHER_THRESHOLD else 0.0
            line.next_send = self._reactor.callLater(wait, self._send_waiting, url, line)
        elif len(line.waiting) == batch.MAX_BATCH:
            line.next_send.reset(0)
        return posted.answer

    def _send_waiting(self, url: str, line: _RelayQueue) -> None:
        line.next_send = None
        waiting, line.waiting = line.waiting, []
        part: list[_Posted] = []
        size = 0
        for posted in waiting:
            if posted.answer.called:
                continue  # The caller has cancelled this message.
            if part and (len(part) >= batch.MAX_BATCH or size + len(posted.data) > batch.MAX_BATCH_SIZE):
                self._send(url, line, part)
                part, size = [], 0
            part.append(posted)
            size += len(posted.data)
        if part:
            self._send(url, line, part)
        elif not line.under_way:
            self._lines.pop(url, None)

    def _send(self, url: str, line: _RelayQueue, part: list[_Posted]) -> None:
        line.under_way += 1

        def failed(failure: Failure) -> None:
            _log.failure("unhandled error while messages were sent to the relay {relay}", failure, relay=url)

        def over(_: object) -> None:
            line.under_way -= 1
            for posted in part:
                posted.fire_answer(0)
            if not line.under_way and line.next_send is None and self._lines.get(url) is line:
                del self._lines[url]

        Deferred.fromCoroutine(self._post_batch(url, part)).addErrback(failed).addBoth(over)

    async def _post_batch(self, url: str, part: list[_Posted]) -> None:
        if len(part) == 1:
            part[0].fire_answer(await self._post_single(url, part[0].data, part[0].only_connected))
            return
        body = batch.encode((posted.data, posted.only_connected) for posted in part)
        headers = Headers({"content-type": [batch.CONTENT_TYPE]})
        response = await self._ask(url + batch.PATH, headers, body)
        if response is None:
            return
        if response.code == 200 and response.headers.hasHeader(batch.OFFER):
            statuses = _Statuses(part)
            response.deliverBody(statuses)
            try:
                await add_fair_timeout(statuses.finished, POST_TIMEOUT, self._reactor)
            except (TimeoutError, CancelledError):
                pass  # The HTTP answer did not name all messages in time. The others get the status 0 (no answer).
            return
        if response.code != 503:
            # The relay at this URL no longer accepts batches, so the messages are sent one by one.
            self._take_batches.pop(url, None)
        for posted in part:
            posted.fire_answer(503 if response.code == 503 else None)
        await self._read(response, url)

    def close(self) -> Deferred[object]:
        """Close the idle connections."""
        result: Deferred[object] = self._pool.closeCachedConnections()
        return result
