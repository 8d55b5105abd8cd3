"""POSTs to other relays."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import CancelledError, Deferred, TimeoutError
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.web.client import Agent
from twisted.web.http_headers import Headers
from twisted.web.iweb import IBodyProducer
from zope.interface import implementer

from dmsg.net.web.body import read_body
from dmsg.net.web.fetch import cancellable, make_pool
from dmsg.rmb.relay.federation.slots import MAX_POSTS
from dmsg.rmb.twins.twin import relay_url

CONNECT_TIMEOUT = 2.0
"""Seconds."""
POST_TIMEOUT = 3.0
"""Seconds for one request."""
MAX_ANSWER = 4096
"""Bytes of another relay's answer."""
ONLY_CONNECTED = b"x-rmb-only-connected"
"""A header: refuse this unless the session is connected.  Relays of the reference do not know it."""

_log = Logger()


@implementer(IBodyProducer)
class _Body:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self.length = len(data)

    def startProducing(self, consumer: Any) -> Deferred[None]:
        consumer.write(self._data)
        done: Deferred[None] = Deferred()
        done.callback(None)
        return done

    def pauseProducing(self) -> None:
        """Everything was written at once."""

    def resumeProducing(self) -> None:
        """Everything was written at once."""

    def stopProducing(self) -> None:
        """Everything was written at once."""


class Poster:
    """POSTs to other relays.

    :param plain: ``http:`` relays are reached too; else only ``https:``, so
        that nobody makes a public relay talk to what is beside it.
    """

    def __init__(self, reactor: IReactorTime, *, plain: bool) -> None:
        self._reactor = reactor
        self._plain = plain
        self._pool = make_pool(reactor, most=MAX_POSTS)
        self._pool.cachedConnectionTimeout = 50
        self._agent = Agent(reactor, connectTimeout=CONNECT_TIMEOUT, pool=self._pool)

    async def post(self, relay: str, data: bytes, *, only_connected: bool) -> int:
        """The status that the relay answers; 0 when it does not."""
        url = relay_url(relay)
        if not (self._plain or url.startswith("https:")):
            return 0
        headers = Headers({"content-type": ["application/octet-stream"]})
        if only_connected:
            headers.addRawHeader(ONLY_CONNECTED, b"1")
        try:
            request = self._agent.request(b"POST", url.encode("ascii"), headers, _Body(data))
            response: Any = await cancellable(request.addTimeout(POST_TIMEOUT, self._reactor))
        except CancelledError:
            raise
        except TimeoutError:
            return 0
        except Exception as error:  # whatever a connection can die of
            _log.debug("relay {relay}: {error!r}", relay=relay, error=error)
            return 0
        code: int = response.code
        try:
            # it says nothing, and is only read so that the connection can be used again
            await cancellable(read_body(response, MAX_ANSWER).addTimeout(POST_TIMEOUT, self._reactor))
        except CancelledError:
            raise
        except Exception as error:  # whatever a connection can die of: the answer is known
            _log.debug("relay {relay}: {error!r}", relay=relay, error=error)
        return code

    def close(self) -> Deferred[Any]:
        """End the connections that are kept."""
        result: Deferred[Any] = self._pool.closeCachedConnections()
        return result
