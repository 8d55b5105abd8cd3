"""Clients and listeners for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from dmsg.aio.reactor import reactor_of
from dmsg.base.timeouts import CONNECT_TIMEOUT
from dmsg.clients.identity import Identity, KeySource
from dmsg.errors import DmsgError
from dmsg.keys import PubKey

if TYPE_CHECKING:
    from dmsg.aio.streams import Stream
    from dmsg.v2019.client import Client as TwistedClient

CLOSE_TIMEOUT = 10.0
"""Seconds that a stream may take to close at the end of its ``async with`` block; after that, it is aborted."""
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[object]]
"""Coroutine function that serves one stream; the stream is closed when it returns."""


class Client:
    """Client of the network, for use in an ``async with`` statement.

    :param discovery: URL of a discovery, or several URLs; by default those in the environment variable
        ``DMSG_DISCOVERY``.
    :param key: secret key, or path of a key file, which is created if it is absent; by default a new key.
    :param options: further arguments of :class:`dmsg.Client`, such as ``min_servers`` and ``encryption``.
    :ivar twisted: the underlying :class:`dmsg.Client`; it exists only inside ``async with``.
    """

    twisted: TwistedClient

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
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def public_key(self) -> PubKey:
        """Public key, by which others reach this client."""
        return self._identity.public_key

    async def __aenter__(self) -> Self:
        """Start the client.

        :raises WrongEventLoop: see :func:`~dmsg.aio.reactor.reactor_of`.
        :raises KeyInUse: another program uses the key file.
        """
        self._loop = asyncio.get_running_loop()
        self._reactor = reactor_of(self._loop)
        from dmsg.v2019.client import Client as TwistedClient

        self.twisted = TwistedClient(self._reactor, self._identity.key, self._identity.urls, **self._options)
        self._identity.hold()
        try:
            self.twisted.startService()
        except BaseException:
            self._identity.release()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await self.twisted.stopService().asFuture(self._loop)
        finally:
            self._identity.release()

    @asynccontextmanager
    async def connect(
        self, key: PubKey | str, port: int = 0, *, timeout: float = CONNECT_TIMEOUT
    ) -> AsyncIterator[Stream]:
        """Open a stream to a port of a public key. The end of the ``async with`` block closes the stream; an exception
        aborts it.

        :param key: public key, or its text.
        :raises DmsgError: the peer cannot be reached, or opening takes longer than ``timeout`` seconds.
        """
        from twisted.internet.protocol import Factory

        from dmsg.aio.streams import StreamBridge

        remote = PubKey.from_text(key) if isinstance(key, str) else key
        factory = Factory.forProtocol(lambda: StreamBridge(self._loop))
        factory.noisy = False
        opening = self.twisted.connect(remote, factory, port, timeout=timeout)
        bridge: Any = await opening.asFuture(self._loop)
        stream: Stream = bridge.stream
        try:
            yield stream
        except BaseException:
            stream.writer.transport.abort()
            raise
        await _close(stream)

    @asynccontextmanager
    async def listen(self, handler: Handler, port: int = 0, *, timeout: float | None = 15.0) -> AsyncIterator[Listener]:
        """Serve each stream that a peer opens to a port, until the ``async with`` block ends.

        :param handler: coroutine function that is called with the reader and writer of each stream, in a task of its
            own.
        :param timeout: seconds to wait until others can find this client; None for any length of time.
        :raises DmsgError: others cannot find the client within the timeout.
        :raises twisted.internet.error.CannotListenError: another listener uses the port.
        """
        from twisted.internet.defer import maybeDeferred
        from twisted.internet.protocol import Factory

        from dmsg.aio.streams import StreamBridge

        factory = Factory.forProtocol(lambda: StreamBridge(self._loop, lambda bridge: self._serve(handler, bridge)))
        factory.noisy = False
        listening = self.twisted.listen(factory, port)
        try:
            await self.twisted.when_published(timeout).asFuture(self._loop)
            yield Listener(self.public_key, port)
        finally:
            await maybeDeferred(listening.stopListening).asFuture(self._loop)

    def _serve(self, handler: Handler, bridge: Any) -> None:
        task = self._loop.create_task(_run_handler(handler, bridge.stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Listener:
    """Port on which a client serves streams.

    :ivar key: public key by which others reach the port.
    """

    def __init__(self, key: PubKey, port: int) -> None:
        self.key = key
        self.port = port

    async def serve_forever(self) -> None:
        """Wait until the task is cancelled; streams are served meanwhile."""
        await asyncio.get_running_loop().create_future()


@asynccontextmanager
async def connect(
    key: PubKey | str,
    port: int = 0,
    *,
    timeout: float = CONNECT_TIMEOUT,
    discovery: str | Sequence[str] | None = None,
    own_key: KeySource = None,
) -> AsyncIterator[Stream]:
    """Start a client and open one stream. The end of the ``async with`` block closes the stream and stops the client.

    See :class:`Client` and :meth:`Client.connect`.

    :param own_key: secret key of this client, or path of its key file.
    """
    async with Client(discovery, key=own_key) as client, client.connect(key, port, timeout=timeout) as stream:
        yield stream


@asynccontextmanager
async def listen(
    handler: Handler,
    port: int = 0,
    *,
    discovery: str | Sequence[str] | None = None,
    key: KeySource = None,
) -> AsyncIterator[Listener]:
    """Start a client and listen on one port. The end of the ``async with`` block closes the port and stops the client.

    See :class:`Client` and :meth:`Client.listen`.
    """
    async with Client(discovery, key=key) as client, client.listen(handler, port) as listener:
        yield listener


async def _close(stream: Stream) -> None:
    """Close a stream. If the peer does not acknowledge all written data in time, abort it."""
    stream.writer.close()
    try:
        await asyncio.wait_for(stream.writer.wait_closed(), CLOSE_TIMEOUT)
    except TimeoutError:
        stream.writer.transport.abort()
    except (DmsgError, OSError):
        pass  # The reader or the writer of the stream has already raised this error.


async def _run_handler(handler: Handler, stream: Stream) -> None:
    try:
        await handler(stream.reader, stream.writer)
    except asyncio.CancelledError:
        stream.writer.transport.abort()
        raise
    except Exception as error:
        stream.writer.transport.abort()
        asyncio.get_running_loop().call_exception_handler(
            {"message": "handler of a dmsg stream failed", "exception": error}
        )
    else:
        with suppress(Exception):
            await _close(stream)
