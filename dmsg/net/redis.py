"""A connection to Redis of what a URL says; reconnects by itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from twisted.internet.defer import Deferred, TimeoutError
from twisted.internet.endpoints import HostnameEndpoint
from twisted.internet.interfaces import IReactorTime

from dmsg.errors import DmsgError, needs_extra

REDIS_PASSWORD = "DMSG_REDIS_PASSWORD"  # noqa: S105  # the name of a variable
CONNECT_TIMEOUT = 5
"""Seconds."""
REPLY_TIMEOUT = 10
"""Seconds."""


class RedisUnavailable(DmsgError):
    """No URL of Redis, or it does not answer."""


def without_password(url: str) -> str:
    """The URL as it may be shown."""
    _, at, tail = url.rpartition("@")
    return f"redis://***@{tail}" if at and url.startswith("redis:") else url


def redis_address(url: str) -> tuple[str, int, int]:
    """Host, port and database of ``redis://HOST[:PORT][/DATABASE]``.

    :raises RedisUnavailable: it is none, or there is a password in it.
    """
    if "@" in url:
        # arguments are for everybody to read who may list processes
        raise RedisUnavailable(f"{without_password(url)}: put the password into {REDIS_PASSWORD}, not into the URL")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or 6379
        database = int(parts.path.strip("/") or 0)
    except ValueError:
        host = None
    if not host or parts.scheme != "redis":
        raise RedisUnavailable(f"{url[:80]}: not a redis URL")
    return host, port, database


def lazy_redis(url: str, *, reply_timeout: float | None = REPLY_TIMEOUT) -> Any:
    """A connection of txredisapi; while Redis is away calls fail.

    :param reply_timeout: seconds; None for calls that wait as long as they like.
    :raises RedisUnavailable: no URL, or the package is not installed.
    """
    try:
        import txredisapi
    except ImportError:
        raise RedisUnavailable(f"redis: {needs_extra('redis')}") from None
    host, port, database = redis_address(url)
    return txredisapi.lazyConnection(
        host,
        port,
        database,
        reconnect=True,
        charset=None,
        password=os.environ.get(REDIS_PASSWORD),
        connectTimeout=CONNECT_TIMEOUT,
        replyTimeout=reply_timeout,
        convertNumbers=False,
    )


async def open_redis(url: str, reactor: IReactorTime) -> Any:
    """The same, when Redis answers.

    :raises RedisUnavailable: it does not.
    """
    connection = lazy_redis(url)
    try:
        await connection.ping().addTimeout(CONNECT_TIMEOUT, reactor)
    except Exception as error:
        await connection.disconnect()
        said = f": {error}" if type(error).__name__ == "ResponseError" else ""
        raise RedisUnavailable(f"{without_password(url)}: Redis does not answer{said}") from None
    return connection


def patience(clock: IReactorTime, call: Deferred[Any], seconds: float) -> Deferred[Any]:
    """The result of a call, or TimeoutError after so long; the call itself goes on, and its result is dropped."""
    result: Deferred[Any] = Deferred(lambda _: timer.cancel() if timer.active() else None)
    timer = clock.callLater(seconds, lambda: result.errback(TimeoutError("Redis does not answer")))

    def done(value: Any) -> None:
        if timer.active():
            timer.cancel()
            result.callback(value)

    call.addBoth(done)
    return result


def subscribe(reactor: Any, url: str, channel: str, told: Callable[[bytes], None]) -> Any:
    """Call ``told`` with every message on a channel; reconnects by itself.

    :returns: something with ``disconnect()``, which fires a Deferred.
    """
    from txredisapi import ConnectionHandler, RedisFactory, SubscriberProtocol

    class Subscriber(SubscriberProtocol):  # type: ignore[misc]
        def messageReceived(self, pattern: Any, channel: Any, message: Any) -> None:
            if isinstance(message, bytes):
                told(message)

    class Factory(RedisFactory):  # type: ignore[misc]
        protocol = Subscriber

        def buildProtocol(self, addr: Any) -> Any:
            protocol = super().buildProtocol(addr)

            def ready(connection: Any) -> Any:
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
    factory.startConnecting(HostnameEndpoint(reactor, host, port, timeout=CONNECT_TIMEOUT))
    return factory
