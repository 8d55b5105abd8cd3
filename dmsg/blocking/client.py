"""Clients and listeners of the blocking API, for threads other than the reactor's."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Condition
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from twisted.internet.defer import maybeDeferred
from twisted.internet.interfaces import IListeningPort
from twisted.internet.protocol import Factory

from dmsg.base.eviction import pick_loser
from dmsg.base.timeouts import CONNECT_TIMEOUT
from dmsg.blocking.reactor import running_reactor, wait
from dmsg.blocking.streams import Stream, StreamProtocol
from dmsg.clients.identity import Identity, KeySource
from dmsg.errors import DmsgError
from dmsg.keys import PubKey
from dmsg.net.streams.transports import stream_of
from dmsg.v2019.client import Client as TwistedClient

if TYPE_CHECKING:
    from dmsg.net.streams.address import DmsgAddress

ONLINE_TIMEOUT = 15.0
"""Default number of seconds to wait until others can find a listening client."""
WAITING_LIMIT = 64
"""Maximum number of open streams that :meth:`Listener.accept` has not returned yet. Above it, a peer that has many such
streams loses one to a peer that has few; otherwise further streams are aborted."""
PROTECTED_DIVISOR = 16
"""Divisor of ``WAITING_LIMIT``. The quotient is the number of waiting streams that a peer never loses to another."""


class Client:
    """Client of the network, for use in a ``with`` statement.

    :param discovery: URL of a discovery, or several URLs; by default those in the environment variable
        ``DMSG_DISCOVERY``.
    :param key: secret key, or path of a key file, which is created if it is absent; by default a new key.
    :param options: further arguments of :class:`dmsg.Client`, such as ``min_servers`` and ``encryption``.
    """

    def __init__(
        self,
        discovery: str | Sequence[str] | None = None,
        *,
        key: KeySource = None,
        **options: Any,
    ) -> None:
        """:raises ValueError: there is no URL of a discovery.
        :raises KeyFileError: the key file cannot be used.
        """
        self._identity = Identity(discovery, key)
        self._options = options

    @property
    def public_key(self) -> PubKey:
        """Public key, by which others reach this client."""
        return self._identity.public_key

    def __enter__(self) -> Self:
        """Start the client.

        :raises NotPossibleHere: see :func:`~dmsg.blocking.reactor.running_reactor`.
        :raises KeyInUse: another program uses the key file.
        """
        self._reactor = running_reactor()

        async def start() -> TwistedClient:
            client = TwistedClient(self._reactor, self._identity.key, self._identity.urls, **self._options)
            client.startService()
            return client

        self._identity.hold()
        try:
            self._client = wait(start)
        except BaseException:
            self._identity.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        async def stop() -> None:
            await self._client.stopService()

        try:
            wait(stop)
        finally:
            self._identity.release()

    def connect(
        self, key: PubKey | str, port: int = 0, *, timeout: float = CONNECT_TIMEOUT, stream_timeout: float | None = None
    ) -> Stream:
        """Open a stream to a port of a public key.

        :param key: public key, or its text.
        :param timeout: seconds that opening may take.
        :param stream_timeout: seconds that each call of a method of the stream may wait; None for any length of time.
        :raises DmsgError: the peer cannot be reached, or not within the timeout.
        """
        remote = PubKey.from_text(key) if isinstance(key, str) else key

        async def opened() -> Stream:
            factory = _quiet(Factory.forProtocol(StreamProtocol))
            protocol = await self._client.connect(remote, factory, port, timeout=timeout)
            assert isinstance(protocol, StreamProtocol)
            return Stream(self._reactor, protocol, stream_timeout)

        return wait(opened)

    def listen(self, port: int = 0, *, timeout: float | None = ONLINE_TIMEOUT) -> Listener:
        """Listen on a port, and wait until others can find this client.

        :param timeout: seconds to wait until others can find the client; None for any length of time.
        :raises DmsgError: others cannot find the client within the timeout.
        :raises twisted.internet.error.CannotListenError: another listener uses the port.
        """
        listener = Listener(self.public_key, port)

        async def listening() -> IListeningPort:
            found = self._client.listen(listener.factory(), port)
            try:
                await self._client.when_published(timeout)
            except BaseException:
                # The port is closed again, so that the caller can listen on it once more.
                listener.abort_waiting()
                await maybeDeferred(found.stopListening)
                raise
            return found

        listener.begin(self._reactor, wait(listening))
        return listener


class Listener:
    """Port on which peers open streams. Call :meth:`accept` for the next stream, or iterate over the object.

    :ivar key: public key by which others reach the port.
    """

    def __init__(self, key: PubKey, port: int) -> None:
        self.key = key
        self.port = port
        self._changed = Condition()
        self._waiting: deque[StreamProtocol] = deque()
        self._closed = False

    def factory(self) -> Factory[Any]:
        """Return the protocol factory for the streams that peers open."""
        return _quiet(Factory.forProtocol(lambda: StreamProtocol(self._opened)))

    def begin(self, reactor: Any, port: IListeningPort) -> None:
        """Store the reactor and Twisted's port, which exist only after listening has begun."""
        self._reactor, self._listening = reactor, port

    def _opened(self, protocol: StreamProtocol) -> None:
        with self._changed:
            if self._closed or (len(self._waiting) >= WAITING_LIMIT and not self._make_room(protocol)):
                stream_of(protocol).abortConnection()
                return
            self._waiting.append(protocol)
            self._changed.notify_all()

    def _make_room(self, newcomer: StreamProtocol) -> bool:
        """Abort the newest waiting stream of the peer that has most waiting streams.

        :returns: whether a stream was aborted; :func:`pick_loser` says which peer loses a stream, if any.
        """
        counts = Counter(_peer_of(one) for one in self._waiting)
        loser = pick_loser(counts, _peer_of(newcomer), WAITING_LIMIT // PROTECTED_DIVISOR)
        if loser is None:
            return False
        newest = next(one for one in reversed(self._waiting) if _peer_of(one) == loser)
        self._waiting.remove(newest)
        stream_of(newest).abortConnection()
        return True

    def abort_waiting(self) -> None:
        """Abort the streams that :meth:`accept` has not returned yet, and all later ones. Call this method only
        in the reactor's thread.
        """
        with self._changed:
            self._closed = True
            waiting, self._waiting = self._waiting, deque()
            self._changed.notify_all()
        for one in waiting:
            stream_of(one).abortConnection()

    def accept(self, timeout: float | None = None, *, stream_timeout: float | None = None) -> Stream:
        """Wait for the next stream that a peer opens, and return it.

        :param timeout: seconds to wait for a stream; None for any length of time.
        :param stream_timeout: seconds that each call of a method of the stream may wait; None for any length of time.
        :raises TimeoutError: no peer has opened a stream within the timeout.
        :raises DmsgError: the listener is closed, perhaps by another thread while this one waits.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or bool(self._waiting), timeout):
                raise TimeoutError(f"no peer has opened a stream for {timeout:g} s")
            if self._closed:
                raise DmsgError("the listener is closed")
            return Stream(self._reactor, self._waiting.popleft(), stream_timeout)

    def __iter__(self) -> Iterator[Stream]:
        """Return an iterator over the streams that peers open. It ends when the listener is closed."""
        while True:
            try:
                stream = self.accept()
            except DmsgError:
                return
            yield stream

    def close(self) -> None:
        """Stop listening, and abort the streams that :meth:`accept` has not returned yet."""

        async def stop() -> None:
            self.abort_waiting()
            await maybeDeferred(self._listening.stopListening)

        wait(stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def connect(
    key: PubKey | str,
    port: int = 0,
    *,
    timeout: float = CONNECT_TIMEOUT,
    stream_timeout: float | None = None,
    discovery: str | Sequence[str] | None = None,
    own_key: KeySource = None,
) -> Iterator[Stream]:
    """Start a client and open one stream. The end of the ``with`` block closes the stream and stops the client.

    See :class:`Client` and :meth:`Client.connect`.

    :param own_key: secret key of this client, or path of its key file.
    """
    with (
        Client(discovery, key=own_key) as client,
        client.connect(key, port, timeout=timeout, stream_timeout=stream_timeout) as stream,
    ):
        yield stream


@contextmanager
def listen(
    port: int = 0,
    *,
    discovery: str | Sequence[str] | None = None,
    key: KeySource = None,
) -> Iterator[Listener]:
    """Start a client and listen on one port. The end of the ``with`` block closes the port and stops the client.

    See :class:`Client` and :meth:`Client.listen`.
    """
    with Client(discovery, key=key) as client, client.listen(port) as listener:
        yield listener


def _peer_of(protocol: StreamProtocol) -> PubKey:
    return cast("DmsgAddress", stream_of(protocol).getPeer()).public_key


def _quiet(factory: Factory[Any]) -> Factory[Any]:
    factory.noisy = False
    return factory
