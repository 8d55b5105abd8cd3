"""Connections to Redis by URL, which reconnect automatically."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import urlsplit

from twisted.internet.defer import Deferred, TimeoutError, fail, succeed
from twisted.internet.interfaces import IAddress, IReactorTime, IStreamClientEndpoint
from twisted.python.failure import Failure

from dmsg.base.printable import without_userinfo
from dmsg.errors import DmsgError, needs_extra
from dmsg.net.outgoing import host_endpoint
from dmsg.net.own_pauses import FairTimeout, add_fair_timeout, stop_timeout
from dmsg.net.redis_protocol import PlainCalls, PlainCommands

if TYPE_CHECKING:
    from txredisapi import ConnectionHandler, RedisFactory, RedisProtocol

_T = TypeVar("_T")

REDIS_PASSWORD = "DMSG_REDIS_PASSWORD"  # noqa: S105  # the name of a variable
CONNECT_TIMEOUT = 5
"""Seconds to wait for a connection to Redis, and again for the answer to the first ping."""
REPLY_TIMEOUT = 10
"""Default number of seconds to wait for the reply of Redis to a command."""
GRACE = 1.0
"""Seconds for which calls wait while the first connection to Redis is being made, or after a connection was lost. After
this time, calls fail at once until there is a connection."""
MAX_DELAY = 2.0
"""Maximum number of seconds between two attempts to connect to Redis."""


class RedisUnavailable(DmsgError):
    """Error: the URL is not a URL of Redis, or Redis does not answer."""


class RedisConnection(Protocol):
    """Type of a connection of txredisapi, which has no type annotations of its own."""

    def eval(self, script: str, keys: Sequence[str], arguments: Sequence[str | bytes]) -> Deferred[Any]:
        """Run a Lua script and return its result."""

    def get(self, key: str) -> Deferred[bytes | None]:
        """Return the value of a key."""

    def hget(self, key: str, field: str) -> Deferred[bytes | None]:
        """Return one field of a hash."""

    def hgetall(self, key: str) -> Deferred[dict[bytes, bytes]]:
        """Return all fields of a hash."""

    def disconnect(self) -> Deferred[None]:
        """Close the connection."""


def without_password(url: str) -> str:
    """Return the URL without its password, for messages."""
    return without_userinfo(url)


def redis_address(url: str) -> tuple[str, int, int]:
    """Return host, port and database of ``redis://HOST[:PORT][/DATABASE]``.

    :raises RedisUnavailable: the URL is malformed or contains a password.
    """
    if "@" in url:
        # Passwords are not accepted in URLs, because any user of the machine can read the arguments of a process.
        raise RedisUnavailable(f"{without_password(url)}: put the password into {REDIS_PASSWORD}, not into the URL")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or 6379
        database = int(parts.path.strip("/") or 0)
    except ValueError:
        host = None
    if not host or parts.scheme != "redis":
        raise RedisUnavailable(f"{url[:80]}: not a URL of Redis such as redis://127.0.0.1:6379/0")
    return host, port, database


# The check for complexity is disabled, because Ruff counts the methods of the inner classes as part of this function.
def _factory_classes() -> tuple[type[RedisFactory], type[RedisFactory]]:  # noqa: C901
    """Return two subclasses of txredisapi's connection factory: one for commands, one for subscriptions.

    txredisapi is an optional dependency, so it is imported here. The subclasses differ from its factory in two ways. In
    txredisapi, calls without a connection wait without limit; in the subclass for commands, they fail :data:`GRACE`
    seconds after the connection was lost. In txredisapi, the factory stops reconnecting for good if SELECT or AUTH is
    not answered in time; both subclasses continue.
    """
    from twisted.internet import reactor
    from txredisapi import ConnectionError as NotConnected, RedisFactory, RedisProtocol

    clock: IReactorTime = reactor

    class Tenacious(RedisFactory):  # type: ignore[misc]
        maxDelay = MAX_DELAY

        def buildProtocol(self, addr: IAddress | None) -> RedisProtocol:
            made = super().buildProtocol(addr)
            made.factory = _ReconnectingProxy(self)
            return made

    class Factory(Tenacious):
        protocol = type("Connection", (PlainCommands, RedisProtocol), {"clock": clock})

        def startConnecting(self, endpoint: IStreamClientEndpoint) -> None:
            self._waiting: dict[Deferred[RedisProtocol], None] = {}
            self._grace: FairTimeout | None = None
            self._start_grace_period()
            super().startConnecting(endpoint)

        def _start_grace_period(self) -> None:
            """Record that there is no connection, and start the grace period of waiting calls."""
            self._end_grace_period()
            if not self.stopped:
                self._grace = FairTimeout(clock, GRACE, self._give_up)

        def _end_grace_period(self) -> None:
            grace, self._grace = self._grace, None
            stop_timeout(grace)

        def _give_up(self, reason: str = "Redis is away") -> None:
            self._grace = None
            waiting, self._waiting = self._waiting, {}
            for one in waiting:
                one.errback(NotConnected(reason))

        def addConnection(self, conn: RedisProtocol) -> None:
            super().addConnection(conn)
            if conn in self.pool:
                self._end_grace_period()
                waiting, self._waiting = self._waiting, {}
                for one in waiting:
                    one.callback(conn)

        def delConnection(self, conn: RedisProtocol) -> None:
            super().delConnection(conn)
            # txredisapi's factory has a queue of connections beside its pool. No code of this package uses the queue.
            # The lost connection is removed from the queue, which would otherwise keep it in memory.
            if conn in self.connectionQueue.pending:
                self.connectionQueue.remove(conn)
            self._start_grace_period()

        def disconnect(self) -> Deferred[object]:
            self._end_grace_period()
            ended: Deferred[object] = super().disconnect()
            self._give_up("the connection to Redis was closed")
            return ended

        def usable(self) -> RedisProtocol | None:
            """Return a connection that takes commands now; None if there is none."""
            return next((conn for conn in self.pool if conn.connected), None)

        def getConnection(self, peek: bool = False) -> Deferred[RedisProtocol]:
            conn = self.usable()
            if conn is not None:
                return succeed(conn)
            if self.stopped or self._grace is None:
                return fail(NotConnected("Redis is away"))
            waiting: Deferred[RedisProtocol] = Deferred(lambda one: self._waiting.pop(one, None))
            self._waiting[waiting] = None
            return waiting

    return Factory, Tenacious


class _ReconnectingProxy:
    """Stand-in for a factory. A connection gets this object instead of the factory, so that the connection cannot stop
    the factory from reconnecting."""

    def __init__(self, factory: RedisFactory) -> None:
        self._factory = factory

    def stopTrying(self) -> None:
        """Ignore the request to stop reconnecting."""

    def connectionError(self, why: str) -> None:
        """Ignore the error, which txredisapi has logged. The factory's own method would fail a Deferred that nobody
        handles, so that the error would be logged a second time."""

    def __getattr__(self, name: str) -> object:
        return getattr(self._factory, name)


def lazy_redis(url: str, *, reply_timeout: float | None = REPLY_TIMEOUT) -> ConnectionHandler:
    """Return a handler of a connection that is made in the background and remade whenever it is lost.

    While there is no connection, calls wait for a new one. The calls fail :data:`GRACE` seconds after the connection
    was lost.

    :param reply_timeout: seconds to wait for a reply; None for commands that may block forever.
    :raises RedisUnavailable: the URL is malformed, or txredisapi is not installed.
    """
    try:
        from txredisapi import ConnectionHandler
    except ImportError:
        raise RedisUnavailable(f"redis: {needs_extra('redis')}") from None
    from twisted.internet import reactor

    host, port, database = redis_address(url)
    factory = _factory_classes()[0](
        f"{host}:{port}",
        database,
        1,
        isLazy=True,
        handler=type("Handler", (PlainCalls, ConnectionHandler), {}),
        charset=None,
        password=os.environ.get(REDIS_PASSWORD),
        replyTimeout=reply_timeout,
        convertNumbers=False,
    )
    factory.startConnecting(host_endpoint(reactor, host, port, CONNECT_TIMEOUT))
    return factory.handler


async def open_redis(url: str, reactor: IReactorTime, *, reply_timeout: float = REPLY_TIMEOUT) -> ConnectionHandler:
    """Connect to Redis, and return the connection after Redis has answered a ping.

    :raises RedisUnavailable: the URL is malformed, txredisapi is not installed, or Redis does not answer.
    """
    connection = lazy_redis(url, reply_timeout=reply_timeout)
    try:
        await add_fair_timeout(connection.ping(), CONNECT_TIMEOUT, reactor)
    except Exception as error:
        await connection.disconnect()
        said = f": {error}" if type(error).__name__ == "ResponseError" else ""
        raise RedisUnavailable(f"{without_password(url)}: Redis does not answer{said}") from None
    return connection


def with_timeout(clock: IReactorTime, call: Deferred[_T], seconds: float) -> Deferred[_T]:
    """Return a Deferred for the result of ``call`` that fails with TimeoutError after ``seconds``.

    Pauses of this process do not count. ``call`` itself is not cancelled. If its result comes too late, the result is
    dropped.
    """
    result: Deferred[_T] = Deferred(lambda _: timeout.stop())
    timeout = FairTimeout(clock, seconds, lambda: result.errback(TimeoutError("Redis does not answer")))

    def done(value: _T | Failure) -> None:
        if timeout.active():
            timeout.stop()
            result.callback(value)

    call.addBoth(done)
    return result


def subscribe(reactor: IReactorTime, url: str, channel: str, on_message: Callable[[bytes], None]) -> RedisFactory:
    """Subscribe to a channel, and call ``on_message`` with each message.

    After the connection is lost, reconnect and subscribe again.

    :returns: factory of the connection. Its ``disconnect()`` ends the subscription and returns a Deferred.
    """
    from txredisapi import ConnectionHandler, SubscriberProtocol

    class Subscriber(SubscriberProtocol):  # type: ignore[misc]
        def messageReceived(self, pattern: object, channel: object, message: object) -> None:
            if isinstance(message, bytes):
                on_message(message)

    class Factory(_factory_classes()[1]):  # type: ignore[misc]
        protocol = Subscriber

        def buildProtocol(self, addr: IAddress | None) -> SubscriberProtocol:
            protocol = super().buildProtocol(addr)

            def ready(connection: SubscriberProtocol) -> SubscriberProtocol:
                connection.subscribe(channel).addErrback(lambda _: None)
                return connection

            protocol.whenConnected().addCallback(ready)
            return protocol

    host, port, _ = redis_address(url)
    factory = Factory(
        None,
        None,
        1,
        isLazy=True,
        handler=ConnectionHandler,
        charset=None,
        password=os.environ.get(REDIS_PASSWORD),
        convertNumbers=False,
    )
    factory.startConnecting(host_endpoint(reactor, host, port, CONNECT_TIMEOUT))
    return factory
