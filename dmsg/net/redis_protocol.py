"""Connection to Redis that takes less time per command than txredisapi's.

txredisapi makes two Deferreds, several callbacks and a timer for each command. This connection makes one Deferred per
command, and has one timer for all of them. Transactions, pipelines and commands with options of txredisapi are left to
txredisapi.

txredisapi is an optional dependency and imports the reactor. So the classes here are mixins, which
:mod:`dmsg.net.redis` combines with txredisapi's classes when the first connection is made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import Deferred, fail
from twisted.internet.interfaces import IReactorTime
from twisted.internet.protocol import connectionDone
from twisted.python.failure import Failure

from dmsg.net.own_pauses import MIN_LEFT, FairTimeout, PauseMeter, stop_timeout
from dmsg.net.turn_writes import send_at_turn_end

if TYPE_CHECKING:
    from txredisapi import ConnectionHandler, RedisProtocol
else:
    ConnectionHandler = RedisProtocol = object

SCRIPTS_REMEMBERED = 64
"""Maximum number of Lua scripts whose digests are cached; there are about a dozen."""


@lru_cache(maxsize=SCRIPTS_REMEMBERED)
def _with_digest(script: str) -> tuple[bytes, str]:
    """Return the text of a script, and the digest by which EVALSHA names the script."""
    text = script.encode()
    return text, hashlib.sha1(text).hexdigest()  # noqa: S324  # Redis names scripts by this digest


class _Reply(Deferred[Any]):
    """Deferred that fires with a reply of Redis.

    :ivar since: time at which the command was sent, in awake seconds of the connection's meter.
    """

    since = 0.0


class PlainCommands(RedisProtocol):  # type: ignore[misc]
    """Mixin of a connection to Redis whose replies are ``bytes``, as Redis sends them. Its factory has
    ``charset=None`` and ``convertNumbers=False``.

    :cvar clock: the reactor.
    """

    clock: IReactorTime
    _timeout: FairTimeout | None = None
    _meter: PauseMeter | None = None
    """Measurement that lasts as long as the timeout. Without it, replies would be late after a pause of this process.
    """

    def connectionMade(self) -> Any:
        send_at_turn_end(self.transport, self.clock)
        return super().connectionMade()

    def tryConvertData(self, data: Any) -> Any:
        """Return a value of a reply unchanged."""
        return data

    def _build_command(self, *args: Any, **options: Any) -> bytes:
        parts = [b"*%d\r\n" % len(args)]
        for arg in args:
            value = arg.encode() if type(arg) is str and arg.isascii() else self._encode_value(arg)
            parts.append(b"$%d\r\n%b\r\n" % (len(value), value))
        return b"".join(parts)

    def execute_command(self, *args: Any, **options: Any) -> Deferred[Any]:
        if options or self.pipelining or self.inTransaction or self.inMulti or not self.connected:
            answered: Deferred[Any] = super().execute_command(*args, **options)
            return answered
        self.transport.write(self._build_command(*args))
        reply = _Reply()
        self.replyQueue.waiting.append(reply)
        if self.replyTimeout:
            if self._meter is None:
                self._meter = PauseMeter(self.clock, self.replyTimeout)
                self._timeout = FairTimeout(self.clock, self.replyTimeout, self._check_oldest)
            reply.since = self._meter.awake
        return reply

    def replyReceived(self, reply: Any) -> None:
        waiting = self.replyQueue.waiting
        if not waiting or type(waiting[0]) is not _Reply:
            super().replyReceived(reply)
            return
        # A cancelled Deferred ignores its reply.
        first = waiting.pop(0)
        if isinstance(reply, Exception):
            first.errback(reply)
        else:
            first.callback(reply)

    def _check_oldest(self) -> None:
        """Fail all commands and end the connection if the oldest command has waited for too long for its reply."""
        oldest = next((one for one in self.replyQueue.waiting if type(one) is _Reply), None)
        if oldest is None or self._meter is None:
            self._stop_timeout()
            return
        left = oldest.since + self.replyTimeout - self._meter.awake
        if left > MIN_LEFT:
            self._timeout = FairTimeout(self.clock, left, self._check_oldest)
            return
        from txredisapi import TimeoutError

        self.transport.abortConnection()
        while self.replyQueue.waiting:
            self.replyReceived(TimeoutError(f"Not received Redis response in {self.replyTimeout} seconds"))

    def connectionLost(self, why: Failure = connectionDone) -> None:
        self._stop_timeout()
        super().connectionLost(why)

    def _stop_timeout(self) -> None:
        stop_timeout(self._timeout)
        if self._meter is not None:
            self._meter.stop()
        self._timeout = self._meter = None

    def eval(self, script: str, keys: Sequence[str] = (), args: Sequence[str | bytes] = ()) -> Deferred[Any]:
        """Run a Lua script by its digest. Redis gets the text of the script only if Redis does not know the script."""
        text, digest = _with_digest(script)
        if digest not in self.script_hashes:
            sent: Deferred[Any] = self._eval(text, digest, keys, args)
            return sent
        return self.execute_command(b"EVALSHA", digest, b"%d" % len(keys), *keys, *args).addErrback(
            self._script_is_unknown, text, digest, keys, args
        )

    def _script_is_unknown(
        self, failure: Failure, text: bytes, digest: str, keys: Sequence[str], args: Sequence[str | bytes]
    ) -> Any:
        from txredisapi import ResponseError

        if failure.check(ResponseError) and str(failure.value).startswith("NOSCRIPT"):
            self.script_hashes.discard(digest)
            return self._eval(text, digest, keys, args)
        return failure


class PlainCalls(ConnectionHandler):  # type: ignore[misc]
    """Mixin of a handler of a connection. It calls the most frequent commands of a usable connection directly;
    txredisapi would make a Deferred for the connection first.
    """

    def eval(self, script: str, keys: Sequence[str] = (), args: Sequence[str | bytes] = ()) -> Deferred[Any]:
        """Run a Lua script and return its result."""
        return self._call("eval", script, keys, args)

    def hget(self, key: str, field: str) -> Deferred[Any]:
        """Return one field of a hash."""
        return self._call("execute_command", b"HGET", key, field)

    def _call(self, method: str, *args: Any) -> Deferred[Any]:
        connection = self._factory.usable()
        if connection is None:
            waiting: Deferred[Any] = self.__getattr__(method)(*args)
            return waiting
        try:
            called: Deferred[Any] = getattr(connection, method)(*args)
        except Exception:
            return fail()
        return called
