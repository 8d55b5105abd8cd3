"""Shared clients for endpoint strings, because a string cannot contain a client object.

A client is created at its first use and stopped with the reactor. All endpoint strings in the process with the same
discovery and key file share a client. Settings that a string lacks come from the environment: ``DMSG_DISCOVERY`` (URLs
separated by blanks) and ``DMSG_KEY_FILE``. A client without a key file gets a new key for this process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IListeningPort, IProtocol, IProtocolFactory

from dmsg.base.timeouts import CONNECT_TIMEOUT
from dmsg.clients.client import AnyClient
from dmsg.keylock import hold_key, this_program
from dmsg.keys import PubKey, SecKey, load_or_create_key
from dmsg.net.reactor import Reactor
from dmsg.net.streams.address import DmsgAddress
from dmsg.net.streams.endpoints import StreamOpener

C = TypeVar("C", bound=AnyClient)


class SharedClients(Generic[C]):
    """Table of the shared clients of one protocol family, by their settings.

    :param prefix: prefix of the endpoint strings, for error messages.
    :param make: function that creates a client. Its arguments are the reactor, the key, the URLs of the discoveries,
        and the further arguments of :meth:`get`.
    """

    def __init__(self, prefix: str, make: Callable[..., C]) -> None:
        self._prefix = prefix
        self._make = make
        self._clients: dict[tuple[Hashable, ...], C] = {}
        self._stops: dict[tuple[Hashable, ...], Callable[[], Deferred[None]]] = {}
        """Functions that stop the clients and release the locks of their keys."""

    def get(self, reactor: Reactor, discovery: str | None = None, key: str | None = None, *others: Hashable) -> C:
        """Return the running client for a discovery and a key file; create and start it at the first call.

        :param discovery: URLs separated by blanks.
        :param key: path of a key file, which is created if absent.
        :param others: further settings by which clients differ.
        :raises ValueError: neither ``discovery`` nor the environment has a URL.
        :raises KeyFileError: the key file cannot be used, or another program uses it.
        """
        urls = tuple((discovery or os.environ.get("DMSG_DISCOVERY", "")).split())
        if not urls:
            raise ValueError(
                f"{self._prefix}: the endpoint needs discovery=URL or the environment variable DMSG_DISCOVERY"
            )
        key = key or os.environ.get("DMSG_KEY_FILE", "")
        # The reactor is part of the table's key, because a client belongs to one reactor.
        name = (id(reactor), urls, key, *others)
        client = self._clients.get(name)
        if client is None:
            secret = load_or_create_key(key) if key else SecKey.generate()
            lock = hold_key(key, this_program()) if key else None
            try:
                client = self._clients[name] = self._make(reactor, secret, urls, *others)
            except BaseException:
                if lock is not None:
                    lock.release()
                raise

            def stop(client: C = client) -> Deferred[None]:
                # The client is removed first, so that an endpoint string that is used during the shutdown does not get
                # a stopping client.
                self._clients.pop(name, None)
                self._stops.pop(name, None)
                if lock is not None:
                    lock.release()
                return client.stopService()

            trigger = reactor.addSystemEventTrigger("before", "shutdown", stop)

            def stop_now() -> Deferred[None]:
                reactor.removeSystemEventTrigger(trigger)
                return stop()

            self._stops[name] = stop_now
            client.startService()
        return client

    async def stop(self) -> None:
        """Stop all clients now, without waiting for the reactor to stop."""
        for stop in list(self._stops.values()):
            await stop()


class LazyClient:
    """Opener of streams that creates its client at the first use.

    :param get: function that returns the client.
    """

    def __init__(self, get: Callable[[], StreamOpener]) -> None:
        self._get = get

    def connect(
        self,
        remote: PubKey | DmsgAddress,
        factory: IProtocolFactory,
        port: int = 0,
        *,
        timeout: float = CONNECT_TIMEOUT,
    ) -> Deferred[IProtocol]:
        """Open a stream; see :class:`~dmsg.net.streams.endpoints.StreamOpener`."""
        return self._get().connect(remote, factory, port, timeout=timeout)

    def listen(self, factory: IProtocolFactory, port: int = 0) -> IListeningPort:
        """Accept streams; see :class:`~dmsg.net.streams.endpoints.StreamOpener`."""
        return self._get().listen(factory, port)
